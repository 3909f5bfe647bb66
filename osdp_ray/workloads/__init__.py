"""Built-in workloads: a byte-level GPT on text."""
