"""A Ray that does not start, or does not let this process in, is one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import ray

from steepest.errors import ConfigurationError, ResourcesError, SteepestError
from steepest.runtime import connection


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Exception("The current node timed out\n  during startup."), "timed out during startup"),
        (RuntimeError("Version mismatch: 2.9"), "Version mismatch: 2.9"),
        (TimeoutError(), "TimeoutError"),
    ],
)
@pytest.mark.parametrize(
    ("call", "kind", "told"),
    [
        (lambda: connection.start_ray(1), ResourcesError, "Ray did not start on this machine: "),
        (
            lambda: connection.connect("10.0.0.1:6379"),
            ConfigurationError,
            "could not connect to the Ray at 10.0.0.1:6379: ",
        ),
    ],
)
def test_whatever_ray_raises_is_told_in_a_line(
    call: Callable[[], None],
    kind: type[SteepestError],
    told: str,
    error: Exception,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init(**_: object) -> None:
        raise error

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(connection, "workers_start_as_usual", lambda: False)
    with pytest.raises(kind) as raised:
        call()
    assert raised.value.__cause__ is error
    assert str(raised.value).startswith(told)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_ctrl_c_while_ray_starts_is_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(connection, "workers_start_as_usual", lambda: False)
    with pytest.raises(KeyboardInterrupt):
        connection.start_ray(1)
