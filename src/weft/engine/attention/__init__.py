"""A step's rows as tensors, the paged key-value cache, and attention over it."""
