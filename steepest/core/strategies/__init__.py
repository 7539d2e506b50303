"""Strategies, the ways of training: frozen settings, validated when made, that say what the engine does."""
