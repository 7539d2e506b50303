"""How tensors lie in memory, on the wire and in files."""
