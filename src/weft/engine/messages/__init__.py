"""Messages between processes: requests, steps and results of ranks, and messages of hosts' agents."""
