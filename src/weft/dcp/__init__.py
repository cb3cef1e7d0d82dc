"""Decode context parallelism: a sequence's tokens dealt out over a group of ranks, attention merged exactly."""
