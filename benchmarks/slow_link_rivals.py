"""torchft's DiLoCo on the links and the batches of `benchmarks.slow_links`, a replica on each host."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import Workload, compute, sgd
from benchmarks.namespaces import DEADLINE, Member, Namespace, Orders, Team

INSTALL = "pip install torchft==0.2.0"
POLL_SECONDS = 0.1
LIMIT = timedelta(seconds=DEADLINE)


def missing() -> str:
    """What to do where torchft is not installed; "" if it is."""
    try:
        importlib.import_module("torchft")
    except ImportError as error:
        return f"torchft is left out: {error}; {INSTALL}"
    return ""


def torchft_team(
    spaces: list[Namespace],
    workload: Workload,
    seconds: float,
    every: int,
    delay: int,
    meeting: str,
) -> Team:
    """Replicas that exchange a fragment after each quarter of `every` batches.

    Args:
        workload: a perceptron of four layers, of which each is a fragment.
        seconds: that a batch takes at least.
        delay: batches from sending a fragment to taking it in.
        meeting: an empty folder.
    """
    common = {
        "workload": workload,
        "seconds": seconds,
        "every": every,
        "delay": delay,
        "meeting": meeting,
        "world": len(spaces),
    }
    members = [
        Member(space, replica, common | {"namespace": space, "rank": rank})
        for rank, space in enumerate(spaces)
    ]
    return Team("torchft", members)


def replica(  # noqa: PLR0913 - each is given by name
    orders: Orders,
    namespace: Namespace,
    rank: int,
    world: int,
    workload: Workload,
    seconds: float,
    every: int,
    delay: int,
    meeting: str,
) -> None:
    """What each host runs; after a turn it writes down what it has computed and sent."""
    torchft: Any = importlib.import_module("torchft")
    local_sgd: Any = importlib.import_module("torchft.local_sgd")
    os.environ["GLOO_SOCKET_IFNAME"] = namespace.device
    if rank == 0:
        coordination: Any = importlib.import_module("torchft.coordination")
        lighthouse = coordination.LighthouseServer(bind="[::]:0", min_replicas=world)
        port = lighthouse.address().rpartition(":")[2]
        Path(meeting, "new").write_text(f"http://{namespace.address}:{port}")
        Path(meeting, "new").rename(Path(meeting, "lighthouse"))
    while not Path(meeting, "lighthouse").exists():
        time.sleep(POLL_SECONDS)
    store = torch.distributed.TCPStore(namespace.address, 0, is_master=True, wait_for_workers=False)
    network = workload.build()
    layers = [layer for layer in network.children() if isinstance(layer, torch.nn.Linear)]
    inner = sgd(network)
    outer = [
        torch.optim.SGD(each.parameters(), 0.7, momentum=0.9, nesterov=True) for each in layers
    ]
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=LIMIT),
        min_replica_size=world,
        use_async_quorum=False,
        init_sync=False,  # all begin with the same weights
        load_state_dict=network.load_state_dict,
        state_dict=network.state_dict,
        replica_id=f"replica_{rank}",
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        connect_timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr=namespace.address,
        store_port=store.port,
        lighthouse_addr=Path(meeting, "lighthouse").read_text(),
        hostname=namespace.address,
    )
    batches = workload.batches(rank)
    parts, settings = len(layers), {"fragment_sync_delay": delay}
    with local_sgd.DiLoCo(manager, layers, inner, outer, every, pin_memory=False, **settings):
        orders.ready()
        for rounds in orders:
            begin, sent, computing = time.perf_counter(), bytes_sent(namespace), 0.0
            updates = []
            for _ in range(rounds * every // parts):
                began = time.perf_counter()
                time.sleep(seconds)
                compute(network, batches)
                computed = time.perf_counter()
                inner.step()
                computing += computed - began
                updates.append(time.perf_counter() - computed)
            took = time.perf_counter() - begin
            # what is longer than usual is an exchange
            computing += statistics.median(updates) * len(updates)
            counts = {
                "computing": computing / rounds,
                "bytes": bytes_sent(namespace) - sent,
                "samples": len(updates) * workload.batch_size,
            }
            Path(meeting, f"counts {rank}").write_text(json.dumps(counts))
            orders.done(took / rounds)
    manager.shutdown(wait=False)


def bytes_sent(namespace: Namespace) -> int:
    """How many bytes have left this process' host."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        device, _, numbers = line.partition(":")
        if device.strip() == namespace.device:
            return int(numbers.split()[8])
    raise RuntimeError(f"there is no device {namespace.device}")
