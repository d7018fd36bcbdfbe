"""A configuration, run small on this machine and held against what is known to be right."""
