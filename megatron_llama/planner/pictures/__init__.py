"""Drawings, charts and pages, as text that needs nothing but a browser."""
