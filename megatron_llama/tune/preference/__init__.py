"""Preference tuning: pairs of answers to samples, the methods' objectives, and reference scores."""
