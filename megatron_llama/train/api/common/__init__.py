"""What several functions share."""
