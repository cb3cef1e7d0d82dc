"""Which rows of a DP group run in the next step, and which sequences wait."""
