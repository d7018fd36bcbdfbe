"""The options of a run and the shape of a model: their schema, and how files and flags become
them."""
