"""Layers of all families, without collectives or rank arithmetic."""
