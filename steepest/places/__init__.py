"""Places to run: each is a context manager that yields a connected Ray and cleans up behind itself, or a command."""

from steepest.places.sessions import existing as existing
from steepest.places.sessions import local as local

__all__ = ["existing", "local"]
