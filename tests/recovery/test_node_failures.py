"""Nodes that die, that nobody can reach for a while, that come late: network namespaces, each with a raylet of its own.

Their links end in one more namespace, at a bridge, or at a switch in user space that delays frames
and loses some.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.failing_nodes import Nodes, run
from tests.network_namespaces import (
    NEEDS_NAMESPACES,
    until,
)
from tests.ray_hosts import SECONDS

pytestmark = NEEDS_NAMESPACES


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    try:
        yield made
    finally:
        made.close()


SETS = """
    import subprocess
    import time
    from steepest import Callback, DeadlineConfig, FailureConfig, ParameterServerStrategy, RunConfig
    from steepest.testing import replay
    from tests.reference import same_bits

    class Disaster(Callback):
        times = []

        def on_step(self, sgd, result):
            self.times.append(time.monotonic())
            if result.step == 100:
                {disaster}

        def kill(self):
            pids = subprocess.run(["ip", "netns", "pids", NAMES[node]], capture_output=True, check=True)
            for pid in pids.stdout.split():
                os.kill(int(pid), 9)

        def cut(self):
            subprocess.run(["ip", "-n", SWITCH, "link", "set", f"port{{node}}", "nomaster"], check=True)

    if __name__ == "__main__":
        NAMES, ADDRESSES, SWITCH = {names}
        deadlines = DeadlineConfig(step=120.0, start=60.0)
        failure = FailureConfig(heartbeat=2.0, spares=0)
        run_config = RunConfig(keep_log=True, deadlines=deadlines, failure=failure)
        with DistributedSGD(linear_model_creator(), num_workers=4, strategy={strategy}, run_config=run_config) as sgd:
            hosts = sgd.foreach_worker(lambda view: view.host)
            node = next(i for i in (1, 2) if hosts.count(ADDRESSES[i]) == 2)
            dead = [f"worker {{i}}" for i, host in enumerate(hosts) if host == ADDRESSES[node]]
            places = sgd._live().places.items()
            dead += [str(p) for p, at in places if p.role == "server" and at.host == ADDRESSES[node]]
            assert len(dead) >= 3, dead
            disaster = Disaster()
            sgd.fit(steps=400, callbacks=[disaster], progress=False)
            first = sgd.stats().events[0]
            print(first, sgd.stats().events, flush=True)
            assert first.kind == "left" and all(name in first.line for name in dead), first
            kinds = {{event.kind for event in sgd.stats().events[1:]}}
            assert sgd.stats().step == 400 and kinds <= {{"resized", "returned"}}, kinds
            assert sgd.num_workers == (4 if "returned" in kinds else 2)
            if {copies}:  # else what came before the snapshot's successor is no part of the log
                assert same_bits(replay(sgd.log(), linear_model_creator()), sgd.weights())
        gap = max(b - a for a, b in zip(disaster.times, disaster.times[1:]))
        print(f"without a step: {{gap:.2f}} s; all is well", flush=True)
        os._exit(0)
"""


@pytest.mark.parametrize(
    ("disaster", "copies"),
    [
        ("kill", True),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (("kill", False), ("cut", True), ("cut", False))
        ),
    ],
)
def test_two_workers_and_a_server_are_done_without_when_their_node_is_gone(
    nodes: Nodes, disaster: str, copies: bool
) -> None:
    """At once, although Ray still takes the node for alive, and has no room elsewhere."""
    nodes.first = nodes.others = 2
    nodes.add(3)
    names = (nodes.names, [nodes.address(index) for index in range(3)], nodes.switch)
    strategy = f"ParameterServerStrategy(num_servers=3, replication={2 if copies else 1})"
    program = nodes.place.script(
        SETS.format(disaster=f"self.{disaster}()", names=names, strategy=strategy, copies=copies)
    )
    output = nodes.place.run("ip", "netns", "exec", nodes.names[0], sys.executable, program)
    assert "all is well" in output


GROWING = """
    from itertools import pairwise
    from steepest import DeadlineConfig, RunConfig
    from tests.reference import Task, difference, samples, sgd as plain
    from tests.reference import serially

    class Watch(Callback):
        results = []

        def on_step(self, trainer, result):
            self.results.append(result)
            if result.step == 20:
                print("training", flush=True)

    if __name__ == "__main__":
        task = Task(optimizer=plain(lr=0.01), data=samples(600), batch_size=1)
        run_config = RunConfig(deadlines=DeadlineConfig(start=60.0))
        with DistributedSGD(task.creator(), num_workers=(1, 3), run_config=run_config) as trainer:
            first = trainer.foreach_worker(lambda view: (view.host, view.pid))
            assert len(first) == 2
            watch = Watch()
            while trainer.num_workers == 2:
                trainer.fit(steps=100, callbacks=[watch], progress=False)
            trainer.fit(steps=300, callbacks=[watch], progress=False)
            after = trainer.foreach_worker(lambda view: (view.host, view.pid))
            weights = trainer.weights()
        assert after[:2] == first and len(dict(after)) == 3, (first, after)
        assert [result.step for result in watch.results] == list(range(1, len(watch.results) + 1))
        seen = {}
        for result in watch.results:
            seen[result.epoch] = seen.get(result.epoch, 0) + result.samples
        *whole, (last, _) = sorted(seen.items())
        assert whole == [(epoch, 600) for epoch in range(last)], seen
        alone = [result.samples for result in watch.results].index(3)
        runs = [(2, alone), (3, len(watch.results) - alone)]
        assert difference(weights, serially(task, runs)) < 1e-9, runs
        print("all is well")
"""


@pytest.mark.full
def test_a_node_joins_and_the_job_grows(nodes: Nodes) -> None:
    """With room for two of up to three it begins with two; each sample of an epoch is in exactly one step."""
    nodes.first = 1
    nodes.add(2)
    program = nodes.place.script(GROWING)
    with nodes.place.start(
        "ip", "netns", "exec", nodes.names[0], sys.executable, program
    ) as process:
        until(process.stdout, "training\n")
        nodes.add()
        output, _ = process.communicate(timeout=SECONDS)
    assert "all is well" in output, output


@pytest.fixture(scope="module")
def impatient() -> Iterator[Nodes]:
    """A cluster of which each test ends a node; Ray gives it up soon."""
    made = Nodes()
    try:
        made.impatient()
        made.add(1)
        yield made
    finally:
        made.close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("disaster", "strategy", "replaced"),
    [
        pytest.param(
            "self.kill()", "ParameterServerStrategy(num_servers=1)", 1, marks=pytest.mark.full
        ),
        ("self.cut()", "ParameterServerStrategy(num_servers=1)", 1),
        (
            "self.kill()",
            "ParameterServerStrategy(replication=2)",
            2,
        ),  # and the server beside the worker
    ],
)
def test_a_node_dies_and_another_takes_its_place(
    impatient: Nodes, strategy: str, disaster: str, replaced: int
) -> None:
    """Without copies it is one that has no server. A link that was cut is whole again while others go on."""
    impatient.add(3 - impatient.left)
    impatient.ended += 1
    heals = "sgd._supervisor.replaced" if "cut" in disaster else False
    about = {"heals": heals, "moves": True, "replaced": replaced}
    run(impatient, strategy=strategy, disaster=disaster, **about)
