"""A rank: the model, its caches, its CUDA graphs, and the loop that serves the controller."""
