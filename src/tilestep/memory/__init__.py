"""Where the bytes of state live: beside their parameters, or in host memory; one file a memory."""
