"""Optimizers as recipes: their classes, parameter groups and schedules."""
