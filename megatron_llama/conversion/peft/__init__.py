"""PEFT's adapter folders."""
