"""GPU kernels in Triton, one module each. They require the extra `gpu`. `weft.engine.kernels.ops` lists the GPU forms
of ops.

All of them can be captured in a CUDA graph: no kernel waits for the host, values that vary from step to step are read
from device memory, and tiles follow from shapes, which a graph fixes at its capacity.
"""
