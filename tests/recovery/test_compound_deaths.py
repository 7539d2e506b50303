"""Deaths of several processes, at once or one after the other, in the middle of putting a job together."""

from __future__ import annotations

import random
import signal
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch

from steepest import (
    AllreduceStrategy,
    DistributedSGD,
    FailureConfig,
    LocalStrategy,
    ParameterServerStrategy,
    RunConfig,
    TorchModel,
)
from steepest.core.messages.message import Peer, server_peer, worker_peer
from steepest.runtime.cluster import Cluster
from tests.jobs_with_copies import COPIES, LOGGED, TASK, check, kill, train
from tests.living import places_of
from tests.pairs import diagonal, mostly_full
from tests.step_callbacks import Watch
from tests.strikes import later, send_signal

pytestmark = pytest.mark.usefixtures("anywhere")

MEMBERS = AllreduceStrategy(replication=2, chunk_bytes=64)
GROUPS = AllreduceStrategy(data_plane="gloo", sharded=True, replication=2, chunk_bytes=64)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("strategy", "victims"),
    [
        (COPIES, [worker_peer(1), server_peer(1)]),
        (COPIES, [worker_peer(3), server_peer(0)]),  # with the coordinator
        (COPIES, [worker_peer(0), worker_peer(2), server_peer(1)]),
        (AllreduceStrategy(sharded=False), [worker_peer(0), worker_peer(2)]),
        pytest.param(
            AllreduceStrategy(data_plane="gloo"),
            [worker_peer(0), worker_peer(2)],
            marks=pytest.mark.long,
        ),
    ],
    ids=["worker and server", "worker and coordinator", "a node", "two members", "of a group"],
)
def test_the_others_go_on_at_once_when_several_die_together(
    strategy: Any, victims: list[Peer]
) -> None:
    with DistributedSGD(
        TASK.creator(), num_workers=4, strategy=strategy, run_config=LOGGED
    ) as trainer:
        watch = train(trainer, 300, (20, lambda: kill(trainer, *victims)))
        check(trainer, watch, 300)
        first = trainer.stats().events[0]
        assert first.kind == "left"
        assert all(str(victim) in first.line for victim in victims)
        assert "no update and no sample is lost" in first.line
        assert trainer.num_servers == 2 or strategy is not COPIES, "copies are back when it ends"


@pytest.mark.few(2)
@pytest.mark.also_real
@pytest.mark.parametrize(
    ("strategy", "victims"),
    [
        (COPIES, [[worker_peer(1)], [server_peer(1)], [worker_peer(3), server_peer(0)]]),
        (MEMBERS, [[worker_peer(1)], [worker_peer(0)]]),
        pytest.param(GROUPS, [[worker_peer(1)], [worker_peer(0)]], marks=pytest.mark.long),
    ],
    ids=["ps", "allreduce", "sharded groups"],
)
def test_processes_die_one_after_the_other_in_one_job(
    strategy: Any, victims: list[list[Peer]]
) -> None:
    """A worker, a server, a worker with the coordinator: each time the others go on, and it is whole again."""
    with DistributedSGD(
        TASK.creator(), num_workers=4, strategy=strategy, run_config=LOGGED
    ) as trainer:
        watch = Watch()
        whole = trainer.num_workers, trainer.num_servers
        for peers in victims:
            seen = len(trainer.stats().events)
            watch.functions[trainer.stats().step + 10] = partial(kill, trainer, *peers)
            for _ in range(200):
                trainer.fit(steps=20, callbacks=[watch], progress=False)
                again = (trainer.num_workers, trainer.num_servers) == whole
                if again and len(trainer.stats().events) > seen:
                    break
            assert again
        check(trainer, watch, trainer.stats().step)
        assert "no update and no sample is lost" in trainer.stats().events[0].line


@pytest.mark.parametrize("seed", mostly_full(range(8), 0))
def test_pairs_of_deaths_soon_after_each_other(seed: int) -> None:
    """With copies no two deaths end a job, unless they are of both holders before the copies are back."""
    draw = random.Random(seed)
    pairs = [(worker_peer(1), server_peer(1)), (server_peer(0), worker_peer(2))]
    pairs += [(worker_peer(0), worker_peer(3))]
    with DistributedSGD(
        TASK.creator(), num_workers=4, strategy=COPIES, run_config=LOGGED
    ) as trainer:
        first, second = draw.choice(pairs)
        pids = {peer: places_of(trainer)[peer].pid for peer in (first, second)}
        seconds, second_one = draw.uniform(0.0, 0.6), list[Thread]()

        def strike() -> None:
            kill_it = partial(send_signal, pids[second], signal.SIGKILL)
            second_one.append(later(seconds, kill_it))
            send_signal(pids[first], signal.SIGKILL)

        watch = train(trainer, 500, (20, strike))
        second_one[0].join()
        check(trainer, watch, 500)


@pytest.mark.few(1)
@diagonal(
    moment=["_take_up", "_connect_driver", "end_leaving"], victim=[worker_peer(0), server_peer(0)]
)
def test_a_death_while_the_job_is_put_together(
    moment: str, victim: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins again with those that are left, from what they still hold."""
    strategy = ParameterServerStrategy(num_servers=3, replication=3, chunk_bytes=64)
    with DistributedSGD(
        TASK.creator(), num_workers=4, strategy=strategy, run_config=LOGGED
    ) as trainer:
        whole, struck = getattr(Cluster, moment), []

        def strike(cluster: Cluster, *arguments: Any, **named: Any) -> Any:
            if not struck:
                struck.append(cluster.places[victim].pid)
                send_signal(struck[0], signal.SIGKILL)
            return whole(cluster, *arguments, **named)

        monkeypatch.setattr(Cluster, moment, strike)
        watch = train(trainer, 400, (20, lambda: kill(trainer, worker_peer(2), server_peer(1))))
        assert struck
        check(trainer, watch, 400)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("strategy", "victim"),
    [
        ("ps", server_peer(0)),
        ("allreduce", worker_peer(1)),
        (AllreduceStrategy(data_plane="gloo", sharded=True), worker_peer(1)),
        (LocalStrategy(), worker_peer(1)),
        (LocalStrategy(num_servers=1), server_peer(0)),
    ],
    ids=["ps", "allreduce", "sharded groups", "local", "local with a server"],
)
def test_by_default_no_single_death_ends_a_job(strategy: Any, victim: Peer) -> None:
    """What only the dead process held comes from the driver's snapshot."""
    with DistributedSGD(TASK.creator(), num_workers=3, strategy=strategy) as trainer:
        snapshots = trainer._supervisor.snapshots
        while snapshots.taken is None:
            train(trainer, 20)
        step = trainer.stats().step
        watch = train(trainer, 200, (step + 20, lambda: kill(trainer, victim)))
        assert not watch.functions
        assert trainer.stats().step == step + 200
        assert trainer.stats().events[0].kind in ("left", "recovered")


class Large(torch.nn.Module):
    """Now and then one pass holds Python's lock for seconds, in one call of C code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == 10:
            assert 3**14_000_000 > 0
        return self.linear(x)


def large_creator(worker: int, device: int) -> TorchModel:
    return TorchModel(
        Large(),
        loss=torch.nn.functional.mse_loss,
        data=(torch.zeros(64, 3), torch.zeros(64, 1)),
        batch_size=2,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    )


@pytest.mark.full
@pytest.mark.real
def test_a_process_that_computes_with_pythons_lock_held_is_not_given_up() -> None:
    run_config = RunConfig(failure=FailureConfig(heartbeat=0.5))
    with DistributedSGD(large_creator, num_workers=2, run_config=run_config) as trainer:
        before = trainer.foreach_worker(lambda view: view.pid)
        trainer.fit(steps=30, progress=False)
        assert trainer.foreach_worker(lambda view: view.pid) == before
        assert trainer.stats().replaced == 0
        assert trainer.stats().seconds > 2, "nothing held the lock for long: this tests nothing"
