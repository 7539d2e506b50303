"""An end that a second Ctrl-C does not break off."""

from __future__ import annotations

import importlib
import signal
import threading

import pytest
import ray

from steepest.cli.begin import begun
from steepest.runtime.connection import end_ray, ray_session
from steepest.runtime.unbroken import unbroken


def test_ray_is_ended_whole_although_the_wait_for_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first Ctrl-C leaves the block, the second one comes amid `ray.shutdown`."""
    interrupted, ended = threading.Event(), list[threading.Thread]()
    main = threading.get_ident()

    def shutdown() -> None:
        # unlike `_thread.interrupt_main` it wakes a thread that waits already
        signal.pthread_kill(main, signal.SIGINT)
        assert interrupted.wait(60)
        ended.append(threading.current_thread())

    monkeypatch.setattr("steepest.runtime.connection.ensure_ray", lambda *_, **__: True)
    monkeypatch.setattr(ray, "shutdown", shutdown)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" ignores it
    try:
        with pytest.raises(KeyboardInterrupt, match=r"^$"), ray_session():
            raise KeyboardInterrupt("the first")
    finally:
        interrupted.set()
        signal.signal(signal.SIGINT, handler)
    (ending,) = (each for each in threading.enumerate() if each.name == "steepest ends Ray")
    assert not ending.daemon  # the interpreter awaits it
    ending.join(60)
    assert ended == [ending]


def test_ctrl_c_while_ray_starts_leaves_no_import_to_break_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A daemonic thread would be ended amid torch's import: by a traceback, SIGSEGV, or not at all."""
    interrupted, importing = threading.Event(), list[threading.Thread]()

    def import_module(name: str) -> None:
        importing.append(threading.current_thread())
        assert interrupted.wait(60)

    def interrupt(*given: object, **named: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("steepest.runtime.prefork.template.start_template", lambda: None)
    monkeypatch.setattr("steepest.runtime.connection.ensure_ray", interrupt)
    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(KeyboardInterrupt), begun("ray"):
        pass
    interrupted.set()
    (thread,) = importing
    assert not thread.daemon  # the interpreter awaits it
    thread.join(60)


def test_what_it_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        unbroken(fails, "an end")
    monkeypatch.setattr(ray, "shutdown", fails)
    monkeypatch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError()))
    with pytest.raises(LookupError, match="no"):  # as at the interpreter's end
        end_ray()
