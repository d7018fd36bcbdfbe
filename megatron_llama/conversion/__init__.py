"""Models in foreign formats: read, written, compared."""
