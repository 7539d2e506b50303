"""Rows of tables: how they begin, how pushes change them, and that nothing else does."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

from steepest.errors import ConfigurationError
from steepest.tables.modules.embedding import EmbeddingBag, connect
from steepest.tables.rows.compilation import compile_kernels
from steepest.tables.rows.hashing import shard_of
from steepest.tables.rows.initial import Constant, Initial, Normal, TruncatedNormal, Uniform, Zeros
from steepest.tables.rows.local import LocalRows
from steepest.tables.rows.row_optimizers import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    RowOptimizer,
    RowWiseAdagrad,
)
from steepest.tables.rows.shard import TableShard
from steepest.tables.rows.spread import Spread
from steepest.tables.rows.table import groups
from tests.table_tools import ids_of, push, same, table

# -- how rows begin ------------------------------------------------------------------------------


def first_values(initial: Initial, rows: int = 5000, dim: int = 8, seed: int = 0) -> np.ndarray:
    shard = TableShard([table(dim=dim, initial=initial, dtype="float64")], seed=seed)
    return shard.pull(np.zeros(rows, np.int32), np.arange(rows))


def distance(values: np.ndarray, cdf: Callable[[float], float]) -> float:
    """Kolmogorov and Smirnov's: of the values' distribution from another."""
    ordered = np.sort(values, axis=None)
    expected = np.array([cdf(value) for value in ordered])
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return float(max(abs(expected - steps[1:]).max(), abs(expected - steps[:-1]).max()))


def truncated(value: float) -> float:
    normal = NormalDist(1.0, 2.0)
    low, high = normal.cdf(-1.0), normal.cdf(2.0)
    return (normal.cdf(value) - low) / (high - low)


@pytest.mark.parametrize(
    ("initial", "cdf"),
    [
        (Normal(1.0, 0.5), NormalDist(1.0, 0.5).cdf),
        (Uniform(-1.0, 3.0), lambda value: (value + 1) / 4),
        (TruncatedNormal(1.0, 2.0, -1.0, 2.0), truncated),
    ],
)
def test_first_values_have_the_distribution_that_was_asked_for(
    initial: Initial, cdf: Callable[[float], float]
) -> None:
    values = first_values(initial)
    assert distance(values, cdf) < 1.95 / math.sqrt(values.size)  # a thousandth of samples is above
    columns = np.corrcoef(values.T) - np.eye(8)
    assert abs(columns).max() < 5 / math.sqrt(len(values))
    assert abs(np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]) < 5 / math.sqrt(len(values))
    if isinstance(initial, TruncatedNormal):
        assert -1.0 <= values.min() < values.max() <= 2.0


def test_normal_values_are_the_quantiles_of_uniform_ones() -> None:
    uniform, normal = first_values(Uniform()), first_values(Normal())
    quantile = np.vectorize(NormalDist().inv_cdf)
    assert np.allclose(normal, quantile(uniform), rtol=1e-13, atol=1e-14)
    assert uniform.min() < 1e-4 < 1 - 1e-4 < uniform.max()  # both tails


def test_constants_and_zeros() -> None:
    assert (first_values(Constant(-2.5)) == -2.5).all()
    assert (first_values(Zeros()) == 0.0).all()


def test_first_values_are_of_seed_name_and_id_alone() -> None:
    names = ["users", "items"]
    shard = TableShard([table(name) for name in names], seed=3)
    other = TableShard([table(name) for name in reversed(names)], shard=1, num_shards=2, seed=3)
    ids = np.array([0, 1, 7, 2**63 - 1])
    zeros, ones = np.zeros(4, np.int32), np.ones(4, np.int32)
    assert np.array_equal(shard.pull(zeros, ids), other.pull(ones, ids))
    assert not np.array_equal(shard.pull(zeros, ids), shard.pull(ones, ids))
    alone = TableShard([table("users")], seed=4)
    assert not np.array_equal(shard.pull(zeros, ids), alone.pull(zeros, ids))


def test_first_values_are_splitmix_of_a_counter() -> None:
    mask = 2**64 - 1

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    salt = int.from_bytes(hashlib.blake2b(b"3/users", digest_size=8).digest(), "little")
    begin = mix(7 ^ salt)
    bits = [mix((begin + turn * 0x9E3779B97F4A7C15) & mask) >> 11 for turn in range(1, 5)]
    uniform = table("users", initial=Uniform(), dtype="float64")
    values = TableShard([uniform], seed=3).pull([0], [7])
    assert values.tolist() == [[(drawn + 0.5) / 2**53 for drawn in bits]]


# -- how pushes change rows ----------------------------------------------------------------------

Steps = list[tuple[np.ndarray, np.ndarray]]


def steps(dim: int, dtype: str, rows: int = 12, every: bool = False) -> Steps:
    """Ids and gradients of twenty pushes."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(20):
        ids = np.arange(rows) if every else random.choice(rows, 5, replace=False)
        found.append((ids, random.normal(size=(len(ids), dim)).astype(dtype)))
    return found


def pushed(optimizer: RowOptimizer, dtype: str, taken: Steps, rows: int = 12) -> np.ndarray:
    """Values of rows before the pushes, and after each."""
    shard = TableShard([table(dim=6, optimizer=optimizer, dtype=dtype)])
    every = np.zeros(rows, np.int32), np.arange(rows)
    values = [shard.pull(*every)]
    for version, (ids, gradients) in enumerate(taken, 1):
        shard.push(np.zeros(len(ids), np.int32), ids, gradients, version)
        values.append(shard.pull(*every))
    return np.stack(values)


def by_torch(
    make: Callable[[Any], torch.optim.Optimizer],
    first: np.ndarray,
    taken: Steps,
    sparse: bool,
    clip: float | None = None,
) -> np.ndarray:
    """What torch's optimizer makes of the same rows."""
    weight = torch.nn.Parameter(torch.tensor(first))
    optimizer = make([weight])
    values = [first]
    for ids, gradients in taken:
        if clip is not None:
            norms = np.linalg.norm(gradients, axis=1, keepdims=True)
            gradients = gradients * np.minimum(1, clip / norms)
        if sparse:
            weight.grad = torch.sparse_coo_tensor(
                torch.tensor(ids)[None],
                torch.tensor(gradients),
                weight.shape,
                is_coalesced=False,
                check_invariants=True,
            )
        else:
            weight.grad = torch.tensor(gradients)[np.argsort(ids)]
        with torch.sparse.check_sparse_tensor_invariants():
            optimizer.step()
        values.append(weight.detach().numpy().copy())
    return np.stack(values)


SPARSE: dict[str, tuple[RowOptimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD": (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "Adagrad": (Adagrad(lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "Adagrad, other defaults": (
        Adagrad(lr=0.1, initial_accumulator_value=0.3, eps=1e-3),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3, eps=1e-3),
    ),
    "Adam": (Adam(lr=0.1), lambda p: torch.optim.SparseAdam(p, lr=0.1)),
    "Adam, other defaults": (
        Adam(lr=0.1, betas=(0.8, 0.9), eps=1e-3),
        lambda p: torch.optim.SparseAdam(p, lr=0.1, betas=(0.8, 0.9), eps=1e-3),
    ),
}
DENSE: dict[str, tuple[RowOptimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "weight decay": (
        SGD(lr=0.1, weight_decay=0.2),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2),
    ),
    "Adagrad with weight decay": (
        Adagrad(lr=0.1, weight_decay=0.2),
        lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.2),
    ),
    "Adam": (
        Adam(lr=0.1, weight_decay=0.2, eps=1e-30),
        lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.2, eps=1e-30),
    ),
    "momentum": (SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "Nesterov": (
        SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
}
CLOSE = {
    "float32": {"rtol": 2e-5, "atol": 2e-6},
    "float64": {"rtol": 1e-12, "atol": 1e-13},
    # twenty pushes, each of which rounds a number by chance: five deviations of the sum, for rows of some 3
    "bfloat16": {"rtol": 0, "atol": 5 * math.sqrt(20) * 0.5 * 2.0**-6},
    "float16": {"rtol": 0, "atol": 5 * math.sqrt(20) * 0.5 * 2.0**-9},
    "int8": {"rtol": 0, "atol": 5 * math.sqrt(20) * 0.5 * 2.0**-5},
}


@pytest.mark.long
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", SPARSE)
def test_optimizers_are_torchs_on_sparse_gradients(name: str, dtype: str) -> None:
    ours, theirs = SPARSE[name]
    taken = steps(6, "float64" if dtype == "float64" else "float32")
    values = pushed(ours, dtype, taken)
    assert np.allclose(values, by_torch(theirs, values[0], taken, sparse=True), **CLOSE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", DENSE)
def test_optimizers_are_torchs_where_every_row_is_pushed(name: str, dtype: str) -> None:
    ours, theirs = DENSE[name]
    taken = steps(6, dtype, every=True)
    values = pushed(ours, dtype, taken)
    assert np.allclose(values, by_torch(theirs, values[0], taken, sparse=False), **CLOSE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_of_rows_are_clipped_by_their_norms(dtype: str) -> None:
    taken = steps(6, dtype)
    values = pushed(Adagrad(lr=0.1, clip_norm=2.0), dtype, taken)
    _, theirs = SPARSE["Adagrad"]
    expected = by_torch(theirs, values[0], taken, sparse=True, clip=2.0)
    assert np.allclose(values, expected, **CLOSE[dtype])
    norms = [np.linalg.norm(gradients, axis=1) for _, gradients in taken]
    assert min(map(np.min, norms)) < 2.0 < max(map(np.max, norms))


def test_momentum_of_a_row_decays_when_the_row_is_pushed() -> None:
    taken = steps(6, "float64")
    values = pushed(SGD(lr=0.1, momentum=0.9), "float64", taken)
    _, theirs = DENSE["momentum"]
    for row in range(12):  # each row by itself, in the pushes that it is in
        turns = [at for at, (ids, _) in enumerate(taken) if row in ids]
        own = [(np.zeros(1, int), taken[at][1][taken[at][0] == row]) for at in turns]
        expected = by_torch(theirs, values[0, row : row + 1], own, sparse=False)
        at = [0, *(turn + 1 for turn in turns)]
        assert np.allclose(values[at, row], expected[:, 0], **CLOSE["float64"])


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_row_wise_adagrad(dtype: str) -> None:
    taken = steps(6, dtype)
    values = pushed(RowWiseAdagrad(lr=0.1, eps=1e-3), dtype, taken)
    rows, totals = values[0].astype(np.float64), np.zeros(12)
    for at, (ids, gradients) in enumerate(taken, 1):
        wide = gradients.astype(np.float64)
        totals[ids] += (wide**2).mean(axis=1)
        rows[ids] -= 0.1 / (np.sqrt(totals[ids]) + 1e-3)[:, None] * wide
        assert np.allclose(values[at], rows, **CLOSE[dtype])


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ftrl_proximal(dtype: str) -> None:
    alpha, beta, l1, l2 = 0.1, 0.5, 0.7, 0.2
    taken = steps(6, dtype)
    ftrl = FTRL(lr=alpha, beta=beta, l1=l1, l2=l2)
    values = pushed(ftrl, dtype, taken)
    w, z, n = values[0].astype(np.float64), np.zeros((12, 6)), np.zeros((12, 6))
    for at, (ids, gradients) in enumerate(taken, 1):  # algorithm 1 of the paper
        g = gradients.astype(np.float64)
        sigma = (np.sqrt(n[ids] + g**2) - np.sqrt(n[ids])) / alpha
        z[ids] += g - sigma * w[ids]
        n[ids] += g**2
        shrunk = -(z[ids] - np.sign(z[ids]) * l1) / ((beta + np.sqrt(n[ids])) / alpha + l2)
        w[ids] = np.where(abs(z[ids]) <= l1, 0.0, shrunk)
        assert np.allclose(values[at], w, rtol=1e-4 if dtype == "float32" else 1e-11, atol=1e-6)
    assert (values[-1] == 0.0).any()


def test_a_learning_rate_may_come_with_a_push() -> None:
    shard = TableShard([table(initial=Zeros())])
    push(shard, [1], 1, learning_rate=0.25)
    assert shard.pull([0], [1]).tolist() == [[-0.25] * 4]
    push(shard, [1], 2)
    assert shard.pull([0], [1]).tolist() == [[-1.25] * 4]


# -- shards --------------------------------------------------------------------------------------


def test_a_pull_changes_nothing() -> None:
    shard = TableShard([table(), table("u")])
    push(shard, [1, 2], 1)
    before = shard.export()
    tables, ids = np.array([0, 0, 1, 0, 0], np.int16), np.array([1, 5, 1, 5, 2], np.uint64)
    values = shard.pull(tables, ids)
    assert np.array_equal(values[1], values[3])
    assert same(shard.export(), before)
    assert shard.pull([], []).shape == (0, 4)


def test_a_pull_writes_where_it_is_told() -> None:
    shard = TableShard([table()])
    push(shard, [1, 2], 1)
    out = np.full((3, 2, 4), 7, np.float32)
    keys = [0, 0], [2, 9]
    assert np.shares_memory(shard.pull(*keys, out[1]), out)
    assert np.array_equal(out[1], shard.pull(*keys))
    assert (out[[0, 2]] == 7).all()
    frozen = out[1].view()
    frozen.flags.writeable = False
    for wrong in (out[1, :1], out[1].astype(float), np.asfortranarray(out[1]), frozen):
        with pytest.raises(
            ConfigurationError, match="give a contiguous, writable array of float32"
        ):
            shard.pull(*keys, wrong)


@pytest.mark.parametrize("optimizer", [SGD(), SGD(momentum=0.9), Adagrad(), RowWiseAdagrad()])
def test_rows_are_the_same_at_any_number_of_shards(optimizer: RowOptimizer) -> None:
    random = np.random.default_rng(0)
    group = [table("a", optimizer=optimizer), table("b", optimizer=optimizer)]
    alone = TableShard(group, seed=5)
    shards = [TableShard(group, shard=at, num_shards=3, seed=5) for at in range(3)]
    for version in range(1, 30):
        keys = np.unique(random.integers([0, 0], [2, 60], (40, 2)), axis=0)
        tables, ids = keys.T
        gradients = random.normal(size=(len(ids), 4)).astype(np.float32)
        alone.push(tables, ids, gradients, version)
        of = shard_of(tables, ids, Spread.evenly(2, 3))
        for at, shard in enumerate(shards):
            mine = of == at
            shard.push(tables[mine], ids[mine], gradients[mine], version)
    ours = TableShard(group, seed=5)
    ours.load([shard.export() for shard in shards], 29)
    assert same(ours.export(), alone.export())
    assert len(alone) == sum(map(len, shards)) == 120
    assert alone.rows_of().tolist() == [60, 60]
    for at, shard in enumerate(shards):  # and back
        again = TableShard(group, shard=at, num_shards=3, seed=5)
        again.load([alone.export()], 29)
        assert same(again.export(), shard.export())


def test_increments_hold_what_was_changed() -> None:
    shard = TableShard([table(initial=Zeros())])
    push(shard, range(10), 1)
    base = shard.export()
    push(shard, [2, 3, 20], 2)
    push(shard, [3], 3)
    assert shard.export(since=1).ids.tolist() == [2, 3, 20]
    assert shard.export(since=2).ids.tolist() == [3]
    assert shard.export(since=3).ids.tolist() == []
    assert base.ids.tolist() == list(range(10))
    assert (base.values == -1.0).all()  # a copy


@pytest.mark.long
def test_all_kernels_are_compiled_before_they_are_used() -> None:
    from steepest.tables.rows import hashing, index, initial, pooling, row_formats, row_store, shard

    group = [table(optimizer=Adam(), dtype="float64"), table("u", optimizer=Adagrad())]
    group.append(table("v", dtype="int8"))
    compile_kernels(group)
    watched = [row_store._gather, row_store._scatter, index._find, initial._fill, shard._mark]
    watched += [hashing._distinct, hashing._add_up, pooling._pool, pooling._spread]
    watched += [row_formats._pack, row_formats._unpack, row_formats._copy]
    before = [len(kernel.signatures) for kernel in watched]  # type: ignore[attr-defined]
    for of in groups(group):
        made = TableShard(of)
        push(made, [1, 2], 1)
        frozen = np.zeros(2, np.int32)
        frozen.flags.writeable = False
        made.pull(frozen, np.arange(4)[::2])
        form = of[0].form
        sent = np.empty((2, form.sent_bytes), np.uint8)
        made.pull_sent(frozen, np.arange(4)[::2], sent)
        form.received(sent.reshape(-1))
        module = EmbeddingBag(of[0], mode="mean")
        connect(module, LocalRows(of, num_shards=2))
        module(torch.tensor([[1, 2], [2, 3]])).sum().backward()
    assert [len(kernel.signatures) for kernel in watched] == before  # type: ignore[attr-defined]


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "ids", "said"),
    [
        ([0], [-1], "ids hold -1: give integers from 0"),
        ([0], [2**64 - 1], "ids hold 18446744073709551615: give integers from 0 to 2"),
        ([0], [1.0], "ids are of float64: give integers"),
        ([0], [True], "ids are of bool: give integers"),
        ([0], ["a"], "ids are of <U1: give integers.*hash texts first"),
        ([0, 0], [1], r"tables of shape \(2,\) and ids of shape \(1,\)"),
        ([[0]], [[1]], r"ids of shape \(1, 1\): give two arrays of one dimension"),
        ([1], [1], "tables hold 1 to 1 of int64: give the numbers 0 to 0 of 't'"),
        ([-1], [1], "tables hold -1"),
        ([0.5], [1], "of float64: give the numbers"),
    ],
)
def test_bad_ids_are_refused(tables: Any, ids: Any, said: str) -> None:
    shard = TableShard([table()])
    with pytest.raises(ConfigurationError, match=said):
        shard.pull(tables, ids)
    with pytest.raises(ConfigurationError, match=said):
        shard.push(tables, ids, np.zeros((len(ids), 4), np.float32), 1)
    assert len(shard) == 0


def test_bad_pushes_are_refused_and_change_nothing() -> None:
    shard = TableShard([table()])
    push(shard, [1, 2, 3], 1)
    before = shard.export()
    three = np.zeros((3, 4), np.float32)
    for arguments, said in [
        (([0], [1], three, 2), r"gradients of shape \(3, 4\) for 1 ids of tables of dimension 4"),
        (([0], [1], three[:1, :3], 2), r"give \(1, 4\)"),
        (([0], [1], three[:1].astype(float), 2), "float64: the tables are of float32"),
        (([0], [1], three[:1], 1), "version=1 after 1: each push has a greater"),
        (([0], [1], three[:1], 1.5), "version=1.5: give an integer"),
        (([0], [1], three[:1], 2, -1.0), "learning_rate=-1.0: give a finite number of at least 0"),
        (([0], [1], three[:1], 2, None, [0]), "sightings of shape .* from 1 to 2"),
        (([0] * 3, [3, 2, 3], three, 2), "id 3 of table 't' is in a push twice"),
        (([0] * 3, [3, 9, 9], three, 2), "id 9 of table 't' is in a push twice"),
    ]:
        with pytest.raises(ConfigurationError, match=said):
            shard.push(*arguments)
        assert same(shard.export(), before)
    push(shard, [3, 9], 2)
    assert ids_of(shard) == [1, 2, 3, 9]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": ""}, "name='': give a table a name"),
        ({"dim": 0}, "dim of table 't'=0: give an integer of at least 1"),
        ({"dtype": "fp16"}, "dtype='fp16' of table 't': give one of 'float32', .*'int8'"),
        ({"dtype": torch.bfloat16}, "dtype=torch.bfloat16 of table 't': give one of"),
        ({"slots_dtype": "float16"}, "slots_dtype='float16' of table 't' of float32: give 'bf"),
        ({"dtype": "float64", "slots_dtype": "bfloat16"}, "a float64 table's are float64"),
        ({"initial": 0.1}, "initial=0.1 of table 't': give Normal"),
        ({"optimizer": torch.optim.Adagrad}, r"torch.optim.adagrad.Adagrad for .* give Adagrad\("),
        ({"optimizer": torch.optim.SparseAdam}, r"row by row, where they lie; give Adam\("),
        ({"optimizer": torch.optim.LBFGS}, "give one of SGD, Adagrad, RowWiseAdagrad, Adam, FTRL"),
        ({"optimizer": "adam"}, "optimizer=builtins.str for table 't'"),
        ({"capacity": 0}, "capacity of table 't'=0"),
    ],
)
def test_bad_tables_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        table(**settings)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Uniform(1.0, 0.0), r"Uniform\(b\)=0.0: give a finite number of at least 1"),
        (lambda: Normal(0.0, -1.0), r"Normal\(std\)=-1.0"),
        (lambda: Constant(math.nan), r"Constant\(val\)=nan: give a finite number$"),
        (lambda: TruncatedNormal(a=50.0, b=51.0), "within 8 standard deviations of the mean"),
        (lambda: SGD(lr=-1), r"SGD\(lr\)=-1: give a finite number of at least 0"),
        (lambda: SGD(nesterov=True), "without momentum: give a momentum above 0"),
        (lambda: Adam(betas=(0.9, 1.0)), r"Adam\(betas=\(0.9, 1.0\)\): give two numbers"),
        (lambda: SGD(lr=10**400), r"SGD\(lr\)=10+: give a finite number of at least 0"),
        (lambda: Adagrad(clip_norm=0.0), r"Adagrad\(clip_norm\)=0.0: give a positive number"),
        (lambda: FTRL(lr=0.0), r"FTRL\(lr\)=0.0: give a positive number"),
        (lambda: TableShard([]), "0 tables: give 1 to 32768"),
        (lambda: TableShard([table(), table()]), "two tables of one name among t, t"),
        (
            lambda: TableShard([table(), table("u", 5)]),
            "one dimension, dtype, optimizer and gradient_dtype",
        ),
        (
            lambda: TableShard([table()], shard=2, num_shards=2),
            "shard=2: give a number from 0 to 1",
        ),
        (
            lambda: groups([table(), table(dim=5)]),
            "table 't' has dim=4 and dim=5: describe it once",
        ),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()


def test_tables_of_one_shape_are_grouped() -> None:
    tables = [table("a"), table("b", 5), table("c"), table("a"), table("d", optimizer=Adagrad())]
    assert [[of.name for of in group] for group in groups(tables)] == [["a", "c"], ["b"], ["d"]]
