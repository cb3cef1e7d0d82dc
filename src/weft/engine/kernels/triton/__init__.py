"""Triton kernels of the engine, one module each; they need the extra `gpu`."""
