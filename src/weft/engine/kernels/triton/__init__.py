"""Triton kernels of the engine, one module each. They require the extra `gpu`."""
