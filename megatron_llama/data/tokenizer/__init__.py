"""Text to token ids and back: sentencepiece, LLaMA 3's files of ranks and ``tokenizer.json`` behind
one small interface."""
