"""Modules with rows of tables, beside torch's with dense weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from steepest.errors import ConfigurationError, NonFiniteError
from steepest.tables.modules.collection import EmbeddingCollection
from steepest.tables.modules.embedding import (
    Embedding,
    EmbeddingBag,
    connect,
    tables_of,
)
from steepest.tables.rows.admission import CounterFilter
from steepest.tables.rows.eviction import GlobalStepEvict
from steepest.tables.rows.local import LocalRows
from steepest.tables.rows.row_optimizers import SGD, Adagrad, Adam, RowOptimizer
from steepest.tables.rows.table import Table
from tests.table_tools import table

ROWS, DIM = 20, 5
OPTIMIZERS: dict[str, tuple[RowOptimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD": (SGD(lr=0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
    "Adagrad": (Adagrad(lr=0.5), lambda p: torch.optim.Adagrad(p, lr=0.5)),
    "Adam": (Adam(lr=0.1), lambda p: torch.optim.SparseAdam(p, lr=0.1)),
}
CLOSE = {"float32": {"rtol": 1e-4, "atol": 1e-5}, "float64": {"rtol": 1e-10, "atol": 1e-11}}


def described(name: str = "t", dim: int = DIM, **settings: Any) -> Table:
    return table(name, dim, **({"dtype": "float64"} | settings))


def rows_of(source: LocalRows, described: Table, count: int = ROWS) -> Tensor:
    """All rows of a table."""
    group, number = source.place(described)
    return torch.tensor(source.pull(group, np.full(count, number, np.int32), np.arange(count)))


def connected(module: nn.Module, **settings: Any) -> LocalRows:
    source = LocalRows(tables_of(module), **settings)
    connect(module, source)
    return source


class Net(nn.Module):
    """Two embeddings, one used twice, and dense layers."""

    def __init__(self, make: Callable[[str, int], nn.Module]) -> None:
        super().__init__()
        self.users, self.items = make("users", 3), make("items", 5)
        torch.manual_seed(0)
        self.head = nn.Linear(3 + 5 + 5, 1, dtype=torch.float64)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        parts = [self.users(users), self.items(items[:, 0]), self.items(items[:, 1:]).mean(1)]
        return self.head(torch.cat(parts, 1).to(self.head.weight.dtype)).sum(1)


def test_a_frozen_embedding_is_looked_up_and_not_trained() -> None:
    ours = Embedding(described(optimizer=SGD(lr=0.5), capacity=3))
    source = connected(ours)
    theirs = nn.Embedding.from_pretrained(rows_of(source, ours.tables[0]), freeze=False)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for trains, ids in ((True, [3, 1, 3]), (False, [1, 2, 7, 9]), (True, [1]), (False, [1])):
        assert ours.requires_grad_(trains) is ours
        theirs.requires_grad_(trains)
        found, wanted = ours(torch.tensor(ids)), theirs(torch.tensor(ids))
        assert torch.allclose(found, wanted, **CLOSE["float64"])
        assert found.requires_grad == wanted.requires_grad == trains
        if trains:
            found.square().sum().backward()
            wanted.square().sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        source.step()
    assert [len(shard) for (shard,) in source.shards] == [2]


def test_rows_in_one_process_are_evicted_after_as_many_updates_as_on_servers() -> None:
    words = Embedding(described(evict=(GlobalStepEvict(steps_to_live=10),)))
    source = connected(words, num_shards=2)

    def rows() -> int:
        return sum(len(shard) for shard in source.shards[0])

    for update in range(2000):
        if update in (0, 999, 1500):
            words(torch.tensor([update, update + 1])).sum().backward()
        if update == 999:
            assert rows() == 2
        source.step()
        if update == 1500:
            assert rows() == 4
    assert rows() == 0


@pytest.mark.parametrize("nonfinite", ["refuse", "skip", "pass"])
def test_gradients_that_are_not_finite_are_refused_or_skipped_as_by_servers(nonfinite: str) -> None:
    net = nn.ModuleList([Embedding(described("good")), Embedding(described("bad", 3))])
    source = connected(net, nonfinite=nonfinite)

    def push(factor: float) -> None:
        for embedding, by in zip(net, (1.0, factor), strict=True):
            (embedding(torch.tensor([1, 2])).sum() * by).backward()

    push(1.0)
    assert source.step() == 1
    before = [rows_of(source, embedding.tables[0]) for embedding in net]
    push(math.inf)
    if nonfinite == "refuse":
        with pytest.raises(NonFiniteError, match=r"gradient of 'bad' holds NaN .*; nothing of"):
            source.step()
    else:
        assert source.step() == 2
    after = [rows_of(source, embedding.tables[0]) for embedding in net]
    unchanged = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert unchanged == [nonfinite != "pass"] * 2
    push(1.0)
    assert source.step() == (2 if nonfinite == "refuse" else 3)
    assert not torch.equal(rows_of(source, net[0].tables[0]), after[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_torchs_sparse_embeddings(
    name: str, dtype: str, num_shards: int
) -> None:
    ours_by, theirs_by = OPTIMIZERS[name]
    ours = Net(lambda of, dim: Embedding(described(of, dim, dtype=dtype, optimizer=ours_by)))
    source = connected(ours, num_shards=num_shards)

    def dense(of: str, dim: int) -> nn.Module:
        first = rows_of(source, getattr(ours, of).tables[0])
        return nn.Embedding.from_pretrained(first, freeze=False, sparse=True)

    theirs = Net(dense)
    sparse = theirs_by([theirs.users.weight, theirs.items.weight])
    heads = [torch.optim.SGD(net.head.parameters(), lr=0.05) for net in (ours, theirs)]
    random = torch.Generator().manual_seed(1)
    for _ in range(15):
        users = torch.randint(ROWS, (8,), generator=random)
        items = torch.randint(ROWS, (8, 4), generator=random)
        target = torch.randn(8, generator=random, dtype=torch.float64)
        losses = []
        for net, head in zip((ours, theirs), heads, strict=True):
            head.zero_grad()
            loss = (net(users, items) - target).square().mean()
            if net is theirs:
                sparse.zero_grad()
            loss.backward()
            head.step()
            losses.append(loss.item())
        with torch.sparse.check_sparse_tensor_invariants():
            sparse.step()
        source.step()
        assert np.allclose(*losses, **CLOSE[dtype])
    for of in ("users", "items"):
        rows = rows_of(source, getattr(ours, of).tables[0])
        assert torch.allclose(rows, getattr(theirs, of).weight, **CLOSE[dtype])
    assert source.version == 15


def run_bags(
    module: nn.Module, weight: Tensor | None, arguments: dict[str, Any], scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The output, and the gradient of per-sample weights."""
    scale = None if scale is None else scale.clone().requires_grad_()
    out = module(**arguments, **({} if scale is None else {"per_sample_weights": scale}))
    factors = torch.arange(1, out.numel() + 1, dtype=out.dtype).view(out.shape)
    (out * factors).sum().backward()
    return out.detach(), None if scale is None else scale.grad


@given(
    st.lists(st.lists(st.integers(0, ROWS - 1), max_size=5), min_size=1, max_size=6),
    st.sampled_from(["sum", "mean", "max"]),
    st.sampled_from([None, 0, 3]),
    st.booleans(),
    st.booleans(),
)
def test_bags_are_torchs(
    bags: list[list[int]], mode: str, padding: int | None, last: bool, weighted: bool
) -> None:
    flat = torch.tensor([key for bag in bags for key in bag], dtype=torch.int64)
    sizes = torch.tensor([0, *map(len, bags)])
    offsets = sizes.cumsum(0)[: None if last else -1]
    settings: dict[str, Any] = {
        "mode": mode,
        "padding_idx": padding,
        "include_last_offset": last,
    }
    ours = EmbeddingBag(described(optimizer=SGD(lr=1.0)), **settings)
    source = connected(ours)
    before = rows_of(source, ours.tables[0])
    theirs = nn.EmbeddingBag.from_pretrained(before.clone(), freeze=False, **settings)
    scale = torch.linspace(-1, 2, len(flat), dtype=torch.float64)
    scale = scale if weighted and mode == "sum" else None
    arguments = {"input": flat, "offsets": offsets}
    expected, of_scale = run_bags(theirs, theirs.weight, arguments, scale)
    arguments = {"ids": flat, "offsets": offsets}
    found, our_scale = run_bags(ours, None, arguments, scale)
    assert torch.allclose(found, expected)
    if scale is not None:
        assert torch.allclose(our_scale, of_scale)
    source.step()
    assert theirs.weight.grad is not None
    assert torch.allclose(before - rows_of(source, ours.tables[0]), theirs.weight.grad)
    made = {key for bag in bags for key in bag if key != padding}
    assert len(source.shards[0][0]) == len(made)  # no row for padding


def test_bags_of_one_size_need_no_offsets() -> None:
    ids = torch.tensor([[1, 2, 2], [3, 1, 0]])
    ours = EmbeddingBag(described(), mode="mean")
    source = connected(ours)
    rows = rows_of(source, ours.tables[0])
    assert torch.allclose(ours(ids), rows[ids].mean(1))
    assert ours(ids[:0]).shape == (0, DIM)


def test_padding_is_zero_and_is_not_trained() -> None:
    ours = Embedding(described(), padding_idx=3)
    source = connected(ours)
    ids = torch.tensor([[1, 3], [3, 2]])
    out = ours(ids)
    assert out.shape == (2, 2, DIM)
    assert not out[ids == 3].any()
    assert torch.equal(out[ids != 3], rows_of(source, ours.tables[0])[[1, 2]])
    out.sum().backward()
    source.step()
    assert source.shards[0][0].export().ids.tolist() == [1, 2]
    assert not ours(torch.tensor([3, 3])).any()


class Counted(LocalRows):
    """A source that notes what is asked of it."""

    def __init__(self, tables: Any) -> None:
        super().__init__(tables)
        self.pulled: list[list[int]] = []
        self.pushed: list[list[int]] = []

    def pull(self, group: int, tables: Any, ids: Any, training: bool = False) -> Any:
        self.pulled.append(ids.tolist())
        return super().pull(group, tables, ids, training)

    def push(self, group: int, tables: Any, ids: Any, gradients: Any, sightings: Any) -> None:
        self.pushed.append(ids.tolist())
        super().push(group, tables, ids, gradients, sightings)


def test_only_a_batchs_distinct_rows_travel_and_many_features_together() -> None:
    features = {
        "a": described("a"),
        "b": described("b"),
        "c": described("b"),
        "d": described("d", 3),
    }
    ours = EmbeddingCollection(features)
    source = Counted(ours.tables)
    connect(ours, source)
    jagged = torch.nested.nested_tensor(
        [torch.tensor([1, 1]), torch.tensor([2, 1, 1])], layout=torch.jagged
    )
    ids = {
        "a": torch.tensor([7, 7]),
        "b": torch.tensor([[1, 7], [1, 2**62]]),
        "c": jagged,
        "d": [[], [4]],
    }
    out = ours(ids)
    assert source.pulled == [[7, 1, 7, 2**62, 2], [4]]  # by tables a and b; by d
    sum(part.sum() for part in out.values()).backward()
    assert sorted(source.pushed) == sorted(source.pulled)
    with torch.no_grad():
        ours(ids)
    assert len(source.pushed) == 2
    a, b, d = (rows_of(source, features[name]) for name in "abd")
    (of_large,) = source.pull(0, np.array([1], np.int32), np.array([2**62]))
    assert torch.equal(out["a"], a[[7, 7]])
    assert torch.allclose(out["b"], torch.stack([b[1] + b[7], b[1] + torch.tensor(of_large)]))
    assert torch.allclose(out["c"], torch.stack([2 * b[1], b[2] + 2 * b[1]]))
    assert torch.equal(out["d"], torch.stack([torch.zeros(3, dtype=torch.float64), d[4]]))


def test_embeddings_of_a_collection_may_stay_apart() -> None:
    ours = EmbeddingCollection({"a": described("a"), "b": described("b")}, mode=None)
    source = connected(ours)
    ids = torch.tensor([[1, 2], [3, 1]])
    out = ours({"a": ids, "b": [[1], [], [2, 2]]})
    a, b = (rows_of(source, of) for of in ours.tables)
    assert torch.equal(out["a"], a[ids])
    assert [part.tolist() for part in out["b"].unbind()] == [
        b[[1]].tolist(),
        [],
        b[[2, 2]].tolist(),
    ]


def test_features_of_a_collection_have_modes_weights_and_padding_of_their_own() -> None:
    tables = {name: described(name) for name in "abcde"}
    modes = {"a": "sum", "b": "mean", "c": "max", "d": None, "e": "sum"}
    ours = EmbeddingCollection(tables, mode=modes, padding_idx={"a": 0, "b": 9, "d": 2})
    source = connected(ours)
    ids = {
        "a": torch.tensor([[0, 1, 2], [3, 0, 0]]),
        "b": [[9], [1, 9, 4]],
        "c": torch.tensor([[1, 2], [5, 6]]),
        "d": torch.tensor([[1, 2], [2, 3]]),
        "e": [[7, 7], []],
    }
    weights = {"a": torch.tensor([[5.0, 2.0, 3.0], [4.0, 5.0, 5.0]], dtype=torch.float64)}
    out = ours(ids, weights)
    a, b, c, d, e = (rows_of(source, tables[name]) for name in "abcde")
    zeros = torch.zeros(5, dtype=torch.float64)
    assert torch.allclose(out["a"], torch.stack([2 * a[1] + 3 * a[2], 4 * a[3]]))
    assert torch.allclose(out["b"], torch.stack([zeros, (b[1] + b[4]) / 2]))
    assert torch.equal(out["c"], torch.stack([c[1].maximum(c[2]), c[5].maximum(c[6])]))
    assert torch.equal(out["d"], torch.stack([d[1], zeros, zeros, d[3]]).view(2, 2, 5))
    assert torch.allclose(out["e"], torch.stack([2 * e[7], zeros]))
    before = {name: rows_of(source, tables[name]) for name in "abde"}
    (out["a"].sum() + 10 * out["b"].sum() + out["d"].sum() + out["e"].sum()).backward()
    source.step()
    for name, moved in {
        "a": {1: 2.0, 2: 3.0, 3: 4.0},
        "b": {1: 5.0, 4: 5.0},
        "d": {1: 1.0, 3: 1.0},
        "e": {7: 2.0},
    }.items():
        after = rows_of(source, tables[name])
        found = ((before[name] - after)[:, 0] / described().optimizer.lr).tolist()
        assert {at: round(by, 9) for at, by in enumerate(found) if by} == moved


def test_modes_weights_and_padding_of_unknown_features_are_refused() -> None:
    tables = {"a": described("a"), "b": described("b")}
    for settings, said in [
        ({"mode": {"a": "sum"}}, "give a mode for each of 'a', 'b'"),
        ({"mode": {"a": "sum", "b": "least"}}, r"mode\['b'\]='least'"),
        ({"padding_idx": {"c": 1}}, r"padding_idx of \['c'\]: "),
        ({"padding_idx": {"a": "x"}}, "padding_idx='x' of table 'a'"),
    ]:
        with pytest.raises(ConfigurationError, match=said):
            EmbeddingCollection(tables, **settings)  # type: ignore[arg-type]
    ours = EmbeddingCollection(tables, mode={"a": "sum", "b": "mean"})
    connected(ours)
    ids = {"a": torch.tensor([[1, 2]]), "b": torch.tensor([[1, 2]])}
    for weights, said in [
        ({"b": torch.ones(1, 2)}, r"per_sample_weights of the features \['b'\]"),
        ({"c": torch.ones(1, 2)}, r"per_sample_weights of the features \['c'\]"),
        ({"a": torch.ones(1, 3)}, "feature 'a' are 3 of torch.float32 for 2 ids"),
        ({"a": torch.ones(1, 2, dtype=torch.int64)}, "of torch.int64 for 2 ids: give a floating"),
        (torch.ones(1, 2), "per_sample_weights are a Tensor: give a dict"),
    ]:
        with pytest.raises(ConfigurationError, match=said):
            ours(ids, weights)


def test_sightings_are_occurrences_in_batches() -> None:
    ours = Embedding(described(admission=CounterFilter(filter_freq=3)))
    source = connected(ours)
    ours(torch.tensor([1, 1, 2])).sum().backward()
    ours(torch.tensor([1, 2, 5, 5, 5])).sum().backward()
    source.step()
    assert source.shards[0][0].export().ids.tolist() == [1, 5]
    assert source.shards[0][0].export().sightings.tolist() == [3, 3]


def test_gradients_of_several_passes_are_added_up_until_the_step() -> None:
    ours = Embedding(described(optimizer=SGD(lr=1.0)))
    source = connected(ours, num_shards=2)
    before = rows_of(source, ours.tables[0])
    for ids in ([1, 2, 2], [2, 3]):
        ours(torch.tensor(ids)).sum().backward()
    assert torch.equal(rows_of(source, ours.tables[0]), before)
    assert source.step() == 1
    change = (before - rows_of(source, ours.tables[0]))[:, 0]
    assert torch.allclose(change[:4], torch.tensor([0.0, 1.0, 3.0, 1.0], dtype=torch.float64))
    source.step()
    assert torch.equal((before - rows_of(source, ours.tables[0]))[:, 0], change)


def test_rows_are_no_parameters() -> None:
    ours = nn.Sequential(Embedding(described()), nn.Linear(DIM, 1, dtype=torch.float64))
    connected(ours)
    assert list(ours.state_dict()) == ["1.weight", "1.bias"]
    assert "t: 5" in repr(ours)
    assert Embedding(described()).embedding_dim == EmbeddingBag(described()).embedding_dim == 5


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (
            lambda: Embedding(described())(torch.tensor([1])),
            "no rows: a trainer .* call steepest.connect",
        ),
        (lambda: Embedding("t"), "table='t': give a Table, such as Table\\('users', 16\\)"),
        (lambda: EmbeddingBag(described(), mode="min"), "mode='min': give one of 'sum', 'mean'"),
        (
            lambda: EmbeddingCollection({"a": described("t", 3), "b": described("t", 4)}),
            "table 't' has dim=3 and dim=4: describe it once",
        ),
        (lambda: connect(Embedding(described()), LocalRows([])), "'t' is not among .* of, none"),
        (
            lambda: connect(Embedding(described()), LocalRows([described("t", 9)])),
            "table 't' is not among",
        ),
        (lambda: LocalRows([], num_shards=0), "num_shards=0"),
        (lambda: connect(nn.Linear(1, 1)), "module=Linear has no embedding of steepest"),
        (lambda: Embedding(described(), padding_idx=0.5), "padding_idx=0.5 of table 't': give an"),
        (lambda: EmbeddingBag(described(), padding_idx=True), "padding_idx=True of table 't'"),
        (lambda: EmbeddingCollection([described()]), "give a dict of features and Tables"),
        (
            lambda: Table("t", 4, optimizer=torch.optim.Adam),
            r"give Adam\(...\) of steepest.tables$",
        ),
    ],
)
def test_modules_that_cannot_work_are_refused(use: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        use()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.tensor([[-1]]),), "ids of table 't' hold -1: give integers from 0"),
        ((torch.tensor([[0.5]]),), "ids of table 't' are of float32: give integers"),
        ((torch.tensor([1, 2]),), r"ids of shape \(2,\), offsets none: give ids \(B, N\)"),
        ((torch.tensor([1, 2]), torch.tensor([[0]])), r"offsets of shape \(1, 1\)"),
        ((torch.tensor([1, 2]), torch.tensor([1])), r"offsets=\[1\] of 2 ids: .* from 0 on"),
        ((torch.tensor([1, 2]), torch.tensor([0, 3])), "ascending, at most 2"),
        ((torch.tensor([1, 2]), torch.tensor([0, 2, 1])), "ascending, at most 2"),
        (
            (torch.tensor([1, 2]), torch.tensor([0]), torch.tensor([1.0])),
            r"per_sample_weights of shape \(1,\) for ids of shape \(2,\) in mode 'sum'",
        ),
    ],
)
def test_ids_and_offsets_that_do_not_fit_are_refused(arguments: Any, said: str) -> None:
    ours = EmbeddingBag(described(), mode="sum")
    connect(ours)
    with pytest.raises(ConfigurationError, match=said):
        ours(*arguments)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1, 2], "ids of table 't' are a list: give a tensor of integers"),
        (torch.tensor([[True]]), "ids of table 't' are of bool: give integers"),
        (torch.tensor([[2**63]], dtype=torch.uint64), "hold 9223372036854775808: give integers"),
        (
            torch.nested.nested_tensor([torch.tensor([1])], layout=torch.jagged),
            "are a nested tensor: give it to an EmbeddingCollection",
        ),
    ],
)
def test_what_is_no_tensor_of_ids_is_refused(ids: Any, said: str) -> None:
    for ours in Embedding(described()), EmbeddingBag(described()):
        connect(ours)
        with pytest.raises(ConfigurationError, match=said):
            ours(ids)


def test_bad_features_are_refused() -> None:
    ours = EmbeddingCollection({"a": described()})
    connected(ours)
    for ids, said in [
        ({"b": torch.tensor([1])}, r"features \['b'\]: give some of 'a'"),
        ({"a": torch.tensor(1)}, r"ids of shape \(\) for feature 'a': give \(B,\)"),
        ({"a": [["x"]]}, "ids of feature 'a' are of <U1: give integers"),
        ({"a": [[-3]]}, "ids of feature 'a' hold -3"),
        (torch.tensor([1]), "ids are a Tensor: give a dict of features"),
        ({}, r"no ids of the features \['a'\]: give ids of each of 'a'"),
    ]:
        with pytest.raises(ConfigurationError, match=said):
            ours(ids)


def test_a_connected_module_is_copied_without_its_rows() -> None:
    ours = Embedding(described())
    source = connected(ours)
    twin = copy.deepcopy(ours)
    with pytest.raises(ConfigurationError, match="has no rows"):
        twin(torch.tensor([4]))
    twin.connect(source)
    assert torch.equal(ours(torch.tensor([4])), twin(torch.tensor([4])))


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's own
def test_a_compiled_module_trains_as_the_plain_one() -> None:
    found = []
    for compiled in (False, True):
        net = Net(lambda of, dim: Embedding(described(of, dim)))
        rows = connected(net)
        run = torch.compile(net, backend="eager") if compiled else net
        for _ in range(2):
            run(
                torch.tensor([1, 2]), torch.tensor([[3, 4, 5], [3, 3, 9]])
            ).square().sum().backward()
            rows.step()
        found.append((rows_of(rows, net.items.tables[0]), net.head.weight.grad))  # type: ignore[index,arg-type]
    plain, compiled_too = found
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled_too, strict=True))
