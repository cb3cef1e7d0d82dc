"""Native kernels: C++ sources in csrc, compiled when first needed."""
