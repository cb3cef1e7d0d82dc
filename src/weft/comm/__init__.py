"""Transports: who carries a planned step out. They know ranks and rows, never models."""
