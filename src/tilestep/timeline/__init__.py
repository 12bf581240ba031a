"""The timeline between two steps: counting gradients of buckets, side streams, waits for parameters in use."""
