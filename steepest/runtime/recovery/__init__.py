"""What becomes of a job when processes die, nodes go, or another size or strategy is wanted."""
