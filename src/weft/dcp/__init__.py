"""Decode context parallelism: a sequence's tokens are interleaved over a group of ranks; attention is merged exactly."""
