"""`offload`: optimizer state in host memory, updated there (`host`) or streamed to the device (`streaming`)."""
