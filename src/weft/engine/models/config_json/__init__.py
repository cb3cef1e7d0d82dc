"""Readers of config.json and of other JSON files of a checkpoint."""
