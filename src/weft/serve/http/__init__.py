"""HTTP: bodies, errors, limits, connections, metrics and logs."""
