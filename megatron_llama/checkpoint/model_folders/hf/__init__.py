"""Hugging Face folders: safetensors and torch files, config.json."""
