"""Embedding tables: rows that are made when ids are first trained, and updated row by row.

`TableShard` is what one server holds. It needs no Ray, no torch, no sockets; numba, from
``pip install 'steepest[embedding]'``.
"""
