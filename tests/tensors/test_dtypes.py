"""Buffers and frozen parameters of any dtype: merged over replicas, pickled, stored, and carried to who needs them."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, load_model, save
from torch import nn

from steepest import DeadlineConfig, DistributedSGD, RunConfig
from steepest.checkpoint.files import Checkpoint, write
from steepest.core.tensors.dtypes import Tensors, as_bytes, merge_replicas
from steepest.data.storage.safetensors_file import read_tensors, write_tensors
from tests.checkpoint_contents import about
from tests.reference import Task, samples, sgd
from tests.whole_checkpoints import all_of

INTEGERS = [
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOATS += [getattr(torch, name) for name in dir(torch) if name.startswith("float8_e")]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
PACKED = [
    getattr(torch, name) for name in ("bits8", "bits16", "float4_e2m1fn_x2") if hasattr(torch, name)
]
ALL = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX, *PACKED]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
dtypes = pytest.mark.parametrize("dtype", ALL, ids=str)


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Values that every dtype has, in a tensor of at least one element per byte."""
    count = int(torch.tensor(shape).prod()) * dtype.itemsize
    return (
        (torch.arange(count, dtype=torch.uint8) % 2).view(dtype).view(shape)
        if count
        else empty(dtype, *shape)
    )


def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Also for dtypes that torch does not compare, and NaN."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return torch.equal(as_bytes(first), as_bytes(second))


@dtypes
def test_one_replica_has_what_it_has(dtype: torch.dtype) -> None:
    for value in (some(dtype, 3, 2), empty(dtype, 0, 2), some(dtype, 1)[0]):
        assert same(merge_replicas([value], [1.0]), value)
        found = merge_replicas([value, value], [1.0, 1.0])
        assert same(found, value)
        assert found.data_ptr() != value.data_ptr() or not value.numel()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_are_at_their_greatest(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    values = [
        torch.tensor([info.min, 1, 3], dtype=dtype),
        torch.tensor([info.max, 2, 3], dtype=dtype),
        torch.tensor([0, 0, 3], dtype=dtype),
    ]
    assert same(merge_replicas(values, [1.0] * 3), torch.tensor([info.max, 2, 3], dtype=dtype))
    assert same(
        merge_replicas([value[0] for value in values], [1.0] * 3),
        torch.tensor(info.max, dtype=dtype),
    )


def test_a_bool_is_true_where_any_is() -> None:
    values = [torch.tensor([True, False, False]), torch.tensor([True, True, False])]
    assert same(merge_replicas(values, [1.0, 1.0]), torch.tensor([True, True, False]))


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
def test_numbers_are_at_their_weighted_mean(dtype: torch.dtype) -> None:
    def tensor(*values: complex) -> torch.Tensor:
        return torch.tensor(values if dtype.is_complex else [value.real for value in values]).to(
            dtype
        )

    assert same(merge_replicas([tensor(1, 4), tensor(5, 4)], [3.0, 1.0]), tensor(2, 4))
    assert same(merge_replicas([tensor(1, 4), tensor(5, 4)], [0.0, 0.0]), tensor(1, 4))
    if dtype.is_complex:
        found = merge_replicas([tensor(1j, complex("inf")), tensor(2, 1)], [1.0, 1.0])
        assert same(found, tensor(1 + 0.5j, complex("inf")))


@given(st.lists(st.complex_numbers(max_magnitude=1e30), min_size=1, max_size=5))
def test_complex_means_are_those_of_their_parts(values: list[complex]) -> None:
    weights = [float(index + 1) for index in range(len(values))]
    tensors = [torch.tensor([value], dtype=torch.complex128) for value in values]
    found = merge_replicas(tensors, weights)
    for part in ("real", "imag"):
        assert same(
            getattr(found, part),
            merge_replicas([getattr(value, part) for value in tensors], weights),
        )


def test_a_view_is_merged_as_what_it_shows() -> None:
    value = torch.tensor([1 + 2j, 3 - 1j])
    for view in (value.conj(), value.flip(0), torch.stack([value, value]).T):
        assert same(merge_replicas([view, view], [1.0, 1.0]), view.resolve_conj().contiguous())
        assert same(
            pickle.loads(pickle.dumps(Tensors(a=view)))["a"], view.resolve_conj().contiguous()
        )


@dtypes
def test_any_dtype_is_pickled(dtype: torch.dtype) -> None:
    given = Tensors(a=some(dtype, 3, 2), b=empty(dtype, 0), c=some(dtype, 1)[0])
    found = pickle.loads(pickle.dumps(given))
    assert isinstance(found, Tensors)
    assert list(found) == ["a", "b", "c"]
    assert all(same(found[name], given[name]) for name in given)
    found["a"].copy_(given["a"])  # it is writable


@dtypes
def test_any_dtype_is_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a": some(dtype, 3, 2),
        "b": empty(dtype, 2, 0),
        "c": some(dtype, 1)[0],
        'd"\n é': some(dtype, 5),
    }
    told = write_tensors(tmp_path / "file", tensors | {"a": tensors["a"].split(2)})  # in two pieces
    found = read_tensors(tmp_path / "file", told)
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensors[name]) for name in tensors)
    if not told["dtypes"]:
        assert all(
            same(value, tensors[name]) for name, value in load_file(tmp_path / "file").items()
        )


def test_the_file_is_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        str(dtype): some(dtype, 3)
        for dtype in ALL
        if not str(dtype).startswith(("torch.bits", "torch.float4"))
    }
    tensors = {name: value for name, value in tensors.items() if value.dtype is not torch.complex32}
    told = write_tensors(tmp_path / "file", {"one": torch.ones(3), "ü": torch.zeros(())})
    assert told["dtypes"] == {}
    theirs = save({"one": torch.ones(3), "ü": torch.zeros(())})
    assert load_file(tmp_path / "file").keys() == {"one", "ü"}
    assert (tmp_path / "file").stat().st_size - len(theirs) in range(
        -64, 65
    )  # but for how they write their header
    write_tensors(tmp_path / "all", tensors)
    assert load_file(tmp_path / "all").keys() == tensors.keys()


def test_a_large_file_is_written_in_parts_and_says_so(tmp_path: Path) -> None:
    path, told = tmp_path / "file", list[Path]()
    write_tensors(path, {"w": torch.ones(4 << 20)}, told.append)
    assert set(told) == {path}
    assert len(told) > 4


@dtypes
def test_a_checkpoint_has_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    value = some(dtype, 3)
    write(tmp_path, Checkpoint({"w": value}, {"w/state": value}, {"0/w": value}, about()))
    found = all_of(tmp_path)
    for tensors in (found.weights, found.optimizer, found.replicas):
        assert same(next(iter(tensors.values())), value)


# -- a job ----------------------------------------------------------------------------------------------


class Rotating(nn.Module):
    """With buffers and frozen parameters of all sorts; some are written in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        for dtype in (torch.bool, *INTEGERS, *FLOATS, *COMPLEX):
            self.register_buffer(str(dtype).replace(".", "_"), some(dtype, 3))
        self.register_buffer("freqs_cis", torch.polar(torch.ones(2), torch.arange(2.0)))
        self.register_buffer("turns", torch.zeros(1, dtype=torch.complex128))
        self.register_buffer("steps", torch.zeros((), dtype=torch.uint16))
        self.frozen = nn.Parameter(torch.polar(torch.ones(2), torch.ones(2)), requires_grad=False)
        self.table = nn.Parameter(some(torch.uint16, 5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.turns += 1j
            self.steps.copy_((self.steps.int() + 1).to(torch.uint16))
        turned = torch.view_as_complex(x.view(-1, 2, 2)) * self.freqs_cis * self.frozen
        return self.linear(torch.view_as_real(turned).reshape(-1, 4))


TASK = Task(Rotating, sgd(lr=0.01), samples(24, 4, 2, torch.float32))


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("workers", [2, 3])
def test_a_job_keeps_them_through_everything(tmp_path: Path, workers: int) -> None:
    initial = Rotating().state_dict()
    constant = [name for name in initial if not name.startswith(("linear", "turns", "steps"))]
    with DistributedSGD(
        TASK.creator(), workers, run_config=RunConfig(deadlines=DeadlineConfig(step=60))
    ) as trainer:
        trainer.fit(steps=3, progress=False)
        assert trainer.evaluate(TASK.data).samples == 24
        trainer.save(tmp_path)

        def look() -> dict[str, Any]:
            state = trainer.state_dict()
            assert state.keys() == initial.keys()
            assert all(same(state[name], initial[name]) for name in constant)
            return state

        before = look()
        trainer.load_state_dict(before)
        assert all(same(value, before[name]) for name, value in look().items())
        assert (int(before["steps"]), complex(before["turns"])) == (3, 3j)
        trainer.fit(steps=2, progress=False)
        os.kill(trainer.foreach_worker(lambda view: view.pid)[-1], signal.SIGKILL)
        trainer.step()
        assert int(look()["steps"]) >= 6  # where a step was taken again it counts twice
        trainer.restore(tmp_path)
        after = look()
        assert all(same(after[name], before[name]) for name in before)
    assert load_file(next(tmp_path.glob("weights-*")))["freqs_cis"].dtype is torch.complex64


def test_what_safetensors_knows_loads_into_the_plain_module(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("freqs", torch.polar(torch.ones(2), torch.ones(2)))
    write_tensors(
        tmp_path / "file", {name: value.detach() for name, value in module.state_dict().items()}
    )
    other = nn.Linear(2, 2)
    other.register_buffer("freqs", torch.zeros(2, dtype=torch.complex64))
    load_model(other, tmp_path / "file")
    assert same(other.freqs, module.freqs)
