"""Kernels of models and of sampling, with their definitions in torch."""
