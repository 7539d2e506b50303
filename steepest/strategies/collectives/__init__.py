"""Collective operations: who are members, their messages, the ring, sums in shared memory, torch's group."""
