"""Weights and training state on disk: resumable checkpoints for any layout, and HuggingFace folders
in and out."""
