"""Places to run: each is a context manager that yields a connected Ray and cleans up behind itself, or a command."""

from steepest.launch.sessions import existing as existing
from steepest.launch.sessions import local as local

__all__ = ["existing", "local"]
