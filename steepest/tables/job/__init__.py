"""Rows of embedding tables in a job: what servers hold of them, and how workers read and push them."""
