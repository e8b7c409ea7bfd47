"""HTTP: the OpenAI surface and the node's own."""
