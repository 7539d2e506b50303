"""What it brings that weights of the first layers come first, and that a forward pass begins with these: on slow links.

    python -m benchmarks.priority                      # two hosts with a worker each, 1 Gbit/s
    python -m benchmarks.priority --mbit 3000 --rounds 7

Servers send the weights of a step in the order in which the next forward pass uses them (priority scheduling, as
in ByteScheduler, Peng et al. 2019), and each layer waits for its own weights only. The network is made for that: its
convolutions come first, compute nearly everything and have a third of the 28 million parameters; two large layers
come last. One contender's servers send in the reverse order, that of the backward pass, in which gradients come; the
workers of another begin a step when all weights are here. Gradients need no priority: no weight of a step leaves before
its last gradient has come. Jobs stay alive, blocked while idle, and take turns; odd rounds run in reverse order. A
ratio is that of one round.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process

import argparse
import contextlib
import functools
import tempfile
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.models import CLASSES, Workload
from benchmarks.namespaces import Orders, Team, star
from benchmarks.network import OVERHEAD
from benchmarks.overhead import alternate, positive, ratios
from benchmarks.training_bodies import job_team, take_part
from steepest.core.engine.server import Server
from steepest.core.engine.worker import Worker

STEPS = 4
PLAN = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")  # of VGG-11


class VGG(nn.Sequential):
    """VGG-11 for pictures of 32 x 32, with layers of 4,096 at its end (Simonyan and Zisserman 2014)."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for each in PLAN:
            if isinstance(each, str):
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(channels, each, kernel_size=3, padding=1), nn.ReLU()]
            channels = each
        layers += [nn.Flatten(), nn.Linear(channels, 4096), nn.ReLU()]
        layers += [nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, CLASSES)]
        super().__init__(*layers, nn.LogSoftmax(dim=1))


WORKLOAD = Workload("vgg", VGG, (3, 32, 32), batch_size=16, samples=512, steps=STEPS)


def last_layers_first(orders: Orders, **given: Any) -> None:
    """A process of a job whose servers send weights as the backward pass would use them."""
    begin = Server.__init__

    def reverse(self: Server, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        self._in_order.reverse()

    Server.__init__ = reverse  # type: ignore[method-assign]
    take_part(orders, **given)


def all_weights_first(orders: Orders, **given: Any) -> None:
    """A process of a job whose workers begin a step when all of its weights are here."""
    Worker._begins_early = lambda self: False  # type: ignore[method-assign]
    take_part(orders, **given)


BODIES = {"first": take_part, "last": last_layers_first, "whole": all_weights_first}


def measure(hosts: int, mbit: int, rounds: int) -> str:
    """Return the table."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        spaces = stack.enter_context(star(hosts, mbit))
        teams: dict[str, Team] = {}
        for name, body in BODIES.items():
            meeting = stack.enter_context(tempfile.TemporaryDirectory())
            team = job_team(spaces, WORKLOAD, "ps", meeting, body=body)
            teams[name] = stack.enter_context(team)
            team.turn(4)  # in which the order of the layers is learned
        times = alternate(
            {name: functools.partial(turn, team) for name, team in teams.items()}, rounds
        )
    size = 4 * WORKLOAD.parameters()
    least = 8 * OVERHEAD * 2 * (hosts - 1) / hosts * size / (mbit * 1e6)
    lines = [
        f"{hosts} hosts x 1 at {mbit} Mbit/s, {size / 1e6:.0f} MB of parameters, median of {rounds} rounds; "
        f"the links alone take {1e3 * least:.0f} ms"
    ]
    for name, seconds in times.items():
        found = ratios(times["first"], seconds)
        lines.append(
            f"{name:6} {1e3 * median(seconds):6.0f} ms a step; first over it {found['median']:.2f} "
            f"({found['min']:.2f} to {found['max']:.2f})"
        )
    return "\n".join(lines)


def turn(team: Team) -> float:
    team.turn(1)  # connections that have been idle begin slowly
    return max(team.turn(STEPS))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.priority", description=__doc__.split("\n")[0] if __doc__ else ""
    )
    parser.add_argument("--hosts", type=positive, default=2, help="with a worker and a server each")
    parser.add_argument("--mbit", type=positive, default=1000)
    parser.add_argument("--rounds", type=positive, default=5)
    options = parser.parse_args(arguments)
    print("\n" + measure(options.hosts, options.mbit, options.rounds))


if __name__ == "__main__":
    main()
