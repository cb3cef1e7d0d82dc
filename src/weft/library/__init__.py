"""Weft as a library: a communicator over a torch ProcessGroup, custom ops, and the planner for a model of one's own."""
