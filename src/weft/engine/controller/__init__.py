"""The controller: the engine's loop, and the start, supervision and restart of ranks."""
