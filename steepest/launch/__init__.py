"""Places to run: each is a context manager that yields a connected Ray and cleans up behind itself, or a command."""
