"""Transports: they carry out the steps of a plan. They know ranks and rows, never models."""
