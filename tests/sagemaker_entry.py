"""The command `steepest`, whose Ray starts workers fast: see `tests.forked_workers`."""

from __future__ import annotations

import sys

from steepest.cli.main import main
from steepest.places import sagemaker_processes
from tests.forked_workers import RAY

sagemaker_processes._RAY = (sys.executable, *RAY)

if __name__ == "__main__":
    sys.exit(main())
