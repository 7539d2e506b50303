"""Why two runs differ, in words: from what the probes of both have noted."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from steepest.testing.verification.comparing import (
    Difference,
    Values,
    gradients_of,
    noisy_variables,
    weights_of,
)
from steepest.testing.verification.records import Facts, Run, StepRecord
from steepest.testing.verification.summaries import Variable

_CLOSE = 0.02
_STATE = "docs/howto/own_loop_state.md#after-a-death"


def expected_causes(facts: Facts | None, runs: Sequence[Run]) -> list[str]:
    """Return the intended reasons why a batch's result is no mean over its samples."""
    if facts is None:
        return []
    causes = []
    if facts.norms:
        causes.append(
            f"BatchNorm ({_some(facts.norms)}) normalizes the part of the batch that its worker has, as "
            f"DistributedDataParallel's "
            "does; where that is too few samples, take GroupNorm or LayerNorm"
        )
    drew = any(step.drew for run in runs for life in run.lives for step in life.steps)
    if facts.dropouts and drew:
        causes.append(f"dropout ({_some(facts.dropouts)}) draws other numbers in each worker")
    elif drew:
        causes.append("the loop draws random numbers, other ones in each worker")
    return causes


def of_parts(difference: Difference, whole: Run, parts: Run) -> list[str]:
    """Return why a divided batch's step differs from the whole one's, the likeliest cause first."""
    workers = len(parts.workers)
    explain = {
        "settings": _settings,
        "steps": _lengths,
        "reports": _reports,
        "gathered": _gathered,
        "rows": _rows,
    }.get(difference.what)
    if explain is not None:
        return explain(difference, whole, parts, workers)
    one = whole.in_order(0).get(difference.step)
    own = [
        record
        for w in parts.workers
        if (record := parts.in_order(w).get(difference.step)) is not None
    ]
    if one is None or not own:
        return []
    if unprepared := _unprepared(parts):
        return [unprepared]
    if same := _all_alike(own):
        return [same]
    warned = warnings_of(parts)
    if _samples_differ(one, own) and (own_draws := _own_draws(parts)):
        return [own_draws]
    if any("reduction='sum'" in text for text in warned):
        return warned
    if factor := _factor(difference.ratio, workers):
        return [*warned, _of_factor(factor, workers, parts)]
    if difference.what in ("weights", "optimizer_state"):
        return [
            *warned,
            "the workers' mean gradient is that of the whole batch, and the rates are the same, but the update is "
            "another one: "
            "weights are written, or gradients changed, elsewhere than by optimizer.step()",
        ]
    if any("steepest.clip_grad_norm_" in text for text in warned):
        return warned
    if any(record.edited for record in own):
        warned.append(
            "each worker changes its own gradient between backward() and step(): what is done to it (clipping, "
            "normalizing, noise) "
            f"is to be done to the mean of all ({own[0].line}); steepest.clip_grad_norm_ clips that"
        )
        return warned
    if _samples_differ(one, own):
        warned.append(
            "the workers have other samples in this step than one process has: the order of the data depends on "
            "the number of "
            "workers or on what a worker finds; let a sampler draw by the epoch's number, and leave dealing out "
            "to steepest"
        )
        return warned
    warned.extend(_of_mean(one, own))
    return warned


def of_decisions(run: Run, sources: dict[str, str]) -> list[str]:
    """Name the variables that differ between workers and on which the script's conditions depend."""
    decisions: dict[str, str] = {}
    workers = run.workers
    for step in sorted(run.steps_of(workers[0])) if len(workers) > 1 else ():
        records = [own[step] for w in workers if step in (own := run.steps_of(w))]
        if len(records) < len(workers):
            break
        for name in records[0].variables:
            several = [record.variables.get(name) for record in records]
            kinds = ("number", "scheduler")
            values = [each for each in several if each is not None and each.kind in kinds]
            if len(values) < len(records) or len({each.digest for each in values}) == 1:
                continue
            each = ", ".join(f"{v.shown:.14} on worker {w}" for w, v in enumerate(values))
            if values[0].kind == "scheduler":
                decisions[name] = (
                    f"the {values[0].type_name} given to prepare() has {each} behind step {step - 1}: it is stepped by "
                    "what one worker finds; step it by what all have found, steepest.gather(...)"
                )
                continue
            scope, variable = name.split(":", 1)
            file = records[0].lines.get(scope, "").rsplit(":", 1)[0]
            if (line := _decided(sources.get(file, ""), variable)) and variable not in decisions:
                decisions[variable] = (
                    f"{file}:{line} decides by `{variable}`, which is {each} behind step {step - 1}: "
                    "decide by what all have found, steepest.gather(...), and all do the same"
                )
    return [*decisions.values()][:3]


@lru_cache(maxsize=256)
def _decided(source: str, variable: str) -> int:
    """Return the line of a condition that names a variable, conditions on a rank aside; 0 if there is none."""
    last = variable.split(".")[-1]
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except SyntaxError:
        return 0
    tests = [n.test for n in nodes if isinstance(n, ast.If | ast.While | ast.IfExp)]
    tests += [
        n.value for n in nodes if isinstance(n, ast.Return) and isinstance(n.value, ast.Compare)
    ]
    for test in tests:
        names = {getattr(n, "id", getattr(n, "attr", None)) for n in ast.walk(test)}
        if last in names and not names & {"rank", "__name__"}:
            return test.lineno
    return 0


def _own_draws(run: Run) -> str:
    """Describe the random generators that the data set owns."""
    names = run.facts.generators if run.facts is not None else []
    if not names:
        return ""
    return (
        f"the data set draws from a generator of its own, `self.{names[0]}`, which goes on otherwise in each process "
        "that reads it, and begins anew in a successor: draw from torch's, NumPy's or Python's own generators, which "
        "are seeded for each batch, or from one that is made of the sample's number"
    )


def of_lengths(run: Run) -> list[str]:
    """Return where the script asks for its loader's length before `prepare`: that is the length for one worker."""
    lengths = {line: length for length, line, _ in run.notes("length")}
    return [
        f"len(loader) at {line}, before prepare(), is {length}, the batches of one worker alone; an epoch of "
        f"{len(run.workers)} workers has about 1/{len(run.workers)} of them: a schedule made of it is too long; call "
        "it behind prepare()"
        for line, length in lengths.items()
        if len(run.workers) > 1
    ]


def _unprepared(run: Run) -> str:
    """Describe a loader over which the loop trains and that was not given to `prepare`."""
    lines = sorted({line for _, line, _ in run.notes("loader")})
    if not lines or run.facts is None or run.facts.has_loader:
        return ""
    return (
        f"the loader that is iterated over at {', '.join(lines)} was not given to steepest.prepare(): each "
        f"worker reads all of it, so that each sample counts {len(run.workers)} times in an epoch, and a successor "
        "begins with its first batch: give it the loader"
    )


def _all_alike(own: Sequence[StepRecord]) -> str:
    """Describe workers that all compute the same."""
    if len(own) < 2 or (not own[0].samples and not own[0].losses):
        return ""
    same_samples = (
        bool(own[0].samples)
        and all(r.samples == own[0].samples for r in own)
        and 0 not in own[0].samples
    )
    same_losses = bool(own[0].losses) and all(repr(r.losses) == repr(own[0].losses) for r in own)
    if not (same_samples or (same_losses and not own[0].samples)):
        return ""
    return (
        f"all workers train on the same samples, so that each counts {len(own)} times: give the loader to "
        "steepest.prepare(), or deal the data out by steepest.rank()"
    )


def _factor(ratio: float, workers: int) -> float:
    """Return the factor between the two if it follows from the number of workers, else 0."""
    for each in (workers, 1 / workers, workers**0.5, workers**-0.5):
        if each != 1 and math.isclose(ratio, each, rel_tol=_CLOSE):
            return float(each)
    return 0.0


def _of_factor(factor: float, workers: int, parts: Run) -> str:
    lines = sorted({line for _, line, _ in parts.notes("size")})
    used = f" (steepest.size() is called at {', '.join(lines)})" if lines else ""
    if math.isclose(factor, 1 / workers):
        return (
            f"it is 1/{workers} of one process's: either the loss adds up the samples of its batch, whose "
            f"gradients are averaged "
            "over the workers (say steepest.prepare(..., reduction='sum'), or take the mean), or it is divided by "
            "the number of "
            f"workers, which the mean over them does already{used}"
        )
    if math.isclose(factor, workers):
        return (
            f"it is {workers} times that of one process: something is multiplied by the number of workers, or "
            f"summed over them, "
            f"while gradients are means over the workers already{used}"
        )
    return (
        f"it is {factor:.3g} times that of one process: it is scaled by the square root of the number of workers"
        + used
    )


def _of_mean(one: StepRecord, own: Sequence[StepRecord]) -> Iterator[str]:
    here, rows = gradients_of(one, own)
    shares, residual = _as_mean(here, rows)
    by_samples = weights_of(own)
    if (
        residual < _CLOSE
        and abs(shares.sum() - 1) < _CLOSE
        and np.abs(shares - by_samples).max() > 1e-3
    ):
        shown = ", ".join(f"{each:.3f}" for each in shares)
        plain = ", ".join(f"{each:.3f}" for each in by_samples)
        yield (
            f"one process's gradient is the mean of the workers' with the weights {shown}, and not {plain}: the "
            f"loss is a mean over "
            "something other than samples (tokens, a mask, class weights): say what a batch weighs, "
            "steepest.weight(tokens)"
        )
        return
    if residual < _CLOSE and abs(shares.sum() - 1) >= _CLOSE:
        yield (
            f"one process's gradient is {shares.sum():.3g} times the workers' mean: the loss of a batch is no mean "
            "over its samples: take the mean; or, where it depends on the other samples of its batch, compute it of "
            "steepest.gather(outputs), which keeps the gradient"
        )
        return
    yield (
        "the gradient of the whole batch is no mean of those of its parts: the loss depends on the other samples "
        "of its batch "
        "(contrastive and ranking losses, statistics of the batch): compute it of steepest.gather(outputs), which "
        "keeps the gradient; "
        "or on the worker's number, or on what it has drawn"
    )


def _as_mean(here: Values, rows: Values) -> tuple[Values, float]:
    """Return the weights with which rows add up best to a vector, and the remainder."""
    shares, *_ = np.linalg.lstsq(rows.T, here, rcond=None)
    left = np.linalg.norm(rows.T @ shares - here) / max(float(np.linalg.norm(here)), 1e-300)
    return shares, float(left)


def _samples_differ(one: StepRecord, own: Sequence[StepRecord]) -> bool:
    several = [row for record in own for row in record.samples]
    if 0 in one.samples or 0 in several or len(one.samples) != len(several):
        return False
    return sorted(one.samples) != sorted(several)


def _settings(difference: Difference, whole: Run, parts: Run, workers: int) -> list[str]:
    name = difference.name.rsplit("@", 1)[0]
    if decided := _decided_by_one(difference, parts.in_order, parts.workers):
        return [decided]
    if factor := _factor(difference.ratio, workers):
        lines = sorted({line for _, line, _ in parts.notes("size")})
        where = f" at {', '.join(lines)}" if lines else ""
        times = f"{factor:.3g} times" if factor > 1 else f"1/{1 / factor:.3g} of"
        return [
            f"{name} is {times} that of one process: it is scaled by steepest.size(){where}, as for a larger "
            f"batch. If that is "
            "meant, the result is another one than that of one process"
        ]
    return [
        f"{name} is set otherwise with {workers} workers: by the number of batches, of workers, or the time"
    ]


def _decided_by_one(
    difference: Difference, steps_of: Callable[[int], dict[int, StepRecord]], workers: Sequence[int]
) -> str:
    """Describe a setting that differs between workers; "" if it is the same on all."""
    name, at = difference.name.rsplit("@", 1)
    steps = {worker: steps_of(worker).get(difference.step) for worker in workers}
    values = {
        worker: step.settings[int(at)].get(name)
        for worker, step in steps.items()
        if step is not None and int(at) < len(step.settings)
    }
    if len({*map(repr, values.values())}) < 2:
        return ""
    each = ", ".join(f"{value!r:.10} on worker {worker}" for worker, value in values.items())
    return (
        f"{name} is {each}: it is decided by what one worker finds; decide by what all have found, "
        "steepest.gather(...), and it is the same everywhere"
    )


def _lengths(difference: Difference, whole: Run, parts: Run, workers: int) -> list[str]:
    lengths = [parts.length_of(w) for w in parts.workers]
    if len(set(lengths)) > 1:
        return [
            "workers leave the loop, or skip steps, after other numbers of steps: a decision of what one worker "
            "finds, such as an early "
            "stop; decide by what all have found, steepest.gather(...)"
        ]
    return [
        "the number of steps depends on the number of workers: by the number of batches, or by what is found; "
        "count epochs, or "
        "steps of the job"
    ]


def _reports(difference: Difference, whole: Run, parts: Run, workers: int) -> list[str]:
    if not difference.name:
        return ["workers report another number of times"]
    if factor := _factor(difference.ratio, workers):
        what = f"1/{workers} of" if factor < 1 else f"{factor:.3g} times"
        return [
            f"report({difference.name}=) has {what} what one process reports: the driver has the mean over the "
            f"workers, and this is a sum "
            f"or a count over a worker's own samples; report a mean, or the sum of steepest.gather({difference.name})"
        ]
    return [
        f"report({difference.name}=) is the mean over the workers of what each finds on its own samples, and this "
        f"value is no mean over samples "
        "(a median, a maximum, an AUC, the last batch alone, what is counted since another moment): compute it of "
        "steepest.gather(...), and report that"
    ]


def _gathered(difference: Difference, whole: Run, parts: Run, workers: int) -> list[str]:
    if difference.here:
        here, there = (each.replace(" calls", "") for each in (difference.here, difference.there))
        return [
            f"steepest.gather({difference.name}) is called {here} times in the step by one process, and {there} times "
            f"by worker {difference.worker}: call it equally often, whatever a worker finds"
        ]
    return [
        f"what steepest.gather(...) returns ({difference.name}) has as many numbers, and other ones: what each worker "
        "gives depends on the other samples of its batch, on its number, or on what it has drawn"
    ]


def _rows(difference: Difference, whole: Run, parts: Run, workers: int) -> list[str]:
    return [
        "all losses and dense weights are equal: rows with a rate, a filter or a lifetime of their own that counts "
        "batches of workers, or which no batch of these steps has read again"
    ]


def of_buffers(difference: Difference, parts: Run) -> str:
    """Describe a buffer that differs where everything else is equal."""
    return (
        f"the buffer {difference.name} is made of each worker's own part of the batch (from step {difference.step}): "
        "result.state_dict has the mean of running statistics, and worker 0's of others; steepest.prepare(..., buffers="
        f'{{"{difference.name.split(".", 1)[-1]}": "mean"}}) says what stands for all'
    )


def of_buffers_of_successor(difference: Difference) -> str:
    """Describe a buffer that differs in a successor."""
    return (
        f"the buffer {difference.name.split('.', 1)[-1]}, which forward passes change, is each worker's own: a "
        "successor begins with that of the others"
    )


def warnings_of(run: Run) -> list[str]:
    """Return the library's warnings in workers: they say themselves what to do."""
    lines: dict[str, str] = {}
    for text, line, _ in run.notes("warned"):
        if "steepest" in text:  # each worker says it
            said = re.sub(r"^worker \d+: ", "", text.split("\n")[0])
            lines.setdefault(said[:400], line)
    return [f"{line}: {text}" for text, line in lines.items()]


#: Why a job with a model creator may differ after a death.
STATE_OF_MODEL = (
    "the successor computes something else from the same weights: state that the model or its data carry from "
    "step to step "
    "in a worker's process, or draws of a generator of their own: buffers are kept, see docs/explanation/deaths.md"
)


def of_job(difference: Difference, workers: int) -> list[str]:
    """Return why a job with a model creator differs on several workers from one."""
    if factor := _factor(difference.ratio, workers):
        return [
            f"it is {factor:.3g} times that of one process: the loss adds up the samples of its batch, or is "
            f"multiplied or divided by "
            "the number of workers; the trainer has the mean over them already"
        ]
    return [
        "the model or its data depend on worker_index, on the process (a seed, the time), or the loss of a batch "
        "is no mean over its "
        "samples: give TorchModel a weight= where it is a mean over tokens"
    ]


# -- deaths ----------------------------------------------------------------------------------------


class ChangedVariable(NamedTuple):
    """A variable whose value in a successor differs from that of an undisturbed run.

    Attributes:
        name: as ``function:variable``.
        step: the first one in which it differs.
        before: its value in the undisturbed run.
        after: its value in the successor.
        line: where the function was then, as ``train.py:31``.
    """

    name: str
    step: int
    before: Variable
    after: Variable
    line: str


def changed_variables(base: Run, other: Run, since: int, noisy: set[str]) -> list[ChangedVariable]:
    """Return the variables that differ in a successor, sorted by the step in which they first do."""
    variables = {}
    first = {life.worker: life.begun for life in reversed(other.lives)}
    for life in other.lives:
        undisturbed = base.steps_of(life.worker)
        steps = life.steps
        if not steps and life.tried is not None:  # the run ended with its first step
            steps = [replace(life.tried, step=since)]
        if life.begun == first[life.worker] or not steps or steps[0].step < since:
            continue
        for step in steps:
            own = undisturbed.get(step.step)
            if own is None:
                continue
            for name, value in step.variables.items():
                if value.kind == "scheduler":
                    continue  # which the job keeps
                if value.kind == "values" and step is not steps[0]:
                    continue  # made in the steps that the successor has taken, such as a loss
                before = own.variables.get(name)
                if (
                    name in noisy
                    or name in variables
                    or before is None
                    or before.digest == value.digest
                ):
                    continue
                line = step.lines.get(name.split(":")[0], step.line)
                variables[name] = ChangedVariable(name, step.step, before, value, line)
    order = {"number": 0, "state": 1, "generator": 2, "values": 3}
    return sorted(variables.values(), key=lambda each: (each.step, order[each.before.kind]))


def _changed(
    base: Run, other: Run, since: int, noisy: set[str], sources: dict[str, str]
) -> list[ChangedVariable]:
    """Return the variables that differ, but for those that a `for` sets, such as a batch."""

    def is_of_a_loop(name: str, line: str) -> bool:
        function, variable = name.split(":", 1)
        return variable in _loop_targets(sources.get(line.rsplit(":", 1)[0], ""), function)

    changed = changed_variables(base, other, since, noisy)
    return [each for each in changed if not is_of_a_loop(each.name, each.line)]


def of_counters(
    base: Run, other: Run, since: int, noisy: set[str], sources: dict[str, str]
) -> dict[str, str]:
    """Describe variables that began anew in a successor, by name, where nothing else differs.

    Tensors and lists are left out: most of them are what a batch has made.
    """
    changed = _changed(base, other, since, noisy, sources)
    return {
        each.name: f"{_of_variable(each, sources)}. It changes no update and no report of these steps"
        for each in changed
        if each.before.kind != "values"
    }


def of_death(
    difference: Difference | None,
    base: Run,
    other: Run,
    since: int,
    noisy: set[str],
    sources: dict[str, str],
) -> list[str]:
    """Return why a run in which a worker died, or which was stopped, differs from an undisturbed one."""
    changed = _changed(base, other, since, noisy, sources)
    if difference is not None and difference.step:  # what differs later is of it
        changed = [each for each in changed if each.step <= difference.step]
    at_once = [each for each in changed if each.step == changed[0].step]
    causes = [*dict.fromkeys(_of_variable(each, sources) for each in at_once)][:3]
    if difference is None:
        return causes
    if causes:
        return causes
    if difference.what == "settings" and (
        decided := _decided_by_one(difference, base.steps_of, base.workers)
    ):
        return [decided]
    step = base.steps_of(difference.worker or 0).get(difference.step)
    if unprepared := _unprepared(base):
        return [unprepared]
    causes.extend(warnings_of(other))
    if difference.what == "samples" and (own_draws := _own_draws(base)):
        return [own_draws]
    if step is not None and step.left_over:
        causes.append(
            f"gradients of the steps before are left when backward() is called before {step.line}: call "
            "optimizer.zero_grad() in each step; a successor does not have them"
        )
    elif difference.what in ("losses", "gradients"):
        causes.append(
            "the successor computes something else from the same weights: state that its function carries from "
            "step to step, and that "
            f"steepest.register(...) does not have ({_STATE}), or draws of a generator of its own"
        )
    return causes


def _of_variable(changed: ChangedVariable, sources: dict[str, str]) -> str:
    before = changed.before
    function, variable = changed.name.split(":", 1)
    file = changed.line.rsplit(":", 1)[0]
    where = _assigned(sources.get(file, ""), function, variable)
    at = f"{file}:{where}" if where else changed.line
    if before.kind == "number":
        what = (
            f"`{variable}` ({at}) is {before.shown} there, and began anew in the successor, where it is "
            + changed.after.shown
        )
    elif before.kind == "generator":
        what = (
            f"`{variable}` ({at}), a random generator of the script's own, began anew in the successor: seed it "
            "in the loop by the epoch or the step, or"
        )
        return f"{what} give its state to steepest.register(...) ({_STATE})"
    else:
        kind = before.type_name
        article = "an" if kind[0] in "AEIOUaeiou" else "a"
        what = f"`{variable}` ({at}), {article} {kind}, went on in the others and began anew in the successor"
    if _is_scheduler(before.type_name):
        return f"{what}: give it to steepest.prepare(model, optimizer, scheduler, loader)"
    own = (
        ""
        if before.kind != "values"
        else (
            "; what each worker has by itself, as a hidden state or a game, is made anew from the epoch's or the "
            "batch's number"
        )
    )
    return f"{what}: give it to steepest.register(...) ({_STATE}){own}"


@lru_cache(maxsize=64)
def _loop_targets(source: str, function: str) -> frozenset[str]:
    loops = (node for node in ast.walk(_body(source, function)) if isinstance(node, ast.For))
    names = (n for loop in loops for n in ast.walk(loop.target) if isinstance(n, ast.Name))
    return frozenset(each.id for each in names)


def _body(source: str, function: str) -> ast.AST:
    """Return a function of a program, or all of it; nothing where it is no Python."""
    try:
        tree: ast.AST = ast.parse(source)
    except SyntaxError:
        return ast.Module([], [])
    named = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function]
    return named[0] if named else tree


def _is_scheduler(type_name: str) -> bool:
    return bool(re.search("LR$|Plateau$|Scheduler|Restarts$", type_name))


@lru_cache(maxsize=256)
def _assigned(source: str, function: str, variable: str) -> int:
    """Return the line in which a variable is last changed within a function; 0 where none is found."""
    tree = _body(source, function)
    last = variable.split(".")[-1]
    best = (-1, 0)
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.Assign | ast.AugAssign)):
        targets: list[ast.expr] = []
        rank = 0
        if isinstance(node, ast.AugAssign):
            targets, rank = [node.target], 2
        elif isinstance(node, ast.Assign):
            targets, rank = node.targets, 1 if not _is_first(node) else 0
        for target in (t for each in targets for t in ast.walk(each)):
            own = getattr(target, "id", getattr(target, "attr", None))
            if own == last and (rank, node.lineno) > best:
                best = (rank, node.lineno)
    return best[1]


def _is_first(node: ast.Assign) -> bool:
    return node.col_offset <= 4


# -- notes -----------------------------------------------------------------------------------------


def of_files(run: Run) -> list[str]:
    """Return which files several workers write."""
    by_path: dict[str, dict[int, str]] = {}
    for path, line, worker in run.notes("opened"):
        by_path.setdefault(path, {})[worker] = line
    return [
        f"{path} is written by {'all' if len(writers) == len(run.workers) else len(writers)} workers "
        f"({next(iter(writers.values()))}): write it by one, `if steepest.rank() == 0:`"
        for path, writers in sorted(by_path.items())
        if len(writers) > 1
    ]


def of_itself(one: Run, again: Run) -> str:
    """Return what makes two runs of one process differ."""
    names = sorted(noisy_variables(one, again), key=lambda name: len(name))
    first = (
        f", beginning with {', '.join(f'`{n.split(chr(58), 1)[1]}`' for n in names[:3])}"
        if names
        else ""
    )
    return (
        f"the script by itself does not do the same twice{first}: seed what it draws (torch, NumPy, random), and "
        f"make nothing depend "
        "on the time, on the order of a set, or on a file that a run before has left"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
