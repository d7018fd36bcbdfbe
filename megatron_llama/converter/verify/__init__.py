"""Compares two model folders: weights bit for bit, configurations field by field, logits within
rounding."""
