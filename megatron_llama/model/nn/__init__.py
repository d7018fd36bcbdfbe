"""Layers: each takes the axes of the mesh on which it communicates as arguments."""
