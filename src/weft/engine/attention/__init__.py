"""Rows of a step as tensors, and attention over paged caches."""
