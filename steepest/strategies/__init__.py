"""Strategies: what a worker does with its gradients, and under which rule they are committed."""
