"""The native engine's fast path on a CUDA device: captured steps over its own kernels. Imports Triton."""
