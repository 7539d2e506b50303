"""Text scripts of a coordinator: what it is told, and below a line of dashes all that it sends then.

A line is one of these, and a line that begins with # is a comment:

    job workers=2 servers=2 [rule=all|each|first-N|quorum-N] [grace=4] [lead=0] [holding=0,1] [replaces] ...
    users servers=2 [nonfinite=skip]      the coordinator of a parameter server by itself
    worker 0: REPORT sequence=5           a message, by the fields of its class; others are as the sender has them
    lost worker 1: reset                  a channel that closes
    tick 10                               the time, in seconds

The lines that follow say what was sent: receivers, kind, and the fields that are not at their default.

    python -m tests.protocol.script       writes what is sent now into the scripts; read the difference

What is not of the core is imported where it is used: scripts of the core are played without the rest of the package.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from steepest.core.messages import driver, gradients, membership, snapshots, users
from steepest.core.messages.message import Message, MessageKind, Peer
from steepest.core.messages.schema import Body
from steepest.core.protocol.commit_rules import (
    CommitAll,
    CommitEach,
    CommitFirst,
    CommitRule,
)
from steepest.core.protocol.commit_state import CommitState, Outgoing
from steepest.core.protocol.coordinator import Coordinator, Updates
from steepest.core.protocol.job_coordinator import JobCoordinator
from steepest.errors import ProtocolError

_TESTS = Path(__file__).resolve().parents[1]
_LINE = "----"
_MODULES = (driver, gradients, membership, snapshots, users)
BODIES: dict[MessageKind, type[Body]] = {
    found.KIND: found
    for module in _MODULES
    for found in vars(module).values()
    if isinstance(found, type) and issubclass(found, Body) and hasattr(found, "KIND")
}
#: What a sender says where a script does not.
_USUAL = {
    "total": 4.0,
    "samples": 4,
    "bytes_pushed": 100,
    "bytes_pulled": 50,
    "squares": 1.0,
    "error": "ValueError: no",
    "traceback": "...",
}
_SETTINGS = ("replaces", "reloads", "step_timeout")


class Script:
    """A coordinator that is told the lines of a script."""

    def __init__(self) -> None:
        self._coordinator: Coordinator | None = None
        self._forget()

    def _forget(self) -> None:
        self._requests = itertools.count(1)  # of clients
        self._pushes: dict[int, int] = {}  # the last of each worker
        self._pulled: dict[int, int] = {}  # the version of each worker's last lease

    def tell(self, line: str) -> list[str]:
        """Do what a line says; return what is sent, in words."""
        head, _, rest = line.partition(" ")
        try:
            if head in ("job", "users"):
                self._begin(head, dict(_word(word) for word in rest.split()))
                return []
            assert self._coordinator is not None, f"{line}: begin with job, or users"
            if head == "tick":
                return self._told(self._coordinator.tick(float(rest)))
            peer, _, said = (rest if head == "lost" else line).partition(": ")
            source = _peer(peer)
            if head == "lost":
                return self._told(self._coordinator.lost(source, said))
            message = self._message(source, *said.split(" ", 1))
            return self._told(self._coordinator.handle(source, message))
        except ProtocolError as error:
            return [f"ProtocolError: {error}"]

    def _begin(self, what: str, given: dict[str, Any]) -> None:
        self._forget()
        servers = given.pop("servers", 1)
        workers = given.pop("workers", 0)
        holding = given.pop("holding", list(range(servers)))
        state = CommitState(
            members=frozenset(range(workers)),
            servers=tuple(range(servers)),
            holding=frozenset([holding] if isinstance(holding, int) else holding),
            rule=CommitEach() if what == "users" else _rule(given),
            witnessed=given.pop("witnessed", False),
        )
        if what == "users":
            from steepest.parameter_server.open_coordinator import OpenCoordinator

            self._coordinator = OpenCoordinator(state, given.pop("nonfinite", "refuse"))
        else:
            own = {name: given.pop(name) for name in _SETTINGS if name in given}
            rates: list[float] = given.pop("rates", [])

            def hyperparameters(step: int) -> list[dict[str, Any]]:
                return [{"lr": rates[step]}] if rates else [{}]

            updates = Updates(hyperparameters, **given)
            kind = JobCoordinator
            if not isinstance(state.rule, CommitAll | CommitEach | CommitFirst):
                from steepest.strategies.rounds import RoundCoordinator

                kind = RoundCoordinator
            self._coordinator = kind(state, updates, **{"step_timeout": 10.0, **own})

    def _message(self, source: Peer, kind: str, fields: str = "") -> Message:
        body = next(found for found in BODIES.values() if found.KIND.name == kind)
        told = dict(_word(word) for word in fields.split())
        assert self._coordinator is not None
        state = self._coordinator.state
        usual = {
            **_USUAL,
            "generation": state.generation,
            "version": state.version,
            "incarnation": 0,
        }
        worker = told.get("worker", source.index)
        usual |= {"worker": worker, "pulled": self._pulled.get(worker, state.version)}
        if kind in ("REPORT", "PUSHED"):
            self._pushes[worker] = told.get("sequence", self._pushes.get(worker, 0) + 1)
        usual["sequence"] = (
            next(self._requests) if source.role == "client" else self._pushes.get(worker, 1)
        )
        names = body.__struct_fields__
        given = {name: usual[name] for name in names if name in usual}
        if kind != "FAILED" and source.role != "server":
            given.pop("worker", None)
        assert told.keys() <= set(names), f"{kind} has no field {told.keys() - set(names)}"
        return body(**{**given, **told}).pack()

    def _told(self, out: Outgoing) -> list[str]:
        """Return messages in words, those that are alike and follow each other in one line."""
        lines: list[tuple[list[str], str]] = []
        for peer, message in out:
            if message.kind.name == "LEASE":
                self._pulled[peer.index] = message.body.version
            words = _in_words(message)
            if lines and lines[-1][1] == words:
                lines[-1][0].append(str(peer))
            else:
                lines.append(([str(peer)], words))
        return [f"{', '.join(peers)}: {words}" for peers, words in lines]


def _rule(given: dict[str, Any]) -> CommitRule:
    name, _, number = str(given.pop("rule", "all")).partition("-")
    if name == "each":
        return CommitEach(given.pop("lead", None), given.pop("drop_above", None))
    if name == "first":
        return CommitFirst(int(number))
    if name == "quorum":
        from steepest.strategies.rounds import CommitQuorum

        return CommitQuorum(int(number), given.pop("grace", 0.0))
    return CommitAll()


def _peer(words: str) -> Peer:
    role, _, index = words.partition(" ")
    return Peer(role, int(index))  # type: ignore[arg-type]


def _word(word: str) -> tuple[str, Any]:
    name, is_given, value = word.partition("=")
    if not is_given:
        return name, True
    try:
        return name, json.loads(value)
    except ValueError:
        return name, [int(part) for part in value.split(",")] if "," in value else value


def _in_words(message: Message) -> str:
    words = [message.kind.name]
    for each in msgspec.structs.fields(message.body):
        value = getattr(message.body, each.name)
        default = each.default_factory() if callable(each.default_factory) else each.default
        if value != default and not (value == [] and default == ()):
            words.append(each.name if value is True else f"{each.name}={_plain(value)}")
    return " ".join(words)


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value) if " " in value else value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_plain(part)}" for name, part in value.items()) + "}"
    if isinstance(value, Peer):
        return str(value).replace(" ", "-")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return repr(value)


def scripts(room: str) -> list[Path]:
    """Return the scripts of a room of the tests."""
    return sorted(_TESTS.glob(f"{room}/scripts/*.txt"))


def blocks(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the parts of a script: lines to tell, with comments, and what is sent then."""
    for block in re.split(r"\n{2,}", text.strip()):
        told, _, sent = block.partition(f"\n{_LINE}")
        yield told.split("\n"), [line for line in sent.strip().split("\n") if line]


def played(text: str) -> str:
    """Return a script with what is sent now."""
    script, parts = Script(), []
    for told, _ in blocks(text):
        sent: list[str] = []
        for line in told:
            if line and not line.startswith("#"):
                sent += script.tell(line)
        if all(line.startswith("#") for line in told):
            parts.append("\n".join(told))
        else:
            parts.append("\n".join([*told, _LINE, *sent]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    for path in scripts("*"):
        path.write_text(played(path.read_text()))
