"""The entry role: turns a request into a session on a route, and its tokens into text."""
