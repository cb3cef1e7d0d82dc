"""Weft as a library: a communicator over a torch ProcessGroup, custom ops, and the planner for your own model."""
