"""Benchmarks of steepest; run as modules, for example ``python -m benchmarks.overhead``."""
