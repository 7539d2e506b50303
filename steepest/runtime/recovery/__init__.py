"""How a job continues when processes die, nodes go, or another size or strategy is wanted."""
