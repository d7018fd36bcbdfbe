"""Every test file against every fault of a catalogue: which tests find what, and at what price."""
