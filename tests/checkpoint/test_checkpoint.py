"""Checkpoints: exact at any number of servers and workers, whole or refused, and nothing is pickled."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import nn

from steepest import DistributedSGD, ParameterServerStrategy, SimpleStrategy
from steepest.checkpoint.files import (
    MANIFEST,
    JobSignature,
    write,
)
from steepest.core.engine.optimizer_slices import assemble, disassemble
from steepest.core.tensors.layout import ParameterLayout
from steepest.errors import CheckpointError, ConfigurationError, SteepestError
from steepest.testing import InProcessCluster
from tests.checkpoint_contents import DAMAGES, Tied, about, content, edit, layouts
from tests.reference import Task, difference, same_bits, samples
from tests.whole_checkpoints import all_of


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.01)


TASK = Task(optimizer=adam)
TIED = Task(Tied, adam, samples(16))


def ps(servers: int) -> ParameterServerStrategy:
    return ParameterServerStrategy(num_servers=servers, chunk_bytes=64)


# -- files ------------------------------------------------------------------------------------------


def holds(path: Path, value: float) -> bool:
    found = all_of(path)
    return same_bits(found.weights, {"w": torch.full((3,), float(value))}) and found.about[
        "step"
    ] == int(value)


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "down", content(3.0))
    found = all_of(tmp_path / "deep" / "down")
    assert same_bits(found.weights, content(3.0).weights)
    assert same_bits(found.optimizer, content(3.0).optimizer)
    assert (found.replicas, found.about) == ({}, about())


def test_nothing_is_pickled(tmp_path: Path) -> None:
    write(tmp_path, content())
    files = sorted(path.name for path in tmp_path.iterdir())
    kinds = [name.split("-")[0] for name in files]
    assert kinds == [MANIFEST, "optimizer", "replicas", "weights"]
    assert all(name == MANIFEST or name.endswith(".safetensors") for name in files)
    for name in files[1:]:
        raw = (tmp_path / name).read_bytes()
        assert isinstance(
            json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]), dict
        )  # the format's header


def test_the_next_checkpoint_takes_the_place_of_the_last(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, content(float(step), step))
        assert holds(tmp_path, step)
        assert len(list(tmp_path.iterdir())) == 4


def test_files_that_no_manifest_names_stay(tmp_path: Path) -> None:
    kinds = ("weights", "optimizer", "replicas", "tables")
    users = {f"{kind}-{end}.safetensors" for kind in kinds for end in ("mine", "7-0123abcd")}
    users |= {"model.safetensors", ".manifest.json-", ".manifest.json-mine"}
    for name in users:
        (tmp_path / name).write_text("mine")
    for step in (1, 2, 3):
        write(tmp_path, content(float(step), step))
        assert holds(tmp_path, step)
    found = {path.name for path in tmp_path.iterdir()}
    assert len(found) == 4 + len(users)
    assert {name for name in found if (tmp_path / name).read_bytes() == b"mine"} == users
    edit(tmp_path, lambda m: m.pop("step") and None)
    write(tmp_path, content(4.0, 4))  # which files were the damaged one's is not known
    assert len(list(tmp_path.iterdir())) == 7 + len(users)


def test_a_write_can_be_ended_before_anything_is_made(tmp_path: Path) -> None:
    seen: list[object] = []

    def end(path: object) -> None:
        seen.append(path)
        raise CheckpointError("given up")

    with pytest.raises(CheckpointError, match="given up"):
        write(tmp_path / "saved", content(), end)
    assert seen == [tmp_path / "saved"]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_crash_in_the_middle_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    write(tmp_path, content(1.0, 1))

    def crash(*_: Any) -> None:
        raise error

    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CheckpointError
    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, crash)
            with pytest.raises(expected):
                write(tmp_path, content(2.0, 2))
        assert holds(tmp_path, 1.0)
    write(tmp_path, content(3.0, 3))
    assert holds(tmp_path, 3.0)
    assert len(list(tmp_path.iterdir())) == 4  # nothing is left of those that crashed


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(tmp_path: Path, damage: str) -> None:
    write(tmp_path, content())
    DAMAGES[damage](tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        all_of(tmp_path)


def test_paths_that_hold_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        all_of(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        all_of(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.touch()
    for use in (all_of, lambda path: write(path, content())):
        with pytest.raises(CheckpointError, match=str(file)):
            use(file)


def test_a_manifest_cannot_lead_out_of_its_directory(tmp_path: Path) -> None:
    write(tmp_path / "a", content(1.0))
    write(tmp_path / "b", content(2.0))
    other = json.loads((tmp_path / "b" / MANIFEST).read_text())["files"]["weights"]
    edit(
        tmp_path / "a", lambda m: m["files"]["weights"].update(other, name=f"../b/{other['name']}")
    )
    with pytest.raises(CheckpointError, match="weights"):
        all_of(tmp_path / "a")


# -- optimizer state, however it is split --------------------------------------------------------------


@pytest.mark.parametrize("there", range(4))
@pytest.mark.parametrize("here", range(4))
def test_optimizer_state_survives_any_cut(here: int, there: int) -> None:
    first, second = layouts()[here], layouts()[there]
    state: dict[str, torch.Tensor] = {}
    for entry in first.entries[:-1]:
        state[f"{entry.name}/exp_avg"] = torch.randn(entry.shape, dtype=torch.float64)
        state[f"{entry.name}/step"] = torch.tensor(7.0)
        state[f"{entry.name}/count"] = torch.tensor(3.0, dtype=torch.float64)
    plain = sorted(name for name in state if name.endswith("/count"))
    records = disassemble(first, state, plain)
    whole, numbers = assemble(first, reversed(records))
    assert same_bits(whole, state)
    assert numbers == plain
    again, numbers = assemble(second, disassemble(second, whole, numbers))
    assert same_bits(again, state)
    assert numbers == plain


def test_state_of_strangers_is_refused() -> None:
    layout = layouts()[0]
    for name in ("stranger/exp_avg", "frozen/exp_avg"):
        with pytest.raises(CheckpointError, match=name.split("/")[0]):
            disassemble(layout, {name: torch.zeros(5)}, [])


@pytest.mark.parametrize("cut", [64, None])
def test_state_of_a_real_run_is_carried_over(cut: int | None) -> None:
    cluster = InProcessCluster(TASK.creator(), num_workers=2, strategy=ps(3))
    other = InProcessCluster(
        TASK.creator(), num_workers=2, strategy=ParameterServerStrategy(chunk_bytes=cut)
    )
    cluster.step(5)
    snapshot = cluster.snapshot("state")
    optimizer, plain = assemble(cluster.job.description.layout, snapshot.records)
    keys = {
        f"{entry.name}/{key}"
        for entry in cluster.job.description.layout.entries
        for key in STATE_OF_ADAM
    }
    assert optimizer.keys() == keys
    records = disassemble(other.job.description.layout, optimizer, plain)
    other.wait(other.client.install(5, snapshot.weights, records), "the installation")
    cluster.step(5)
    other.step(5)
    assert same_bits(other.weights(), cluster.weights())


STATE_OF_ADAM = ("step", "exp_avg", "exp_avg_sq")


@pytest.mark.usefixtures("simulated")
def test_another_number_of_workers_with_the_same_global_batch(tmp_path: Path) -> None:
    task = replace(TASK, batch_size=1)
    expected = replace(TASK, batch_size=2).train(1, 50)
    with DistributedSGD(task.creator(), num_workers=1, devices_per_worker=2) as one:
        one.fit(steps=30, progress=False)
        one.save(tmp_path)
    with DistributedSGD(task.creator(), num_workers=2) as two:
        two.restore(tmp_path)
        two.fit(steps=20, progress=False)
        assert difference(two.weights(), expected) < 1e-12


def test_the_owner_says_what_does_not_fit() -> None:
    layout = ParameterLayout.plan([("w", (3,), torch.float32, True)])
    owner = JobSignature(layout, "torch.optim.Adam", {}, 16, {})
    owner.check(content())
    cases = [
        (
            replace(owner, optimizer="torch.optim.SGD"),
            "optimizer torch.optim.Adam, this job has torch.optim.SGD",
        ),
        (replace(owner, flags={"0.amsgrad": True}), "flags {}, this job has {'0.amsgrad': True}"),
        (replace(owner, samples=17), "samples 16, this job has 17"),
        (replace(owner, buffers={"mean": torch.zeros(2)}), "no 'mean'"),
        (
            replace(owner, layout=ParameterLayout.plan([("w", (4,), torch.float32, True)])),
            r"shape \(3,\)",
        ),
        (
            replace(owner, layout=ParameterLayout.plan([("w", (3,), torch.float64, True)])),
            "dtype torch.float32",
        ),
        (replace(owner, layout=ParameterLayout.plan([("v", (3,), torch.float32, True)])), "no 'v'"),
        (replace(owner, layout=ParameterLayout.plan([])), "it has 'w', the model has not"),
    ]
    for other, message in cases:
        with pytest.raises(CheckpointError, match=message):
            other.check(content())


# -- over processes -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(
    machine_of_module: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[DistributedSGD, Path, Any]]:
    """A trainer after 50 steps, its checkpoint after 30, and its weights."""
    path = tmp_path_factory.mktemp("trained")
    with DistributedSGD(TIED.creator(), num_workers=2, strategy=ps(2), seed=3) as sgd:
        sgd.fit(steps=30, progress=False)
        sgd.save(path)
        sgd.fit(steps=20, progress=False)
        yield sgd, path, sgd.weights()


class TestOverProcesses:
    def test_training_continues_where_it_was_saved(self, trained: Any) -> None:
        sgd, path, weights = trained
        uninterrupted = InProcessCluster(TIED.creator(), num_workers=2, strategy=ps(2), seed=3)
        uninterrupted.step(50)
        assert same_bits(weights, uninterrupted.weights())
        sgd.restore(path)
        assert sgd.stats().step == 30
        assert sgd.fit(steps=20, progress=False).step == 50
        assert same_bits(sgd.weights(), weights)

    @pytest.mark.few(1)
    @pytest.mark.parametrize("strategy", [ps(1), SimpleStrategy()], ids=["one server", "simple"])
    def test_a_new_trainer_continues_bit_for_bit(
        self, trained: Any, tmp_path: Path, strategy: Any
    ) -> None:
        _, path, weights = trained
        with DistributedSGD(
            TIED.creator(), num_workers=2, strategy=strategy
        ) as other:  # of another seed
            other.restore(path)
            result = other.fit(steps=10, progress=False)
            assert (result.step, result.epoch) == (40, 9)
            other.save(tmp_path)  # and back
            other.fit(steps=10, progress=False)
            assert same_bits(other.weights(), weights)
        sgd = trained[0]
        sgd.restore(tmp_path)
        sgd.fit(steps=10, progress=False)
        assert same_bits(sgd.weights(), weights)

    def test_the_weights_file_loads_into_the_plain_module(self, trained: Any) -> None:
        sgd, path, _ = trained
        sgd.restore(path)
        module = Tied()
        load_model(module, next(path.glob("weights-*.safetensors")), strict=True)
        assert module.decode.weight is module.encode.weight
        assert same_bits(module.state_dict(), sgd.state_dict())

    def test_a_state_dict_is_loaded_again_to_the_bit(self, trained: Any) -> None:
        sgd, path, _ = trained
        sgd.restore(path)
        before = sgd.state_dict()
        sgd.fit(steps=5, progress=False)
        after, rest = sgd.state_dict(), sgd.fit(steps=1, progress=False)
        sgd.load_state_dict(before)
        assert same_bits(sgd.state_dict(), before)
        with DistributedSGD(TIED.creator(), num_workers=3, strategy="allreduce", seed=9) as other:
            other.step()
            other.load_state_dict(after)
            assert same_bits(other.state_dict(), after)
            assert other.stats().step == 1
            module = Tied()  # and the plain module's
            other.load_state_dict(module.state_dict())
            assert same_bits(other.state_dict(), module.state_dict())
        assert sgd.step().step == rest.step + 1

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"encode.weight": None}, "state has no encode.weight: give what state_dict"),
            ({"norm.running_mean": None}, "state has no norm.running_mean"),
            ({"stranger": torch.zeros(2)}, "the model has no stranger"),
            ({"norm.running_mean": torch.zeros(2)}, r"'norm.running_mean' has shape \(2,\)"),
            ({"head.bias": torch.zeros(7, 7)}, r"'head.bias' has shape \(7, 7\)"),
        ],
    )
    def test_a_state_dict_of_another_model_is_refused_and_nothing_changes(
        self, trained: Any, change: dict[str, torch.Tensor | None], says: str
    ) -> None:
        sgd = trained[0]
        before = sgd.state_dict()
        wrong = {name: value for name, value in (before | change).items() if value is not None}
        with pytest.raises(ConfigurationError, match=says):
            sgd.load_state_dict(wrong)
        assert same_bits(sgd.state_dict(), before)

    def test_what_does_not_fit_is_refused_and_nothing_changes(
        self, trained: Any, tmp_path: Path
    ) -> None:
        sgd, path, _ = trained
        sgd.restore(path)
        before = sgd.state_dict()
        saved = all_of(path)
        described = {key: value for key, value in saved.about.items() if key != "format"}
        single = {
            name: value.float() if name == "head.bias" else value
            for name, value in saved.weights.items()
        }
        wrong = {
            "optimizer": replace(saved, about={**described, "optimizer": "torch.optim.SGD"}),
            "samples": replace(saved, about={**described, "samples": 15}),
            "head.bias": replace(saved, weights=single),
            "norm.running_mean": replace(
                saved, weights=without(saved.weights, "norm.running_mean")
            ),
            "encode.weight": replace(saved, weights=without(saved.weights, "encode.weight")),
            "extra": replace(saved, weights=saved.weights | {"extra": torch.zeros(1)}),
            "stranger": replace(
                saved, optimizer=saved.optimizer | {"stranger/exp_avg": torch.zeros(1)}
            ),
        }
        for name, checkpoint in wrong.items():
            write(tmp_path / name, checkpoint)
            with pytest.raises(CheckpointError, match=rf"{tmp_path / name} .*{name}"):
                sgd.restore(tmp_path / name)
        with pytest.raises(SteepestError):
            sgd.restore(tmp_path / "nowhere")
        assert same_bits(sgd.state_dict(), before)
        assert sgd.fit(steps=20, progress=False).step == 50
        assert same_bits(sgd.weights(), trained[2])


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in tensors.items() if key != name}
