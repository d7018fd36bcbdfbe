"""Everything a step does, decided beforehand as plain integers. Nothing in here imports torch."""
