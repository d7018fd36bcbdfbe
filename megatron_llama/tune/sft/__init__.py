"""Instruction tuning: files of conversations as packed samples whose loss counts the answers."""
