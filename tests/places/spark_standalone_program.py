"""What tests/places/test_spark_standalone.py has `steepest launch spark` run; each line with FOUND is a finding."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from pyspark.sql import SparkSession
from torch.nn import functional as F

from steepest import DistributedSGD
from tests.places.spark_program import executor_of, found, join_without_token, psutil, shown
from tests.reference import Task, difference

WORKERS, STEPS, BATCH = 3, 10, 64


def task() -> Task:
    """MNIST with the network of examples/mnist_parameter_server.py, in float64; ten steps are an epoch."""
    from data import load_mnist
    from mnist_parameter_server import ConvNet

    images, classes = load_mnist().train
    count = WORKERS * STEPS * BATCH  # of scikit-learn's digits there are fewer
    data = (torch.as_tensor(images[:count]).double(), torch.as_tensor(classes[:count]))
    return Task(module=lambda: ConvNet().double(), data=data, loss=F.nll_loss, batch_size=BATCH)


def where(_: Any) -> tuple[str, int, int, str | None]:
    """A worker's Ray node, its executor, the worker of Spark's that has started that, and Ray's token."""
    executor = executor_of(os.getpid())
    daemon = psutil.Process(executor).ppid()
    node = ray.get_runtime_context().get_node_id()
    return node, executor, daemon, os.environ.get("RAY_AUTH_TOKEN")


def main(directory: str) -> None:
    token = os.environ["RAY_AUTH_TOKEN"]  # new, of the command
    ray.init(address="auto", log_to_driver=False)
    found("cpus", sorted(n["Resources"].get("CPU", 0) for n in ray.nodes() if n["Alive"]))
    wanted = task()
    with DistributedSGD(wanted.creator(), num_workers=WORKERS) as sgd:
        sgd.fit(steps=STEPS, progress=False)
        weights = sgd.weights()
        found("steps", sgd.stats().step)
        *places, tokens = zip(*sgd.foreach_worker(where), strict=True)
    found("workers' nodes, executors, daemons", [len(set(each)) for each in places])
    found("workers with the token", tokens.count(token))
    found("difference from one process", difference(weights, wanted.train(WORKERS, STEPS)))
    session = SparkSession.getActiveSession()
    assert session is not None
    task_of_spark = session.sparkContext.parallelize([0], 1).map(
        join_without_token(os.environ["RAY_ADDRESS"])
    )
    has_token, status, said = task_of_spark.first()
    found("joined without a token", [has_token, status == 0, "InvalidAuthToken" in said])
    (root,) = Path(directory).glob("s-*")
    found("shown", shown(token, root))


if __name__ == "__main__":
    main(sys.argv[1])
