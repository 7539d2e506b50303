"""The messages of the protocol: their kinds, their fields, and who may send which."""
