"""The messages of the protocol: their kinds, their fields, and which role may send which."""
