"""Benchmarks of Weft and of what it is compared with, and the commands of `weft` that run them."""
