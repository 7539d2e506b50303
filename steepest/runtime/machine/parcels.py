"""Values that travel between processes of one machine: pickles whose large parts lie in shared memory."""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

from steepest.runtime.answers import Answer
from steepest.runtime.job_runtime import Call, LateError, UnreadableError
from steepest.runtime.pickling import UserPickler

_LARGE = 1 << 20  # buffers of this many bytes in all, or more, lie in shared memory
_ALIGNED = 64  # bytes to which a buffer's beginning is rounded
_HEADER = struct.Struct("<QI")  # bytes of a frame, and the number of its descriptors
_MOST_DESCRIPTORS = 250  # that go with one byte; the kernel takes 253


class SharedMemory:
    """Memory without a name, which exists as long as a process has its descriptor or maps it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True)
class Parcel:
    """A pickled value.

    Attributes:
        pickle: without its buffers.
        sizes: of the buffers, in bytes.
        buffers: the buffers one behind the other, each at a multiple of 64 bytes.
        parts: results of calls, which the value refers to by their numbers.
    """

    pickle: bytes
    sizes: tuple[int, ...]
    buffers: bytes | SharedMemory
    parts: tuple[Parcel, ...] = ()


class ParcelCall(Call):
    """A call whose result is a parcel; as an argument of another call it stands for the result."""

    def __init__(self) -> None:
        self.parcel: Answer[Parcel] = Answer()

    @classmethod
    def of(cls, parcel: Parcel) -> ParcelCall:
        """Return a call that has ended with a result."""
        call = cls()
        call.parcel.set_result(parcel)
        return call

    def done(self) -> bool:
        """Return whether it has ended."""
        return self.parcel.done()

    def get(self, timeout: float | None = None) -> Any:
        """Return a copy of the result when it is there."""
        try:
            parcel = self.parcel.result(timeout)
        except FutureTimeoutError:
            raise LateError("the call has not ended in time") from None
        return opened(parcel)

    def future(self) -> Future[Any]:
        """Return the future of a copy of the result."""
        future: Future[Any] = Future()

        def finish(parcel: Answer[Parcel]) -> None:
            try:
                future.set_result(opened(parcel.result()))
            except BaseException as error:  # noqa: BLE001 - the future's
                future.set_exception(error)

        self.parcel.add_done_callback(finish)
        return future


class _Pickler(UserPickler):
    """Pickles a value; calls in it are noted, and referred to."""

    def __init__(self, file: io.BytesIO) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        self.calls: list[ParcelCall] = []
        super().__init__(file, protocol=5, buffer_callback=self.buffers.append)

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of a call; None for anything else."""
        if not isinstance(value, ParcelCall):
            return None
        self.calls.append(value)
        return len(self.calls) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, parcel: Parcel) -> None:
        super().__init__(io.BytesIO(parcel.pickle), buffers=_buffers(parcel))
        self._parts = parcel.parts

    def persistent_load(self, number: int) -> ParcelCall:
        """Return the call of a number, which has ended."""
        return ParcelCall.of(self._parts[number])


@dataclass(frozen=True)
class OpenParcel:
    """A pickled value with calls in it, which may not have ended.

    Attributes:
        pickle, sizes, buffers: as of `Parcel`.
        calls: to which the value refers by their numbers.
    """

    pickle: bytes
    sizes: tuple[int, ...]
    buffers: bytes | SharedMemory
    calls: tuple[ParcelCall, ...]

    def closed(self) -> Parcel:
        """Return the parcel with the calls' results; raise the error of a call that has failed."""
        parts = tuple(call.parcel.result(0) for call in self.calls)
        return Parcel(self.pickle, self.sizes, self.buffers, parts)


def packed(value: Any) -> OpenParcel:
    """Return a value as a parcel; errors of its own pickling methods are raised."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    views = [buffer.raw() for buffer in pickler.buffers]
    sizes = tuple(view.nbytes for view in views)
    calls = tuple(pickler.calls)
    total = sum(map(_rounded, sizes))
    if total < _LARGE:
        joined = b"".join(view.tobytes().ljust(_rounded(view.nbytes), b"\0") for view in views)
        return OpenParcel(file.getvalue(), sizes, joined, calls)
    memory = SharedMemory(os.memfd_create("steepest", os.MFD_CLOEXEC))
    os.ftruncate(memory.descriptor, total)
    with mmap.mmap(memory.descriptor, total) as mapped:
        at = 0
        for view in views:
            mapped[at : at + view.nbytes] = view
            at += _rounded(view.nbytes)
    return OpenParcel(file.getvalue(), sizes, memory, calls)


def opened(parcel: Parcel) -> Any:
    """Return a copy of a parcel's value, whose arrays may be written to; UnreadableError if it cannot be unpickled."""
    try:
        return _Unpickler(parcel).load()  # of this program's own processes
    except Exception as error:  # the user's objects are unpickled by methods of their own
        raise UnreadableError(f"{type(error).__name__}: {error}") from error


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _buffers(parcel: Parcel) -> list[memoryview]:
    """Return a parcel's buffers; of shared memory a private copy, page by page as it is written to."""
    if isinstance(parcel.buffers, SharedMemory):
        total = sum(map(_rounded, parcel.sizes))
        whole = memoryview(
            mmap.mmap(
                parcel.buffers.descriptor,
                total,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        )
    else:
        whole = memoryview(bytearray(parcel.buffers))
    buffers, at = [], 0
    for size in parcel.sizes:
        buffers.append(whole[at : at + size])
        at += _rounded(size)
    return buffers


class Frames:
    """Frames of values and parcels over a Unix socket between two processes of this program.

    Args:
        sock: connected. One thread sends, and one receives.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def send(
        self, value: Any, parcel: Parcel | None = None, descriptors: Sequence[int] = ()
    ) -> None:
        """Send plain values, perhaps a parcel, and descriptors; OSError if the other end is closed."""
        memories: list[SharedMemory] = []
        body = pickle.dumps((value, None if parcel is None else _plain(parcel, memories)))
        sent = [*descriptors, *(memory.descriptor for memory in memories)]
        header = _HEADER.pack(len(body), len(sent))
        first = sent[:_MOST_DESCRIPTORS]
        count = socket.send_fds(self.socket, [header], first) if sent else self.socket.send(header)
        self.socket.sendall(header[count:])
        for at in range(_MOST_DESCRIPTORS, len(sent), _MOST_DESCRIPTORS):
            socket.send_fds(self.socket, [b"\0"], sent[at : at + _MOST_DESCRIPTORS])
        self.socket.sendall(body)

    def receive(self, descriptors: int = 0) -> tuple[Any, Parcel | None, list[int]]:
        """Return the values, the parcel and the descriptors of the next frame; EOFError at the end.

        Args:
            descriptors: the number of the frame's descriptors that belong to no parcel.
        """
        header, ends = self._with_descriptors(_HEADER.size)
        header += self._exactly(_HEADER.size - len(header))
        length, count = _HEADER.unpack(header)
        while len(ends) < count:
            ends += self._with_descriptors(1)[1]
        value, plain = pickle.loads(self._exactly(length))  # noqa: S301 - of this program's own
        memories = [SharedMemory(each) for each in ends[descriptors:]]
        parcel = None if plain is None else _restored(plain, memories)
        return value, parcel, ends[:descriptors]

    def _with_descriptors(self, most: int) -> tuple[bytes, list[int]]:
        """Return some bytes and the descriptors that came with them; OSError: too many are open here."""
        data, descriptors, flags, _ = socket.recv_fds(
            self.socket, most, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            raise EOFError
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return data, descriptors

    def _exactly(self, length: int) -> bytes:
        """Return `length` bytes; EOFError if the other end is closed before."""
        memory = bytearray(length)
        rest = memoryview(memory)
        while rest:
            count = self.socket.recv_into(rest)
            if not count:
                raise EOFError
            rest = rest[count:]
        return bytes(memory)


def _plain(parcel: Parcel, memories: list[SharedMemory]) -> Any:
    """Return a parcel as plain values; a memory becomes its index in `memories`."""
    buffers: bytes | int
    if isinstance(parcel.buffers, SharedMemory):
        buffers = len(memories)
        memories.append(parcel.buffers)
    else:
        buffers = parcel.buffers
    return parcel.pickle, parcel.sizes, buffers, [_plain(part, memories) for part in parcel.parts]


def _restored(plain: Any, memories: Sequence[SharedMemory]) -> Parcel:
    content, sizes, buffers, parts = plain
    memory = memories[buffers] if isinstance(buffers, int) else buffers
    return Parcel(content, sizes, memory, tuple(_restored(part, memories) for part in parts))
