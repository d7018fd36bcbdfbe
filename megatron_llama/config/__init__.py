"""The options of a run and the shape of a model: their schema, and their parser for files and
flags."""
