"""A job's processes on this machine, without Ray: forks of one process that has imported what they use."""
