"""State in host memory, updated there or streamed to the device; a file per kind of memory."""
