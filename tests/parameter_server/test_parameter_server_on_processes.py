"""ParameterServer on processes of this machine, without Ray: used by others, ended by others, one of them killed."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import select
import signal
from typing import Any

import numpy as np
import pytest
import torch

from steepest import DistributedSGD, ParameterServer
from steepest.errors import ConfigurationError, PeerLostError
from steepest.parameter_server.on_machine import MachineServers, _Board
from tests.processes import until
from tests.reference import Task

SECONDS = 60.0
SIZE = 300_000  # three chunks
pytestmark = pytest.mark.usefixtures("machine")


def pids(server: ParameterServer) -> list[int]:
    servers = server._access.servers
    assert isinstance(servers, MachineServers)
    written = servers.read()
    assert written is not None
    return [pid for pid, _ in written.pids]


def push_ones(server: ParameterServer, times: int) -> None:
    for _ in range(times):
        assert len({*server.push_pull(np.ones(SIZE))}) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("dies", [0, 1])
def test_any_server_may_die_and_every_process_finds_its_successor(dies: int) -> None:
    with ParameterServer(np.zeros(SIZE), 2, replication=2, timeout=SECONDS) as server:
        child = multiprocessing.get_context("fork").Process(target=push_ones, args=(server, 30))
        child.start()
        until(lambda: server.version >= 5)
        os.kill(pids(server)[dies], signal.SIGKILL)
        server.push(np.ones(SIZE))
        child.join(SECONDS)
        assert child.exitcode == 0
        assert {*server.pull()} == {31}
        assert server.state_dict()["version"] == 31


def test_workers_of_a_job_use_it_and_the_job_has_its_own_optimizer() -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5)

    task = Task()
    with (
        ParameterServer(np.zeros(3), 1, optimizer=sgd, timeout=SECONDS) as server,
        DistributedSGD(task.creator(), 2) as trainer,
    ):
        versions = trainer.foreach_worker(lambda worker: server.push(np.ones(3)))
        assert sorted(versions) == [1, 2]
        assert server.pull().tolist() == [-1, -1, -1]


def end(server: ParameterServer) -> None:
    with server:
        pass  # leaves its parent's alone
    copy.copy(server).shutdown()


def test_another_process_ends_the_servers_and_nobody_waits_in_vain() -> None:
    server = ParameterServer(np.zeros(SIZE), 2, replication=2, timeout=SECONDS)
    server.push(np.ones(SIZE))
    running = [os.pidfd_open(pid) for pid in pids(server)]
    child = multiprocessing.get_context("fork").Process(target=end, args=(server,))
    child.start()
    child.join(SECONDS)
    with pytest.raises(PeerLostError, match="it was shut down or died"):
        server.pull()
    server.shutdown()
    assert len(select.select(running, [], [], SECONDS)[0]) > 0
    for descriptor in running:
        os.close(descriptor)


def test_servers_end_with_the_last_handle_of_the_process_that_has_made_them() -> None:
    with ParameterServer(np.zeros(3), 1, timeout=SECONDS):
        pass  # the template stays
    before = len(os.listdir("/proc/self/fd"))
    server = ParameterServer(np.zeros(3), 1, timeout=SECONDS)
    other = pickle.loads(pickle.dumps(server))
    del server
    gc.collect()
    assert other.push(np.ones(3)) == 1
    (running,) = (os.pidfd_open(pid) for pid in pids(other))
    other._close()
    del other
    gc.collect()
    assert select.select([running], [], [], SECONDS)[0]
    os.close(running)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_process_of_another_machine_is_told_so() -> None:
    elsewhere = MachineServers(_Board("a-host its-boot", 1, 1, 3))
    with pytest.raises(ConfigurationError, match="has processes of a-host, and this is another"):
        _ = elsewhere.node
    with pytest.raises(ConfigurationError, match="runtime='threads': give one of 'auto', 'ray'"):
        ParameterServer(np.zeros(3), runtime="threads")
