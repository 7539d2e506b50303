"""What TLS between hosts costs: one tensor of 100 MB reduced by two hosts, plain and encrypted.

    python -m benchmarks.tls                       # a link without a limit, 10 and 1 Gbit/s
    python -m benchmarks.tls --mbit 0 --rounds 9
    python -m benchmarks.tls --mbit                # processor time alone, in a second

First, the processor time of sending and of receiving 1 GiB over loopback, in one thread of one
process, which other programs disturb little; also by an `ssl.SSLSocket` as it comes, which no
library in Python beats. Then two hosts, network namespaces of this machine (root and iproute2
needed, and tc for a limit), with one process each. Both jobs stay alive, blocked while idle, and
take turns; odd rounds run in reverse order. A ratio is the median over rounds of the time of one
over the other's, with its range. On a link without a limit, processors are all that is measured,
and those of both hosts are this machine's.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process

import argparse
import contextlib
import functools
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from benchmarks import all_reduce_bodies
from benchmarks.namespaces import Team, UnavailableError, star
from benchmarks.overhead import alternate, compare, comparison, positive
from steepest.runtime.tls.certificates import make_certificate
from steepest.runtime.tls.connections import Tls

GIB = 1 << 30
PAYLOAD = 4 << 20


Ends = tuple[socket.socket, socket.socket]


def plain_ends() -> Ends:
    """Two connected sockets: TCP over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def tls_ends() -> Ends:
    """The same as steepest has them under TLS."""
    tls = Tls(make_certificate())
    near, far = plain_ends()
    accepted = tls.accept(far)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(accepted.do_handshake)
        called = tls.call(near)
        done.result()
    return called, accepted


def ssl_ends() -> Ends:
    """The same as Python's ssl has them, with the same protocol and kind of key."""
    accepting, calling = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )
    calling.check_hostname, calling.verify_mode = False, ssl.CERT_NONE
    accepting.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile() as file:
        identity = make_certificate()
        file.write(identity.key + identity.certificate)
        file.flush()
        accepting.load_cert_chain(file.name)
    near, far = plain_ends()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accepting.wrap_socket, far, server_side=True)
        return calling.wrap_socket(near), accepted.result()


def processor_seconds(ends: Callable[[], Ends]) -> tuple[float, float]:
    """Processor seconds of sending and of receiving 1 GiB."""
    near, far = ends()
    near.setblocking(False)
    far.setblocking(False)
    sends_several = type(near) is not ssl.SSLSocket  # which has no sendmsg
    source, target = memoryview(bytearray(PAYLOAD)), memoryview(bytearray(PAYLOAD))
    sent = received = 0
    sending = receiving = 0.0
    with near, far:
        while received < GIB:
            begin = time.process_time()
            with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError):
                while sent < GIB:
                    rest = source[sent % PAYLOAD :]
                    sent += near.sendmsg([rest]) if sends_several else near.send(rest)
            middle = time.process_time()
            with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
                while received < GIB:
                    received += far.recv_into(target)
            sending += middle - begin
            receiving += time.process_time() - middle
    return sending, receiving


def processor_table(rounds: int) -> str:
    """The table of processor seconds, plain and under TLS."""
    kinds = {"plain": plain_ends, "TLS": tls_ends, "ssl": ssl_ends}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, ends in kinds.items():
            found[name].append(processor_seconds(ends))
    lines = [
        f"processor seconds for 1 GiB, median of {rounds} rounds",
        f"{'':8}{'send':>8}{'receive':>9}",
    ]
    for name, values in found.items():
        sending, receiving = (median(column) for column in zip(*values, strict=True))
        lines.append(f"{name:8}{sending:8.2f}{receiving:9.2f}")
    return "\n".join(lines)


def measure(mbit: int | None, rounds: int, calls: int) -> str:
    """The table of one link: milliseconds of a call, plain and under TLS."""
    with contextlib.ExitStack() as stack:
        spaces = stack.enter_context(star(2, mbit))
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)]
        found = all_reduce_bodies.secured(spaces, *folders)
        for team in found.values():
            stack.enter_context(team)
            team.turn(1)

        def turn(team: Team) -> float:
            return max(team.turn(calls)) / calls

        times = alternate(
            {name: functools.partial(turn, team) for name, team in found.items()}, rounds
        )
    where = "a link without a limit" if mbit is None else f"{mbit} Mbit/s"
    title = f"all_reduce of 100 MB, 2 hosts, {where}, median of {rounds} rounds of {calls}"
    return comparison(title, compare(times, ["plain"]))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tls", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--mbit", type=int, nargs="*", default=[0, 10_000, 1_000], help="0: no limit"
    )
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--calls", type=positive, default=3)
    options = parser.parse_args(arguments)
    print(processor_table(options.rounds), flush=True)
    try:
        for mbit in options.mbit:
            print(measure(mbit or None, options.rounds, options.calls), flush=True)
    except UnavailableError as error:
        print(f"not measured: {error}")


if __name__ == "__main__":
    main()
