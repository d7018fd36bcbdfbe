"""The functions for users of Python. The commands call them; ``megatron_llama`` exports them."""
