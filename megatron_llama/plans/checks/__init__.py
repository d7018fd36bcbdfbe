"""What can be wrong with a configuration, by subject."""
