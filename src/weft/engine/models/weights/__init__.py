"""Checkpoints, and the parts of them that a rank reads."""
