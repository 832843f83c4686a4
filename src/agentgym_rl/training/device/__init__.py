"""Device code of the learner: packed passes, fused layers, CUDA graphs, the head, the optimizer and their kernels."""
