"""`python -m steepest`: the `steepest` command."""

from __future__ import annotations

import sys

from steepest.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
