"""A program that trains on processes of this machine until it is ended: their numbers are its first line."""

import signal
from typing import Any

from steepest import Callback, DistributedSGD, RunConfig
from tests.core.models import classifier


class Shows(Callback):
    """Prints the workers' numbers at a step."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids

    def on_step(self, sgd: Any, result: Any) -> None:
        """Print them once."""
        if self.pids:
            print(*self.pids, flush=True)  # noqa: T201
            self.pids = []


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs inherit "ignore"
    with DistributedSGD(classifier, 2, run_config=RunConfig(runtime="processes")) as trainer:
        pids = trainer.foreach_worker(lambda worker: worker.pid)
        trainer.fit(steps=10**9, progress=False, callbacks=[Shows(pids)])
