"""Aggregation inside a host: its workers' gradients leave it as one sum, and weights come to it once."""
