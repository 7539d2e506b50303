"""Models: the protocol that the engine drives, and the adapters for PyTorch and JAX."""
