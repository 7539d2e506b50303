"""What all tests share: one Ray cluster for those that ask for it, a deadline, how many examples are tried."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import logging
import os
import re
import signal
import sys
import traceback
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; Ray's processes inherit it

import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from steepest.runtime.machine.runtime import MachineRuntime

from tests.forked_workers import fork_workers
from tests.hand_moved_clock import clock as clock
from tests.process_one import leave_it_to_an_init
from tests.random_examples import scale

pytest.register_assert_rewrite(  # before a test module imports them
    *(
        f"tests.{name}"
        for name in (
            "chunk_store_contract",
            "failing_nodes",
            "jobs_with_copies",
            "model_contract",
            "network_namespaces",
            "ray_hosts",
            "sagemaker_hosts",
            "socket_ends",
            "storage_contract",
            "table_tasks",
        )
    )
)
leave_it_to_an_init()  # while this process has one thread

ROOT = Path(__file__).resolve().parent.parent
TEST_SECONDS = 180
LATER_SECONDS = 30  # after which what a test does at its end is interrupted again
# what is in each file that has tests marked `ray` or `cluster`
ON_RAY = re.compile(r"\bmark\.(ray|cluster)\b|\banywhere\b|\bNEEDS_NAMESPACES\b")
STAGES = ("long", "ray", "cluster")  # marks that say which part of which target runs a test
BATCH_SECONDS = 0.03  # of virtual time for a batch's gradients, where a test runs simulated
MOST_GARBAGE = 200 << 20  # bytes by which a process of tests grows before garbage is collected
torch.set_num_threads(1)
# a machine under load is no error; what failed is printed, so that it can be repeated
settings.register_profile(
    "few", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("full", settings.get_profile("few"), max_examples=1000)
settings.load_profile("few")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files that have no tests on Ray, where others are not asked for: these are most of them."""
    if not collection_path.match("test_*.py") or not _on_ray_alone(config.option.markexpr):
        return None
    return None if ON_RAY.search(collection_path.read_text()) else True


@functools.cache
def _on_ray_alone(chosen: str) -> bool:
    """Return whether an expression given with -m, of the marks of stages and `full`, needs `ray` or `cluster`."""
    if not set(re.findall(r"\w+", chosen)) <= {*STAGES, "full", "and", "or", "not"} or not chosen:
        return False
    others = [{"long": long, "full": full} for long in (False, True) for full in (False, True)]
    return not any(eval(chosen, {}, {"ray": False, "cluster": False, **each}) for each in others)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Leaves out what only `make test-full` runs, unless the expression given with -m says something of it."""
    chosen = config.option.markexpr
    if "full" not in chosen:
        config.option.markexpr = f"({chosen}) and not full" if chosen else "not full"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves so many cases of tests with the mark `few`, evenly spread, and the others to make test-full.

    Those that make test has and those that make test-cluster has are counted apart.
    """
    cases: dict[tuple[object, str, frozenset[str]], list[pytest.Item]] = {}
    used = {
        item.path for item in items if {"ray", "cluster"} & {m.name for m in item.iter_markers()}
    }
    missed = [str(path) for path in used if ON_RAY.search(path.read_text()) is None]
    assert not missed, (
        f"{missed} would be left out where tests on Ray alone are asked for: see ON_RAY"
    )
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("full"):
            stage = frozenset(name for name in STAGES if item.get_closest_marker(name))
            key = (item.parent, getattr(item, "originalname", ""), stage)
            cases.setdefault(key, []).append(item)
    for (_, name, _), each in cases.items():
        mark = each[0].get_closest_marker("few")
        assert mark is not None
        (count,) = mark.args
        kept = _spread(len(each), count, name)
        for number, item in enumerate(each):
            if number not in kept:
                item.add_marker(pytest.mark.full)


def _spread(cases: int, count: int, name: str) -> set[int]:
    """Return so many numbers of cases, from the first to the last, or one that differs from test to test.

    Of a product of two settings they are on a diagonal.
    """
    if count == 1:
        return {zlib.crc32(name.encode()) % cases}
    return {n * (cases - 1) // (count - 1) for n in range(count)}


def pytest_collection_finish() -> None:
    """What is there before the first test stays: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """What a file's tests have imported and keep stays, too; but for what the frames of a failed one hold."""
    done = yield
    if (nextitem is None or nextitem.path != item.path) and not hasattr(sys, "last_value"):
        gc.collect()
        gc.freeze()
    return done


_resident = 0  # bytes after the last collection


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    """Jobs of one process are circles of few objects and much memory, which the collector does not see."""
    global _resident
    yield
    if _resident_bytes() > _resident + MOST_GARBAGE:
        gc.collect()
        _give_back_memory()
        _resident = _resident_bytes()


def _give_back_memory() -> None:
    """Have the C library give back what is free: each of many threads has a heap of its own."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # None without glibc
        trim(0)


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    """No test may hang: after three minutes (ten times that with as many examples) it fails where it is."""
    seconds = TEST_SECONDS * scale()

    def give_up(signum: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback()  # of all threads
        places = [f"{Path(at.filename).name}:{at.lineno}" for at in traceback.extract_stack(frame)]
        raise TimeoutError(f"the test ran for {seconds} s; it was at {' > '.join(places[-8:])}")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds, LATER_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster of eight CPUs, however many there are; its processes find steepest and the tests' modules."""
    ray = pytest.importorskip("ray")
    folders = sorted({str(path.parent) for path in (ROOT / "tests").rglob("*.py")})
    found = [str(ROOT), *folders, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(dict.fromkeys(path for path in found if path)))
        patch.delenv("RAY_ADDRESS", raising=False)
        fork_workers()
        ray.init(
            num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
        )
        try:
            yield
        finally:
            ray.shutdown()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Has a test that uses `anywhere` run simulated, and on processes and on Ray by `make test-full`.

    Those marked `real` run on Ray alone, by `make test-cluster`; those marked `also_real` there on processes too.
    """
    if "anywhere" in metafunc.fixturenames:
        real = metafunc.definition.get_closest_marker("real") is not None
        often = metafunc.definition.get_closest_marker("also_real") is not None
        stage = pytest.mark.long if often else pytest.mark.full
        elsewhere = [
            pytest.param("simulated", marks=pytest.mark.long),
            pytest.param("processes", marks=stage),
        ]
        on_ray = [pytest.mark.ray, pytest.mark.long if real else pytest.mark.full]
        worlds = [*([] if real else elsewhere), pytest.param("ray", marks=on_ray)]
        metafunc.parametrize("anywhere", worlds, indirect=True)


@pytest.fixture
def anywhere(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where a test of whole jobs runs: simulated, on virtual time, on processes of this machine, or on the tests' Ray.

    It sends signals, and lets things happen later, by `tests/strikes.py`.
    """
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        yield
        return
    if request.param == "processes":
        machine = request.getfixturevalue("machine")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(machine, "total", lambda: {"CPU": 8.0})  # as many as the others have
            yield
        return
    from steepest.core.models.torch import TorchModel
    from tests.simulation.run import Simulation, pause

    compute = TorchModel.compute_gradients

    def in_some_time(model: TorchModel, *arguments: Any, **named: Any) -> Any:
        """Take virtual time, so that a process's start does not last for thousands of steps."""
        pause(BATCH_SECONDS)
        return compute(model, *arguments, **named)

    simulation = Simulation(1, cpus=(8,), switches=1_000_000)
    with pytest.MonkeyPatch.context() as patch, simulation.running():
        patch.setattr(TorchModel, "compute_gradients", in_some_time)
        yield


@pytest.fixture(scope="session")
def machine_of_session() -> Iterator[MachineRuntime]:
    """Processes of this machine; all tests have one template."""
    from steepest.runtime.machine.runtime import MachineRuntime

    made = MachineRuntime()
    yield made
    made.close()


@contextlib.contextmanager
def _on(machine: MachineRuntime) -> Iterator[None]:
    """Have jobs of a block run on processes of this machine, also where a Ray of other tests runs."""
    from steepest.runtime.job_runtime import using

    with pytest.MonkeyPatch.context() as patch, using(machine):
        patch.setattr(
            "steepest.runtime.holders.chosen", lambda name: "processes" if name == "auto" else name
        )
        yield


@pytest.fixture
def machine(machine_of_session: MachineRuntime) -> Iterator[MachineRuntime]:
    """The test's jobs run on processes of this machine."""
    with _on(machine_of_session):
        yield machine_of_session


@pytest.fixture(scope="module")
def machine_of_module(machine_of_session: MachineRuntime) -> Iterator[None]:
    """All jobs of the module's tests from here on do."""
    with _on(machine_of_session):
        yield


@pytest.fixture
def simulated() -> Iterator[None]:
    """The test's jobs are simulated: their processes are threads of this one, on virtual time."""
    from tests.simulation.run import Simulation

    with Simulation(1).running():
        yield
