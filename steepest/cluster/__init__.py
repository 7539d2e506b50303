"""A job's processes on Ray: how they are placed, started, watched, replaced and ended."""
