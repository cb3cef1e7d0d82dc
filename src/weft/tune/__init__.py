"""Measures what exchanges and local steps cost on this host: the table by which the planner chooses."""
