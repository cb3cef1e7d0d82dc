"""The advisor: layouts that start for a model on a host, and their predicted speed under a load."""
