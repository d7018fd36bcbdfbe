"""Text to token ids and back: sentencepiece models and HuggingFace ``tokenizer.json`` behind one small interface."""
