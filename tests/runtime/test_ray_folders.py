"""A Ray that steepest starts keeps its files where their paths are short, and its token where one can be written."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from steepest.core.transport.loopback import HOST, require_loopback
from steepest.errors import ConfigurationError
from steepest.runtime.ray_folders import MODE, TOKENS, RayFolders, ray_folders

NOWHERE = "/proc/nowhere"  # no user may make a directory there, root neither


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a short path, which is Ray's and the home; nothing of Ray's is set."""
    for name in ("RAY_TMPDIR", MODE, *TOKENS):
        monkeypatch.delenv(name, raising=False)
    with subprocess.Popen(
        ["mktemp", "-d", "/tmp/s-XXXXXX"], stdout=subprocess.PIPE, text=True
    ) as made:
        folder = Path(made.communicate(timeout=20)[0].strip())
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("HOME", str(folder))
    return folder


def test_rays_own_choice_stays_where_it_does(short: Path) -> None:
    assert ray_folders() == RayFolders()


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
@pytest.mark.parametrize("given", ["too long", "not writable"])
def test_a_folder_that_does_not_do_has_another_in_its_place(
    short: Path, monkeypatch: pytest.MonkeyPatch, variable: str, given: str
) -> None:
    monkeypatch.setenv(variable, NOWHERE if given == "not writable" else str(short / ("x" * 60)))
    found = ray_folders([NOWHERE, str(short)])
    assert found == RayFolders(f"{short}/steepest-ray-{os.getuid()}/ray")
    path = f"{found.directory}/session_2026-11-28_11-12-54_123456_4194304/sockets/plasma_store"
    with socket.socket(socket.AF_UNIX) as listener:
        os.makedirs(os.path.dirname(path))
        listener.bind(path)  # it is short enough for the kernel
    with pytest.raises(ConfigurationError, match="set TMPDIR to a directory of at most"):
        ray_folders([NOWHERE])


@pytest.mark.parametrize("long", [False, True])
def test_without_a_home_the_token_lies_beside_rays_files(
    short: Path, monkeypatch: pytest.MonkeyPatch, *, long: bool
) -> None:
    monkeypatch.setenv("HOME", NOWHERE)
    if long:
        monkeypatch.setenv("TMPDIR", str(short / ("x" * 60)))
    found = ray_folders([str(short)])
    folder = short / f"steepest-ray-{os.getuid()}"
    assert found.directory == (f"{folder}/ray" if long else None)
    token = Path(found.variables[TOKENS[1]])
    assert (token.parent, token.stat().st_mode & 0o777) == (folder, 0o600)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(token.read_text()) == 64
    assert ray_folders([str(short)]) == found, "the same token as before"
    monkeypatch.setenv(TOKENS[0], "mine")
    assert ray_folders([str(short)]).variables == {}
    folder.chmod(0o755)
    monkeypatch.delenv(TOKENS[0])
    with pytest.raises(ConfigurationError, match="is not a directory of this user's that others"):
        ray_folders([str(short)])


def test_a_machine_that_does_not_reach_itself_is_told_in_one_line() -> None:
    require_loopback()
    program = "from steepest.core.transport.loopback import require_loopback; require_loopback()"
    try:
        done = subprocess.run(
            ["unshare", "-rn", sys.executable, "-c", program],
            capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2],
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("no network namespaces")
    if done.returncode == 0 or "ConfigurationError" not in done.stderr:
        pytest.skip(f"no network namespaces: {done.stderr[-200:]}")
    last = done.stderr.splitlines()[-1]
    assert f"this machine does not reach itself at {HOST} (Network is unreachable)" in last
    assert "ip link set lo up" in last
