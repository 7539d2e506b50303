"""A job's processes on Ray: where they run, how they start, are called, are watched and end."""
