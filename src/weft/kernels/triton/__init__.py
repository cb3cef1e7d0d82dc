"""GPU kernels in Triton: a module each, which needs the extra `gpu`; `definitions` has each one's twin in torch alone.

All of them can be captured in a CUDA graph: nothing waits for the host, what varies from step to step is read from
device memory, and tiles follow from shapes, which are those of the graph's capacity. The twins say what is computed:
they are what tests compare with, and what runs where there is no Triton.
"""
