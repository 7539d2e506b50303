"""The `steepest` command, and the demonstration that it runs."""
