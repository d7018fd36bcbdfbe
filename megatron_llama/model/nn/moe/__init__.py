"""Layers of mixtures of experts: which experts a token is sent to, and what they compute. A dense
model imports nothing of it."""
