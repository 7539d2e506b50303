"""Gradients in fewer bytes."""
