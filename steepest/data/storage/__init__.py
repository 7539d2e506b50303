"""Files in directories and object stores, by paths and URLs."""
