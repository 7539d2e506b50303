"""A node that will go, and says so before: what runs there has moved away by then."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.failing_nodes import Nodes

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and iproute2",
    ),
]

PROGRAM = """
    import subprocess
    from steepest import Callback, DeadlineConfig, FailureConfig, ParameterServerStrategy, RunConfig
    from steepest.core.messages.message import worker_peer

    class Notice(Callback):
        def __init__(self, node):
            self.node = node

        def on_step(self, sgd, result):
            if result.step == 20:
                command = [{ray!r}, "drain-node", "--address", {address!r}, "--node-id", self.node]
                reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
                subprocess.Popen([*command, *reason, "--deadline-remaining-seconds", "60"])

    if __name__ == "__main__":
        NAMES, ADDRESSES = {names}
        creator, failure = linear_model_creator(), FailureConfig(heartbeat=2.0)
        run_config = RunConfig(deadlines=DeadlineConfig(start={patience}), failure=failure)
        with DistributedSGD(creator, num_workers={workers}, strategy={strategy}, run_config=run_config) as sgd:
            before = sgd.foreach_worker(lambda view: (view.host, view.pid))
            last = worker_peer({workers} - 1)
            notice = Notice(sgd._live().places[last].node)
            while "moved" not in {{event.kind for event in sgd.stats().events}}:
                sgd.fit(steps=50, callbacks=[notice], progress=False)
            kinds = [event.kind for event in sgd.stats().events]
            after = sgd.foreach_worker(lambda view: (view.host, view.pid))
            gone = before[-1][0]
            assert gone not in dict(after), (before, after)
            assert after[: {workers} - 1] == before[:-1] and len(after) == {left}
            assert gone not in [place.host for place in sgd._live().places.values()]
            inside = ["ip", "netns", "pids", NAMES[ADDRESSES.index(gone)]]
            for pid in subprocess.run(inside, capture_output=True, check=True).stdout.split():
                os.kill(int(pid), 9)
            sgd.fit(steps=50, progress=False)
            print(before, after, sgd.stats().events, flush=True)
            assert kinds == ["draining", "moved"] and sgd.stats().replaced == 0
            steps, weights = sgd.stats().step, sgd.weights()
        if {left} == {workers}:
            again = InProcessCluster(creator, num_workers={workers})
            again.step(steps)
            for name, value in again.weights().items():
                assert float((weights[name] - value).abs().max()) < 1e-12, name
        print("all is well")
"""


INTERRUPTED = """
    import signal
    import subprocess
    from steepest import Callback, FailureConfig, RunConfig
    from steepest.core.messages.message import worker_peer

    class Notice(Callback):
        def on_step(self, sgd, result):
            if result.step == 20:
                command = [{ray!r}, "drain-node", "--address", {address!r}, "--node-id", node]
                reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
                subprocess.Popen([*command, *reason, "--deadline-remaining-seconds", "120"])
            if sgd._supervisor.observation.leaving.nodes and victim not in self.killed:
                self.killed.append(victim)
                os.kill(victim, signal.SIGKILL)

    if __name__ == "__main__":
        creator = linear_model_creator()
        run_config = RunConfig(failure=FailureConfig(spares=0), keep_log=True)
        with DistributedSGD(creator, num_workers=3, strategy="ps", run_config=run_config) as sgd:
            before = sgd.foreach_worker(lambda view: (view.host, view.pid))
            node, victim = sgd._live().places[worker_peer(2)].node, before[0][1]
            notice = Notice()
            notice.killed = []
            kinds = set()
            # a successor that is up before the others have gone on without the dead one replaces it
            while "moved" not in kinds or not kinds & {{"returned", "replaced"}}:
                sgd.fit(steps=50, callbacks=[notice], progress=False)
                kinds = {{event.kind for event in sgd.stats().events}}
            assert notice.killed == [victim]
            while sgd.num_workers < 3:
                sgd.fit(steps=50, progress=False)
            after = sgd.foreach_worker(lambda view: (view.host, view.pid))
            assert before[2][0] not in dict(after) and before[1] in after and before[0] not in after, (before, after)
            assert len(set(after)) == 3
            from steepest.testing import replay
            weights = sgd.weights()
            again = replay(sgd.log(), creator)
            assert all(bool((again[name] == value).all()) for name, value in weights.items())
            print("all is well", [event.line for event in sgd.stats().events], flush=True)
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A cluster of which each test has a node drained, which is of no use to the next."""
    made = Nodes()
    try:
        made.add(6)
        yield made
    finally:
        made.close()


def run(nodes: Nodes, program: str, **about: object) -> None:
    """Trains in a program which has a node drained."""
    nodes.ended += 1
    about |= {
        "address": nodes.place.environment["RAY_ADDRESS"],
        "ray": str(Path(sys.executable).with_name("ray")),
    }
    path = nodes.place.script(program.format(**about))
    output = nodes.place.run("ip", "netns", "exec", nodes.names[0], sys.executable, path)
    assert "all is well" in output


@pytest.mark.full
def test_a_death_meanwhile_does_not_make_it_forgotten(nodes: Nodes) -> None:
    """The others go on without who died first, and leave the node afterwards."""
    run(nodes, INTERRUPTED)


@pytest.mark.full
@pytest.mark.parametrize("elsewhere", [pytest.param(True, marks=pytest.mark.full), False])
def test_what_runs_on_a_node_that_will_go_moves_away(nodes: Nodes, elsewhere: bool) -> None:
    """To another node where there is one; else the others go on without it. Nothing is lost with the node."""
    names = (nodes.names, [nodes.address(index) for index in range(len(nodes.names))])
    workers = 2 if elsewhere else nodes.left
    assert workers >= 2, "the others are at least one"
    run(
        nodes, PROGRAM, names=names, workers=workers, left=workers if elsewhere else workers - 1,
        strategy="ParameterServerStrategy(num_servers=2)" if elsewhere else "'allreduce'",
        patience=30.0 if elsewhere else 3.0,
    )  # fmt: skip
