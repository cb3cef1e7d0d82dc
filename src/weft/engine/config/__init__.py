"""Options of the engine, their defaults and checks."""
