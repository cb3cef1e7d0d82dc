"""Decode context parallelism: a sequence's tokens are interleaved over the ranks of a group, and attention merged."""
