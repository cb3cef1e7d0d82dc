"""Engines over several hosts: an agent on each starts its ranks, and node 0 reaches the agents by one secured port."""
