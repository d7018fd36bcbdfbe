"""Layers that read like the papers: each takes its process group as an argument."""
