"""Plans of embedding tables, from samples of which the whole is known."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="embedding tables need it")

from steepest import Embedding, ParameterServerStrategy, TorchModel
from steepest.cli import main
from steepest.cli.planning.distinct import distinct_ids, hit_share
from steepest.cli.planning.events import Links
from steepest.cli.planning.evictions import evictions_at
from steepest.cli.planning.measuring import RowCosts
from steepest.cli.planning.table_plan import plan_tables, step_of
from steepest.errors import ConfigurationError
from steepest.tables import LFU, LRU, Adagrad, GlobalStepEvict, RowWiseAdagrad, Table
from steepest.tables.rows.tiered_rows import bytes_of
from steepest.testing import InProcessCluster
from tests.reference import sgd
from tests.table_jobs import trainer, words

Draw = Callable[[np.random.Generator, int], Any]
LOOK_UPS = 1_000_000
LIMITS: dict[str, Any] = {"capacity": 9, "eviction": LFU(), "pinned": (3, 24)}


def power_law(ids: int, power: float) -> Draw:
    edges = (np.arange(1, ids + 1) ** -power).cumsum()

    def draw(random: np.random.Generator, count: int) -> Any:
        return np.searchsorted(edges, random.random(count) * edges[-1])

    return draw


def of_equal_chance(ids: int) -> Draw:
    return lambda random, count: random.integers(0, ids, count)


def counts_of(ids: Any) -> Any:
    return np.unique(ids, return_counts=True)[1].astype(np.int64)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("draw", "times", "off"),
    [
        (power_law(300_000, 1.05), 4, 0.06),
        (power_law(300_000, 1.05), 20, 0.25),
        (power_law(300_000, 1.5), 20, 0.06),
        (of_equal_chance(10_000), 20, 0.01),  # the sample has nearly all
        (of_equal_chance(300_000), 4, 0.15),
    ],
)
def test_distinct_ids_are_foreseen_from_a_sample(draw: Draw, times: int, off: float) -> None:
    whole = draw(np.random.default_rng(0), LOOK_UPS)
    expected = len(np.unique(whole))
    found = distinct_ids(counts_of(whole[: LOOK_UPS // times]), times)
    assert found.likely == pytest.approx(expected, rel=off)
    assert 0.97 * found.least <= expected <= 1.03 * found.most  # chance
    assert distinct_ids(counts_of(whole), 1.0) == (expected,) * 3


def test_bounds_are_those_of_closed_forms() -> None:
    """Nothing but ids that were seen once: twice as many look-ups have twice as many."""
    assert distinct_ids(np.ones(1000, np.int64), 2.0).most == 2000
    ones = np.array([1] * 40 + [2] * 10 + [50] * 5)
    assert distinct_ids(ones, 1e9).least == 55 + round(40 * 39 / (2 * 11))  # Chao1, bias-corrected
    assert distinct_ids(np.zeros(0, np.int64), 5.0) == (0, 0, 0)


def test_the_share_found_in_memory_is_no_more_than_it_will_be() -> None:
    whole = power_law(300_000, 1.05)(np.random.default_rng(0), LOOK_UPS)
    frequent = np.sort(counts_of(whole))[::-1]
    table = Table("t", 16)
    (plan,) = plan_tables({table: whole[: LOOK_UPS // 10]}, samples=LOOK_UPS).tables
    for places in (1000, 10_000, 50_000):
        share = frequent[:places].sum() / LOOK_UPS
        assert share - 0.1 < plan.hits(places) < share + 0.005
    assert plan.hits(plan.rows.likely) == 1.0
    assert plan.hits(plan.wanted_places) >= 0.9 > plan.hits(plan.wanted_places - 1)
    ones = np.ones(10, np.int64)
    assert hit_share(ones, ones, 10, 5) == 0.5


def test_rows_of_crossed_features_of_adult() -> None:
    """Real numbers: people by age, hours, education and work, a tenth of whom is known."""
    if (folder := os.environ.get("STEEPEST_DATA")) is None:
        pytest.skip("STEEPEST_DATA is not set")
    text = (Path(folder) / "adult" / "adult.data").read_text().splitlines()
    people = [line.split(", ") for line in text if line]
    numbers: dict[tuple[str, ...], int] = {}
    crossed = [(each[0], each[3], each[6], each[12]) for each in people]
    ids = np.array([numbers.setdefault(each, len(numbers)) for each in crossed])
    mixed, expected = np.random.default_rng(0).permutation(ids), len(numbers)
    found = distinct_ids(counts_of(mixed[: len(mixed) // 10]), 10.0)
    assert found.likely == pytest.approx(expected, rel=0.1)
    assert found.least < expected < found.most


def test_bytes_are_those_of_shards() -> None:
    plain = Table("t", 16, optimizer=RowWiseAdagrad())
    packed = Table("p", 16, dtype="int8", capacity=1000, eviction=LFU(half_life=10), ttl="7d")
    ids = np.arange(4000) % 2000
    first, second = plan_tables({plain: ids, packed: ids}).tables
    assert (first.bytes.values, first.bytes.slots, first.bytes.memory) == (64, 4, 68 + 47)
    assert first.bytes.place == bytes_of(2, plain.form) - bytes_of(1, plain.form)
    assert (second.bytes.values, second.bytes.slots) == (18, 64)
    assert second.bytes.known == 47 + 12 + 4 + 8
    assert (first.rows.likely, second.rows.likely) == (2000, 1000)
    assert first.memory == 2000 * 115
    assert plan_tables({plain: ids}, memory=115_000).servers == 2


@pytest.mark.parametrize(
    ("limits", "rows"),
    [
        ({}, 2000),
        ({"num_embeddings": 1700}, 1700),
        ({"capacity": 500, "eviction": LFU()}, 500),
        ({"capacity": 500, "eviction": LFU(), "num_embeddings": 900}, 500),
    ],
)
def test_rows_are_no_more_than_a_table_has(limits: dict[str, Any], rows: int) -> None:
    (found,) = plan_tables({Table("t", 16, **limits): np.arange(4000) % 2000}, samples=10**6).tables
    assert found.rows == (rows, rows, rows)
    assert found.memory == rows * found.bytes.memory


class Bought(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = Embedding(Table("items", 4, optimizer=Adagrad(lr=0.1), dtype="float64"))
        self.bias = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.items(ids).sum((1, 2)) + self.bias


def creator(worker: int, device: int) -> TorchModel:
    ids = torch.from_numpy(power_law(500, 1.1)(np.random.default_rng(0), 3000)).reshape(1000, 3)
    return TorchModel(
        Bought(),
        loss=lambda output, target: (output - target).square().mean(),
        data=(ids, torch.zeros(1000, dtype=torch.float64)),
        batch_size=10,
        optimizer=sgd(),
    )


def test_a_model_is_sampled_as_it_trains() -> None:
    ids = creator(0, 0).data
    plan = plan_tables(creator, batches=100)
    (found,) = plan.tables
    whole = power_law(500, 1.1)(np.random.default_rng(0), 3000)
    assert sorted(found.sample.counts) == sorted(counts_of(whole))
    assert abs(int(found.sample.first.sum()) - 1500) <= 60
    assert plan.times == 1.0
    part = plan_tables(creator, batches=20)
    assert part.times == 5.0
    assert part.tables[0].look_ups == 3000
    assert part.tables[0].rows.likely == pytest.approx(len(np.unique(whole)), rel=0.15)
    assert ids.size == 1000


def test_bytes_of_a_batch_are_those_that_travel() -> None:
    (items,) = plan_tables(creator, batches=100).tables
    strategy = ParameterServerStrategy(num_servers=1)
    cluster = InProcessCluster(creator, num_workers=1, strategy=strategy)
    results, dense, head = cluster.step(100), 8, 8
    pulled = sum(each.bytes_pulled - dense for each in results) / 100
    pushed = sum(each.bytes_pushed - dense - head for each in results) / 100
    assert items.batch_bytes == (round(pulled), round(pushed))
    (given,) = plan_tables(
        {Table("t", 16): [np.array(ids) for ids in ([1, 1, 2], [3, 4, 5], [1, 2, 3])]}
    ).tables
    assert given.sample.batch_rows == pytest.approx(8 / 3)
    (flat,) = plan_tables({Table("t", 16): np.arange(9)}).tables
    assert flat.batch_bytes is None


@pytest.mark.parametrize("eviction", [LRU(), LFU()])
@pytest.mark.parametrize("pinned", [(), (90, 95)])
def test_what_a_table_removes_of_a_sample_is_what_a_dict_of_rows_loses(
    eviction: Any, pinned: tuple[int, ...]
) -> None:
    random = np.random.default_rng(0)
    batches = [power_law(100, 0.8)(random, 12) for _ in range(150)]
    settings = {"capacity": 30, "eviction": eviction, "pinned": pinned}
    age = GlobalStepEvict(steps_to_live=2)
    (found,) = plan_tables({Table("t", 4, evict=(age,), **settings): batches}).tables
    # by id: the batch that pushed it last, and look-ups since its row was made
    rows: dict[int, list[int]] = {}
    seen, had, full, missed = Counter[int](), set[int](), 0, 0
    use = 0 if isinstance(eviction, LRU) else 1
    for number, batch in enumerate(batches):
        counts = Counter(batch.tolist())
        missed += sum(count for id, count in counts.items() if id in had and id not in rows)
        others = [id for id in rows if id not in counts and id not in pinned]
        fresh = [id for id in counts if id not in rows and id not in pinned]
        held = sum(id not in pinned for id in rows)
        excess = max(held + len(fresh) - 30 + len(pinned), 0)
        for id in sorted(others, key=lambda id: (rows[id][use], id))[:excess]:
            del rows[id]
            full += 1
        for id, count in counts.items():
            rows[id] = [number, rows.get(id, [0, 0])[1] + count]
        seen += counts
        had |= set(rows)
    old = {id for id, (last, _) in rows.items() if 149 - last > 2 and id not in pinned}
    removed = found.sample.evictions
    assert removed is not None
    assert removed.removed == {"full": full, "age": len(old), "norm": 0, "ttl": 0}
    assert removed.rows == len(rows) - len(old)
    gone = had - (set(rows) - old)
    assert set(removed.ids.tolist()) == gone
    assert [seen[id] for id in removed.ids.tolist()] == sorted(seen[id] for id in gone)[::-1]
    assert removed.share == missed / (150 * 12)
    assert full
    assert old


def test_what_tables_remove_of_a_checkpoint_is_what_a_restore_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job saves and another one, with other settings, goes on with it."""
    before, small = (words(torch.arange(48) % 25, **settings) for settings in ({}, LIMITS))
    with trainer(before) as sgd:
        sgd.fit(steps=12, progress=False)
        rows = sgd.export_table("words").ids.tolist()
        sgd.save(tmp_path / "saved")
    with trainer(small) as sgd:
        sgd.restore(tmp_path / "saved")
        found = sgd.export_table("words").ids.tolist()
    described = small(0, 0).tables[0]
    removed = evictions_at(tmp_path / "saved", [described])["words"]
    assert removed.rows == len(found) == 9
    assert removed.removed["full"] == len(rows) - 9
    assert sorted([*removed.ids.tolist(), *found]) == rows
    assert 0 < removed.share < 1
    with pytest.raises(
        ConfigurationError, match="table 'words' has 25 rows here, its capacity is 9"
    ):
        evictions_at(tmp_path / "saved", [replace(described, eviction=None)])
    (plan,) = plan_tables({described: [0]}, checkpoint=tmp_path / "saved").tables
    assert plan.sample.evictions is not None
    assert plan.sample.evictions.rows == 9


def test_a_step_is_what_workers_do_at_once_and_servers_one_after_the_other() -> None:
    """Figures by hand: 10 ms of a worker, 4 ms of a server with all rows; 1 MB each way, 8 Gbit/s."""
    costs, links = RowCosts(0.010, 0.004, 512, 1_000_000), Links(1e9, 0.0)

    def seconds(workers: int, servers: int, cores: int | None) -> float:
        return step_of(costs, 2_000_000, workers, servers, links, cores).seconds

    assert seconds(1, 1, None) == pytest.approx(0.014)
    assert seconds(2, 1, 2) == pytest.approx(0.010 + 2 * 0.004)
    assert seconds(4, 1, 2) == pytest.approx(2 * 0.010 + 4 * 0.004)
    assert seconds(4, 4, 2) == pytest.approx(4 * 0.014 / 2)
    assert seconds(4, 4, None) == pytest.approx(0.014 + 3 / 4 * 4_000_000 / 1e9)
    assert seconds(4, 1, None) == pytest.approx(0.010 + 4 * 0.004 + 3 / 4 * 4 * 4_000_000 / 1e9)
    steps = plan_tables(creator, batches=20, workers=(2, 1), one_host=True).steps
    assert [each[:2] for each in steps] == [(1, 1), (2, 1)]
    assert all(
        each.samples_per_second == pytest.approx(10 * each.workers / each.seconds) for each in steps
    )


SCRIPT = """
import torch, steepest
from torch.utils.data import DataLoader, TensorDataset

class Bought(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.items = steepest.Embedding(steepest.Table("items", 4, dtype="float64"))
        self.bias = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, ids):
        return self.items(ids).sum((1, 2)) + self.bias

model = Bought()
data = TensorDataset(torch.arange(600).reshape(200, 3) % 77, torch.zeros(200, dtype=torch.float64))
model, optimizer, loader = steepest.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=10))
for _ in steepest.epochs(1):
    for ids, target in loader:
        optimizer.zero_grad()
        (model(ids) - target).square().mean().backward()
        optimizer.step()
"""


def test_the_command_reads_scripts_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert main.main(["plan", str(tmp_path / "train.py"), "--tables", "--batches", "20"]) == 0
    said = capsys.readouterr().out
    assert "counting the ids of" in said
    assert "items   600        77    77" in said
    assert "a step  samples/s" in said
    np.savez(tmp_path / "ids.npz", users=np.arange(1000) % 100, items=np.arange(2000) % 50)
    out = tmp_path / "plan.json"
    given = ["plan", str(tmp_path / "ids.npz"), "--tables", "--samples", "1e5", "--dim", "8"]
    assert main.main([*given, "--optimizer", "SGD", "--json", str(out)]) == 0
    assert "The data are 50 times the sample" in capsys.readouterr().out
    found = {each["name"]: each for each in json.loads(out.read_text())["tables"]}
    assert found["users"]["rows"] == {"likely": 100, "least": 100, "most": 100}
    assert found["items"]["row_bytes"]["memory"] == 8 * 4 + 47
    assert found["items"]["look_ups"] == 100_000
    assert found["items"]["batch_bytes"] is None
    assert main.main([*given, "--capacity", "60", "--eviction", "LRU"]) == 0
    said = capsys.readouterr().out
    assert "removed  full  age  norm  ttl  rows that stay  look-ups" in said
    assert "users     940    0     0    0              60    90.0 %  0, 1, 2, 3, 4" in said
    assert main.main([*given, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["servers"] == 1


def test_what_is_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match="a sample without ids"):
        plan_tables({Table("t", 4): np.zeros(0, np.int64)})
    with pytest.raises(ConfigurationError, match="ids of table 't' are of float64"):
        plan_tables({Table("t", 4): np.ones(3)})
    with pytest.raises(ConfigurationError, match="give one such as 16GB"):
        plan_tables({Table("t", 4): np.arange(3)}, memory="16 pounds")
    (tmp_path / "ids.txt").write_text("1 2 x")
    assert main.main(["plan", str(tmp_path / "ids.txt"), "--tables"]) == 1
    assert "ids.txt holds no ids" in capsys.readouterr().err
    np.savez(tmp_path / "ids.npz", t=np.arange(1000))
    whole = (tmp_path / "ids.npz").read_bytes()
    (tmp_path / "ids.npz").write_bytes(whole[:4000])
    assert main.main(["plan", str(tmp_path / "ids.npz"), "--tables"]) == 1
    assert "ids.npz holds no ids" in capsys.readouterr().err
    assert main.main(["plan", str(tmp_path / "ids.txt"), "--json", "x.json"]) == 1
    assert "--json is for --tables" in capsys.readouterr().err
