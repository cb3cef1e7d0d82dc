"""Placements, legal steps and the planner. Standard library only: no tensors here."""
