"""The controller's side of the ranks: starts, watches, commands and restarts them."""
