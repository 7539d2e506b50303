"""Decisions without I/O and without tensors: membership, commits, leases of samples, the log."""
