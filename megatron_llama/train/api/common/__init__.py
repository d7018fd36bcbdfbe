"""Code that several functions share."""
