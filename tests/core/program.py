"""A program that trains until it is ended: its processes' numbers are its first line.

python -m tests.core.program START_METHOD
"""

import signal
import sys

from steepest.core import ProcessRuntime, Trainer
from tests.core.models import classifier

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs inherit "ignore"
    trainer = Trainer(classifier, num_workers=2, runtime=ProcessRuntime(sys.argv[1]))
    trainer.fit(steps=1)
    print(*trainer.pids, flush=True)  # noqa: T201
    trainer.fit(steps=10**9)
