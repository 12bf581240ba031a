"""When updates run: at the step, inside backward, before the next forward, sharded over ranks, in a CUDA graph."""
