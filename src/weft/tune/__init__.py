"""Measurement of the costs of exchanges and local steps on this host: the planner's cost table."""
