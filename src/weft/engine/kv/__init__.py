"""KV caches and recurrent states: declared by layers, allocated to requests, and reused by prefix."""
