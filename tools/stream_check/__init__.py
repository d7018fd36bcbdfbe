"""Proves the order of streams on the device path without a device."""
