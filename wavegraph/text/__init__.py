"""Text and token ids: tokenizer, chat templates, and the text of an output as it grows."""
