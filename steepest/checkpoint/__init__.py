"""Checkpoints: files, their manifest, and which of them are kept."""
