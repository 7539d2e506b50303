"""What a shard of a table is: its index, its rows and their optimizers, which rows come and go.

It needs NumPy and numba alone.
"""
