"""The timeline of gradients and parameters between two steps: who waits for what."""
