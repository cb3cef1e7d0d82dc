"""GPU kernels in Triton, one module each. They need the extra `gpu`. `weft.engine.kernels.ops` lists those that are
the GPU's form of an op.

All of them can be captured in a CUDA graph: no kernel waits for the host, values that vary from step to step are read
from device memory, and tiles follow from shapes, which are those of the graph's capacity.
"""
