"""Scheduler of a DP group: rows of the next step, and the queue of waiting sequences."""
