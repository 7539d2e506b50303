"""What is decided, without I/O and without tensors: membership, commits, leases, the log."""
