"""What the tests of jobs with embedding tables share: models with rows on servers, and torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steepest.checkpoint.files import Checkpoint
from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.commit_log import CommitLog
from steepest.core.engine.optimizer_slices import assemble
from steepest.core.optim.portable import Record
from steepest.runtime.state.row_read import rows_of as rows_of_state
from steepest.tables.files.row_values import wide
from steepest.tables.job.job_tables import dealing_of
from steepest.tables.job.restored_shards import MADE, RestoredShards, RowsWanted
from steepest.tables.job.table_chunk import TableChunk
from steepest.tables.modules.embedding import Embedding, EmbeddingBag, tables_of
from steepest.tables.rows.initial import Zeros
from steepest.tables.rows.local import LocalRows
from steepest.tables.rows.row_optimizers import SGD, Adagrad, Adam, RowOptimizer
from steepest.tables.rows.state import TableState
from steepest.tables.rows.table import Table, groups
from steepest.testing import InProcessCluster, replay
from tests.inside import replay_state
from tests.reference import Task, Weights, same_bits, samples, sgd

ROWS, DIM = 20, 3  # ids are below ROWS
BAG = 4  # items of a sample


def mostly_long(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Values for tests, of which all but those kept take part only where tests may take long."""
    return [
        value if value in kept else pytest.param(value, marks=pytest.mark.long) for value in values
    ]


def described(name: str, dim: int = DIM, **settings: Any) -> Table:
    """A table of float64 rows."""
    return Table(**({"optimizer": SGD(lr=0.1), "dtype": "float64"} | settings), name=name, dim=dim)


def clicks(count: int = 13, rows: int = ROWS) -> tuple[Tensor, ...]:
    """Fixed random users, bags of items, and targets; some ids are in many samples."""
    generator = torch.Generator().manual_seed(2)
    numbers = torch.rand(count, 1 + BAG, generator=generator) ** 2 * rows
    users, *items = numbers.long().unbind(1)
    return users, torch.stack(items, 1), samples(count)[1]


class Clicks(nn.Module):
    """A user, the mean of a bag of items, and a dense layer.

    Args:
        users: looks ids (B,) up: (B, DIM).
        items: looks ids (B, BAG) up: (B, 2).
    """

    def __init__(self, users: nn.Module, items: nn.Module) -> None:
        super().__init__()
        self.users, self.items = users, items
        self.head = nn.Linear(DIM + 2, 2, dtype=torch.float64)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return (B, 2)."""
        found = torch.cat([self.users(users), self.items(items)], 1)
        return self.head(torch.tanh(found.to(self.head.weight.dtype)))


def with_tables(**settings: Any) -> nn.Module:
    """The model with rows of two tables, in two groups."""
    return Clicks(
        Embedding(described("users", **settings)), EmbeddingBag(described("items", 2, **settings))
    )


def table_task(optimizer: Any = None, data: Any = None, batch_size: int = 2, **tables: Any) -> Task:
    """The task of that model; keywords of both tables."""
    optimizer = optimizer or sgd(momentum=0.9)
    if "row_optimizer" in tables:
        tables["optimizer"] = tables.pop("row_optimizer")
    data = clicks() if data is None else data
    return Task(lambda: with_tables(**tables), optimizer, data, batch_size=batch_size)


@dataclass(frozen=True)
class Rows:
    """An optimizer of rows, and torch's for the same as sparse parameters."""

    ours: RowOptimizer
    theirs: Callable[[Any], torch.optim.Optimizer]


OPTIMIZERS = {
    "SGD": Rows(SGD(lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
    "momentum": Rows(
        SGD(lr=0.2, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, nesterov=True),
    ),
    "Adagrad": Rows(Adagrad(lr=0.3), lambda p: torch.optim.Adagrad(p, lr=0.3)),
    "Adam": Rows(Adam(lr=0.1), lambda p: torch.optim.SparseAdam(p, lr=0.1)),
}


def first_rows(module: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """The rows of ids 0 to ROWS - 1 of each table before any step, (ROWS, dim)."""
    return values_of(module, LocalRows(tables_of(module), seed=seed))


def values_of(module: nn.Module, source: LocalRows) -> dict[str, Tensor]:
    """The rows of ids 0 to ROWS - 1 of each table that a source has, (ROWS, dim)."""
    found = {}
    for table in tables_of(module):
        group, number = source.place(table)
        pulled = source.pull(group, np.full(ROWS, number, np.int32), np.arange(ROWS))
        found[f"{table.name}.weight"] = torch.tensor(pulled)
    return found


def torchs(sparse: bool = True) -> nn.Module:
    """The same model with torch's own modules; its first rows are to be set."""
    options: dict[str, Any] = {"sparse": sparse, "dtype": torch.float64}
    return Clicks(
        nn.Embedding(ROWS, DIM, **options), nn.EmbeddingBag(ROWS, 2, mode="mean", **options)
    )


def in_one_process(
    task: Task, rows: Rows, sizes: Sequence[tuple[int, int]], clip: float | None = None
) -> Weights:
    """The weights of torch's model, trained with a dense and a sparse optimizer.

    Args:
        sizes: samples in a step, and steps with so many, one after the other.
        clip: the greatest norm of a gradient; torch clips none that are sparse.
    """
    torch.manual_seed(0)
    ours = task.module()
    first = first_rows(ours)
    theirs = torchs(sparse=clip is None)
    theirs.load_state_dict({**first, **ours.state_dict()})
    dense, sparse = (
        task.optimizer(theirs.head),
        rows.theirs([theirs.users.weight, theirs.items.weight]),
    )
    step = epoch = offset = 0
    for size, count in sizes:
        plan = SamplePlan(len(task.data[0]), size, 0, step, epoch, offset)
        for _ in range(count):
            index = torch.from_numpy(plan.share(step, 0, 1))
            users, items, target = (column[index] for column in task.data)
            dense.zero_grad()
            sparse.zero_grad()
            task.loss(theirs(users, items), target).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(theirs.parameters(), clip)
            dense.step()
            with torch.sparse.check_sparse_tensor_invariants():
                sparse.step()
            step += 1
        epoch, offset = plan.position(step).epoch, plan.position(step).begin
    return {name: value.detach() for name, value in theirs.state_dict().items()}


def all_weights(cluster: InProcessCluster, task: Task) -> Weights:
    """Dense weights by name, and rows 0 to ROWS - 1 of tables as torch's modules name them."""
    return cluster.weights() | table_values(task, rows_of(cluster))


def table_values(task: Task, rows: dict[str, Tensor]) -> Weights:
    """Rows 0 to ROWS - 1 of each table, of what servers know of rows."""
    module = task.module()
    found = first_rows(module)
    tables = groups(tables_of(module))
    for shard in range(task.table_shards * len(tables)):
        group = tables[shard // task.table_shards]
        part = {name: rows[f"tables/{shard}/{name}"] for name in ("tables", "ids", "values")}
        for number, table in enumerate(group):
            mine = part["tables"] == number
            found[f"{table.name}.weight"][part["ids"][mine]] = part["values"][mine]
    return found


def rows_of(cluster: InProcessCluster) -> dict[str, Tensor]:
    """All that servers know of rows, by "shard/array", see `ordered`."""
    layout = cluster.job.description.layout
    records = cluster.snapshot("state").records
    return ordered(assemble(layout, records)[0])


def installable(cluster: InProcessCluster, records: Sequence[Record]) -> Sequence[Record]:
    """Records of a state with those that stand for its rows, of which each server gets the shards made."""
    dealing, saved = dealing_of(cluster.job), rows_of_state(cluster.job, records)
    if dealing is None or saved is None:
        return records
    for server in cluster.servers:
        held = [each for each in server.chunks.values() if isinstance(each, TableChunk)]
        made, chunks = RestoredShards(), [each.chunk.index for each in held]
        assert not any(made.read(RowsWanted(-1, chunks, dealing, saved)))
        for each in held:
            each.made = made
    about = {"key": MADE, "start": 0, "stop": 1, "plain": False}
    stand = [
        (chunk, {**about, "name": dealing.name(chunk)}, torch.tensor([-1]))
        for chunk in dealing.chunks
    ]
    return [record for record in records if record[0] not in dealing.chunks] + stand


def ordered(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows in the order of their tables and ids, which no history changes, without a shard's random "life"."""
    shards: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        shard, _, key = name.rpartition("/")
        if shard.startswith("tables/") and key != "life":
            shards.setdefault(shard, {})[key] = value
    found = {}
    for shard, arrays in shards.items():
        beside = {key: arrays.pop(key) for key in ("updates", "seed", "clock") if key in arrays}
        rows = TableState.of_arrays({key: wide(value) for key, value in arrays.items()})
        parts = {key: torch.from_numpy(array) for key, array in rows.sorted().arrays().items()}
        found |= {f"{shard}/{key}": value for key, value in (parts | beside).items()}
    return found


def same_rows(rows: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Whether two jobs know the same of rows, to the bit."""
    return len(rows) > 0 and same_bits(ordered(rows), ordered(expected))


def rows_in(saved: Checkpoint) -> dict[str, Tensor]:
    """All that a checkpoint has of rows, by "shard/array"."""
    return {name: value for name, value in saved.optimizer.items() if name.startswith("tables/")}


class Sightings(nn.Module):
    """Its gradients are -1 for each sighting: with a learning rate of 1, a row counts the sightings of its id."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Embedding(described("rows", optimizer=SGD(lr=1.0), initial=Zeros()))
        self.updates = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        """Return what is to be as small as can be."""
        return -self.rows(ids).sum() - self.updates.sum()


def counting(count: int) -> Task:
    """The task whose rows count, with so many samples."""
    data = clicks(count)[1], torch.zeros(count)
    return Task(Sightings, sgd(lr=1.0), data, lambda output, target: output, batch_size=1)


def expected_counts(task: Task, log: CommitLog) -> tuple[Tensor, float]:
    """What each row counts after what a log has, and how many updates had samples, each times its learning rate."""
    counts, updates = torch.zeros(ROWS, dtype=torch.float64), 0.0
    for part in log.parts:
        assert part.plan is not None
        shares, parts = part.cuts
        for commit in part.commits:
            found = [
                part.plan.share(push.share // shares, push.share % shares, parts)
                for push in commit.pushes
            ]
            ids = task.data[0][torch.from_numpy(np.concatenate(found))]
            total = max(len(ids), 1)
            counts += commit.rate / total * torch.bincount(ids.flatten(), minlength=ROWS).double()
            updates += commit.rate * (len(ids) > 0)
    return counts, updates


TASK = table_task(row_optimizer=OPTIMIZERS["Adam"].ours)
#: The same with rows in fewer bytes.
PACKED = {
    "bfloat16": table_task(row_optimizer=OPTIMIZERS["Adam"].ours, dtype="bfloat16"),
    "int8": table_task(row_optimizer=OPTIMIZERS["Adam"].ours, dtype="int8", slots_dtype="bfloat16"),
}


def explained(cluster: InProcessCluster, task: Task = TASK) -> None:
    """The log makes the weights and all that is known of rows."""
    log = cluster.log()
    state = replay_state(log, task.creator())
    rows = {name: value for name, value in state.items() if name.startswith("tables/")}
    assert same_rows(rows_of(cluster), rows)
    assert same_bits(cluster.weights(), replay(log, task.creator()))
