"""Built kernels: their cache, and launches of Triton."""
