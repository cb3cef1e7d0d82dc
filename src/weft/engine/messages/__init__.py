"""Messages between processes: requests, steps and results of ranks, and what agents of hosts exchange."""
