"""What the steps of a running engine are made of: traces of all ranks, read and drawn."""
