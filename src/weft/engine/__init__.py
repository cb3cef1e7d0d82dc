"""Continuous batching over data-parallel groups that step together."""
