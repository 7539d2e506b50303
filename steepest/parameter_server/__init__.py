"""A parameter server by itself, for programs that write their own training loop."""
