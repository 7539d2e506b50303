"""Adapters: a framework's model as a steepest Model."""
