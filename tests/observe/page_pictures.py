"""Pictures of the page of a job for the documents: three workers train digits, one is slow, one is killed.

    CHROMIUM=/path/of/chromium python -m tests.observe.page_pictures --out docs/page.png

Needs pip install 'steepest[page,demo]' and a Chromium.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from sklearn.datasets import load_digits

from steepest import (
    Checkpoints,
    DeadlineConfig,
    DistributedSGD,
    RunConfig,
    TorchModel,
    accuracy,
)
from steepest.observe.page.document import chart_script, document
from steepest.observe.page.run_files import read_run
from tests.observe.browser import browser
from tests.step_callbacks import After
from tests.strikes import send_signal

SLOW = 0.01  # seconds more of each batch of worker 1


def digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    x, y = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    x = x.float() / 16
    return (x[:1500], y[:1500]), (x[1500:], y[1500:])


def model_creator(worker_index: int, device_index: int) -> TorchModel:
    module = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    if worker_index == 1:
        module.register_forward_pre_hook(lambda *_: time.sleep(SLOW))
    return TorchModel(
        module,
        loss=torch.nn.functional.cross_entropy,
        data=digits()[0],
        batch_size=20,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9),
        metrics={"accuracy": accuracy},
    )


def train(run: Path) -> None:
    """Train 400 steps, in which worker 2 is killed."""
    checkpoints = Checkpoints(run, every=50)
    config = RunConfig(deadlines=DeadlineConfig(start=120))  # this machine may be busy
    with DistributedSGD(model_creator, 3, run_config=config, checkpoints=checkpoints) as trainer:

        def kill() -> None:
            pids = {each.name: each.pid for each in trainer.processes()}
            send_signal(pids["worker 2"], signal.SIGKILL)

        told: Any = {"validation": digits()[1], "evaluate_every": 50, "progress": False}
        trainer.fit(steps=400, callbacks=[After({180: kill})], **told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/page.png"))
    options = parser.parse_args()
    ray.init(num_cpus=4)  # also where there are fewer
    with tempfile.TemporaryDirectory() as folder, browser() as page:
        run = Path(folder) / "digits"
        train(run)
        file = Path(folder) / "page.html"
        file.write_text(document(read_run(run).as_json(), chart_script()))
        page.size(1200, 2400)
        page.go(file.as_uri())
        page.wait_for("document.querySelector('#heat svg') !== null")
        height = page.value("document.getElementById('processes-head').getBoundingClientRect().top")
        page.size(1200, int(height))
        page.value("new Promise((done) => setTimeout(done, 500))")
        page.picture(options.out)


if __name__ == "__main__":
    main()
