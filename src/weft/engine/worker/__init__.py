"""A rank's side: the model, its caches, its graphs, and the loop that serves the controller."""
