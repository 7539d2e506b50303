"""Rows outside of shards: in pieces, in a checkpoint's files, exported, served, imported, changed by a user."""
