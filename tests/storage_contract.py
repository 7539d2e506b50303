"""What holds of checkpoints wherever they lie: run over directories, fsspec's memory and a server that speaks S3."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load

from steepest.checkpoint import files
from steepest.checkpoint.directory import CheckpointDirectory
from steepest.checkpoint.files import MANIFEST, Checkpoint
from steepest.data.storage.blocks import no_progress
from steepest.data.storage.files import storage_of
from steepest.data.storage.places import ObjectUrl, StoragePlace
from steepest.errors import CheckpointError
from steepest.observe.history_file import history_file
from tests.checkpoint_contents import content
from tests.reference import same_bits
from tests.whole_checkpoints import all_of, newest_of


def kept(place: StoragePlace) -> list[int]:
    """The steps of the checkpoints there, the oldest first."""
    return [int(found.name.rpartition("-")[2]) for found in CheckpointDirectory(place, 1).paths()]


def holds(place: StoragePlace, value: float) -> bool:
    found = all_of(place)
    return (
        same_bits(found.weights, content(value).weights)
        and same_bits(found.optimizer, content(value).optimizer)
        and found.about["step"] == int(value)
    )


def names(place: StoragePlace) -> list[str]:
    return sorted(each.name for each in storage_of(place).files(place))


def blocks(*parts: bytes) -> Any:
    return lambda: iter(map(memoryview, parts))


class Parts(files.RowParts):
    """Rows that come in two parts; each is written before the next is asked for."""

    def __init__(self, place: StoragePlace) -> None:
        self.place = place
        self.seen: list[int] = []

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(2):
            self.seen.append(sum(name.startswith("tables-") for name in names(self.place)))
            yield {"tables/0/keys": torch.full((3,), number)}

    def about(self) -> dict[str, Any]:
        return {}


def step(row: int, **more: Any) -> dict[str, Any]:
    return {"kind": "step", "step": row, "time": 0.5, **more}


class StorageContract:
    """Tests over the fixture `place`, where there is nothing yet."""

    # -- the interface ---------------------------------------------------------------------------

    def test_files_are_read_as_they_were_written(self, place: StoragePlace) -> None:
        storage = storage_of(place)
        storage.make(place)
        assert storage.files(place) == []
        file = place / "a-file"
        for missing in (storage.read, lambda file: storage.on_disk(file).__enter__().read_bytes()):
            with pytest.raises(FileNotFoundError):
                missing(file)
        storage.write(file, blocks(b"one", b"two"))
        with storage.on_disk(file) as path:
            assert path.read_bytes() == b"onetwo"
        assert storage.read(file) == b"onetwo"
        storage.write(file, blocks(b"three"))
        assert storage.read(file) == b"three"
        storage.make(place / "folder")
        storage.write(place / "folder" / "other", blocks(b"-"))
        assert storage.files(place) == [file]
        assert storage.folders(place) == [place / "folder"]
        assert (storage.exists(file), storage.exists(place / "a")) == (True, False)

    def test_removing_removes_that_alone(self, place: StoragePlace) -> None:
        storage = storage_of(place)
        for folder in ("1", "10"):
            storage.make(place / folder)
            for name in ("a", "ab"):
                storage.write(place / folder / name, blocks(b"-"))
        for _ in range(2):
            storage.remove(place / "10" / "a")
        assert names(place / "10") == ["ab"]
        storage.remove_folder(place / "1")
        assert [folder.name for folder in storage.folders(place)] == ["10"]
        assert names(place / "10") == ["ab"]

    def test_a_commit_is_whole_and_replaces_only_what_it_knew(self, place: StoragePlace) -> None:
        storage, worked_on = storage_of(place), []
        storage.make(place)
        file = place / "manifest"
        assert storage.version(file) is None
        storage.commit(file, b"first", "1", None, worked_on.append)
        first = storage.version(file)
        storage.commit(file, b"second", "2", first, no_progress)
        assert storage.read(file) == b"second"
        assert len(worked_on) == 1
        for replaced in (None, first):
            with pytest.raises(FileExistsError, match=str(file)):
                storage.commit(file, b"third", "3", replaced, no_progress)
        assert storage.read(file) == b"second"
        second = storage.version(file)
        storage.remove(file)
        with pytest.raises(FileExistsError, match=f"removed.*{file}|{file}.*removed"):
            storage.commit(file, b"third", "3", second, no_progress)
        assert not storage.exists(file)

    def test_a_file_is_replaced_as_a_whole(self, place: StoragePlace) -> None:
        storage = storage_of(place)
        storage.make(place)
        file = place / "table"
        storage.replace(file, blocks(b"one", b"two"))
        if str(place).startswith("memory://"):  # whose files are seen as they grow
            return

        def torn() -> Iterator[memoryview]:
            yield memoryview(b"three")
            assert storage.read(file) == b"onetwo"
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            storage.replace(file, torn)
        assert storage.read(file) == b"onetwo"
        assert names(place) == ["table"]

    def test_of_many_who_create_at_once_one_does(self, place: StoragePlace) -> None:
        if not isinstance(place, ObjectUrl):
            pytest.skip("a directory is looked at just before")
        done: list[bytes] = []

        def create(content: bytes) -> None:
            try:
                storage_of(place).commit(place / "manifest", content, "", None, no_progress)
            except FileExistsError:
                return
            done.append(content)

        writers = [threading.Thread(target=create, args=(b"%d" % i,)) for i in range(8)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(60)
        assert [storage_of(place).read(place / "manifest")] == done

    # -- one checkpoint --------------------------------------------------------------------------

    def test_a_checkpoint_takes_the_place_of_the_last(self, place: StoragePlace) -> None:
        with pytest.raises(CheckpointError, match=f"no checkpoint at {place}"):
            all_of(place)
        for value in (1, 2, 3):
            files.write(place, content(float(value), value))
            assert holds(place, float(value))
            assert len(names(place)) == 4

    def test_rows_come_in_files_of_their_own(self, place: StoragePlace) -> None:
        parts = Parts(place)
        files.write(place, replace(content(), rows=parts))
        assert parts.seen == [0, 1]
        written = sorted(each for each in names(place) if each.startswith("tables-"))
        raw = [load(storage_of(place).read(place / name)) for name in written]
        found = [tensors["tables/0/keys"] for tensors in raw]
        assert torch.cat(found).tolist() == [0, 0, 0, 1, 1, 1]

    def test_blocks_are_small(self, place: StoragePlace) -> None:
        seen: list[object] = []
        big = replace(content(), weights={"w": torch.arange(6 << 20, dtype=torch.int32)})
        files.write(place, big, seen.append)
        weights = next(each for each in seen if "weights-" in str(each))
        assert seen.count(weights) >= 24 / 4
        assert same_bits(all_of(place).weights, big.weights)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, CheckpointError])
    @pytest.mark.parametrize("at", ["optimizer-", MANIFEST])
    def test_a_write_that_ends_early_leaves_the_last_one(
        self, place: StoragePlace, at: str, error: type[BaseException]
    ) -> None:
        def end(file: object) -> None:
            if at in str(file):
                raise error

        with pytest.raises(error):
            files.write(place, content(1.0, 1), end)
        with pytest.raises(CheckpointError, match="no checkpoint at"):
            all_of(place)
        files.write(place, content(2.0, 2))
        with pytest.raises(error):
            files.write(place, content(3.0, 3), end)
        assert holds(place, 2.0)
        files.write(place, content(4.0, 4))
        assert holds(place, 4.0)
        assert len(names(place)) == 4

    @pytest.mark.parametrize("there", [False, True])
    @pytest.mark.parametrize("when", ["weights-", MANIFEST])
    def test_of_two_writers_at_once_one_is_refused_and_the_other_stays_whole(
        self, place: StoragePlace, there: bool, when: str
    ) -> None:
        if there:
            files.write(place, content(1.0, 1))
        calls: list[object] = []

        def other(file: object) -> None:
            if when in str(file) and not calls:
                calls.append(file)
                files.write(place, content(2.0, 2))

        with pytest.raises(CheckpointError, match=f"cannot write a checkpoint to {place}: "):
            files.write(place, content(3.0, 3), other)
        assert holds(place, 2.0)
        files.write(place, content(4.0, 4))
        assert holds(place, 4.0)
        assert len(names(place)) == 4

    def test_what_another_writes_while_old_files_are_removed_stays(
        self, place: StoragePlace
    ) -> None:
        files.write(place, content(1.0, 1))
        committed: list[object] = []

        def other(file: object) -> None:
            if "optimizer-1-" in str(file):
                committed.append(file)
                files.write(place, content(3.0, 3))

        files.write(place, content(2.0, 2), other)
        assert committed
        assert holds(place, 3.0)
        assert len(names(place)) == 4

    def test_damage_is_found(self, place: StoragePlace) -> None:
        files.write(place, content())
        storage = storage_of(place)
        weights = next(file for file in storage.files(place) if file.name.startswith("weights"))
        raw = storage.read(weights)
        storage.write(weights, blocks(raw[:-1], b"!"))
        with pytest.raises(CheckpointError, match=f"damaged checkpoint at {place}.*checksum"):
            all_of(place)
        storage.remove(weights)
        with pytest.raises(CheckpointError, match=f"damaged checkpoint at {place}"):
            all_of(place)

    # -- those of a job --------------------------------------------------------------------------

    def test_the_newest_and_the_best_stay(self, place: StoragePlace) -> None:
        directory = CheckpointDirectory(place, 2)
        assert newest_of(directory) is None
        for value in (10, 20, 30, 40):
            directory.put(content(float(value), value), best=10)
        assert kept(place) == [10, 30, 40]
        found = newest_of(CheckpointDirectory(place, 2))
        assert found is not None
        assert found[0].name == "000004-step-40"
        assert same_bits(found[1].weights, content(40.0).weights)
        assert directory.of_step(10) == place / "000001-step-10"
        assert directory.of_step(20) is None
        directory.put(content(50.0, 50))
        assert kept(place) == [40, 50]

    def test_what_has_no_manifest_does_not_count_and_is_removed_by_the_next(
        self, place: StoragePlace
    ) -> None:
        directory = CheckpointDirectory(place, 2)
        storage = storage_of(place)
        for name in ("000001-step-1", "000002-step-2"):
            storage.make(place / name)
            storage.write(place / name / "weights-1.safetensors", blocks(b"half a"))
        assert newest_of(directory) is None
        directory.put(content(3.0, 3))
        assert kept(place) == [3]
        storage.remove(place / "000003-step-3" / MANIFEST)  # a deletion that was cut off
        assert newest_of(directory) is None

    def test_a_manifest_is_removed_before_its_files(
        self, place: StoragePlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = CheckpointDirectory(place, 1)
        directory.put(content(1.0, 1))

        def die(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(type(storage_of(place)), "remove_folder", die)
            with pytest.raises(KeyboardInterrupt):
                directory.put(content(2.0, 2))
        old = place / "000001-step-1"
        assert MANIFEST not in names(old)
        assert len(names(old)) == 3
        again = CheckpointDirectory(place, 1)
        assert newest_of(again) is not None
        again.put(content(3.0, 3))
        assert kept(place) == [3]

    def test_increments_are_read_with_what_they_continue(self, place: StoragePlace) -> None:
        directory = CheckpointDirectory(place, 1)

        class Rows(files.RowParts):
            def __init__(self, link: files.BaseLink | None) -> None:
                self.link = link

            def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
                return iter(())

            def about(self) -> dict[str, Any]:
                return {} if self.link is None else {"base": vars(self.link)}

        link = None
        for value in (1, 2):
            _, link = directory.put(replace(content(float(value), value), rows=Rows(link)))
        assert kept(place) == [1, 2]
        assert newest_of(CheckpointDirectory(place, 1)) is not None
        storage_of(place).remove_folder(place / "000001-step-1")
        with pytest.raises(CheckpointError, match=f"{place}/000001-step-1, which is to be"):
            all_of(place / "000002-step-2")

    # -- the history -----------------------------------------------------------------------------

    def test_a_history_is_cut_back_and_appended_to(self, place: StoragePlace) -> None:
        storage_of(place).make(place)
        rows = history_file(place)
        assert rows.resume(0) == []
        rows.append([step(1), step(2, loss=float("nan"))])
        rows.append([step(3), {"kind": "event", "step": 3, "time": 0.0}])
        rows.append([])
        rows.append([step(3, again=True), step(4)])

        def found(at: int) -> list[tuple[str, int]]:
            return [(row["kind"], row["step"]) for row in history_file(place).resume(at)]

        assert found(9) == [("step", 1), ("step", 2), ("event", 3), ("step", 3), ("step", 4)]
        again = history_file(place)
        assert [row.get("again") for row in again.resume(3)] == [None, None, None, True]
        again.append([step(4)])
        assert found(2) == [("step", 1), ("step", 2), ("event", 3)]
        assert found(0) == []


def whole(value: float, size: int) -> Checkpoint:
    """A checkpoint with so many numbers."""
    return replace(content(value), weights={"w": torch.full((size,), value)})
