"""Kernels of models and of sampling, and their definitions in torch."""
