"""What this room hangs into the trainer (``megatron_llama/hooks.py``)."""
