"""What a model is: GGUF reader, configuration, tokenizer, chat template, recipe."""
