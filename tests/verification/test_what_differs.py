"""What a probe notes of a function, what of two runs differs first, and why: on plain runs of this process."""

from __future__ import annotations

import itertools
import random
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import steepest
import steepest.loop.session
import steepest.testing
from steepest.loop.kept_values import finder, restored
from steepest.testing.verification import explaining
from steepest.testing.verification.comparing import (
    Comparison,
    noisy_variables,
    tables_apart,
    to_the_bit,
    weights_of,
    whole_and_parts,
)
from steepest.testing.verification.drawing import Draws, put_aside
from steepest.testing.verification.frames import frames_of_user, is_users, scopes_of
from steepest.testing.verification.probe import WatchedFunction
from steepest.testing.verification.records import EntryFile, Run, read_entries, read_lives
from steepest.testing.verification.summaries import Variable, Variables, gathered_value

BATCH, WORKERS = 8, 2
X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
SIZE = {"workers": 1}  # what a script takes for the number of workers
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def script(columns: Any, loss: Loss = cross_entropy, **more: Any) -> Callable[[], None]:
    def train() -> None:
        torch.manual_seed(0)
        model = more.get("model", lambda: nn.Linear(4, 2))()
        optimizer = more.get("optimizer", lambda p: torch.optim.Adam(p, lr=0.05))(
            model.parameters()
        )
        loader = DataLoader(TensorDataset(*columns), batch_size=len(columns[0]) // 6)
        model, optimizer, loader = steepest.prepare(model, optimizer, loader)
        count, began = more.get("count", 0), more.get("clock", int)()
        for _ in steepest.epochs(1):
            for x, y in loader:
                count += 1
                optimizer.zero_grad()
                (loss(model, x, y) * more.get("times", lambda _: 1.0)(count)).backward()
                more.get("before", lambda model: None)(model)
                optimizer.step()
        assert began >= 0

    return train


def run(folder: Path, functions: list[Callable[[], None]], **chosen: Any) -> Run:
    """Run each function as a plain script, as that of a worker."""
    lives = []
    for worker, function in enumerate(functions):
        own = folder / str(len([*folder.iterdir()]))
        own.mkdir()
        SIZE["workers"] = len(functions)
        WatchedFunction(function, str(own), steps=20, **chosen)()
        (life,) = read_lives(own)
        lives.append(replace(life, worker=worker))
    return Run("", lives)


def parts(**more: Any) -> list[Callable[[], None]]:
    """The same script on two parts of each of the whole batches."""
    halves = [
        [c.reshape(6, 2, -1, *c.shape[1:])[:, w].reshape(-1, *c.shape[1:]) for c in (X, Y)]
        for w in (0, 1)
    ]
    return [script(half, **more) for half in halves]


class TogetherOptimizer(torch.optim.SGD):
    """Trains nothing, so that both parts compute from the same weights in each step."""

    def step(self, closure: Any = None) -> None:
        return None


STILL = {"optimizer": lambda parameters: TogetherOptimizer(parameters, lr=0.1)}


def compared(folder: Path, **more: Any) -> tuple[Comparison, Run, Run]:
    whole = run(folder, [script((X, Y), **STILL, **more)])
    several = run(folder, parts(**STILL, **more))
    return whole_and_parts(whole, several), whole, several


def test_parts_of_a_mean_are_equal_to_the_whole_and_each_sample_is_there_once(
    tmp_path: Path,
) -> None:
    found, _, _ = compared(tmp_path)
    assert found.first is None
    assert found.each_once is True
    assert 0 < found.distances["losses"] < 1e-5


def summed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="sum")


def scaled(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model, x, y) * SIZE["workers"]


def weighted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y, weight=torch.tensor([1.0, 5.0]))


def contrastive(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x) @ model(x).T, torch.arange(len(x)))


def clipped(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ({"loss": summed}, "1/2 of one process's: either the loss adds up the samples"),
        ({"loss": scaled}, "2 times that of one process"),
        ({"loss": weighted}, "steepest.weight(tokens)"),
        ({"loss": contrastive}, "no mean of those of its parts"),
        ({"before": clipped}, "each worker changes its own gradient between backward() and step()"),
    ],
)
def test_a_mistake_in_a_loss_is_named(tmp_path: Path, mistake: Any, said: str) -> None:
    found, whole, several = compared(tmp_path, **mistake)
    assert found.first is not None
    assert found.first.step == 1
    assert said in explaining.of_parts(found.first, whole, several)[0]


def test_adams_steps_by_the_noise_of_a_gradient_of_zero_are_no_difference(tmp_path: Path) -> None:
    # a bias that all classes have in common: its gradient is zero but for rounding, of which Adam makes whole steps
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.shift = nn.Linear(4, 2), nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(x) + self.shift

    whole = run(tmp_path, [script((X, Y), model=Shifted)])
    order = torch.cat(
        [i * 8 + torch.randperm(8, generator=torch.Generator().manual_seed(1)) for i in range(6)]
    )
    again = run(tmp_path, [script((X[order], Y[order]), model=Shifted)])
    last = [r.steps_of(0)[6].weights["shift"].values for r in (whole, again)]
    assert abs(last[0] - last[1]).max() > 1e-3  # such steps were made
    assert whole_and_parts(whole, again).first is None


def test_a_run_is_equal_to_itself_to_the_bit_and_a_rate_by_a_counter_is_not(tmp_path: Path) -> None:
    base = run(tmp_path, [script((X, Y))])
    assert to_the_bit(base, run(tmp_path, [script((X, Y))])).same_bits
    falling = {"times": lambda count: 1.0 / (9 + count)}
    undisturbed = run(tmp_path, [script((X, Y), **falling)])
    # the successor of a worker that died in step 4, whose count begins anew
    successor = run(tmp_path, [script((X, Y), **falling, count=-3)])
    (life,) = successor.lives
    life.steps = [step for step in life.steps if step.step >= 4]
    disturbed = Run("", [*undisturbed.lives, replace(life, begun=life.begun + 1)])
    found = to_the_bit(undisturbed, disturbed)
    assert found.first is not None
    assert (found.first.step, found.first.what) == (4, "losses")
    text = Path(__file__).read_text()
    told = explaining.of_death(
        found.first, undisturbed, disturbed, 4, set(), {Path(__file__).name: text}
    )
    line = 1 + text[: text.index("count += 1")].count("\n")
    assert f"`count` ({Path(__file__).name}:{line}) is 3 there" in told[0]
    assert "where it is 0: give it to steepest.register(...)" in told[0]


def test_variables_that_no_two_runs_have_in_common_are_left_out(tmp_path: Path) -> None:
    ticks = itertools.count()
    runs = [run(tmp_path, [script((X, Y), clock=lambda: next(ticks))]) for _ in range(2)]
    assert {name.split(":")[1] for name in noisy_variables(*runs)} == {"began", "ticks"}


def test_what_an_optimizer_steps_by_is_of_its_own_parameters(tmp_path: Path) -> None:
    def train() -> None:
        one, two = nn.Linear(4, 2), nn.Linear(4, 2)
        first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, two))
        loader = DataLoader(TensorDataset(X, Y), batch_size=24)
        one, two, first, second, loader = steepest.prepare(one, two, first, second, loader)
        for _ in steepest.epochs(1):
            for x, y in loader:
                for optimizer in (first, second):
                    nn.functional.cross_entropy(one(x) + two(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()

    steps = run(tmp_path, [train]).steps_of(0)
    names = [sorted({name[:2] for name in step.gradients}) for step in steps.values()]
    assert names == [["0."], ["1."]] * 2
    # the first one's gradients of the second one's backward pass are left in the next batch
    assert [step.left_over for step in steps.values()] == [False, True, True, True]


def noisy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    inner = nn.functional.dropout(x + torch.randn_like(x) + torch.randn(len(x), 1), 0.5)
    return cross_entropy(
        model, inner + torch.rand(len(x), 4).normal_(), y + torch.randint(0, 1, (len(x),))
    )


def normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_numbers_drawn_by_sample_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    mean = run(tmp_path, [script((X, Y), noisy, model=normed, **STILL)])
    several = run(tmp_path, parts(loss=noisy, model=normed, **STILL))
    assert whole_and_parts(mean, several).first is not None
    causes = explaining.expected_causes(several.facts, [several])
    assert [each.split()[0] for each in causes] == ["BatchNorm", "the"]
    mean = run(tmp_path, [script((X, Y), noisy, model=normed, **STILL)], aside=True)
    several = run(tmp_path, parts(loss=noisy, model=normed, **STILL), aside=True)
    assert whole_and_parts(mean, several).first is None
    assert torch.nn.functional.dropout(torch.ones(9), 1.0).sum() == 0  # all is as it was


def test_records_are_read_back_without_what_a_killed_process_has_not_written_whole(
    tmp_path: Path,
) -> None:
    batch = Pair(torch.arange(3), [float("nan"), 2**70, b"x", {"k": np.ones(2, np.float32)}])
    file = EntryFile(tmp_path / "entries")
    for each in (batch, random.Random(3).getstate()):
        file.append("one", each)
    file.close()
    kept = (tmp_path / "entries").read_bytes()
    (tmp_path / "entries").write_bytes(kept + kept[:100])
    (_, pair), (_, state) = read_entries(tmp_path / "entries")
    found = restored(pair, None, "", finder(cross_entropy))
    assert type(found) is Pair
    assert found.x.tolist() == [0, 1, 2]
    assert repr(found.more) == repr(batch.more)
    assert restored(state, None, "", finder(cross_entropy)) == random.Random(3).getstate()
    assert pickle_opcodes_of(kept) == 0


class Pair:
    """A batch of a user's own class."""

    def __init__(self, x: torch.Tensor, more: list[Any]) -> None:
        self.x, self.more = x, more


def pickle_opcodes_of(content: bytes) -> int:
    """How often the beginning of a pickle is in bytes."""
    return content.count(b"\x80\x04\x95") + content.count(b"\x80\x05\x95")


def test_an_optimizers_state_is_compared_by_key_and_name(tmp_path: Path) -> None:
    base, other = (run(tmp_path, [script((X, Y))]) for _ in range(2))
    steps = base.steps_of(0)
    assert [bool(steps[n].optimizer_state) for n in range(1, 7)] == [False] * 5 + [True]
    assert sorted(steps[6].optimizer_state) == [
        f"{key} of {name}"
        for key in ("exp_avg", "exp_avg_sq", "step")
        for name in ("bias", "weight")
    ]
    state = other.steps_of(0)[6].optimizer_state
    changed = state["exp_avg_sq of weight"]
    state["exp_avg_sq of weight"] = replace(changed, values=changed.values * 1.1, digest="other")
    for found in (to_the_bit(base, other).first, whole_and_parts(base, other).first):
        assert found is not None
        assert (found.step, found.what, found.name) == (
            6,
            "optimizer_state",
            "exp_avg_sq of weight",
        )


class Counting(nn.Module):
    """Keeps the sum of the first column that it has seen, which changes no output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.seen += x[:, 0].abs().sum()
        return self.linear(x)


def test_a_buffer_that_changes_no_update_is_named_beside_what_is_equal(tmp_path: Path) -> None:
    found, _, several = compared(tmp_path, model=Counting)
    assert found.first is None
    assert found.buffers is not None
    assert (found.buffers.step, found.buffers.name) == (1, "0.seen")
    assert '{"seen": "mean"}' in explaining.of_buffers(found.buffers, several)


def test_draws_and_gathered_values_are_compared(tmp_path: Path) -> None:
    base, other = (run(tmp_path, [script((X, Y))]) for _ in range(2))
    own = other.steps_of(0)[2]
    own.drawn = "others"
    found = to_the_bit(base, other).first
    assert found is not None
    assert (found.step, found.what) == (2, "draws")
    values = [
        gathered_value((torch.tensor(v), 1), str(v), "t.py:7") for v in ([2.0, 1.0], [1.0, 2.5])
    ]
    base.steps_of(0)[1].gathered, other.steps_of(0)[1].gathered = ([each] for each in values)
    for found in (to_the_bit(base, other).first, whole_and_parts(base, other).first):
        assert found is not None
        assert (found.step, found.what, found.name) == (1, "gathered", "t.py:7")
    other.steps_of(0)[1].gathered = values
    found = whole_and_parts(base, other).first
    assert found is not None
    assert (found.here, found.there) == ("1 calls", "2 calls")


def test_a_users_program_is_neither_the_librarys_nor_pythons() -> None:
    for module in (steepest.loop.session, steepest.testing, torch, random):
        assert not is_users(str(module.__file__)), module
    assert is_users(__file__)


COUNTERS = """
import functools, itertools
import helper
TOTAL = 0
def by_global():
    global TOTAL
    TOTAL += 1
def warmup():
    done = 0
    def warm():
        nonlocal done
        done += 1
    return warm
class Stop:
    calls = 0
    def __init__(self):
        self.bad = 0
    def __call__(self, loss):
        self.bad += loss > 1
        return self.bad > 3
def rates(begin):
    number = begin
    while True:
        yield number
        number += 1
def cached(x, seen=[]):
    seen.append(x)
def train(look):
    warm, stop, following, ticks = warmup(), Stop(), rates(7), itertools.count(5)
    next(following)
    partly = functools.partial(cached, 2)
    by_global()
    look()
"""


def test_counters_are_found_wherever_a_script_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("tau = 0.5\n")
    (tmp_path / "counters.py").write_text(COUNTERS)
    helper = types.ModuleType("helper")
    helper.__file__, helper.tau = str(tmp_path / "helper.py"), 0.5  # type: ignore[attr-defined]
    space: dict[str, Any] = {"__name__": "counters"}
    found: dict[str, Any] = {}

    def look() -> None:
        frames = [f for f in frames_of_user() if f.f_code.co_filename.startswith(str(tmp_path))]
        read = Variables(lambda value: False, is_own).read
        within = lambda value: vars(value) if is_own(type(value)) else {}  # noqa: E731
        for scope in scopes_of(frames, within):
            found.update({f"{scope.name}:{k}": v.shown for k, v in read(scope.variables).items()})

    def is_own(kind: type) -> bool:
        return kind.__module__ == "counters"

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "helper", helper)
        exec(compile(COUNTERS, str(tmp_path / "counters.py"), "exec"), space)
        space["train"](look)
    counters = {
        "<counters.py>:TOTAL": "1",
        "warm:done": "0",
        "train:stop.bad": "0",
        "train:stop.calls": "0",
        "rates:number": "7",
        "cached:seen": "list",
        "train:ticks": "count(5)",
    }
    assert counters.items() <= found.items()


def test_what_is_decided_by_what_one_worker_finds_is_named_with_its_line(tmp_path: Path) -> None:
    text = "best = 9.0\nif loss < best or rank() == 0:\n    save()\nwhile worst > 3:\n    pass\n"
    base, other = (run(tmp_path, [script((X, Y))]) for _ in range(2))
    for at, each in enumerate((base, other)):
        step = each.steps_of(0)[4]
        shown = {"best": "1.5", "worst": "0" * (1 + at)}
        step.variables = {f"train:{n}": Variable(v, v, "number", "float") for n, v in shown.items()}
        step.lines = {"train": "t.py:1"}
    both = Run("", [*base.lives, *(replace(life, worker=1) for life in other.lives)])
    (said,) = explaining.of_decisions(both, {"t.py": text})
    assert said.startswith(
        "t.py:4 decides by `worst`, which is 0 on worker 0, 00 on worker 1 behind step 3"
    )


def test_dropout_by_sample_is_that_of_the_whole_batch_and_of_its_rate(tmp_path: Path) -> None:
    def dropping(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model, nn.functional.dropout(x, 0.5) + torch.rand(len(x), 4), y)

    mean = run(tmp_path, [script((X, Y), dropping, **STILL)], by_sample=True)
    several = run(tmp_path, parts(loss=dropping, **STILL), by_sample=True)
    assert whole_and_parts(mean, several).first is None
    draws = Draws()
    draws.begin_batch(list(range(400)))
    with put_aside(draws, drops=True):
        first, second = (nn.functional.dropout(torch.ones(400, 4), 0.25) for _ in range(2))
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert 0.2 < float((first == 0).float().mean()) < 0.3
    assert not torch.equal(first, second)


def test_rows_of_tables_are_compared_by_their_ids() -> None:
    ids, rows = torch.tensor([2, 5, 9]), torch.ones(3, 4)
    other = rows.clone()
    other[1, 2] += 1e-6
    runs = [Run("", [], tables={"users": (ids, each)}) for each in (rows, other)]
    assert tables_apart(*runs, limit=1e-5) is None
    found = tables_apart(*runs, limit=0.0)
    assert found is not None
    assert (found.what, found.name) == ("rows", "'users', id 5")
    fewer = Run("", [], tables={"users": (ids[:2], rows[:2])})
    found = tables_apart(runs[0], fewer, limit=1e-5)
    assert found is not None
    assert found.name == "'users', id 9"


def test_a_sample_for_want_of_another_weighs_nothing(tmp_path: Path) -> None:
    several = run(tmp_path, parts(loss=summed, **STILL))
    own = [several.steps_of(worker)[1] for worker in (0, 1)]
    for record in own:
        record.sums = True
    assert weights_of(own).tolist() == [1.0, 1.0]
    own[1].samples = own[0].samples[:1]
    assert weights_of(own).tolist() == [1.0, 0.0]


def test_who_enters_has_not_seen_batches_without_a_step(tmp_path: Path) -> None:
    base, other = (run(tmp_path, [script((X, Y))]) for _ in range(2))
    base.steps_of(0)[3].samples.insert(0, 7)  # of a batch before, of which no step was made
    found = to_the_bit(base, other).first
    assert found is not None
    assert (found.step, found.what) == (3, "samples")
    (life,) = other.lives
    lives = [replace(life, steps=life.steps[:2]), replace(life, steps=life.steps[2:])]
    assert to_the_bit(base, Run("", lives)).first is None


def test_a_steps_own_closure_makes_its_gradients(tmp_path: Path) -> None:
    def train() -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
        loader = DataLoader(TensorDataset(X, Y), batch_size=24)
        model, optimizer, loader = steepest.prepare(model, optimizer, loader)
        for _ in steepest.epochs(1):
            for x, y in loader:

                def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = cross_entropy(model, x, y)
                    loss.backward()
                    return loss

                optimizer.step(closure)

    steps = run(tmp_path, [train]).steps_of(0)
    assert [(len(s.losses), s.gradients, s.edited) for s in steps.values()] == [(2, {}, False)] * 2
