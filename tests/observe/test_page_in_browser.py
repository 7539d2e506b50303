"""The page of a job as a person sees it: in a Chromium, while a job runs and a worker is killed. See make test-page."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from steepest import DistributedSGD
from steepest.observe.job_record import JobRecord
from steepest.observe.page.document import chart_script, document
from steepest.observe.page.overlay import overlay_of
from steepest.observe.page.run_view import RunView
from tests.observe.browser import Browser, browser, program
from tests.page_rows import row_of
from tests.reference import Task, samples
from tests.strikes import send_signal

pytestmark = [
    pytest.mark.skipif(program() is None, reason="needs Chromium: make test-page"),
    pytest.mark.skipif(find_spec("plotly") is None, reason="needs plotly: make test-page"),
]
SHOWN = "document.querySelectorAll('.plot svg').length >= 2"
TEXT = "(document.body?.innerText ?? '')"
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    with browser() as found:
        yield found


def long_run() -> str:
    """The page of 100,000 steps of 64 workers, of which one is slow."""
    chance, record, view = random.Random(1), JobRecord(), RunView("a long run")
    for step in range(1, 100_001):
        numbers = {"loss": chance.random(), "gradient_norm": chance.random(), "seconds": 2.0 * step}
        view.add(row_of(step, **numbers))
        if step % 5000 == 0:
            line = "worker 3 died; going on with 63 workers"
            more = f"change 1 at step {step} | cause: worker 3 died | seconds: in all 1.55 | repeated: 2 steps, 8 "
            more += "samples"
            view.add(
                {
                    "kind": "event",
                    "time": 1000.0 + step,
                    "step": step,
                    "event": "left",
                    "line": line,
                    "record": more,
                }
            )
        if step % 20 == 0:
            spent = [(w, 0.01, chance.random() + 3 * (w == 7), 0.0) for w in range(64)]
            record.stepped(step, 2.0 * step, spent)
    processes = [[f"worker {w}", "ab12" * 14, f"10.0.0.{w // 8}", 1000 + w] for w in range(64)]
    record.describe(0, {"strategy": "ps", "samples": 2048, "processes": processes})
    view.add_all(record.unwritten()[0])
    return document(view.as_json(), chart_script())


def test_the_page_of_a_long_run_opens_at_any_width_by_day_and_by_night(
    page: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(long_run())
    assert file.stat().st_size < 6_000_000
    for width, dark in ((390, True), (1440, False), (390, False), (1440, True)):
        page.size(width, dark=dark)
        page.go(file.as_uri())
        page.wait_for(SHOWN)
        text = page.value(TEXT)
        for words in (
            "a long run",
            "100,000",
            "each point is the mean of 128 steps",
            "worker 7 ended 100 % last",
        ):
            assert words in text
        assert page.value(SIDEWAYS) == 0
        ground = page.value("getComputedStyle(document.body).backgroundColor")
        assert (sum(json.loads(f"[{ground[4:-1]}]")) < 128) == dark
        if dark:
            assert page.value("document.querySelector('#heat svg') === null")
            page.send("Page.printToPDF")
            assert page.value("document.querySelector('#heat svg') !== null")
        page.value("document.getElementById('by-time').click()")
        page.value("document.getElementById('heat').scrollIntoView()")
        page.wait_for("document.querySelector('#heat svg') !== null")
        assert page.value(SIDEWAYS) == 0
    assert page.complaints == []


def test_what_few_steps_have_is_seen_beside_what_all_have(page: Browser, tmp_path: Path) -> None:
    view, file = RunView("reports"), tmp_path / "page.html"
    for step in range(1, 61):
        found = {"loss": 1 / step, "accuracy": step / 60} if step % 20 == 0 else {}
        view.add(row_of(step, metrics=found))
    file.write_text(document(view.as_json(), chart_script()))
    page.size(1440)
    page.go(file.as_uri())
    page.wait_for(SHOWN)
    drawn = "[...document.getElementById('curve {}').querySelectorAll('{}')]"
    page.wait_for(drawn.format("accuracy", ".point") + ".length === 3")
    assert page.value(drawn.format("accuracy", "path.js-line") + ".length") == 1
    legend = page.value(drawn.format("loss", ".legendtext") + ".map((each) => each.textContent)")
    assert legend == ["loss", "reported by the script"]
    view.add(
        {"kind": "evaluation", "step": 60, "time": 1.0, "loss": None, "metrics": {"held out": 0.5}}
    )
    file.write_text(document(view.as_json(), chart_script()))
    page.go(file.as_uri())
    page.wait_for(SHOWN)
    page.wait_for(drawn.format("held out", ".point") + ".length === 1")
    rates = page.value(drawn.format("learning rate", ".ytick") + ".map((each) => each.textContent)")
    assert "0" in rates
    assert not any(each.startswith("−") for each in rates)  # none is below 0


@pytest.mark.cluster
def test_a_live_job_is_seen_to_lose_a_worker(page: Browser) -> None:
    task = Task(data=samples(24))
    with DistributedSGD(task.creator(), 2) as trainer:
        training = threading.Thread(target=lambda: trainer.fit(steps=100_000, progress=False))
        training.start()
        try:
            before = len(page.complaints)
            page.size(1440)
            page.go(trainer.page().url)
            page.wait_for(f"{SHOWN} && {TEXT}.includes('live: training')")
            first = page.value(f"{TEXT}.match(/worker \\d+.*/g)")
            assert len(first) >= 2
            page.wait_for("document.getElementById('processes').innerText.includes('MB')")
            pid = next(each.pid for each in trainer.processes() if each.name == "worker 1")
            send_signal(pid, signal.SIGKILL)
            page.wait_for(
                "/worker 1 .*died/.test(document.getElementById('changes').innerText)", 90
            )
            page.value("document.getElementById('stacks').click()")
            page.wait_for("document.getElementById('text').innerText.includes('the driver (pid')")
            page.value("document.getElementById('dialog').close()")
            page.value("document.querySelector('#processes button').click()")
            page.wait_for(
                "document.getElementById('text').innerText.includes('it has printed nothing')"
            )
            page.value("document.getElementById('dialog').close()")
            page.size(390, dark=True)
            assert page.value(SIDEWAYS) == 0
        finally:
            trainer.stop()
            training.join()
    page.wait_for(f"{TEXT}.includes('has not answered')")
    # the browser itself tells of requests that failed when the job was gone
    complaints = [each for each in page.complaints[before:] if "ERR_CONNECTION" not in each]
    assert complaints == []


def test_runs_are_laid_over_one_another(page: Browser, tmp_path: Path) -> None:
    views, file = [RunView("first"), RunView("second")], tmp_path / "page.html"
    for number, view in enumerate(views, 1):
        for step in range(1, 61):
            view.add(row_of(step, loss=number / step, metrics={"right": step / 60}))
        view.add({"kind": "evaluation", "step": 60, "time": 1.0, "loss": 0.5, "metrics": {}})
    file.write_text(document(overlay_of(views, ["a", "b"]), chart_script(), "comparison"))
    before = len(page.complaints)
    for width in (390, 1440):
        page.size(width)
        page.go(file.as_uri())
        page.wait_for(SHOWN)
        assert page.value(SIDEWAYS) == 0
    heads = page.value(
        "[...document.querySelectorAll('#charts h3')].map((each) => each.textContent)"
    )
    assert heads[:3] == [
        "right against steps",
        "loss against steps",
        "evaluation: loss against steps",
    ]
    legend = page.value(
        "[...document.querySelectorAll('#charts .legendtext')].slice(0, 2).map((e) => e.textContent)"
    )
    assert legend == ["first", "second"]
    assert page.value("document.getElementById('recommended').hidden")
    ticks = "[...document.querySelectorAll('#charts .plot')][1].querySelectorAll('.ytick').length"
    before_log = page.value(ticks)
    page.value("document.getElementById('log').click()")
    page.wait_for(f"{ticks} !== {before_log}")
    assert page.complaints[before:] == []


def scored(
    page: Browser, tmp_path: Path, compute: list[float], waited: list[float] | None
) -> list[str]:
    """The scores that are red, of workers that take so long now, and wait for a processor so much of the time."""
    view, record, file = RunView("scores"), JobRecord(), tmp_path / "page.html"
    for step in range(1, 401):
        usual = [0.1] * len(compute)
        now = compute if step > 300 else usual
        record.stepped(
            step, step, [(w, 0.0, now[w], max(compute) - now[w]) for w in range(len(now))]
        )
    view.add(row_of(1))
    view.add_all(record.unwritten()[0])
    live = {"live": True, "training": True, "processes": [
        {"name": f"worker {w}", "node": "a", "host": "b", "pid": w, "waited": part}
        for w, part in enumerate(waited or [])
    ]}  # fmt: skip
    file.write_text(document(view.as_json(now=live if waited else None), chart_script()))
    page.size(1440)
    page.go(file.as_uri())
    page.wait_for("document.querySelectorAll('#scores tr').length > 1")
    red: list[str] = page.value(
        "[...document.querySelectorAll('#scores .bad')].map((each) => each.textContent)"
    )
    return red


def test_a_worker_is_red_if_it_is_slow_and_not_if_its_machine_is_busy(
    page: Browser, tmp_path: Path
) -> None:
    """It takes three times as long by itself; without a processor; as all others do; where nobody waits for it."""
    slow = [0.1, 0.3, 0.1, 0.1]
    assert scored(page, tmp_path, slow, None) == ["0.33", "0.33"]
    assert scored(page, tmp_path, slow, [0.3, 0.3, 0.3, 0.3]) == ["0.33", "0.33"]
    assert scored(page, tmp_path, slow, [0.0, 0.6, 0.0, 0.0]) == []
    assert "Of 300 ms it waits 180 ms for a processor: its machine is busy" in page.value(TEXT)
    assert scored(page, tmp_path, [0.3] * 4, None) == []
    assert scored(page, tmp_path, [0.01, 0.3, 0.05, 0.01], None) == [
        "0.03",
        "0.33",
    ]  # not the third


def test_a_stranger_reads_what_is_missing(page: Browser) -> None:
    from steepest.observe.page.server import PageServer

    class Nothing:
        def as_json(self, known: object) -> dict[str, object]:
            raise AssertionError

        def stacks(self) -> str:
            raise AssertionError

        def log(self, process: str) -> str:
            raise AssertionError

    server = PageServer(Nothing())
    page.go(server.url.partition("#")[0])
    page.wait_for(f"{TEXT}.includes('This page is behind a token')")
    server.close()
