"""Checkpoints by URL: the contract over directories and fsspec's memory, failures, leases, and whole runs."""

from __future__ import annotations

import errno
import logging
import os
import random
import secrets
import tempfile
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from steepest import Checkpoints, DistributedSGD
from steepest.checkpoint import files
from steepest.checkpoint.directory import CheckpointDirectory
from steepest.checkpoint.prefix_lease import LEASES, LeaseTimes, PrefixLease
from steepest.data.storage import object_storage
from steepest.data.storage.blocks import write_blocks
from steepest.data.storage.files import storage_of
from steepest.data.storage.object_storage import ObjectStorage, Patience
from steepest.data.storage.places import ObjectUrl, StorageError, StoragePlace, place_of
from steepest.errors import CheckpointError, ConfigurationError
from tests.checkpoint.kept_checkpoints import TASK
from tests.checkpoint_contents import content
from tests.reference import same_bits
from tests.simulation.run import Simulation, run_config
from tests.step_callbacks import Stop
from tests.storage_contract import StorageContract, blocks, holds, kept, names
from tests.whole_checkpoints import all_of, newest_of


class TestDirectories(StorageContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> StoragePlace:
        return tmp_path / "run"


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [0, 5, 4096, 4 << 20, (9 << 20) + 7])
def test_a_file_has_the_bytes_of_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, direct: bool
) -> None:
    opened, original = list[int](), os.open

    def open_file(path: Path, flags: int, *mode: int) -> int:
        opened.append(flags & os.O_DIRECT)
        if opened[-1] and not direct:
            raise OSError(errno.EINVAL, "no file of this system is written past its cache")
        return original(path, flags, *mode)

    monkeypatch.setattr(os, "open", open_file)
    data, file = memoryview(random.Random(0).randbytes(size)), tmp_path / "file"
    file.write_bytes(b"longer than some")
    step = 3_000_001  # no buffer ends where a block does
    write_blocks(file, lambda: (data[at : at + step] for at in range(0, size, step)))
    assert file.read_bytes() == data
    assert opened == [os.O_DIRECT] if direct else [os.O_DIRECT, 0]


class TestFileUrls(StorageContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> StoragePlace:
        found = place_of(f"file://{tmp_path}/run%201")
        assert found == tmp_path / "run 1"
        return found


@pytest.fixture
def url() -> Iterator[ObjectUrl]:
    """A prefix in this process' memory."""
    found = place_of(f"memory://{secrets.token_hex(4)}/run")
    assert isinstance(found, ObjectUrl)
    yield found
    store = fsspec.filesystem("memory")
    if store.exists(str(found.parent)):
        store.rm(str(found.parent), True)


class TestMemory(StorageContract):
    @pytest.fixture
    def place(self, url: ObjectUrl) -> StoragePlace:
        return url


# -- URLs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("memory://a/b/", "memory://a/b"),
        ("memory:///a", "memory://a"),
        ("MEMORY://a", "memory://a"),
        ("file:///tmp/a", "/tmp/a"),
        ("file://localhost/tmp/a", "/tmp/a"),
        ("here", "here"),
        ("a:b/c", "a:b/c"),
        (Path("there"), "there"),
    ],
)
def test_a_place_is_a_path_or_a_url(given: Any, shown: str) -> None:
    assert str(place_of(given)) == shown
    Checkpoints(given)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("http://a/b", "s3://, gs://, memory://"),
        ("simplecache::s3://a/b", "s3://, gs://, memory://"),
        ("file://host/a", "file:///path"),
        ("memory://", "names of folders"),
        ("memory://a//b", "names of folders"),
        ("memory://a/../b", "names of folders"),
        ("memory://a/b\n", "names of folders"),
        ("s3://bucket", "s3://bucket/run7"),
        ("s3://bucket:9/a", "names of folders"),
        (Path("s3://bucket/a"), "as a str"),
    ],
)
def test_other_places_are_refused(given: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Checkpoints(given)


@pytest.mark.parametrize(
    "given",
    ["s3://AKIA:hidden@b/c", "s3://AKIA:hid/den@b/c", "s3://b/c?token=hidden", "gs://b/c#hidden"],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(given: str) -> None:
    with pytest.raises(ConfigurationError, match="credentials or a query") as caught:
        place_of(given)
    assert "hid" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steepest.data.storage.places.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'steepest\[storage\]'"):
        place_of("s3://bucket/run")
    with pytest.raises(ConfigurationError, match="pip install gcsfs"):
        place_of("gs://bucket/run")


# -- failures -----------------------------------------------------------------------------------------


class Flaky(MemoryFileSystem):  # type: ignore[misc]
    """Memory whose calls fail when they are told to: by method, the errors of the next calls."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[str, list[BaseException | None]] = {}
        self.done: list[str] = []
        self.answers_are_lost = False

    def fail(self, method: str) -> None:
        self.done.append(method)
        waiting = self.errors.get(method)
        if waiting and (error := waiting.pop(0)) is not None:
            raise error

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        self.fail("ls")
        return super().ls(path, detail, **more)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        if not self.answers_are_lost:
            self.fail("pipe_file")
        super().pipe_file(path, value, mode, **more)
        if self.answers_are_lost:
            self.fail("pipe_file")

    def open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        found = super().open(path, mode, **more)
        if mode == "wb":
            original = found.write

            def write(block: Any) -> Any:
                self.fail("write")
                return original(block)

            found.write = write
        return found

    def cat_file(self, path: str, *where: Any, **more: Any) -> Any:
        self.fail("cat_file")
        return super().cat_file(path, *where, **more)


class Time:
    """A clock that whoever waits turns."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.now += seconds


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Flaky:
    found = Flaky()
    monkeypatch.setattr(object_storage, "filesystem", lambda scheme, process: found)
    return found


def store(flaky: Flaky, time: Time, **patience: float) -> ObjectStorage:
    return ObjectStorage(flaky, Patience(**patience), time, time.wait)


def test_what_fails_for_a_while_is_done_again(flaky: Flaky, url: ObjectUrl) -> None:
    time = Time()
    storage = store(flaky, time)
    flaky.errors = {
        "write": [None, OSError("reset"), None, OSError("reset")],
        "cat_file": [RuntimeError("of some client")],
        "pipe_file": [OSError("slow down"), TimeoutError()],
    }
    storage.write(url / "a", blocks(b"one", b"two"))
    assert storage.read(url / "a") == b"onetwo"
    storage.create(url / "b", b"three")
    assert storage.read(url / "b") == b"three"
    assert time.waited == [0.2, 0.4, 0.2, 0.2, 0.4]


def test_what_fails_for_long_is_an_error_with_url_and_step(flaky: Flaky, url: ObjectUrl) -> None:
    time = Time()
    flaky.errors = {"cat_file": [OSError("the network is down")] * 99}
    with pytest.raises(
        OSError, match=f"reading {url}/a: OSError: the network is down, 1.* s after"
    ):
        store(flaky, time).read(url / "a")
    assert time.now <= 120
    assert max(time.waited) == 10


def test_a_call_that_hangs_is_given_up(flaky: Flaky, url: ObjectUrl) -> None:
    go = threading.Event()

    def hang(*_: Any) -> None:
        go.wait(60)

    flaky.rm_file = hang
    try:
        with pytest.raises(OSError, match=f"removing {url}: TimeoutError: no answer for 0.01 s"):
            store(flaky, Time(), call=0.01, retry=0).remove(url)
    finally:
        go.set()


class CredentialsError(Exception):
    """As some client's."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError("denied"), "see docs/howto/storage.md"),
        (CredentialsError("cannot locate any"), "see docs/howto/storage.md"),
        (ValueError("no such bucket's name"), "no such bucket's name"),
    ],
)
def test_what_would_fail_again_is_not_tried_again(
    flaky: Flaky, url: ObjectUrl, error: BaseException, said: str
) -> None:
    time = Time()
    flaky.errors = {"cat_file": [error]}
    with pytest.raises(StorageError, match=f"reading {url}.*{said}"):
        store(flaky, time).read(url)
    assert time.waited == []


def test_errors_and_logs_keep_credentials(
    flaky: Flaky, url: ObjectUrl, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    said = f"GET /?X-Amz-Signature=ab12&x=1 AKIAIOSFODNN7EXAMPLE {secret} token: hidden"
    flaky.errors = {"cat_file": [OSError(said)] * 99}
    with caplog.at_level(logging.DEBUG, "steepest"), pytest.raises(OSError, match="GET") as caught:
        store(flaky, Time()).read(url)
    assert (caught.value.__cause__, caught.value.__suppress_context__) == (None, True)
    for text in (str(caught.value), caplog.text, str(caught.value.__context__)):
        assert "GET" in text
        assert not any(part in text for part in ("ab12", "AKIA", secret[:8], "hidden"))


def test_a_create_whose_answer_was_lost_is_known_to_be_done(flaky: Flaky, url: ObjectUrl) -> None:
    flaky.answers_are_lost = True
    flaky.errors = {"pipe_file": [OSError("reset")] * 2}
    storage = store(flaky, Time())
    storage.create(url / "mine", b"mine")
    flaky.errors = {"pipe_file": [OSError("reset")]}
    with pytest.raises(FileExistsError, match="mine"):
        storage.create(url / "mine", b"another's")
    assert storage.read(url / "mine") == b"mine"


def test_an_upload_that_fails_leaves_the_last_checkpoint_and_none_of_its_own(
    flaky: Flaky, url: ObjectUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(url, content(1.0, 1))
    monkeypatch.setattr(ObjectStorage, "of", lambda scheme: store(flaky, Time(), retry=1))
    flaky.errors = {"write": [None, None, None, *[OSError("reset")] * 99]}
    with pytest.raises(CheckpointError, match=f"cannot write a checkpoint to {url}: writing"):
        files.write(url, content(2.0, 2))
    flaky.errors.clear()
    assert holds(url, 1.0)
    assert len(names(url)) == 4


def test_files_stay_when_nobody_knows_whether_their_manifest_is_there(
    flaky: Flaky, url: ObjectUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectStorage, "of", lambda scheme: store(flaky, Time(), retry=0))
    flaky.answers_are_lost = True
    flaky.errors = {"pipe_file": [OSError("reset")]}
    with pytest.raises(CheckpointError, match="reset"):
        files.write(url, content(1.0, 1))
    assert holds(url, 1.0)


def test_of_two_who_write_one_checkpoint_the_second_is_told_and_removes_its_own(
    url: ObjectUrl,
) -> None:
    def other(file: object) -> None:
        if "manifest" in str(file):
            files.write(url, content(1.0, 1))

    with pytest.raises(CheckpointError, match=f"cannot write a checkpoint to {url}: creating"):
        files.write(url, content(2.0, 2), other)
    assert holds(url, 1.0)
    assert len(names(url)) == 4


def test_a_place_that_cannot_be_listed_is_an_error_and_no_empty_one(
    flaky: Flaky, url: ObjectUrl
) -> None:
    flaky.errors = {"ls": [PermissionError("denied")] * 2}
    with pytest.raises(CheckpointError, match=f"cannot keep checkpoints in {url}: listing"):
        PrefixLease(url)
    with pytest.raises(CheckpointError, match=f"cannot write a checkpoint to {url}"):
        files.write(url, content())


def test_a_checkpoint_that_cannot_be_read_now_is_not_taken_for_a_damaged_one(
    flaky: Flaky, url: ObjectUrl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = CheckpointDirectory(url, 1)
    for value in (1, 2):
        directory.put(content(float(value), value))
    monkeypatch.setattr(ObjectStorage, "of", lambda scheme: store(flaky, Time(), retry=0))
    down = CheckpointDirectory(url, 1)
    for errors in ({"cat_file": [None, OSError("down")]}, {"ls": [OSError("down")]}):
        flaky.errors = dict(errors)
        with pytest.raises(CheckpointError, match="cannot .*down"):
            newest_of(down)
    flaky.errors = {"cat_file": [OSError("down")]}
    with pytest.raises(CheckpointError, match=f"cannot read the checkpoint at {url}"):
        files.about(url / "000002-step-2")
    assert caplog.text == ""
    flaky.errors = {"ls": [None, None, None, OSError("down")]}
    down.put(content(3.0, 3))
    assert "old checkpoints stay" in caplog.text
    flaky.errors.clear()
    assert kept(url) == [2, 3]
    assert holds(url / "000003-step-3", 3.0)


def test_a_full_disk_of_this_machine_is_named(
    url: ObjectUrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(url, content())
    for name in names(url):
        (tmp_path / name).symlink_to("/dev/full")
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryDirectory", lambda **_: nullcontext(tmp_path))
        with pytest.raises(CheckpointError, match=f"cannot read .* to {tmp_path}/.*No space"):
            all_of(url)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="cannot read .* temporary directory"):
        all_of(url)


# -- leases -------------------------------------------------------------------------------------------

TIMES = LeaseTimes(lasts=60, renew=3600, look=2)  # tests renew themselves


def lease(url: ObjectUrl, time: Time) -> PrefixLease:
    storage = storage_of(url)
    assert isinstance(storage, ObjectStorage)
    return PrefixLease(url, TIMES, storage, time, time.wait)


def numbers(url: ObjectUrl) -> list[str]:
    return names(url / LEASES)


def test_a_lease_is_released_and_taken_again_at_once(url: ObjectUrl) -> None:
    time = Time()
    for number in ("000001", "000002", "000003"):
        found = lease(url, time)
        found.check()
        found.release()
        found.release()
        assert numbers(url) == [number]
    assert time.waited == []


def test_a_holder_that_renews_is_found_out(url: ObjectUrl) -> None:
    time = Time()
    first = lease(url, time)

    class Later(Time):
        def wait(self, seconds: float) -> None:
            super().wait(seconds)
            first.renew()

    with pytest.raises(CheckpointError, match=rf"in {url}: process \d+ on \S+ keeps its own there"):
        lease(url, Later())
    first.check()
    first.release()


def test_a_holder_that_is_silent_is_waited_for_once_and_found_out_itself(
    url: ObjectUrl, caplog: pytest.LogCaptureFixture
) -> None:
    time = Time()
    first, second = lease(url, time), None
    second = lease(url, Time())
    assert "has not renewed the lease" in caplog.text
    assert numbers(url) == ["000002"]
    first.check()  # by its own clock its last renewal was just now
    time.now += 31
    with pytest.raises(CheckpointError, match=r"process \d+ on \S+ keeps its own .* now"):
        first.check()
    first.release()
    second.check()
    second.release()


def test_a_released_lease_need_not_be_waited_for_to_its_end(url: ObjectUrl) -> None:
    first, time = lease(url, Time()), Time()

    def release(seconds: float) -> None:
        time.now += seconds
        first.release()

    storage = storage_of(url)
    second = PrefixLease(url, TIMES, storage, time, release)  # type: ignore[arg-type]
    assert time.now == 2
    second.release()


def test_the_lease_of_a_dead_process_of_this_machine_is_free(
    url: ObjectUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        original = PrefixLease._content
        # as if another process had begun with the same number, after a restart of this one
        patch.setattr(
            PrefixLease,
            "_content",
            lambda self, **more: original(self, **more).replace(b'"life": [', b'"life": ["0", '),
        )
        lease(url, Time())
    time = Time()
    lease(url, time).release()
    assert time.now >= 60  # of no process that can be looked for: it is waited for
    raw = storage_of(url).read(url / LEASES / numbers(url)[0])
    ended = raw.replace(b'"released": true', b'"released": false')
    life = ended.index(b'"life"')
    started = ended.rindex(b'"]', life, ended.index(b"token"))
    storage_of(url).write(url / LEASES / "000009", blocks(ended[:started] + b"0" + ended[started:]))
    time = Time()
    lease(url, time).release()
    assert (time.waited, numbers(url)) == ([], ["000010"])


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"holder": 3, "life": [1]}'])
def test_a_lease_that_makes_no_sense_is_waited_for(url: ObjectUrl, content: bytes) -> None:
    storage_of(url).write(url / LEASES / "000001", blocks(content))
    time = Time()
    lease(url, time).release()
    assert time.now == 60


def test_of_two_who_take_over_at_once_one_is_refused(url: ObjectUrl) -> None:
    storage = storage_of(url)
    silent = lease(url, Time())

    class Last(Time):
        def wait(self, seconds: float) -> None:
            super().wait(seconds)
            if self.now == 60:
                storage.write(url / LEASES / "000002", blocks(b"{}"))

    class Blind(ObjectStorage):
        def files(self, folder: ObjectUrl) -> list[ObjectUrl]:
            return [each for each in super().files(folder) if each.name == "000001"]

    time = Last()
    blind = Blind(fsspec.filesystem("memory"), None, time, time.wait)
    with pytest.raises(CheckpointError, match="faster by a moment"):
        PrefixLease(url, TIMES, blind, time, time.wait)
    silent.release()


def test_a_store_that_does_not_answer_ends_what_is_written(
    flaky: Flaky, url: ObjectUrl, caplog: pytest.LogCaptureFixture
) -> None:
    time = Time()
    found = PrefixLease(url, TIMES, store(flaky, time, retry=10), time, time.wait)
    time.now += 29
    flaky.errors = {"ls": [OSError("down")] * 999}
    found.check()
    time.now += 2
    with pytest.raises(CheckpointError, match=f"lease on {url} was not renewed .* s.*down"):
        found.check()
    flaky.errors.clear()
    found.check()  # nobody has taken it
    flaky.errors = {"pipe_file": [OSError("down")] * 999}
    found.release()
    assert "ends by itself" in caplog.text


def test_a_store_without_conditions_is_warned_of(
    flaky: Flaky, url: ObjectUrl, caplog: pytest.LogCaptureFixture
) -> None:
    flaky.pipe_file = lambda path, value, mode="": MemoryFileSystem.pipe_file(flaky, path, value)
    PrefixLease(url, TIMES).release()
    assert f"{url} does not create objects under conditions" in caplog.text


# -- whole runs ---------------------------------------------------------------------------------------


def trained(url: object, *callbacks: Any, steps: int = 18, **more: Any) -> tuple[Any, Any]:
    """Run the same program once more; return its weights, and the steps of its history."""
    with (
        Simulation(7).running(),
        DistributedSGD(
            TASK.creator(), 2, run_config=run_config(),
            checkpoints=Checkpoints(url, every=4, keep=2, **more),  # type: ignore[arg-type]
        ) as sgd,
    ):  # fmt: skip
        sgd.fit(steps=steps, callbacks=callbacks, progress=False)
        return sgd.weights(), [row["step"] for row in sgd.history[:] if row["kind"] == "step"]


def test_the_same_program_started_again_ends_with_the_same_bits(
    tmp_path: Path, url: ObjectUrl
) -> None:
    expected, _ = trained(tmp_path)
    with pytest.raises(ZeroDivisionError):
        trained(str(url), Stop(10))
    assert kept(url)[-1] >= 10
    weights, steps = trained(str(url))
    assert same_bits(weights, expected)
    assert steps == list(range(1, 19))
    assert kept(url) == [16, 18]
    assert numbers(url) == ["000002"]


def test_save_and_restore_and_the_best_by_url(url: ObjectUrl) -> None:
    checkpoints = Checkpoints(f"{url}/kept", every=100, keep=1, best="loss", mode="max")
    with (
        Simulation(3).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config(), checkpoints=checkpoints) as sgd,
    ):
        sgd.fit(steps=6, progress=False, validation=TASK.data, evaluate_every=2)
        assert sgd.best_checkpoint == f"{url}/kept/000001-step-2"
        sgd.save(f"{url}/own")
        weights = sgd.weights()
        sgd.restore(sgd.best_checkpoint)
        assert sgd.stats().step == 2
        sgd.restore(f"{url}/own")
        assert same_bits(sgd.weights(), weights)
        with pytest.raises(CheckpointError, match=f"no checkpoint at {url}/nowhere"):
            sgd.restore(f"{url}/nowhere")
        for use in (sgd.save, sgd.restore):
            with pytest.raises(ConfigurationError, match="s3://"):
                use("ftp://a/b")


@pytest.mark.long
def test_a_driver_that_lost_its_lease_writes_nothing_more(url: ObjectUrl) -> None:
    def take(sgd: Any, result: Any) -> None:
        if result.step == 10:
            storage_of(url).write(url / LEASES / "000009", blocks(b'{"holder": "process 9"}'))
            sgd._keeping._keeper._lock.check.__self__._renewed -= 45

    taking = Stop(99)
    taking.on_step = take  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="process 9 keeps its own checkpoints"):
        trained(str(url), taking)
    assert kept(url) == [4, 8]
    assert numbers(url) == ["000001", "000009"]
