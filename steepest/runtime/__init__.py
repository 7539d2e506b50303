"""A job's processes, on Ray or on this machine: where they run, how they start, are called, are watched and end."""
