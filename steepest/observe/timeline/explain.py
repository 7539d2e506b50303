"""A trace in a few sentences: where a step's time goes, which worker waits for which, and what would help."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from steepest.observe.timeline.parsed import (
    NONSENSE,
    ParsedTrace,
    WorkerStep,
    makes_no_sense,
    parse,
)
from steepest.observe.timeline.replay import PARTS, Replay, all_alike, replay, without_slowness

_WORTH = 0.03  # of a step, that is told of
_SLOW = 1.1  # times as long as the others: a slow worker
_WORDS = {
    "compute": "computing",
    "load": "loading batches",
    "push": "packing and handing over gradients",
    "transfer": "until the servers have taken and reduced the last gradient",
    "commit": "until the commit",
    "apply": "the optimizer's update",
    "pull": "until the weights have come",
    "idle": "before the next share begins",
}
_LOAD = "batches are awaited: a DataLoader with more worker processes loads them beforehand"
_IDLE = (
    "workers wait between two steps without need of weights: fewer evaluations or checkpoints, and, with the trainer, "
    "fit(steps=...) instead of step() one by one"
)


@dataclass(frozen=True)
class Stragglers:
    """Slow workers, and the seconds of a step if they took the median of the others' times."""

    workers: tuple[int, ...]
    without: float

    def __str__(self) -> str:
        *others, last = map(str, self.workers)
        return f"workers {', '.join(others)} and {last}" if others else f"worker {last}"


def explain(path: str | Path) -> str:
    """Return what a trace says, in sentences, each a line.

    Raises:
        ConfigurationError: it is no whole trace of steepest, or has no whole step.
    """
    trace = parse(path)
    try:
        lines = _together(trace) if trace.needs_all else _apart(trace)
    except NONSENSE as error:  # each event is well by itself
        raise makes_no_sense(path, error) from error
    if trace.lost:
        lines.append(f"{trace.lost} spans had no room and are missing, so some steps are left out.")
    if trace.error > 0:
        lines.append(
            f"Clocks of different nodes agree within {_ms(trace.error)}: shorter transfers between them say nothing."
        )
    return "\n".join(lines)


def stragglers(trace: ParsedTrace, usual: Replay) -> Stragglers | None:
    """Return the workers that usually take longer than the others; None where that costs little."""
    typical = {
        worker: statistics.median(each.busy for each in work) for worker, work in trace.work.items()
    }
    slow = []
    for worker, own in typical.items():
        others = [seconds for other, seconds in typical.items() if other != worker]
        if others and own > _SLOW * statistics.median(others):
            slow.append(worker)
    slowest = Stragglers(tuple(slow), replay(trace, without_slowness(*slow)).seconds)
    return slowest if usual.seconds - slowest.without >= _WORTH * usual.seconds else None


def _together(trace: ParsedTrace) -> list[str]:
    """Return the sentences about steps that have all workers' gradients."""
    usual = replay(trace)
    count, seconds = len(usual.steps), usual.seconds
    recorded = (trace.versions[-1].committed - trace.versions[0].committed) / max(count, 1)
    lines = [
        f"{_counted(count, 'step')} of {_counted(len(trace.work), 'worker')} and "
        f"{_counted(trace.servers, 'server')} under {trace.strategy!r}: {_ms(recorded)} a step; the replay of the "
        f"trace gives {_ms(seconds)}."
    ]
    parts = {
        name: statistics.fmean(step.parts[name] for step in usual.steps) if usual.steps else 0.0
        for name in PARTS
    }
    shown = [name for name in parts if parts[name] >= _WORTH * seconds]
    shares = ", ".join(
        f"{_ms(parts[name])} ({_percent(parts[name], seconds)}) {_WORDS[name]}"
        for name in sorted(shown, key=lambda name: -parts[name])
    )
    lines.append(f"On the path of the worker that is awaited: {shares}.")
    lines += _waits(usual, seconds)
    slow = stragglers(trace, usual)
    if slow is not None:
        share = _percent(seconds - slow.without, seconds)
        lines.append(
            f"If {slow} took the median of the others' times, a step would take {_ms(slow.without)}: that slowness "
            f"costs {share}."
        )
    alike = replay(trace, all_alike).seconds
    if slow is None and seconds - alike >= _WORTH * seconds:
        lines.append(
            f"No worker is slower than others for long; if all took the median in each step, it would take "
            f"{_ms(alike)}, {_percent(seconds - alike, seconds)} less."
        )
    lines.append(f"What would help: {_advice(trace, parts, slow, usual, alike)}.")
    return lines


def _waits(usual: Replay, seconds: float) -> list[str]:
    """Describe the worker that is awaited most, and how long the others wait for it."""
    last = Counter(step.last for step in usual.steps)
    if not last or len(usual.steps[0].ahead) < 2:
        return []
    worker, times = last.most_common(1)[0]
    waits = [
        max(wait, 0.0)
        for step in usual.steps
        if step.last == worker
        for other, wait in step.ahead.items()
        if other != worker
    ]
    mean = statistics.fmean(waits)
    if mean < _WORTH * seconds:
        return ["Workers hardly wait for each other."]
    return [
        f"Worker {worker} is the last in {times} of {_counted(len(usual.steps), 'step')}; the others wait "
        f"{_ms(mean)} for it then, in the mean."
    ]


def _computing(trace: ParsedTrace) -> str:
    """Return what helps if most of a step is computing."""
    if trace.nodes > 1:
        return "the step is its computation: more workers, or faster devices, shorten an epoch"
    return "the step is its computation: more workers shorten an epoch while the machine has free cores"


def _moving(trace: ParsedTrace) -> str:
    """Return what helps if gradients and weights travel long; inside a host their bytes cross no link."""
    said = ["moving gradients and weights takes long:"]
    if trace.nodes > 1:
        said.append('wire_dtype="bf16" or compression=, for links between hosts;')
    else:
        said.append("greater batches, of which fewer are exchanged;")
    if trace.servers < trace.chunks:
        said.append("more servers (num_servers=), for many bytes;")
    said.append('or strategy="local", which exchanges once in several steps')
    return " ".join(said)


def _applying(trace: ParsedTrace) -> str:
    """Return what helps if the update takes long; servers share it chunk by chunk."""
    if trace.servers < trace.chunks:
        return "the update takes long: more servers share it (num_servers=)"
    counted = _counted(trace.chunks, "chunk")
    return (
        f"the update takes long, and {_counted(trace.servers, 'server')} share {counted}: more of both share it (a "
        "smaller chunk_bytes=, and num_servers=)"
    )


def _other_machine(trace: ParsedTrace, slow: Stragglers) -> str:
    """Return what helps against slow workers."""
    backup = f'ParameterServerStrategy(backup_workers={len(slow.workers)}), "ssp", "async", or '
    if trace.nodes > 1:
        first = f"another machine for {slow}"
    else:
        first = f"for {slow} as much of this machine as the others have (cores, memory, less that runs beside it)"
    return f'{first}; or a strategy that does not wait for it: {backup}LocalStrategy(pace="speed")'


def _advice(
    trace: ParsedTrace,
    parts: Mapping[str, float],
    slow: Stragglers | None,
    usual: Replay,
    alike: float,
) -> str:
    """Return what would help most: less of the greatest part of a step, or of its slow workers."""
    seconds = usual.seconds
    groups = {
        "compute": parts["compute"],
        "load": parts["load"],
        "moving": parts["push"] + parts["transfer"] + parts["pull"],
        "apply": parts["apply"],
        "idle": parts["idle"] + parts["commit"],
    }
    greatest = max(groups, key=lambda name: groups[name])
    lost = seconds - (slow.without if slow else alike)
    others = max((groups[name] for name in groups if name != "compute"), default=0.0)
    if slow is not None and lost >= others:
        return _other_machine(trace, slow)
    if slow is None and lost > max(others, 2 * _WORTH * seconds):
        return 'workers take turns at being slow: a strategy that waits less often ("local", or "ssp") evens this out'
    if greatest == "compute" and others >= 0.25 * seconds:
        greatest = max((name for name in groups if name != "compute"), key=lambda n: groups[n])
    said = {
        "compute": _computing(trace),
        "load": _LOAD,
        "moving": _moving(trace),
        "apply": _applying(trace),
        "idle": _IDLE,
    }
    return said[greatest]


def _apart(trace: ParsedTrace) -> list[str]:
    """Return the sentences about workers that do not wait for each other."""
    lines, rates = [], {}
    shares = sum(map(len, trace.work.values()))
    lines.append(
        f"{_counted(shares, 'share')} of {_counted(len(trace.work), 'worker')} and "
        f"{_counted(trace.servers, 'server')} under {trace.strategy!r}, where each gradient is a version of its own."
    )
    for worker, work in trace.work.items():
        busy = statistics.fmean(each.busy for each in work)
        whole = (work[-1].ended - work[0].began) / len(work)
        rates[worker] = 1.0 / whole if whole else 0.0
        lines.append(
            f"Worker {worker}: {len(work)} shares, {_ms(busy)} of work each, and {_ms(max(whole - busy, 0.0))} of "
            "waiting."
        )
    total = sum(rates.values())
    slowest = min(rates, key=lambda worker: rates[worker])
    others = [rate for worker, rate in rates.items() if worker != slowest]
    usual = statistics.median(others) if others else rates[slowest]
    if total and usual - rates[slowest] >= _WORTH * total:
        lines.append(
            f"If worker {slowest} were as fast as the median of the others, the job would have "
            f"{_percent(usual - rates[slowest], total)} more shares a second; the others do not wait for it."
        )
    waiting = statistics.fmean(_waiting(work) for work in trace.work.values())
    lines.append(
        f"What would help: {_waiting_less(trace) if waiting > 0.25 else _computing(trace)}."
    )
    return lines


def _waiting_less(trace: ParsedTrace) -> str:
    """Return what helps if workers wait for weights, and for no other worker."""
    ways = ["more servers"] if trace.servers < trace.chunks else []
    ways += ["fewer bytes (wire_dtype=, compression=)"] if trace.nodes > 1 else []
    return f"workers wait for weights: {', '.join([*ways, 'a greater staleness'])}"


def _waiting(work: Sequence[WorkerStep]) -> float:
    """Return the share of a worker's time in which it waited."""
    whole = work[-1].ended - work[0].began
    return 1.0 - sum(each.busy for each in work) / whole if whole > 0 else 0.0


def _ms(seconds: float) -> str:
    """Return seconds in words, with three digits."""
    if seconds >= 1.0:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
