"""Whether two model folders hold the same model: weights bit for bit, configurations field by
field, logits within rounding."""
