"""State in host memory, updated there or streamed to the device; one file a memory."""
