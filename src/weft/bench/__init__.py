"""Measurements that anyone can run: collectives, latency, and the table that the planner reads."""
