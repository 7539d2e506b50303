"""Gradients in fewer bytes: formats of chunks, and error feedback."""
