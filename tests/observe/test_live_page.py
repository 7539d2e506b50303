"""The page of a live job: served to whoever has the token, read when it is asked for, found by `steepest watch`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from steepest import (
    Checkpoints,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
    RunConfig,
    StepResult,
)
from steepest.cli import main
from steepest.core.transport.strangers import MOST_OPENINGS
from steepest.errors import ConfigurationError, ShutdownError
from steepest.observe.history_file import HistoryFile
from steepest.observe.page import addresses
from steepest.observe.page import document as pages
from steepest.observe.page.log_text import log_text
from steepest.observe.page.overlay import WatchedRuns
from steepest.observe.page.run_files import WatchedRun, read_run
from steepest.observe.page.run_view import Known, RunView
from steepest.observe.page.server import PageServer
from steepest.runtime.driver.job_page import LiveRun
from tests.limits import limited
from tests.logged_runs import TASK
from tests.page_rows import row_of
from tests.reference import samples
from tests.simulation.run import Simulation, pause, run_config
from tests.step_callbacks import After


@pytest.fixture(autouse=True)
def _charts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stands in for plotly, which is an extra; addresses are kept apart from those of real jobs."""
    for user in ("runtime.driver.trainer", "observe.page.server"):
        monkeypatch.setattr(f"steepest.{user}.chart_script", lambda: "var Plotly = {};")
    monkeypatch.setattr(addresses.tempfile, "gettempdir", lambda: str(tmp_path))


class Fixed:
    """A run that does not change."""

    def __init__(self, *steps: int) -> None:
        self.view = RunView("a secret name")
        self.view.add_all(map(row_of, steps))

    def as_json(self, known: Known) -> Any:
        return self.view.as_json(known)

    def stacks(self) -> str:
        return "worker 0 computes"

    def log(self, process: str) -> str:
        return f"what {process} has printed"


@pytest.fixture
def server() -> Iterator[PageServer]:
    found = PageServer(Fixed(1, 2, 3))
    yield found
    found.close()


def ask(server: PageServer, path: str, token: str | None = None) -> tuple[int, str]:
    """The status and the text of an answer; `token` in place of the page's own."""
    place, _, own = server.url.partition("#token=")
    own = own if token is None else token
    request = urllib.request.Request(place + path, headers={"Authorization": f"Bearer {own}"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


# -- the server ------------------------------------------------------------------------------------


def test_whoever_has_the_token_sees_the_job(
    server: PageServer, capfd: pytest.CaptureFixture[str]
) -> None:
    status, text = ask(server, "data")
    assert (status, json.loads(text)["curves"]["step"]) == (200, [1, 2, 3])
    status, text = ask(server, "data?since=2&revision=0")
    assert (json.loads(text)["curves"]["from"], json.loads(text)["curves"]["step"]) == (2, [3])
    assert "events" in json.loads(text)
    changes = json.loads(text)["changes"]
    status, text = ask(server, f"data?since=2&revision=0&changes={changes}")
    assert "events" not in json.loads(text)
    assert len(text) < 2000
    status, text = ask(server, "data?since=-1&revision=x&changes=")
    assert (status, json.loads(text)["curves"]["step"]) == (200, [1, 2, 3])
    assert ask(server, "stacks") == (200, "worker 0 computes")
    assert ask(server, "log?process=worker%201") == (200, "what worker 1 has printed")
    assert ask(server, "log") == (200, "what  has printed")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("token", ["", "wrong", "é", "x" * 10_000])
@pytest.mark.parametrize("path", ["data", "stacks", "log?process=worker%200", "data?token="])
def test_a_stranger_is_told_what_is_missing(server: PageServer, path: str, token: str) -> None:
    if token == "é":
        token = token.encode().decode("latin-1")
    status, text = ask(server, path, token)
    assert status == 403
    assert text.startswith("This page is behind a token: open the whole address")
    for public in ("", "charts.js", "page.js"):
        status, text = ask(server, public, token)
        assert status == 200
        assert "secret" not in text
    assert ask(server, "../etc/passwd", token)[0] == 404


def test_a_page_listens_where_it_is_told_to_and_nowhere_else(server: PageServer) -> None:
    assert server.url.startswith(f"http://127.0.0.1:{server.port}/#token=")
    with pytest.raises(
        ConfigurationError, match=rf"port {server.port} of 127\.0\.0\.1 is in use: give"
    ):
        PageServer(Fixed(), port=server.port)
    with pytest.raises(ConfigurationError, match="give a number up to 65535"):
        PageServer(Fixed(), port=70_000)
    with pytest.raises(ConfigurationError, match="port=-1"):
        PageServer(Fixed(), port=-1)
    with pytest.raises(
        ConfigurationError, match=r"cannot be served at 192\.0\.2\.1:0: .* give an address of"
    ):
        PageServer(Fixed(), "192.0.2.1")
    with pytest.raises(ConfigurationError, match="host=''"):
        PageServer(Fixed(), "")


def dial(server: PageServer, said: bytes = b"") -> socket.socket:
    sock = socket.create_connection((server.host, server.port), 20)
    sock.sendall(said)
    return sock


def receive_all(sock: socket.socket) -> bytes:
    """What comes until the page has closed a connection."""
    with contextlib.suppress(ConnectionError):
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))
    return b""


def page_threads() -> int:
    return sum("process_request" in thread.name for thread in threading.enumerate())


def test_strangers_take_a_bounded_number_of_places_and_none_of_a_readers(
    server: PageServer, caplog: pytest.LogCaptureFixture
) -> None:
    token = server.url.partition("#token=")[2]
    reader = http.client.HTTPConnection(server.host, server.port, timeout=20)
    headers = {"Authorization": f"Bearer {token}"}
    with contextlib.ExitStack() as stack:
        stack.callback(reader.close)
        connections = set()
        for _ in range(4):
            reader.request("GET", "/stacks", headers=headers)
            assert reader.getresponse().read() == b"worker 0 computes"
            connections.add(reader.sock)
            for _ in range(MOST_OPENINGS):
                stack.enter_context(dial(server, b"GET /data HTTP/1.1\r\nX: "))
            assert ask(server, "stacks")[0] == 200
            assert page_threads() <= MOST_OPENINGS + 2
    assert len(connections) == 1, "the reader keeps its connection"
    assert len(caplog.records) == 1
    assert caplog.messages[0].startswith("refused a connection to the page of a job from 127.0.0.1")


def test_a_request_has_to_come_whole_in_time(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often a byte of it comes."""
    monkeypatch.setattr("steepest.observe.page.server.OPENING_SECONDS", 0.2)
    began = time.monotonic()
    with dial(server, b"GET /") as sock:
        sock.settimeout(0.02)
        while time.monotonic() < began + 20:
            try:
                sock.sendall(b"x")
                assert sock.recv(100) == b""
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
    assert 0.2 <= time.monotonic() - began < 10


def test_without_a_descriptor_strangers_are_sent_away_and_the_page_is_quiet(
    server: PageServer,
) -> None:
    with dial(server, b"GET /data HTTP/1.1\r\n\r\n") as held:
        assert held.recv(1 << 16).startswith(b"HTTP/1.1 403 ")
        # The descriptor that is left is the other caller's own: the page has one for it once the first has lost its.
        with limited(1), dial(server) as other:
            receive_all(held)  # what was left of its answer, and its end
            other.sendall(b"GET /data HTTP/1.1\r\n\r\n")
            assert other.recv(1 << 16).startswith(b"HTTP/1.1 403 ")
    with limited(1), dial(server) as nobody:
        assert receive_all(nobody) == b""
        began = time.process_time()
        server._thread.join(0.3)
        assert time.process_time() - began < 0.15
    assert ask(server, "stacks")[0] == 200


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET http://[/ HTTP/1.1", 404),
        (b"GET /\x1b[31m x HTTP/1.1", 400),
        (b"GET / HTTP/9.9", 505),
        (b"nothing", 400),
        (b"POST / HTTP/1.1", 501),
        (b"HEAD / HTTP/1.1", 501),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1", 414),
    ],
)
def test_what_is_no_request_is_answered_as_others_are_and_logged_once(
    server: PageServer, caplog: pytest.LogCaptureFixture, request_line: bytes, status: int
) -> None:
    for _ in range(3):
        with dial(server, request_line + b"\r\nConnection: close\r\n\r\n") as sock:
            head = receive_all(sock).decode().partition("\r\n\r\n")[0]
        if head or status != 414:  # the rest of a long line is not read
            assert head.startswith(f"HTTP/1.1 {status} ")
            assert "\r\nContent-Security-Policy: default-src 'none'" in head
            assert "\r\nX-Content-Type-Options: nosniff" in head
    assert len(caplog.records) == (status != 404)
    assert not any("\x1b" in line or len(line) > 300 for line in caplog.messages)


def test_a_closed_page_does_not_answer() -> None:
    server = PageServer(Fixed())
    connected = http.client.HTTPConnection(server.host, server.port, timeout=20)
    connected.request("GET", "/page.js")
    assert connected.getresponse().read() == pages.page_script().encode()
    server.close()
    server.close()
    connected.request("GET", "/page.js")
    with pytest.raises(http.client.HTTPException):
        connected.getresponse()
    connected.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((server.host, server.port), 5).close()


# -- a live job ------------------------------------------------------------------------------------


def curves(told: Any) -> Any:
    return {key: told["curves"][key] for key in ("step", "values", "sums", "steps")}


def test_a_live_page_goes_on_where_it_was_also_when_steps_are_taken_again() -> None:
    simulation = Simulation(4)
    config = run_config(failure=FailureConfig(snapshot_every=10_000, patience=60.0))
    seen: list[tuple[int, int]] = []

    def kill_server() -> None:
        (victim,) = (each for each in simulation.living() if "server 1" in str(each))
        simulation.world.kill(victim, "it was killed. connection error code 2.")

    class Look(After):
        def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
            told = live.as_json(Known())
            seen.append((result.step, told["curves"]["step"][-1]))
            assert told["goal"] == 20  # of the call, which pauses before
            super().on_step(trainer, result)

    with (
        simulation.running(),
        DistributedSGD(
            TASK.creator(), 2, strategy=ParameterServerStrategy(num_servers=2), run_config=config
        ) as trainer,
    ):
        live = LiveRun(trainer._live(), trainer._training, "a run")
        pauses = {"validation": samples(6), "evaluate_every": 6}
        trainer.fit(steps=20, callbacks=[Look({9: kill_server})], progress=False, **pauses)  # type: ignore[arg-type]
        pause(1.0)  # rows are not read anew at once
        told, view = live.as_json(Known()), RunView("a run")
        view.add_all(trainer.history[:])
        assert curves(told) == curves(view.as_json())
        assert told["curves"]["step"] == list(range(1, 21))
        assert told["events"] == view.as_json()["events"]
        assert [each["name"] for each in told["processes"]] == [p.name for p in trainer.processes()]
        assert [each["name"].partition(" (pid")[0] for each in told["ended"]] == ["server 1"]
        assert told["live"]
        assert not told["training"]
        assert told["goal"] == 20
        settings = told["about"]["settings"]
        assert settings["strategy"] == "ParameterServerStrategy(num_servers=2)"
        assert settings["optimizer"].startswith("SGD(lr=")
        assert settings["seed"] == "0"
        assert "torch" in settings["versions"]
        for _ in range(2):  # what is used in a second takes two looks
            live._ask()
            pause(1.0)
        for process in live.as_json(Known())["processes"]:
            assert process["memory"] > 0
            assert process["processor"] >= 0
            assert process["sent"] >= 0
        assert {worker for _, _, each in told["workers"]["lanes"] for worker, *_ in each} == {0, 1}
    assert all(last <= step + 4 for step, last in seen)


def test_a_live_page_shows_what_servers_spend_a_version_on() -> None:
    with (
        Simulation(4).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        live = LiveRun(trainer._live(), trainer._training, "a run")
        assert live.as_json(Known())["servers"] == []
        pause(6.0)  # the next look at counters is five seconds later
        trainer.fit(steps=4, progress=False)
        live.as_json(Known())
        pause(1.0)
        (server,) = live.as_json(Known())["servers"]
        assert (server["server"], server["versions"]) == (0, 4)
        assert 0 < server["taking"] < server["waiting"]
        assert 0 < server["updating"] < server["waiting"]
        whole = server["taking"] + server["updating"] + server["waiting"]
        assert 4 * whole == pytest.approx(6.0, abs=0.5)


def test_a_trainer_has_one_page_until_it_is_shut_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(page=True)
    with (
        Simulation(5).running(),
        DistributedSGD(
            TASK.creator(), 2, run_config=config, checkpoints=Checkpoints(tmp_path / "run")
        ) as trainer,
    ):
        page = trainer.page()
        assert trainer.page() is page
        host, port = page.where
        assert f"the page of this job: steepest watch {host}:{port}" in caplog.text
        token = page.url.partition("#token=")[2]
        assert len(token) >= 32
        assert token not in caplog.text + repr(page)
        assert page.address_file.stat().st_mode & 0o777 == 0o600
        socket.create_connection(page.where, 5).close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(page.where, 5).close()
    assert not page.address_file.exists()
    with pytest.raises(ShutdownError):
        trainer.page()
    with pytest.raises(ConfigurationError, match="page=1: give"):
        RunConfig(page=1)  # type: ignore[arg-type]


# -- steepest watch --------------------------------------------------------------------------------


def test_files_are_watched_while_they_grow_and_when_they_are_written_anew(tmp_path: Path) -> None:
    path, file = tmp_path / "history.jsonl", HistoryFile(tmp_path / "history.jsonl")
    with pytest.raises(ConfigurationError, match="there is no run"):
        WatchedRun(tmp_path)
    file.append([row_of(1), row_of(2)])
    watched = WatchedRun(tmp_path)
    watched._put_off = lambda began: None  # type: ignore[method-assign]
    watched._next = 0.0

    def told() -> Any:
        found = watched.as_json(Known())
        assert curves(found) == curves(read_run(tmp_path).as_json())
        return found

    assert told()["curves"]["step"] == [1, 2]
    file.append([row_of(3)])
    first = told()["curves"]
    assert first["step"] == [1, 2, 3]
    with open(path, "a") as half:
        half.write('{"kind": "step", "ti')
    assert watched.as_json(Known())["curves"] == first
    file.resume(2)
    file.append([row_of(3, loss=7.0), row_of(4)])
    anew = watched.as_json(Known(2, first["revision"]))["curves"]
    assert (anew["from"], anew["step"]) == (0, [1, 2, 3, 4])
    assert anew["revision"] != first["revision"]
    job = {"kind": "job", "time": 1.0, "step": 0, "format": 1, "strategy": "async", "processes": []}
    HistoryFile(tmp_path / "job.jsonl").append([job])
    assert told()["about"]["strategy"] == "async"
    path.unlink()
    assert "there is no run" in watched.as_json(Known())["about"]["notes"][0]


def test_watch_finds_the_page_of_a_live_job(
    server: PageServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    address = addresses.KeptAddress(server, run)
    for named in (
        str(run),
        str(run / "."),
        f"127.0.0.1:{server.port}",
        f"http://127.0.0.1:{server.port}/",
        server.url,
    ):
        assert main.main(["watch", named]) == 0
        assert capsys.readouterr().out == f"{server.url}\n"
    assert main.main(["watch", server.url[:-1] + "?"]) == 1
    assert "give a path, or a URL" in capsys.readouterr().err
    assert main.main(["watch", server.url + "x"]) == 1
    assert "the token is not that of this page" in capsys.readouterr().err
    address.file.write_text(json.dumps({"url": server.url, "pid": 2**22 + 1, "run": str(run)}))
    assert main.main(["watch", f"127.0.0.1:{server.port}"]) == 1  # its process is gone
    assert "is behind a token, and this user has no job" in capsys.readouterr().err
    address.remove()
    server.close()
    assert main.main(["watch", server.url]) == 1
    assert "no job answers there" in capsys.readouterr().err


def test_the_token_is_not_among_the_arguments_of_a_browser(
    server: PageServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, opened = addresses.KeptAddress(server, None), list[str]()
    monkeypatch.setattr("webbrowser.open", opened.append)
    for _ in range(2):
        assert main.main(["watch", server.url, "--open"]) == 0
    assert capsys.readouterr().out == f"{server.url}\n" * 2
    assert [urlsplit(each).scheme for each in opened] == ["file", "file"]
    assert not any(server.url.partition("#token=")[2] in each for each in opened)
    file = Path(url2pathname(urlsplit(opened[-1]).path))
    assert file.stat().st_mode & 0o777 == 0o600
    assert f'content="0; url={server.url}"' in file.read_text()
    address.remove()
    assert not file.exists()


def test_addresses_are_kept_where_others_cannot_read_them(
    server: PageServer, tmp_path: Path
) -> None:
    address = addresses.KeptAddress(server, None)
    assert address.file.parent.stat().st_mode & 0o777 == 0o700
    address.file.parent.chmod(0o755)
    with pytest.raises(
        ConfigurationError, match="is not a directory of this user's that others cannot"
    ):
        addresses.kept_addresses()
    address.remove()
    address.file.parent.rmdir()
    os.symlink(tmp_path, address.file.parent)
    with pytest.raises(ConfigurationError, match="is not a directory of this user's"):
        addresses.KeptAddress(server, None)


def test_watch_serves_the_page_of_files_until_it_is_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    HistoryFile(tmp_path / "history.jsonl").append([row_of(1)])
    found: list[tuple[int, str]] = []

    class Waits:
        def wait(self) -> None:
            url = capsys.readouterr().out.splitlines()[0]
            place, _, token = url.partition("#token=")
            asked = urllib.request.Request(
                place + "data", headers={"Authorization": f"Bearer {token}"}
            )
            with urllib.request.urlopen(asked, timeout=20) as answer:
                found.append((answer.status, answer.read().decode()))
            raise KeyboardInterrupt

    monkeypatch.setattr("steepest.cli.watch.threading", _Threads(Waits))
    assert main.main(["watch", str(tmp_path)]) == 130
    ((status, text),) = found
    assert (status, json.loads(text)["curves"]["step"]) == (200, [1])


def test_several_runs_are_watched_on_one_page(tmp_path: Path) -> None:
    """Each read sees what has come to any of the files; alike names are told apart by what the user calls them."""
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    for steps, folder in enumerate(folders, 1):
        folder.mkdir(parents=True)
        HistoryFile(folder / "history.jsonl").append([row_of(n) for n in range(1, steps + 1)])
    watched = WatchedRuns(folders)
    server = PageServer(watched, kind="comparison")
    try:
        status, text = ask(server, "data")
        told = json.loads(text)
        assert status == 200
        assert [run["strategy"] for run in told["runs"]] == [str(folder) for folder in folders]
        assert [run["curves"]["step"] for run in told["runs"]] == [[1], [1, 2]]
        assert [len(row) for row in told["rows"]] == [len(told["head"])] * 2
        status, text = ask(server, "")
        assert 'id="recommended"' in text
        assert ask(server, "log?process=worker%200")[1].startswith("this page shows files")
        assert ask(server, "stacks")[1].startswith("this page shows files")
    finally:
        server.close()
    with pytest.raises(ConfigurationError, match="there is no run"):
        WatchedRuns([folders[0], tmp_path / "none"])


def test_the_output_of_a_process_is_shown_without_secrets_and_within_bounds() -> None:
    lines = [
        "epoch 1, lr=0.1",
        'password: "hunter2", retries=3',
        "wandb_api_key=abcd",
        "Authorization: Bearer x.y.z",
    ]
    lines += [
        "https://me:secret@host/x?token=zzz&y=1",
        "AWS_SECRET_ACCESS_KEY=abc/def",
        "tokens/s 120",
    ]
    shown = log_text(lines)
    for secret in ("hunter2", "abcd", "x.y.z", "me:secret", "zzz", "abc/def"):
        assert secret not in shown
    for kept in ("lr=0.1", "retries=3", "@host/x", "y=1", "tokens/s 120"):
        assert kept in shown
    long = log_text(["x" * 5000] * 1000)
    assert len(long) <= 64_000
    assert set(long) == {"x", "\n"}
    assert log_text(["first", *["y" * 999] * 63, "last"]).endswith("last\n")


@pytest.mark.usefixtures("machine")
@pytest.mark.long
def test_a_live_page_has_the_last_lines_of_each_process() -> None:
    """Those of a process of this machine, also after its death; of one that is none it is said so."""
    with DistributedSGD(printing_creator, 2) as trainer:
        trainer.fit(steps=2, progress=False)
        run = LiveRun(trainer._live(), trainer._training, "run")
        for worker in range(2):
            text = run.log(f"worker {worker}")
            assert f"made by worker {worker}" in text
            assert "hunter2" not in text
        assert run.log("server 0") == "it has printed nothing"
        assert "'worker 7' is no process of the job" in run.log("worker 7")
        (pid,) = (each.pid for each in trainer.processes() if each.name == "worker 1")
        os.kill(pid, signal.SIGKILL)
        trainer.fit(steps=2, progress=False)
        (ended,) = run.as_json(Known())["ended"]
        assert ended["name"] == f"worker 1 (pid {pid})"
        assert "made by worker 1" in run.log(ended["name"])


def printing_creator(worker: int, device: int) -> Any:
    sys.stdout.write(f"made by worker {worker}, password=hunter2\n")
    return TASK.creator()(worker, device)


class _Threads:
    """Stands in for the module."""

    def __init__(self, event: Any) -> None:
        self.Event = event

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)
