"""What the tests train in SageMaker's place: ten steps on MNIST, a worker for each host, checkpoints on the way."""

from __future__ import annotations

import argparse
import sys
import threading

import ray
import torch
from data import load_mnist
from torch import nn
from torch.nn import functional as F

from steepest import Checkpoints, DistributedSGD, FailureConfig, RunConfig, TorchModel
from steepest.places import sagemaker
from steepest.testing import InProcessCluster

STEPS = 10


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def create(worker_index: int, device_index: int) -> TorchModel:
    images, classes = load_mnist().train
    net = nn.Sequential(nn.Flatten(), nn.Linear(images[0].size, 10))
    return TorchModel(
        net,
        loss=F.cross_entropy,
        data=(torch.as_tensor(images[:600]), torch.as_tensor(classes[:600])),
        batch_size=20,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wait-at", type=int, default=0)
    parser.add_argument("--lost", type=int, default=0, help="nodes that will die meanwhile")
    parser.add_argument("--fail", type=int, default=0, help="exit status")
    options = parser.parse_args()
    job = sagemaker.job()
    say(f"on {job.host} of {len(job.hosts)}, {job.channels}, {job.hyperparameters}")
    if options.fail:
        sys.stderr.write("the reason is this\n")
        sys.exit(options.fail)
    with DistributedSGD(
        create,
        num_workers=len(job.hosts),
        strategy="ps",
        run_config=RunConfig(failure=FailureConfig(spares=0)),
        checkpoints=Checkpoints(job.checkpoints, every=100),
    ) as sgd:
        say(f"from step {sgd.stats().step}")
        while options.lost > sum(not node["Alive"] for node in ray.nodes()):
            sgd.fit(steps=20, progress=False)
            say("twenty steps")
        before = sgd.stats().step
        if options.wait_at:
            sgd.fit(steps=options.wait_at, progress=False)
        if before < options.wait_at:
            say(f"waiting at step {options.wait_at}")
            threading.Event().wait()  # for a signal
        sgd.fit(steps=STEPS - options.wait_at, progress=False)
        say(f"to step {sgd.stats().step}")
        weights = sgd.weights()
        sgd.save(job.model_dir)
    if not options.lost:
        alone = InProcessCluster(create, num_workers=len(job.hosts))
        alone.step(STEPS)
        assert all(torch.equal(weights[name], each) for name, each in alone.weights().items())
        say("the weights of an uninterrupted run")
    assert all(bool(each.isfinite().all()) for each in weights.values())


if __name__ == "__main__":
    main()
