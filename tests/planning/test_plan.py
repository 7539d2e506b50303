"""Predictions equal closed forms where there are some, and follow what changes."""

from __future__ import annotations

import csv
import io
import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import steepest
from steepest.cli import main
from steepest.cli.planning.events import Events, Links, ModelledProcess
from steepest.cli.planning.measuring import measure, measure_codec
from steepest.cli.planning.profile import Costs
from steepest.cli.planning.quantities import bandwidth_of, seconds_of
from steepest.cli.planning.simulation import Prediction, predict
from steepest.core.strategies.strategy import Strategy
from steepest.errors import ConfigurationError, ModelRaisedError
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.local import LocalStrategy
from steepest.strategies.named import as_strategy
from steepest.strategies.names import STRATEGY_NAMES
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.testing import linear_model_creator
from tests.page_examples import ROOT
from tests.planning_profiles import MEGABYTE, made_up
from tests.reference import perceptron, samples

SECONDS = 0.1
SLOW = Links(bandwidth=12.5e6, latency=0.0, framing=1.0)  # 100 Mbit/s
BYTES = 24 * MEGABYTE


def predicted(
    strategy: str | Strategy, workers: int, links: Links = SLOW, **settings: Any
) -> Prediction:
    return predict(made_up(SECONDS), as_strategy(strategy), workers, links, **settings)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", STRATEGY_NAMES)
def test_one_worker_only_computes(name: str) -> None:
    strategy = as_strategy(name)
    found = predicted(name, 1)
    assert found.seconds == pytest.approx(strategy.updates * SECONDS, rel=1e-6)
    assert found.samples_per_second == pytest.approx(32 / SECONDS, rel=1e-6)
    assert found.sent == 0


@pytest.mark.parametrize("workers", [2, 3, 4, 6, 8, 12, 24])
def test_a_slow_link_is_full_under_allreduce(workers: int) -> None:
    found = predicted("allreduce", workers)
    least = 2 * (workers - 1) / workers * BYTES / SLOW.bandwidth
    # what a chunk waits until the one before it has come is no part of the closed form
    assert SECONDS + least <= found.seconds <= SECONDS + least * 1.09
    assert found.sent == pytest.approx(2 * (workers - 1) * BYTES)


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (4, 1), (4, 2), (8, 4), (6, 6), (6, 12)])
def test_servers_with_hosts_of_their_own_share_the_bytes(workers: int, servers: int) -> None:
    found = predicted("ps", workers, servers=servers, apart=True)
    # each worker's link, or each server's, carries the gradients one way and the weights the other way afterwards
    least = 2 * max(workers / servers, 1) * BYTES / SLOW.bandwidth
    # who has got its weights first computes while the others get theirs
    assert least * 0.98 <= found.seconds <= SECONDS + least * 1.1


@pytest.mark.few(2)
@pytest.mark.parametrize("every", [2, 8, 32])
def test_local_sends_a_part_of_the_bytes(every: int) -> None:
    whole = predicted(LocalStrategy(sync_every=1), 4)
    found = predicted(LocalStrategy(sync_every=every), 4)
    of_sample = found.sent / (every * 4 * 32), whole.sent / (4 * 32)
    assert of_sample[0] == pytest.approx(of_sample[1] / every)
    exchange = whole.seconds - SECONDS
    assert found.seconds == pytest.approx(every * SECONDS + exchange)


def test_a_delay_as_long_as_the_exchange_hides_it() -> None:
    parts = {"sync_every": 200, "fragments": 4}
    waits = predicted(LocalStrategy(**parts), 2)
    hidden = predicted(LocalStrategy(**parts, delay=40), 2)
    assert waits.seconds > 50 * SECONDS * 1.005
    assert hidden.seconds == pytest.approx(50 * SECONDS)
    assert hidden.computing == pytest.approx(1.0)


def test_bits_shorten_the_exchange() -> None:
    found = [
        predicted(LocalStrategy(sync_every=8, num_servers=2, compression=bits), 2).sent
        for bits in (None, "int8", "int4")
    ]
    plain, eight, four = found
    assert eight == pytest.approx(
        plain * (1 + 1 / 4) / 2, rel=0.02
    )  # weights come back as they are
    assert four == pytest.approx(plain * (1 + 1 / 8) / 2, rel=0.02)


def test_half_precision_halves_the_exchange() -> None:
    plain, half = predicted("allreduce", 4), predicted(AllreduceStrategy(wire_dtype="fp16"), 4)
    assert half.sent == pytest.approx(plain.sent / 2)
    assert half.seconds - SECONDS == pytest.approx((plain.seconds - SECONDS) / 2, rel=0.01)


def test_gradients_leave_during_the_backward_pass() -> None:
    links = Links(bandwidth=1e9, latency=0.0, framing=1.0)
    strategy = as_strategy("allreduce")
    at_end = predict(made_up(SECONDS), strategy, 4, links)
    along = predict(made_up(SECONDS, at_end=False), strategy, 4, links)
    assert SECONDS < along.seconds < at_end.seconds
    assert at_end.seconds - SECONDS > 1.6 * (
        along.seconds - SECONDS
    )  # weights alone are waited for


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["ps", "allreduce", "async", "ssp", "local"])
def test_a_better_link_is_never_slower(name: str) -> None:
    found = [
        predicted(name, 4, Links(bandwidth, latency)).seconds
        for bandwidth, latency in [(1e7, 0.01), (1e7, 1e-4), (1e8, 1e-4), (1e9, 1e-5), (1e12, 0.0)]
    ]
    together = as_strategy(name).rule.needs_all  # else passes vary
    assert all(after <= before * (1.01 if together else 1.1) for before, after in pairwise(found))
    assert found[-1] == pytest.approx(as_strategy(name).updates * SECONDS, rel=0.01)


@pytest.mark.parametrize("name", ["ps", "allreduce", "local"])
def test_latency_counts_once_for_each_hop(name: str) -> None:
    near, far = (predicted(name, 4, Links(1e12, latency)).seconds for latency in (0.0, 0.05))
    # gradients to servers, their word to the coordinator, its word to them, weights to workers
    assert far - near == pytest.approx(4 * 0.05, rel=0.01)


def test_asynchronous_workers_wait_for_no_other() -> None:
    links = Links(1e12, 0.0)
    assert predicted("async", 8, links).samples_per_second == pytest.approx(
        8 * 32 / SECONDS, rel=0.01
    )


def test_work_beside_the_passes_takes_time() -> None:
    links, strategy = Links(1e12, 0.0), as_strategy("ps")
    for costs in (
        Costs(applied=1e-9),
        Costs(added=1e-9),
        Costs(message=1e-4),
        Costs(alone=1e-4),
        Costs(wake=1e-4),
        Costs(sent=1e-9),
    ):
        free = predict(made_up(SECONDS), strategy, 4, links)
        assert predict(made_up(SECONDS, costs=costs), strategy, 4, links).seconds > free.seconds


@pytest.mark.parametrize(
    ("strategy", "copies"), [("ps", 0), ("allreduce", 1), ("async", 2), ("local", 1)]
)
def test_inside_a_host_only_weights_of_its_own_cost_a_worker_bytes(
    strategy: str, copies: float
) -> None:
    received, chosen = 1e-10, as_strategy(strategy)
    free, costly = (
        predict(profile, chosen, 2, Links(1e12, 0.0), 1 if chosen.has_servers else None, cores=8)
        for profile in (made_up(SECONDS), made_up(SECONDS, costs=Costs(received=received)))
    )
    # allreduce: each worker has half of them from the other one; local: the server is in the first one
    assert costly.beside - free.beside == pytest.approx(
        copies * made_up(SECONDS).nbytes * received, rel=0.05
    )


@pytest.mark.parametrize("processor", [0.01, 0.3])
def test_a_pass_takes_the_processors_that_were_measured(processor: float) -> None:
    found = predict(
        made_up(SECONDS, processor=processor, costs=Costs(sent=2e-10)), as_strategy("ps"), 4, SLOW
    )
    assert found.of_workers + found.of_servers == pytest.approx(4 * processor + found.beside)
    assert found.of_servers == pytest.approx(
        found.beside / 2
    )  # weights; gradients are as many bytes


def test_a_message_by_itself_costs_more_than_one_of_a_row() -> None:
    events = Events()
    process = ModelledProcess(events, 0, Costs(alone=0.5, wake=0.125))
    # the first is slept until, the second comes while it is worked on, the third when nothing is to be done
    for time in (1.0, 1.2, 9.0):
        events.at(time, lambda: process.deliver(0.25, lambda: None))
    assert not events.run()
    assert process.spent == pytest.approx(3 * 0.25 + 2 * 0.5)
    assert process.cursor == pytest.approx(9.0 + 0.125 + 0.75)


@pytest.mark.parametrize("on_device", [False, True])
def test_processors_are_busy_beside_the_passes_for_each_byte_that_travels(on_device: bool) -> None:
    costs = Costs(sent=2e-10, received=1e-10)
    profile = made_up(SECONDS, costs=costs, on_device=on_device)
    found = predict(profile, as_strategy("allreduce"), 4, SLOW)
    assert found.beside == pytest.approx(3e-10 * found.sent)


def test_a_device_computes_while_its_process_sends() -> None:
    costs, links = Costs(sent=1e-9), Links(1e12, 0.0, framing=1.0)
    own, device = (
        predict(
            made_up(SECONDS, at_end=False, costs=costs, on_device=each),
            ParameterServerStrategy(num_servers=4),
            4,
            links,
            apart=True,
        ).seconds
        for each in (False, True)
    )
    sending = 1e-9 * BYTES
    assert own >= SECONDS + sending
    assert device < own - sending / 2


def test_a_quorum_waits_until_its_grace_is_over() -> None:
    quick, patient = (
        predicted(
            LocalStrategy(sync_every=2, num_servers=1, quorum=2, grace=grace), 3, Links(1e12, 0.0)
        )
        for grace in (None, 5.0)
    )
    assert quick.seconds > patient.seconds  # the third of three waits for one of the next round
    assert patient.seconds == pytest.approx(2 * SECONDS, rel=0.1)  # all three are there at once


# -- plan -----------------------------------------------------------------------------------


def test_a_plan_has_a_row_for_each_strategy_and_number() -> None:
    forecast = steepest.plan(
        made_up(SECONDS), workers=[4, 1, 2], bandwidth="100Mbit", latency="1ms"
    )
    assert len(forecast.rows) == 3 * len(forecast.strategies)
    assert [row.workers for row in forecast.of("ps")] == [1, 2, 4]
    assert forecast.alone == pytest.approx(320)
    assert [name for name in forecast.strategies if name.startswith("local ")] == [
        "local 100", "local 100/4 delay 20", "local 100/4 delay 20 int4",
    ]  # fmt: skip
    for row in forecast.rows:
        assert 0 < forecast.efficiency(row) <= 1.0001
    best = forecast.best(4)
    assert best is not None
    assert best.strategy.startswith("local 100/4")
    assert forecast.pays_with("ps") == []  # a step of 2 takes 2 s longer
    assert forecast.pays_with("local 100") == [2, 4]
    advice = forecast.advice()
    assert (
        advice[0]
        == "ps, allreduce, async, ssp, local: of 2 to 4 workers no number is faster than one process alone."
    )
    assert len({line.partition(": ")[2] for line in advice[:-1]}) == len(advice) - 1
    assert advice[-1].startswith("Fastest in samples a second")
    assert "ignores learning" in advice[-1]
    rows = list(csv.DictReader(io.StringIO(forecast.csv())))
    assert len(rows) == len(forecast.rows)
    assert float(rows[0]["step_seconds"]) == pytest.approx(SECONDS, rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize(("layers", "servers"), [(24, 64), (240, 32)])
def test_chunks_that_are_too_few_for_the_servers_are_told(layers: int, servers: int) -> None:
    """What is advised gives each server a chunk, and shortens the step."""
    profile = made_up(SECONDS, layers=layers, at_end=False)
    forecast = steepest.plan(
        profile, workers=[8, servers], bandwidth="10Gbit", latency="50us", strategies=["allreduce"]
    )
    few = forecast.of("allreduce")[1]
    (told,) = [line for line in forecast.advice() if "chunk_bytes" in line]
    assert told.startswith(f"allreduce: {few.chunks} chunks are few for the servers of {servers} ")
    size = int(told.partition("chunk_bytes=")[2].partition(" ")[0].replace(",", ""))
    links = Links(bandwidth=1.25e9, latency=50e-6)
    advised = predict(profile, AllreduceStrategy(chunk_bytes=size), servers, links)
    assert advised.chunks >= servers
    assert advised.seconds < few.seconds


def test_chunks_that_are_enough_are_not_told() -> None:
    forecast = steepest.plan(
        made_up(SECONDS), workers=[2, 8], bandwidth="10Gbit", strategies=["allreduce"]
    )
    assert not [line for line in forecast.advice() if "chunk_bytes" in line]


def test_what_a_job_refuses_is_told_beside_the_others() -> None:
    strategies = [
        LocalStrategy(quorum=2, num_servers=1, delay=1),
        "ps",
        ParameterServerStrategy(backup_workers=2),
    ]
    forecast = steepest.plan(made_up(), workers=[2, 3], strategies=strategies)
    assert forecast.strategies == ["ps"]
    assert [name for name, _ in forecast.refused] == ["local", "ps 2"]
    assert "leave delay and fragments out" in forecast.refused[0][1]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"bandwidth": "25 parsec"}, "unit 'parsec' is not known"),
        ({"bandwidth": "fast"}, "no number with a unit"),
        ({"bandwidth": 0}, "above 0"),
        ({"bandwidth": "10b/s"}, "not known"),
        ({"latency": "50Gbit"}, "not known"),
        ({"latency": -1}, "at least 0"),
        ({"workers": []}, "at least one number"),
        ({"workers": [0]}, "at least 1"),
        ({"servers": 0}, "at least 1"),
        ({"strategies": ["best"]}, "give one of"),
        ({"strategies": []}, "at least one"),
        ({"devices_per_worker": 0}, "at least 1"),
        ({"batches": 0}, "at least 1"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        steepest.plan(made_up(), **wrong)


def test_what_does_not_train_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="without arguments that trains"):
        steepest.plan("train.py")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"without calling steepest\.prepare"):
        steepest.plan(lambda: None, workers=[1])


def test_quantities() -> None:
    assert [bandwidth_of(each) for each in ("8bit", "1kbit", "100 Mbit/s", "1Gbps", "2GB/s", 16)] == [
        1, 125, 12.5e6, 125e6, 2e9, 2,
    ]  # fmt: skip
    assert [
        seconds_of(each) for each in ("1s", "20 ms", "50us", "50µs", "1ns", 0.5)
    ] == pytest.approx([1, 0.02, 5e-5, 5e-5, 1e-9, 0.5])


# -- measuring ------------------------------------------------------------------------------


def test_a_model_is_measured() -> None:
    found = measure(linear_model_creator(), batches=2)
    assert (found.samples, found.nbytes) == (4, 64)  # 8 values, and what aligns them
    assert found.ready.keys() == {"weight", "bias"}
    assert 0 <= found.ready["weight"] <= found.seconds
    assert min(found.costs.sent, found.costs.received, found.costs.message, found.costs.applied) > 0
    assert not found.own_loop


def train() -> None:
    torch.manual_seed(0)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.utils.data.TensorDataset(*samples(12))
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, loader = steepest.prepare(model, optimizer, loader)
    for _ in steepest.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()


def test_a_loop_of_ones_own_is_measured_over_epochs() -> None:
    forecast = steepest.plan(train, workers=[1, 2], strategies=["ps"], batches=20)
    assert forecast.profile.own_loop
    assert forecast.profile.holds_back
    assert forecast.profile.samples == 2
    assert [row.workers for row in forecast.rows] == [1, 2]


def test_what_the_model_raises_is_told() -> None:
    def raising(*_: Any) -> Any:
        raise RuntimeError("no such luck")

    with pytest.raises(ModelRaisedError, match="no such luck"):
        measure(linear_model_creator(metrics={"never": raising}), batches=1)


def test_a_codecs_work_is_measured() -> None:
    codec = AllreduceStrategy(compression="int8").codec
    assert codec is not None
    found = measure_codec(codec)
    assert 0 < found.packed < 1e-6
    assert 0 < found.unpacked < 1e-6


# -- the command ----------------------------------------------------------------------------

SCRIPT = """
import sys, torch, steepest
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
data = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.ones(8, 2))
model, optimizer, loader = steepest.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2))
for _ in steepest.epochs(1):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""


def test_the_command_prints_a_table(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script, out = tmp_path / "train.py", tmp_path / "plan.csv"
    script.write_text(SCRIPT)
    chosen = ["--workers", "1,2", "--strategies", "ps,local", "--csv", str(out), "--batches", "1"]
    assert main.main(["plan", str(script), *chosen, "--", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "of ideal" in said
    assert "one process: 2 samples in" in said
    assert "0.032 kB are trained" in said
    assert len(out.read_text().splitlines()) == 5


@pytest.mark.long
def test_an_example_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason="digits: pip install 'steepest[demo]'")
    threads = threading.active_count()
    script = str(ROOT / "examples" / "own_loop_digits.py")
    chosen = ["--workers", "1,2,4", "--bandwidth", "100Mbit", "--batches", "4"]
    assert main.main(["plan", script, *chosen]) == 0
    said = capsys.readouterr().out
    assert "one process: 32 samples in" in said
    assert "local 100 int4" in said
    assert threading.active_count() == threads  # the script's loop has ended


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--workers", "0,1"], "--workers 0,1: give numbers from 1 on"),
        (["--workers", "two"], "--workers two: give numbers from 1 on"),
        (["--bandwidth", "25 bananas"], "unit 'bananas' is not known"),
        (["--latency", "soon"], "no number with a unit"),
        (["--strategies", "best"], "strategy='best'"),
        (["--servers", "0"], "--servers 0: give a number from 1 on"),
        (["--batches", "0"], "--batches 0: give a number from 1 on"),
        (["--csv", "plan.txt"], "give a name that ends with .csv"),
        (["--csv", "/nowhere/plan.csv"], "/nowhere is no directory"),
        ([], "cannot run no_such_script.py"),
    ],
)
def test_the_command_says_what_is_wrong(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["plan", "no_such_script.py", *given]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.few(6)
@pytest.mark.parametrize(("workers", "cores"), [(1, 2), (2, 2), (3, 2), (8, 2), (8, 8)])
@pytest.mark.parametrize("strategy", ["ps", "allreduce", "local", "async"])
def test_workers_of_one_host_share_its_cores(strategy: str, workers: int, cores: int) -> None:
    """Without costs beside the passes, a step takes as long as all passes on all cores."""
    found = predict(made_up(SECONDS), as_strategy(strategy), workers, SLOW, cores=cores)
    alone = predict(made_up(SECONDS), as_strategy(strategy), 1, SLOW)
    share = max(workers / cores, 1.0)
    assert found.seconds == pytest.approx(alone.seconds * share, rel=0.02)
    assert found.sent == 0  # no link is there
    assert found.samples_per_second == pytest.approx(
        alone.samples_per_second * workers / share, rel=0.02
    )
    assert found.computing == pytest.approx(1.0, abs=0.02)


def test_what_servers_of_one_host_compute_takes_its_cores_too() -> None:
    costs = Costs(applied=1e-9, added=1e-9)
    profile = made_up(SECONDS, costs=costs)
    spare, short = (predict(profile, as_strategy("ps"), 2, SLOW, cores=each) for each in (8, 1))
    assert short.seconds >= short.of_workers + short.of_servers - 1e-9
    assert short.seconds > spare.seconds


def test_one_host_is_planned_with_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
    forecast = steepest.plan(made_up(SECONDS), workers=[2, 4, 8], strategies=["ps"], one_host=True)
    assert forecast.cores == 4
    two, four, eight = (row.samples_per_second for row in forecast.rows)
    assert four == pytest.approx(2 * two, rel=0.02)
    assert eight == pytest.approx(four, rel=0.02)
    with pytest.raises(ConfigurationError, match="leave one of them out"):
        steepest.plan(made_up(SECONDS), one_host=True, servers_apart=True)
    names = steepest.plan(made_up(SECONDS), workers=[2], one_host=True).strategies
    assert set(names) == {"ps", "allreduce", "async", "ssp", "local"}  # no settings for slow links


def test_a_note_is_told_once_and_the_load_where_it_disturbs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What several strategies are refused for stands there once; so does what others did meanwhile."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
    quiet_profile = made_up(SECONDS)
    forecast = steepest.plan(quiet_profile, workers=[2], strategies=["ps"])
    refused = tuple((name, "not predicted: tables") for name in ("ps", "async", "local"))
    words = replace(forecast, refused=refused).advice()
    assert [line for line in words if "tables" in line] == [
        "ps, async, local: not predicted: tables"
    ]
    assert not any("wanted one of" in line for line in words)
    busy = replace(forecast, profile=replace(quiet_profile, load=3.2))
    assert "Measured while 3.2 processes" in busy.advice()[-1]
