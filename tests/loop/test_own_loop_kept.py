"""What scripts keep by `register`, such as replay buffers: in place after deaths, and in runs that go on."""

from __future__ import annotations

import random
import shutil
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import steepest
from steepest.errors import ConfigurationError
from steepest.loop.kept import Kept, pack, unpack
from steepest.loop.kept_values import finder
from tests.own_loop_runs import STRATEGIES, run, without
from tests.own_loops import Parts, Script
from tests.reference import same_bits, samples
from tests.simulated_programs import quiet

Transition = namedtuple("Transition", ["loss", "hidden"])


@dataclass
class Replay:
    """A buffer of some losses."""

    size: int
    items: list[Any] = field(default_factory=list)
    at: int = 0

    def add(self, item: Any) -> None:
        self.items[self.at : self.at + 1] = [item]
        self.at = (self.at + 1) % self.size


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def round_trip(value: Any, into: Any) -> Any:
    """Return what a script finds that had registered one value, and has registered another by now."""
    kept = Kept({"it": into})
    kept.load(unpack(pack(Kept({"it": value}).state())), finder(round_trip))
    return vars(kept)["it"]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return type(other) is np.ndarray and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Replay):
        return equal(vars(one), vars(other))
    return bool(one == other)


VALUES: dict[str, tuple[Any, Any]] = {
    "list": ([1, 2.5, "a", None, True, (1, [2])], [7]),
    "scalars": ([np.float32(0.1), np.int64(3), 1 << 70, float("inf"), -0.0], []),
    "dict": ({"a": torch.ones(2), 3: {"b": [1]}, (1, "x"): 2}, {"z": 1}),
    "ordered": (OrderedDict(b=1, a=2), OrderedDict(a=0)),
    "default": (defaultdict(list, a=[1]), defaultdict(list)),
    "counter": (Counter("abca"), Counter()),
    "set": ({1, 2, 3}, {9}),
    "deque": (
        deque([(torch.zeros(2), 1, False), (torch.ones(2), 2, True)], maxlen=3),
        deque(maxlen=3),
    ),
    "tensor": (torch.arange(6.0).reshape(2, 3), torch.zeros(2, 3)),
    "bfloat16": (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
    "array": (np.arange(6).reshape(2, 3), np.zeros((2, 3), dtype=int)),
    "flags": (np.array([True, False]), np.zeros(2, dtype=bool)),
    "bytes": (bytearray(b"abc"), bytearray()),
    "object": (Replay(3, [torch.ones(1), 2], 1), Replay(3)),
    "nested": ({"buffer": Replay(2, [Transition(1.0, np.ones(2))]), "last": [deque([1])]}, {}),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_as_they_were_and_in_place(name: str) -> None:
    value, into = VALUES[name]
    found = round_trip(value, into)
    assert found is into
    assert type(found) is type(value)
    assert equal(found, value)
    fresh = round_trip(value, None)
    assert type(fresh) is type(value)
    assert equal(fresh, value)


def test_named_tuples_and_generators_come_back() -> None:
    (found,) = round_trip([Transition(0.5, torch.ones(2))], [])
    assert type(found) is Transition
    assert torch.equal(found.hidden, torch.ones(2))
    makers: list[Any] = [
        random.Random,
        torch.Generator,
        np.random.default_rng,
        np.random.RandomState,
    ]

    def draw(generator: Any) -> Any:
        if isinstance(generator, torch.Generator):
            return torch.rand(3, generator=generator).tolist()
        return [generator.random() for _ in range(3)]

    for make in makers:
        one, other = make(), make()
        draw(one)
        state = Kept({"it": one}).state()
        kept = Kept({"it": other})
        kept.load(unpack(pack(state)), finder(None))
        assert vars(kept)["it"] is other
        assert draw(other) == draw(one)


def test_what_is_in_a_container_is_not_written_to_where_it_is_a_part_of_the_data() -> None:
    data = torch.zeros(3, 2)
    window = [data[0], data[1]]
    found = round_trip([torch.ones(2), torch.ones(2)], window)
    assert found is window
    assert torch.equal(torch.stack(found), torch.ones(2, 2))
    assert not data.any()


def in_itself() -> list[Any]:
    found: list[Any] = [1]
    found.append({"a": found})
    return found


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, threading.Lock()]}, r"it\['a'\]\[1\] is a lock, which cannot be kept"),
        (Replay(2, [lambda: 1]), r"it\.items\[0\] is a function, which cannot be kept"),
        (np.array([object()]), "it is a ndarray, which cannot be kept"),
        (torch.eye(2).to_sparse(), "it is a Tensor, which cannot be kept"),
        ([np.complex64(1j)], r"it\[0\] is a complex64, which cannot be kept"),
        (in_itself(), r"it\[1\]\['a'\] is a list that it is in itself"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_way_to_it(value: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        steepest.register(it=value)


def remembering(parts: Parts, epochs: int) -> None:
    """The loss depends on all that is kept, which changes before and after each step, alike on all workers."""
    hidden = torch.zeros(2, dtype=torch.float64)
    ring, place = np.zeros((3, 2)), {"at": 0}
    memory: deque[Any] = deque(maxlen=3)
    average = {n: p.detach().clone() for n, p in parts.model.named_parameters()}
    replay = Replay(4)
    seen: set[int] = set()
    steepest.register(
        hidden=hidden,
        ring=ring,
        place=place,
        memory=memory,
        average=average,
        replay=replay,
        seen=seen,
    )
    for epoch in steepest.epochs(epochs):
        for x, y in parts.loader:
            out = parts.model(torch.ones_like(x[:1])).detach()[0]
            hidden.mul_(0.5).add_(out)
            ring[place["at"] % 3] = hidden.numpy()
            place["at"] += 1
            replay.add((float(hidden.sum()), epoch))
            parts.optimizer.zero_grad()
            remembered = sum(each.loss * each.hidden.sum() for each in memory)
            factor = hidden.sum() + ring.sum() + remembered + sum(v for v, _ in replay.items)
            nn.functional.mse_loss((1 + 0.01 * factor) * parts.model(x), y).backward()
            parts.optimizer.step()
            memory.append(Transition(float(out.mean()), hidden.clone()))
            seen.add(place["at"])
            for name, parameter in parts.model.named_parameters():
                average[name].lerp_(parameter.detach(), 0.3)
        with torch.no_grad():
            drift = sum((p - average[n]).abs().sum() for n, p in parts.model.named_parameters())
        steepest.report(drift=drift, seen=len(seen), at=place["at"])


SCRIPT = Script(remembering, data=samples(16), epochs=2)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_a_successor_has_what_was_kept_at_the_step_that_it_takes(strategy: str) -> None:
    script = Script(remembering, data=samples(16), epochs=2)
    expected = run(script, 2, STRATEGIES[strategy])
    for victim, step in ((1, 2), (0, 3), (1, 4), (0, 6)):
        found = without(script, 2, victim, step, STRATEGIES[strategy])
        assert same_bits(found.weights, expected.weights), (victim, step)


def carrying(parts: Parts, epochs: int) -> None:
    """Each worker carries a state of its own from batch to batch, and takes a batch that it has fetched before."""
    hidden = torch.zeros(3, dtype=torch.float64)
    ahead: list[Any] = []
    steepest.register(hidden=hidden, ahead=ahead)
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            ahead.append((x.clone(), y.clone()))
            x, y = ahead.pop(0) if len(ahead) > 1 else ahead[0]
            loss = nn.functional.mse_loss(parts.model(x + 0.1 * hidden), y)
            loss.backward()
            hidden.mul_(0.5).add_(x.mean(0))
            parts.optimizer.step()
            steepest.report(hidden=hidden.sum(), loss=loss)


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [2, 1])
@pytest.mark.parametrize("loop", [remembering, carrying])
def test_a_run_that_goes_on_has_what_each_worker_kept(
    loop: Any, workers: int, tmp_path: Path
) -> None:
    script = Script(loop, data=samples(16), epochs=2)
    whole = run(
        script, workers, checkpoints=steepest.Checkpoints(tmp_path / "run", every=1, keep=100)
    )
    kept = sorted(each for each in (tmp_path / "run").iterdir() if "-step-" in each.name)
    for number in range(1, len(kept), 3):
        folder: Any = shutil.copytree(tmp_path / "run", tmp_path / str(number))
        for later in kept[number:]:
            shutil.rmtree(folder / later.name)
        again = run(script, workers, checkpoints=steepest.Checkpoints(folder, every=100))
        assert same_bits(again.weights, whole.weights)
        assert again.reports == whole.reports
