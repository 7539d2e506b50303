# ruff: noqa: F811 - fixtures are imported, and named as arguments
"""TLS between hosts: who speaks it, what is seen on the way, certificates; see test_sockets for the rest."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from steepest import DistributedSGD, RunConfig, TLSConfig
from steepest.core.messages.message import COORDINATOR, worker_peer
from steepest.core.transport import handshake
from steepest.core.transport.channel import Address
from steepest.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
)
from steepest.runtime import holders
from steepest.runtime.holders import who_else
from steepest.runtime.tls import certificates
from steepest.runtime.tls.certificates import JobCertificate, make_certificate
from steepest.runtime.tls.connections import RECORD, Tls, TlsSocket, identity_of
from steepest.testing import linear_model_creator
from tests.said import heard
from tests.simulation.run import Simulation, run_config
from tests.socket_ends import (
    GREETING,
    LIMIT,
    Node,
    assert_serves,
    certificate,
    connecting_to,
    message_of,
    node,  # noqa: F401 - a fixture
    together,
    until,
)

WORKER = worker_peer(2)
MARK = b"a weight that nobody else may read" * 30


@pytest.fixture
def server(node: Any) -> Node:
    made: Node = node(COORDINATOR, identity=certificate())
    made.address = made.transport.listen("127.0.0.1")  # type: ignore[attr-defined]
    return made


@pytest.fixture
def client(node: Any) -> Node:
    made: Node = node(WORKER, node="elsewhere", identity=certificate())
    return made


# -- who speaks it -----------------------------------------------------------------------------------


def test_between_hosts_it_is_tls_1_3_and_inside_a_host_it_is_not(
    server: Node, client: Node, node: Any
) -> None:
    near = together(lambda: client.transport.connect(server.address), server)
    assert isinstance(near._socket, TlsSocket)
    assert near._socket.version() == "TLSv1.3"
    beside = node(worker_peer(1), identity=certificate())
    local = together(lambda: beside.transport.connect(server.address), server)
    assert local._socket.family == socket.AF_UNIX
    assert not isinstance(local._socket, ssl.SSLSocket)
    everywhere = node(worker_peer(3), ways="tcp", identity=certificate())
    assert isinstance(
        together(lambda: everywhere.transport.connect(server.address), server)._socket, TlsSocket
    )


@pytest.mark.parametrize("speaks", ["caller", "listener"])
def test_who_speaks_tls_and_who_does_not_part_at_once_and_say_why(node: Any, speaks: str) -> None:
    listener = node(COORDINATOR, identity=certificate() if speaks == "listener" else None)
    caller = node(WORKER, "elsewhere", identity=certificate() if speaks == "caller" else None)
    address = listener.transport.listen("127.0.0.1")
    said = {
        "caller": "does not speak TLS, .* the same tls=",
        "listener": "speaks TLS alone, .* the same tls=",
    }
    began = time.monotonic()
    with pytest.raises(ProtocolError, match=said[speaks]):
        together(lambda: caller.transport.connect(address), listener)
    assert time.monotonic() - began < 2.0
    until(lambda: listener.transport.refused == 1, listener)
    assert listener.opened == []


def test_another_certificate_is_refused_by_both_ends_and_named(
    server: Node, node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    other = node(WORKER, "elsewhere", identity=make_certificate())
    with pytest.raises(AuthenticationError, match="other end's certificate is not accepted: self"):
        together(lambda: other.transport.connect(server.address), server)
    until(lambda: server.transport.refused == 1, server)
    assert "certificate" in caplog.text
    assert_serves(server, node)


@pytest.mark.parametrize("shown", ["none", "another"])
def test_a_caller_with_another_certificate_or_none_learns_that_it_is_refused(
    server: Node, client: Node, shown: str
) -> None:
    """It accepts the listener's, so that only the listener refuses."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.sslsocket_class = TlsSocket
    if shown == "another":
        stranger = Tls(make_certificate())._calling
        stranger.verify_mode = ssl.CERT_NONE
        context = stranger
    client.transport._tls._calling = context  # type: ignore[union-attr]
    with pytest.raises(AuthenticationError, match="refuses this process: .*alert"):
        together(lambda: client.transport.connect(server.address), server)
    until(lambda: server.transport.refused == 1, server)
    assert server.opened == []


def test_a_listener_that_goes_away_in_the_handshake_is_tried_again_until_the_deadline(
    client: Node,
) -> None:
    def script(sock: socket.socket, future: Any) -> None:
        sock.sendall(handshake._SPEAKS_TLS)

    assert type(connecting_to(script, client, timeout=0.3)) in (DeadlineError, PeerLostError)


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n" * 9, handshake._SPEAKS_TLS + bytes(99)]
)
def test_an_impostor_without_tls_is_told_apart(client: Node, said: bytes) -> None:
    def script(sock: socket.socket, future: Any) -> None:
        sock.sendall(said)
        future.exception(LIMIT)

    assert type(connecting_to(script, client)) is ProtocolError


def test_a_silent_listener_costs_no_more_than_the_timeout(client: Node) -> None:
    def script(sock: socket.socket, future: Any) -> None:
        sock.sendall(handshake._SPEAKS_TLS)
        future.exception(LIMIT)

    began = time.monotonic()
    assert type(connecting_to(script, client, timeout=0.2)) is DeadlineError
    assert time.monotonic() - began < 2.0


# -- on the way --------------------------------------------------------------------------------------


class Relay:
    """Passes bytes between a caller and a listener, through a function of the test.

    Args:
        address: of the listener.
        change: is given bytes from the caller, and returns those that go on, in pieces.
    """

    def __init__(self, address: Address, change: Callable[[bytes], list[bytes]]) -> None:
        self.seen = bytearray()
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = address._replace(port=self._listener.getsockname()[1], unix="")
        self._there = socket.create_connection((address.host, address.port))
        self._pool = ThreadPoolExecutor(2)
        self._work = [self._pool.submit(self._run)]

    def _run(self) -> None:
        self._here, _ = self._listener.accept()
        self._work.append(self._pool.submit(self._back))
        with contextlib.suppress(OSError):
            while part := self._here.recv(1 << 16):
                self.seen += part
                for piece in self._change(part):
                    self._there.sendall(piece)

    def _back(self) -> None:
        with contextlib.suppress(OSError):
            while part := self._there.recv(1 << 16):
                self._here.sendall(part)

    def close(self) -> None:
        for sock in (self._here, self._there):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._listener.close()
        self._pool.shutdown()


@pytest.fixture
def relay(server: Node) -> Iterator[Callable[..., Relay]]:
    with contextlib.ExitStack() as closing:

        def make(
            change: Callable[[bytes], list[bytes]] = lambda part: [part],
            address: Address = server.address,  # type: ignore[attr-defined]
        ) -> Relay:
            made = Relay(address, change)
            closing.callback(made.close)
            return made

        yield make


def marked(sequence: int) -> Any:
    message = message_of(sequence)
    message.payload = torch.frombuffer(bytearray(MARK), dtype=torch.uint8)
    return message


@pytest.mark.parametrize("tls", [False, True])
def test_who_listens_on_the_way_reads_what_is_plain_only(relay: Any, node: Any, tls: bool) -> None:
    identity = certificate() if tls else None
    listener = node(COORDINATOR, identity=identity)
    caller = node(WORKER, "elsewhere", identity=identity)
    between = relay(address=listener.transport.listen("127.0.0.1"))
    near = together(lambda: caller.transport.connect(between.address), listener)
    near.send(marked(1))
    until(lambda: listener.messages, listener)
    assert bytes(listener.messages[0].payload.numpy()) == MARK
    assert (MARK[:16] in bytes(between.seen)) != tls
    assert (GREETING in bytes(between.seen)) != tls


def test_a_byte_changed_on_the_way_is_refused_and_nothing_of_it_arrives(
    relay: Any, server: Node, client: Node
) -> None:
    damage = False

    def change(part: bytes) -> list[bytes]:
        return [part[:-1] + bytes([part[-1] ^ 1]) if damage else part]

    between = relay(change)
    near = together(lambda: client.transport.connect(between.address), server)
    near.send(marked(1))
    until(lambda: server.messages, server)
    damage = True
    near.send(marked(2))
    until(lambda: server.lost, server)
    assert [heard(message).sequence for message in server.messages] == [1]
    assert server.transport.refused == 1


def test_the_proof_of_the_token_holds_for_one_tls_session(server: Node, client: Node) -> None:
    """Who has the job's certificate, and ends TLS in the middle, can pass no proof on."""

    def script(here: socket.socket, future: Any) -> None:
        tls, deadline = Tls(certificate()), time.monotonic() + LIMIT
        here.sendall(handshake._SPEAKS_TLS)
        near = tls._accepting.wrap_socket(here, server_side=True)
        there = socket.create_connection((server.address.host, server.address.port))  # type: ignore[attr-defined]
        far = handshake.secure(there, tls, deadline)
        far.settimeout(LIMIT)
        near.sendall(far.recv(43))
        with contextlib.suppress(OSError):
            while part := near.recv(4096):
                far.sendall(part)
                near.sendall(far.recv(4096))
        far.close()
        near.close()

    with ThreadPoolExecutor(1) as pool:
        raised = pool.submit(connecting_to, script, client)
        until(raised.done, server)
    assert type(raised.result()) is AuthenticationError
    assert server.opened == []
    assert server.transport.refused == 1


def test_records_in_pieces_of_any_size_arrive_without_another_byte(
    relay: Any, server: Node, client: Node
) -> None:
    """Nobody waits for bytes that have left the kernel, or for more than will come."""
    dice = random.Random(4)

    def pieces(part: bytes) -> list[bytes]:
        found = []
        while part:
            size = dice.choice([1, 4, 5, 6, 300, RECORD - 1, RECORD, RECORD + 22, 30_000])
            found.append(part[:size])
            part = part[size:]
        return found

    between = relay(pieces)
    near = together(lambda: client.transport.connect(between.address), server)
    sizes = [1, RECORD - 1, RECORD, RECORD + 1, 3 * RECORD, 100_000, 3 << 20]
    for number, size in enumerate(sizes):
        near.send(message_of(number, size))
        until(lambda: len(server.messages) == number + 1, client, server)  # noqa: B023 - at once
        assert torch.equal(server.messages[-1].payload, message_of(number, size).payload)  # type: ignore[arg-type]


def test_the_kernel_is_not_asked_to_wait_for_bytes_that_the_session_has_taken(
    server: Node, client: Node
) -> None:
    """Of the last record its head has been read, and its end is less than what is missing."""
    near = together(lambda: client.transport.connect(server.address), server)
    until(lambda: server.opened, server)
    far = server.opened[0]
    for missing, wanted in (
        (1, 1),
        (RECORD, 1),
        (RECORD + 261, 1),
        (RECORD + 300, 39),
        (8 << 20, 1 << 21),
    ):
        far.await_bytes(missing)
        asked = far._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        assert asked == wanted, missing
    near.close()


def test_a_record_that_did_not_leave_is_repeated_at_its_length(
    server: Node, client: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL wants that, also when more has been queued meanwhile."""
    near = together(lambda: client.transport.connect(server.address), server)
    calls: list[tuple[int, bool]] = []
    send = ssl.SSLSocket.send

    def seen(sock: ssl.SSLSocket, data: Any, flags: int = 0) -> int:
        try:
            sent = send(sock, data, flags)
        except ssl.SSLWantWriteError:
            calls.append((len(data), True))
            raise
        calls.append((len(data), False))
        return sent

    monkeypatch.setattr(ssl.SSLSocket, "send", seen)
    number = 0
    while not near.pending:
        near.send(message_of(number := number + 1, 3000))
        near.flush()
    blocked = len(calls) - 1
    for _ in range(20):
        near.send(message_of(number := number + 1, 900))
    until(lambda: len(server.messages) == number, client, server)
    assert calls[blocked][1]
    for (length, stopped), (again, _) in itertools.pairwise(calls):
        assert again == length or not stopped
    assert len({length for length, _ in calls}) > 1


# -- certificates ------------------------------------------------------------------------------------


def test_the_jobs_key_is_shown_to_nobody_and_lies_in_no_file(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = set(os.listdir("/proc/self/fd"))
    made = make_certificate()
    Tls(made)
    assert made.key.startswith(b"-----BEGIN PRIVATE KEY-----")
    for line in made.key.decode().splitlines()[1:-1]:
        assert line not in repr(made) + caplog.text
    assert b"PRIVATE KEY" not in made.certificate
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before
    assert make_certificate().key != made.key


def test_without_a_file_in_memory_the_key_lies_in_one_that_is_gone_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: Any
) -> None:
    modes = []
    load = ssl.SSLContext.load_cert_chain

    def looked_at(context: ssl.SSLContext, path: str) -> None:
        modes.append(os.stat(path).st_mode & 0o777)
        load(context, path)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", looked_at)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delattr(os, "memfd_create")
    Tls(certificate())
    assert modes == [0o600, 0o600]
    assert list(tmp_path.iterdir()) == []


def test_a_jobs_certificate_holds_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch, authority: Authority
) -> None:
    expired = authority.sign("old", "-days", "-1", by_itself=True)
    own = JobCertificate(Path(expired.certificate).read_bytes(), Path(expired.key).read_bytes())
    Tls(own)
    with pytest.raises(ConfigurationError, match="would not connect: certificate has expired"):
        Tls(replace(expired, ca=expired.certificate))


@pytest.mark.parametrize("trouble", ["missing", "fails", "silent"])
def test_without_a_working_openssl_command_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    command = {"missing": "openssl-of-nobody", "fails": "false", "silent": "true"}[trouble]
    monkeypatch.setattr(certificates, "_COMMAND", (command,))
    with pytest.raises(ConfigurationError, match=r"install the openssl command .*TLSConfig\("):
        identity_of(True)


class Authority:
    """Makes keys and certificates in a folder, with the openssl command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._openssl("req", "-x509", "-subj", "/CN=authority", *self._new("ca"), "-out", "ca.pem")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(
            ["openssl", *arguments], cwd=self.folder, check=True, capture_output=True, timeout=20
        )

    def _new(self, name: str) -> tuple[str, ...]:
        pair = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
        return (*pair, "-nodes", "-keyout", f"{name}.key")

    def sign(self, name: str, *options: str, by_itself: bool = False) -> TLSConfig:
        """Return a new certificate, signed by the authority or by its own key."""
        self._openssl("req", "-subj", f"/CN={name}", *self._new(name), "-out", f"{name}.csr")
        by = (
            ("-key", f"{name}.key")
            if by_itself
            else ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
        )
        self._openssl(
            "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem",
            *(("-signkey", f"{name}.key") if by_itself else by), *options,
        )  # fmt: skip
        paths = [str(self.folder / file) for file in (f"{name}.pem", f"{name}.key", "ca.pem")]
        return TLSConfig(certificate=paths[0], key=paths[1], ca=paths[2])


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_certificates_of_ones_own_connect_if_one_authority_has_signed_them(
    authority: Authority, node: Any, tmp_path: Path
) -> None:
    first, second = authority.sign("first"), authority.sign("second")
    listener = node(COORDINATOR, identity=first)
    caller = node(WORKER, "elsewhere", identity=second)
    address = listener.transport.listen("127.0.0.1")
    near = together(lambda: caller.transport.connect(address), listener)
    near.send(message_of(1, size=100_000))
    until(lambda: listener.messages, listener)
    (tmp_path / "other").mkdir()
    foreign = node(worker_peer(1), "elsewhere", identity=Authority(tmp_path / "other").sign("it"))
    with pytest.raises(AuthenticationError, match="certificate is not accepted"):
        together(lambda: foreign.transport.connect(address), listener)


def encrypted(own: TLSConfig, other: TLSConfig) -> TLSConfig:
    locked = str(own.key) + ".locked"
    subprocess.run(
        ["openssl", "pkey", "-in", own.key, "-aes128", "-passout", "pass:no", "-out", locked],
        check=True, capture_output=True, timeout=20,
    )  # fmt: skip
    return replace(own, key=locked)


WRONG: dict[str, tuple[Callable[[TLSConfig, TLSConfig], TLSConfig], str]] = {
    "no file": (lambda own, other: replace(own, key="/nowhere/key.pem"), "No such file .* '/nowhere/key.pem'; every"),
    "another's key": (lambda own, other: replace(own, key=other.key), "key values mismatch"),
    "no PEM": (lambda own, other: replace(own, certificate=__file__), "give PEM files"),
    "no authority": (lambda own, other: replace(own, ca=own.key), "give PEM files"),
    "another authority": (lambda own, other: replace(own, ca=other.certificate), "would not connect: unable to get"),
    "an encrypted key": (encrypted, "a key without a passphrase"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("change", "said"), WRONG.values(), ids=WRONG.keys())
def test_files_that_do_not_fit_are_refused_before_anything_starts(
    authority: Authority, change: Callable[[TLSConfig, TLSConfig], TLSConfig], said: str
) -> None:
    wrong = change(authority.sign("own"), authority.sign("other"))
    with pytest.raises(ConfigurationError, match=said):
        identity_of(wrong)


def test_files_that_do_not_fit_leave_no_trainer_and_no_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "_holders", [])  # another test's simulation may have left one
    nowhere = str(tmp_path / "nowhere.pem")
    config = run_config(tls=TLSConfig(certificate=nowhere, key=nowhere, ca=nowhere))
    with Simulation(1).running() as simulation:
        with pytest.raises(ConfigurationError, match="No such file"):
            DistributedSGD(linear_model_creator(), run_config=config)
        assert not simulation.runtime.is_up
        with DistributedSGD(linear_model_creator(), run_config=run_config()) as sgd:
            assert who_else(sgd._live().holder) == ""
        assert not simulation.runtime.is_up  # it ends with the last trainer that holds it


@pytest.mark.parametrize("given", [1, None, "yes", b"-----BEGIN"])
def test_what_tls_takes(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"tls=.*: give True .* a TLSConfig"):
        RunConfig(tls=given)
    with pytest.raises(ConfigurationError, match="TLSConfig key=.*: give the path"):
        TLSConfig(certificate="a", key=given if given != "yes" else "", ca="b")
    assert RunConfig().tls is False
