"""Corpora, the indexed token file, the order of samples, and batches."""
