"""What profiling and execution both do to a user's module: build it, find its parts, make it recompute."""
