"""TLS 1.3 between hosts: how both ends are set up, and a socket with the methods of a plain one.

Both ends show a certificate, and demand one that the authority has signed: with the job's own
certificate, that one certificate. Names and addresses in certificates are not looked at, because a
process is known by the job's token, whose proof is bound to the connection (`TlsSocket.binding`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from steepest.core.config.run import TLSConfig
from steepest.core.transport.encryption import EncryptedSocket
from steepest.errors import (
    AuthenticationError,
    ConfigurationError,
    ProtocolError,
)
from steepest.runtime.tls.certificates import JobCertificate, make_certificate

#: A process' certificate: the job's own, or where the user's files lie on each node.
Identity = JobCertificate | TLSConfig

RECORD = 1 << 14  # bytes that are encrypted together, at most
#: Bytes of one record that the kernel no longer counts when some of them are still to come.
WITHHELD = RECORD + 256 + 5
_NO_CHECK_TIME = 0x200000  # of OpenSSL's verification; Python has no name for it
_WOULD_BLOCK = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class TlsSocket(ssl.SSLSocket, EncryptedSocket):
    """A connected socket under TLS, for a channel: `sendmsg` and `recv_into` as of a plain one.

    OpenSSL encrypts a record, and then wants the same number of bytes again until the kernel has
    taken it all; they may lie elsewhere, and no longer matter. A record is at most `RECORD` bytes,
    so a sender's memory may change as soon as the channel says that it has sent it, or holds a copy.
    """

    withheld = WITHHELD
    _owed = 0  # bytes of the record that is encrypted and has not left yet
    _failure: Exception | None = None  # met behind bytes that were returned

    def sendmsg(  # type: ignore[override]
        self, buffers: Sequence[memoryview], *arguments: Any
    ) -> int:
        """Send bytes of the first buffers; return how many the kernel took.

        Large buffers are read where they lie; small ones are copied, to leave in one record.

        Raises:
            BlockingIOError: it takes none now.
            ConnectionError: the other end takes no more.
        """
        limit = self._owed or RECORD
        data = buffers[0]
        if data.nbytes < limit and len(buffers) > 1:
            data = _joined(buffers, limit)
        sent = 0
        while sent < data.nbytes:
            piece = data[sent : sent + limit]
            try:
                sent += self.send(piece)
            except _WOULD_BLOCK:
                self._owed = piece.nbytes
                if not sent:
                    raise BlockingIOError from None
                return sent
            except ssl.SSLError as error:
                raise ConnectionError(f"TLS: {_reason(error)}") from None
            self._owed, limit = 0, RECORD
        return sent

    def send(self, data: Any, flags: int = 0) -> int:
        """Send bytes; return how many, all if the socket blocks not; ConnectionError: the other end takes no more."""
        try:
            return super().send(data, flags)
        except ssl.SSLEOFError:
            raise ConnectionError("it closed the connection") from None

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive as many bytes as are there; return how many, 0 at the end of the stream.

        Fewer than the buffer holds only if no more are there: OpenSSL then keeps none, so that the kernel tells
        when there are more.

        Raises:
            BlockingIOError: none are there.
            ProtocolError: what came is not what the other end has sent.
        """
        if self._failure is not None:
            raise self._failure
        view, filled = memoryview(buffer), 0
        read: Callable[[int, memoryview], int] = self.read  # type: ignore[assignment]
        try:
            while filled < view.nbytes and (count := read(view.nbytes - filled, view[filled:])):
                filled += count
        except _WOULD_BLOCK:
            if not filled:
                raise BlockingIOError from None
        except OSError as error:
            failure = _translated(error)
            if not filled:
                raise failure from None
            self._failure = failure
            with contextlib.suppress(OSError):  # so that the kernel reports an end
                self.shutdown(socket.SHUT_RD)
        return filled

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receive some bytes, none at the end of the stream; errors as of `recv_into`.

        Raises:
            AuthenticationError: the other end refuses this process' certificate.
        """
        try:
            return super().recv(buflen, flags)
        except ssl.SSLError as error:
            raise _translated(error) from None

    def advance(self) -> int:
        """Do as much of the handshake as is possible without blocking.

        Return 0 when it is done, or the selector's event to wait for.

        Raises:
            AuthenticationError: the certificate is not accepted.
            ProtocolError: no TLS 1.3, or a closed connection.
        """
        try:
            self.do_handshake()
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        except ssl.SSLEOFError:
            raise ProtocolError("connection closed during the TLS handshake") from None
        except ssl.SSLError as error:
            raise _translated(error) from None
        return 0

    @property
    def binding(self) -> bytes:
        """Bytes that both ends of this TLS session have, and no other session has.

        They are the caller's Finished message, a keyed hash over the whole handshake ("tls-unique"); Python's ssl
        module does not offer tls-exporter, which is made for this.
        """
        finished = self.get_channel_binding("tls-unique")
        assert finished, "the handshake is done"
        return finished

    def shutdown(self, how: int) -> None:
        """Shut down the socket one way; `SSLSocket.shutdown` would also end the encryption."""
        socket.socket.shutdown(self, how)


class Tls:
    """Both ends' settings of TLS, as an `Encryption`.

    Args:
        identity: the certificate of this process.

    Raises:
        ConfigurationError: a file cannot be read, does not hold what it should, or the certificate
            is not one that its own authority accepts from either end.
    """

    def __init__(self, identity: Identity) -> None:
        self._accepting = _context(ssl.PROTOCOL_TLS_SERVER, identity)
        self._accepting.num_tickets = 0  # no session is resumed
        self._calling = _context(ssl.PROTOCOL_TLS_CLIENT, identity)
        self._accepting.sslsocket_class = self._calling.sslsocket_class = TlsSocket
        self._try_out(identity)

    def accept(self, sock: socket.socket) -> TlsSocket:
        """Return an accepted socket under TLS, without waiting; `advance` does the handshake."""
        made = self._accepting.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        assert isinstance(made, TlsSocket)
        return made

    def call(self, sock: socket.socket) -> TlsSocket:
        """Return a connected socket under TLS, with the handshake done; waits for its timeout.

        The socket is closed if that fails.

        Raises:
            AuthenticationError: the other end's certificate is not accepted.
            ProtocolError: the other end does not speak TLS 1.3.
            TimeoutError: it did not answer in time.
            ConnectionError: it closed the connection.
        """
        made = self._calling.wrap_socket(sock, do_handshake_on_connect=False)
        assert isinstance(made, TlsSocket)
        try:
            made.do_handshake()
        except OSError as error:
            made.close()
            if error.errno == errno.ENOTCONN:  # it was closed before there was a handshake
                raise ConnectionError("it closed the connection") from None
            raise _translated(error) from None
        return made

    def _try_out(self, identity: Identity) -> None:
        """Connect two ends with each other in memory; ConfigurationError: one does not accept the certificate."""
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        caller = self._calling.wrap_bio(back, there)
        acceptor = self._accepting.wrap_bio(there, back, server_side=True)
        try:
            for end in (caller, acceptor, caller, acceptor):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        except ssl.SSLError as error:
            message = getattr(error, "verify_message", "") or _reason(error)
            setting = "tls=True" if isinstance(identity, JobCertificate) else repr(identity)
            raise ConfigurationError(
                f"{setting}: two processes with this certificate would not connect: {message}"
            ) from None


def identity_of(tls: bool | TLSConfig) -> Identity | None:
    """Return the certificate of a new job, after a test; None without TLS.

    Args:
        tls: as of `RunConfig`.

    Raises:
        ConfigurationError: a certificate cannot be made, or the user's is of no use; see `Tls`.
    """
    if not tls:
        return None
    identity = tls if isinstance(tls, TLSConfig) else make_certificate()
    Tls(identity)
    return identity


def encryption_with(identity: Identity | None) -> Tls | None:
    """Return the encryption of a process with a certificate; None without one. Raises what `Tls` does."""
    return None if identity is None else Tls(identity)


def _context(protocol: int, identity: Identity) -> ssl.SSLContext:
    made = ssl.SSLContext(protocol)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    if isinstance(identity, JobCertificate):
        made.load_verify_locations(cadata=identity.certificate.decode())
        with _as_file(identity.key + identity.certificate) as path:
            made.load_cert_chain(path)
        # The certificate lives as long as the job does, and hosts' clocks may differ from each other.
        made.verify_flags |= _NO_CHECK_TIME
    else:
        _load(made, identity)
    return made


def _load(context: ssl.SSLContext, files: TLSConfig) -> None:
    """Give a context the user's files; ConfigurationError: they are unreadable, or without certificate and key."""

    def no_passphrase() -> bytes:
        raise ConfigurationError(
            f"{files}: the key is encrypted; give a key without a passphrase, in a file that only "
            "this user can read"
        )

    for path in (files.certificate, files.key, files.ca):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigurationError(
                f"{files}: {error.strerror} on {socket.gethostname()}: {str(path)!r}; every node of "
                "the job needs the three files at these paths"
            ) from None
    try:
        context.load_cert_chain(files.certificate, files.key, no_passphrase)
        context.load_verify_locations(cafile=files.ca)
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"{files}: {_reason(error)}; give PEM files: a certificate with its chain, its own "
            "key, and the authority's certificate"
        ) from None


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Return the path of a file with these bytes, in memory or private to this user, in a context that removes it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("steepest-key")
        path = f"/proc/self/fd/{descriptor}"
    else:  # macOS
        descriptor, path = tempfile.mkstemp()
    with open(descriptor, "wb", buffering=0) as file:
        try:
            file.write(content)
            yield path
        finally:
            if not path.startswith("/proc"):
                os.unlink(path)


def _joined(buffers: Sequence[memoryview], limit: int) -> memoryview:
    """Return the first `limit` bytes of several buffers, or all if they have fewer."""
    joined = bytearray()
    for buffer in buffers:
        joined += buffer[: limit - len(joined)]
        if len(joined) == limit:
            break
    return memoryview(joined)


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")


def _translated(error: OSError) -> Exception:
    """Return an error of ssl as one of this library or of sockets; other errors unchanged."""
    if not isinstance(error, ssl.SSLError):
        return error
    if isinstance(error, _WOULD_BLOCK):
        return BlockingIOError()
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return ConnectionError("it closed the connection")
    reason = _reason(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationError(
            f"the other end's certificate is not accepted: {error.verify_message}"
        )
    if "alert" in reason:
        return AuthenticationError(
            f"the other end refuses this process: {reason}: the two have different certificates"
        )
    if "certificate" in reason:
        return AuthenticationError(f"the other end shows no certificate that counts: {reason}")
    return ProtocolError(f"the other end does not speak TLS as it should: {reason}")
