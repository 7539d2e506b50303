"""Local SGD of a model in fragments that are exchanged in turn, against the same in plain torch."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steepest import AllreduceStrategy, DistributedSGD, Embedding, FailureConfig, Table
from steepest.core.config.compression import Int2, Int4, Int8, TopK
from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.topology import HostMap
from steepest.core.messages.driver import Failure, Result
from steepest.core.tensors.layout import ParameterLayout
from steepest.errors import ConfigurationError, ModelError
from steepest.strategies.compression.codecs import make_codec
from steepest.strategies.compression.gradient_compressor import GradientCompressor
from steepest.strategies.local import LocalStrategy
from steepest.testing import InProcessCluster, replay
from tests.pairs import grid
from tests.random_examples import seeds
from tests.reference import Task, Weights, difference, same_bits, samples, sgd
from tests.rounds import FRAGMENTS, OPTIMIZERS, deep, deep_task
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config


def by_hand(
    task: Task,
    workers: int,
    steps: int,
    strategy: LocalStrategy,
    devices: int = 1,
    skipped: Collection[int] = (),
    dies_before: int | None = None,
) -> Weights:
    """The same in plain torch, one worker after the other.

    Steps that are `skipped` are as if they had not been; before a step worker 1 may get the mean of what the
    others have of their own.
    """
    fragments, every = FRAGMENTS[strategy.fragments], strategy.sync_every // strategy.fragments
    shared = task.module()
    outer = torch.optim.SGD(
        shared.parameters(),
        strategy.outer_lr,
        momentum=strategy.outer_momentum,
        nesterov=strategy.nesterov,
    )
    servers = dict(shared.named_parameters())
    copies = [task.module() for _ in range(workers)]
    optimizers = [task.optimizer(module) for module in copies]
    since = [[0.0] * len(fragments) for _ in range(workers)]
    sent: list[str] = []  # parameters whose new values are still to be taken in
    parts = workers * devices * every
    plan = SamplePlan(len(task.data[0]), parts * task.batch_size, 0)
    for step in sorted(set(range(steps)) - set(skipped)):
        at = step % len(fragments)
        if step == dies_before:
            others = [i for i in range(workers) if i != 1]
            since[1] = [
                math.fsum(since[i][f] for i in others) / len(others) for f in range(len(fragments))
            ]
            named = [dict(module.named_parameters()) for module in copies]
            for name, own in named[1].items():
                own.data.copy_(sum(named[i][name].data for i in others) / len(others))
        change = {name: torch.zeros_like(servers[name]) for name in fragments[at]}
        for worker, (module, optimizer) in enumerate(zip(copies, optimizers, strict=True)):
            own = dict(module.named_parameters())
            for update in range(every):
                for name in sent if update == strategy.delay else ():
                    part = (own[name] - servers[name]).detach() * strategy.blend
                    own[name].data.copy_(servers[name] + part)
                index = [
                    plan.share(step, (worker * devices + device) * every + update, parts)
                    for device in range(devices)
                ]
                count = sum(map(len, index))
                if not count:
                    continue
                optimizer.zero_grad()
                for part in filter(len, index):
                    x, y = (column[torch.from_numpy(part.copy())] for column in task.data)
                    (task.loss(module(x), y) * (len(part) / count)).backward()
                optimizer.step()
                since[worker] = [weight + count for weight in since[worker]]
            for name in fragments[at]:
                change[name] += (servers[name] - own[name]).detach() * since[worker][at]
        total = sum(weights[at] for weights in since)
        outer.zero_grad()
        for name in fragments[at]:
            servers[name].grad = change[name] / total
        outer.step()
        sent = fragments[at]
        for weights in since:
            weights[at] = 0.0
    return {name: p.detach().clone() for name, p in servers.items()}


def run(
    task: Task, workers: int, steps: int, strategy: LocalStrategy, **options: Any
) -> InProcessCluster:
    cluster = InProcessCluster(task.creator(), num_workers=workers, strategy=strategy, **options)
    assert [type(result) for result in cluster.step(steps)] == [Result] * steps
    return cluster


def simulated_run(
    task: Task, strategy: LocalStrategy, steps: int, creator: Any = None, seed: int = 1
) -> Weights:
    """The weights of two workers, whose processes take turns in virtual time."""
    with (
        quiet(),
        Simulation(seed).running(),
        DistributedSGD(
            creator or task.creator(), 2, strategy=strategy, run_config=run_config()
        ) as trainer,
    ):
        trainer.fit(steps=steps, progress=False)
        return trainer.weights()


@pytest.mark.few(1)
@grid(
    optimizer=OPTIMIZERS,
    size=[(1, 1), (2, 1), (3, 2)],
    servers=[None, 2],
    # fragments, delay, blend
    how=[
        (2, 0, 0.0),
        (3, 0, 0.0),
        (4, 0, 0.25),
        (1, 1, 0.0),
        (2, 1, 0.5),
        (4, 2, 0.0),
        (1, 3, 0.5),
    ],
)
def test_equals_the_same_by_hand(
    optimizer: str, size: tuple[int, int], servers: int | None, how: tuple[int, int, float]
) -> None:
    (workers, devices), (fragments, delay, blend) = size, how
    task = deep_task(optimizer)
    for config in (
        LocalStrategy(
            sync_every=2 * fragments + fragments * delay,
            fragments=fragments,
            delay=delay,
            blend=blend,
            num_servers=servers,
            chunk_bytes=32,
        ),
        LocalStrategy(
            sync_every=fragments + fragments * delay,
            fragments=fragments,
            delay=delay,
            blend=blend,
            outer_lr=0.7,
            outer_momentum=0.9,
            nesterov=True,
            num_servers=servers,
        ),
    ):
        found = run(task, workers, 13, config, devices_per_worker=devices).weights()
        assert difference(found, by_hand(task, workers, 13, config, devices)) < 1e-12


def test_each_exchange_carries_one_fragment() -> None:
    task = deep_task("adam", 600)
    whole = run(task, 2, 2, LocalStrategy(sync_every=8, num_servers=1))
    once = [result.bytes_pushed for result in whole.step(2)]
    pulled = [result.bytes_pulled for result in whole.step(2)]
    config = LocalStrategy(sync_every=8, fragments=4, num_servers=1)
    results = run(task, 2, 2, config).step(8)
    assert [4 * result.bytes_pushed for result in results] == once * 4
    assert [4 * result.bytes_pulled for result in results] == pulled * 4
    assert sum(result.samples for result in results) == 2 * 8 * 2 * 2


def normalised() -> nn.Module:
    """With buffers, which each batch changes, and random numbers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 3)
    ).double()


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.parametrize("hosts", [None, HostMap((0, 0, 1), (0, 0, 1), gathers=True)])
@pytest.mark.parametrize("delay", [0, 2])
def test_two_runs_and_a_replay_have_the_same_bits(delay: int, hosts: HostMap | None) -> None:
    task = Task(normalised, OPTIMIZERS["adam"], samples(72, outputs=3), batch_size=4)
    config = LocalStrategy(
        sync_every=6, fragments=2, delay=delay, blend=0.3, outer_momentum=0.5, chunk_bytes=48
    )
    first = run(task, 3, 11, config, keep_log=True, hosts=hosts)
    second = run(task, 3, 11, config, shuffle=3, hosts=hosts)
    assert same_bits(first.weights(), second.weights())
    assert same_bits(replay(first.log(), task.creator()), first.weights())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("delay", "blend", "shuffle"), [(0, 0.0, None), (1, 0.5, None), (1, 0.0, 5)]
)
def test_a_step_that_is_skipped_leaves_no_trace(
    delay: int, blend: float, shuffle: int | None
) -> None:
    """Also in the weights of fragments that it would not have exchanged; what was begun from it is begun anew."""
    task = deep_task("momentum", 60)
    task.data[1][SamplePlan(60, 8, 0).share(3, 2, 4)[0]] = torch.inf  # of worker 1's fourth step
    config = LocalStrategy(
        sync_every=4, fragments=2, delay=delay, blend=blend, nonfinite="skip", chunk_bytes=48
    )
    cluster = run(task, 2, 7, config, keep_log=True, shuffle=shuffle)
    log = cluster.log()
    assert [commit.version - 1 for commit in log.commits if commit.skipped] == [3]
    found = cluster.weights()
    assert difference(found, by_hand(task, 2, 7, config, skipped=[3])) < 1e-12
    assert same_bits(replay(log, task.creator()), found)


class Sick(nn.Module):
    """Raises once, in one of its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = deep()
        self.passes = 0
        self.raises_in = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == self.raises_in:
            raise ArithmeticError("once")
        return self.inner(x)


@pytest.mark.few(2)
@pytest.mark.parametrize("raises_in", [9, 10])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_step_that_failed_leaves_no_trace(delay: int, raises_in: int) -> None:
    task = Task(Sick, OPTIMIZERS["adam"], samples(60, outputs=3), batch_size=2)
    config = LocalStrategy(sync_every=4, fragments=2, delay=delay)

    def create(worker_index: int, device_index: int) -> Any:
        model = task.creator()(worker_index, device_index)
        model.module.raises_in = raises_in if worker_index == 1 else -1
        return model

    cluster = InProcessCluster(create, num_workers=2, strategy=config)
    assert [type(each) for each in cluster.step(8)] == [Result] * 4 + [Failure]
    cluster.step(4)
    assert same_bits(cluster.weights(), run(task, 2, 8, config).weights())


def test_uneven_ends_of_epochs_and_more_workers_than_samples() -> None:
    task = deep_task("momentum", 7)
    config = LocalStrategy(sync_every=4, fragments=2)
    assert difference(run(task, 3, 9, config).weights(), by_hand(task, 3, 9, config)) < 1e-12


def test_fragments_are_whole_layers_of_about_the_same_size() -> None:
    sizes = [
        ("in.weight", 40),
        ("in.bias", 2),
        ("mid.weight", 10),
        ("out.weight", 10),
        ("scale", 4),
    ]
    parameters = [(name, (size,), torch.float32, True) for name, size in sizes]
    for count, expected in (
        (1, [["scale", "out.weight", "mid.weight", "in.bias", "in.weight"]]),
        (2, [["scale", "out.weight", "mid.weight"], ["in.bias", "in.weight"]]),
        (3, [["scale", "out.weight"], ["mid.weight"], ["in.bias", "in.weight"]]),
        (4, [["scale"], ["out.weight"], ["mid.weight"], ["in.bias", "in.weight"]]),
    ):
        layout = ParameterLayout.plan(parameters, fragments=count, chunk_bytes=64)
        assert layout.fragments == count
        found = [
            list(
                dict.fromkeys(
                    layout.entries[piece.entry].name
                    for chunk in sorted(layout.changed_by(version))
                    for piece in layout.chunks[chunk].slices
                )
            )
            for version in range(1, count + 1)
        ]
        assert found == expected
        assert layout.changed_by(count + 1) == layout.changed_by(1)


@pytest.mark.few(1)
@pytest.mark.parametrize("servers", [None, 1])
def test_a_worker_computes_on_while_its_changes_and_what_became_of_them_travel(
    servers: int | None,
) -> None:
    task = deep_task("adam", 600)
    passes = [0, 0]
    leads: list[int] = []

    def create(worker_index: int, device_index: int) -> Any:
        def count(*_: Any) -> None:
            passes[worker_index] += 1
            leads.append(abs(passes[0] - passes[1]))

        model = task.creator()(worker_index, device_index)
        model.module.register_forward_hook(count)
        return model

    found = []
    for delay in (0, 2):
        passes[:], leads[:] = [0, 0], []
        strategy = LocalStrategy(sync_every=4, delay=delay, num_servers=servers)
        simulated_run(task, strategy, 9, create)
        found.append(max(leads))
    assert found[0] <= 4 < found[1] <= 6


@pytest.mark.few(2)
@pytest.mark.parametrize("servers", [None, 1])
@pytest.mark.parametrize("seed", [1, 2])
def test_what_was_begun_from_a_step_that_is_skipped_is_begun_anew(
    servers: int | None, seed: int
) -> None:
    task = deep_task("momentum", 72)
    task.data[1][SamplePlan(72, 12, 0).share(3, 2, 6)[0]] = torch.inf  # of worker 0's fourth step
    strategy = LocalStrategy(
        sync_every=6, fragments=2, delay=2, blend=0.5, nonfinite="skip", num_servers=servers
    )
    found = simulated_run(task, strategy, 6, seed=seed)
    assert difference(found, by_hand(task, 2, 6, strategy, skipped=[3])) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("servers", "how"), [(None, (1, 3, 0.5)), (2, (2, 1, 0.0)), (1, (4, 2, 0.25))]
)
def test_real_overlap_changes_no_bit(servers: int | None, how: tuple[int, int, float]) -> None:
    fragments, delay, blend = how
    task = Task(normalised, OPTIMIZERS["adam"], samples(96, outputs=3), batch_size=4)
    if fragments > 2:
        task = deep_task("adam")
    strategy = LocalStrategy(
        sync_every=fragments * (delay + 1),
        fragments=fragments,
        delay=delay,
        blend=blend,
        num_servers=servers,
    )
    found = simulated_run(task, strategy, 8)
    assert same_bits(found, run(task, 2, 8, strategy).weights())


def test_more_fragments_than_layers_are_refused() -> None:
    task = deep_task("adam")
    with pytest.raises(ModelError, match=r"fragments=8: the model has 4 layers .* at most 4"):
        InProcessCluster(
            task.creator(), num_workers=2, strategy=LocalStrategy(sync_every=8, fragments=8)
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fragments": 0}, "fragments=0"),
        ({"fragments": True}, "fragments=True"),
        ({"fragments": 3}, "fragments=3 with sync_every=8: .* give sync_every=9, say"),
        ({"fragments": 16}, "fragments=16 with sync_every=8: .* give sync_every=16, say"),
        ({"delay": -1}, "delay=-1"),
        ({"delay": 8}, "delay=8 with sync_every=8 and fragments=1: .* give at most delay=7"),
        ({"delay": 2, "fragments": 4}, "at most delay=1"),
        ({"blend": 1.0}, r"blend=1\.0: give a finite number from 0 to 1, but not 1"),
        ({"blend": -0.5}, r"blend=-0\.5"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LocalStrategy(**settings)


def test_a_delay_is_refused_with_embedding_tables_on_servers() -> None:
    strategy = LocalStrategy(sync_every=4, delay=1)

    def task(**settings: Any) -> Task:
        def net() -> nn.Module:
            rows = Embedding(Table("rows", 4, **settings))
            return nn.Sequential(rows, nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 1))

        data = torch.arange(32).view(-1, 1), torch.ones(32, 1)
        return Task(net, sgd(), data, batch_size=2)

    with pytest.raises(ConfigurationError, match="delay=1 and blend=0.0 with .* replicate=True"):
        InProcessCluster(task().creator(), num_workers=2, strategy=strategy)
    held = task(num_embeddings=32, replicate=True)
    cluster = InProcessCluster(held.creator(), num_workers=2, strategy=strategy, keep_log=True)
    losses = [result.loss for result in cluster.step(6)]
    assert losses[-1] < losses[0]
    assert same_bits(replay(cluster.log(), held.creator()), cluster.weights())


@pytest.mark.few(1)
@pytest.mark.parametrize(("servers", "delay"), [(None, 0), (1, 1), (None, 1)])
def test_a_checkpoint_in_the_middle_of_a_cycle_goes_on_exactly(
    servers: int | None, delay: int, tmp_path: Path
) -> None:
    task = deep_task("adam")
    strategy = LocalStrategy(sync_every=8, fragments=4, delay=delay, blend=0.5, num_servers=servers)
    whole = simulated_run(task, strategy, 9)
    with quiet(), Simulation(1).running():
        config = run_config()
        with DistributedSGD(task.creator(), 2, strategy=strategy, run_config=config) as trainer:
            trainer.fit(steps=6, progress=False)
            trainer.save(tmp_path / "saved")
        with DistributedSGD(task.creator(), 2, strategy=strategy, run_config=config) as trainer:
            trainer.restore(tmp_path / "saved")
            trainer.fit(steps=3, progress=False)
            assert same_bits(trainer.weights(), whole)


def test_weights_that_are_set_are_those_that_workers_go_on_with() -> None:
    task = Task(deep, sgd(), samples(50, outputs=3), batch_size=2)
    strategy = LocalStrategy(sync_every=4, fragments=2)
    zeros = {name: torch.zeros_like(p) for name, p in deep().state_dict().items()}
    with quiet(), Simulation(1).running():
        config = run_config()
        with DistributedSGD(task.creator(), 2, strategy=strategy, run_config=config) as trainer:
            trainer.fit(steps=3, progress=False)
            trainer.set_weights(zeros)
            trainer.fit(steps=2, progress=False)
            found = trainer.weights()
    assert not found["0.weight"].any()  # of zeros all gradients but the last bias' are zero
    assert found["6.bias"].any()


@pytest.mark.few(1)
@pytest.mark.parametrize("delay", [0, 1])
def test_after_a_death_the_successor_goes_on_with_the_mean_of_the_others(delay: int) -> None:
    """Every sample counts once, and training goes on; own weights of the dead one are not known."""
    simulated = Simulation(1)
    task = Task(deep, sgd(0.05), samples(97, outputs=3), batch_size=2)
    strategy = LocalStrategy(sync_every=4, fragments=2, delay=delay, num_servers=2)
    config = run_config(failure=FailureConfig(patience=math.inf))
    with (
        quiet(),
        simulated.running(),
        DistributedSGD(task.creator(), 3, strategy=strategy, run_config=config) as trainer,
    ):
        trainer.fit(steps=5, progress=False)
        process = next(each for each in simulated.living() if "worker 1" in str(each))
        simulated.world.kill(process, "it was killed. connection error code 2.")
        result = trainer.fit(steps=5, progress=False)
        assert len(trainer.stats().events) == 1
        assert result.step == 10
        found = trainer.weights()
    assert difference(found, by_hand(task, 3, 10, strategy, dies_before=5)) < 1e-12
    assert difference(found, by_hand(task, 3, 10, strategy)) > 1e-6


def test_strategies_follow_each_other() -> None:
    """To other fragments own weights are taken along; to another kind of training they are not."""
    task = deep_task("momentum", 96)
    with quiet(), Simulation(1).running():
        strategy, config = LocalStrategy(sync_every=4, fragments=2), run_config()
        with DistributedSGD(task.creator(), 2, strategy=strategy, run_config=config) as trainer:
            trainer.fit(steps=2, progress=False)
            for following in (
                LocalStrategy(sync_every=8, fragments=4, delay=1),
                "allreduce",
                strategy,
            ):
                trainer.set_strategy(following)
                trainer.fit(steps=2, progress=False)
            trainer.set_strategy(LocalStrategy(sync_every=4))
            trainer.resize(3)
            trainer.fit(steps=1, progress=False)
            assert trainer.stats().step == 9


@seeds(3)
def test_a_worker_may_be_ahead_of_a_server_that_has_none_of_a_fragment(seed: int) -> None:
    """It has the weights of a version from other servers before that one has heard of the commit."""
    task = deep_task("momentum", 60)
    strategy = LocalStrategy(sync_every=4, fragments=4, num_servers=2)
    found = run(task, 3, 8, strategy, shuffle=seed).weights()
    assert same_bits(found, run(task, 3, 8, strategy).weights())


# -- compressed changes ---------------------------------------------------------------------------


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 2)
    )


WIDE = Task(wide, sgd(momentum=0.9), samples(60, dtype=torch.float32))
CHOICES = {"int8": Int8(16), "int4": Int4(16), "int2": Int2(16), "topk": TopK(0.1)}


@pytest.mark.few(1)
@grid(choice=CHOICES, servers=[None, 2], workers=[2, 3], how=[(1, 0), (2, 1)])
def test_a_compressed_run_is_replayed_to_the_bit(
    choice: str, servers: int | None, workers: int, how: tuple[int, int]
) -> None:
    fragments, delay = how
    strategy = LocalStrategy(
        sync_every=4,
        fragments=fragments,
        delay=delay,
        num_servers=servers,
        compression=CHOICES[choice],
    )
    cluster = run(WIDE, workers, 9, strategy, keep_log=True, shuffle=1)
    found = cluster.weights()
    assert same_bits(replay(cluster.log(), WIDE.creator()), found)
    plain = run(WIDE, workers, 9, replace(strategy, compression=None)).weights()
    assert difference(found, plain) > 1e-6


def test_what_is_left_out_arrives_with_the_next_change_of_the_fragment() -> None:
    """With plain SGD that does not move, what all pushes together bring is what was to be pushed."""
    layout, codec = ParameterLayout.plan([("w", (8, 8), torch.float32, True)]), make_codec(Int2(16))
    assert codec is not None
    sender = GradientCompressor(layout, codec, [True])
    change = torch.randn(64, generator=torch.Generator().manual_seed(2))
    total = torch.zeros(64)
    for _ in range(200):
        sender.begin()
        packed = sender.pack(0, change.view(torch.uint8), 1.0, 1.0, frozenset())
        codec.add(layout, layout.chunks[0], [(packed, 1.0)], total)
        sender.commit()
    assert difference({"": total / 200}, {"": change}) < 0.05


@pytest.mark.few(1)
@pytest.mark.parametrize("choice", ["int8", "int4", "int2"])
def test_as_many_bytes_travel_as_the_bits_say(choice: str) -> None:
    """Without servers no weights travel: a worker gets every other one's changes."""
    count = {"int8": 8, "int4": 4, "int2": 2}[choice]

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))

    task = Task(net, sgd(), samples(64, 512, 512, dtype=torch.float32), batch_size=1)
    strategy = LocalStrategy(sync_every=4, fragments=2, compression=choice)
    results = run(task, 3, 3, strategy).step(2)
    block = 512 * 512 * count // 8 + 4 * 512 * 512 // 256
    assert [result.bytes_pushed for result in results] == [3 * 2 * block] * 2
    assert [result.bytes_pulled for result in results] == [0, 0]


def test_a_checkpoint_has_what_compression_has_left_out(tmp_path: Path) -> None:
    strategy = LocalStrategy(sync_every=8, fragments=2, delay=1, compression=Int2(16))
    whole = simulated_run(WIDE, strategy, 9)
    with quiet(), Simulation(1).running():
        config = run_config()
        with DistributedSGD(WIDE.creator(), 2, strategy=strategy, run_config=config) as trainer:
            trainer.fit(steps=6, progress=False)
            trainer.save(tmp_path / "saved")
        with DistributedSGD(WIDE.creator(), 2, strategy=strategy, run_config=config) as trainer:
            trainer.restore(tmp_path / "saved")
            trainer.fit(steps=3, progress=False)
            assert same_bits(trainer.weights(), whole)
            trainer.set_strategy(AllreduceStrategy(compression=Int2(16)))
            trainer.fit(steps=2, progress=False)
            trainer.set_strategy(strategy)
            trainer.fit(steps=2, progress=False)


def test_a_form_of_weights_that_do_not_travel_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no weights are sent; leave wire_dtype out"):
        LocalStrategy(compression="int4", wire_dtype=(None, "bf16"))
    assert LocalStrategy(compression="int4", wire_dtype=(None, "bf16"), num_servers=1)
