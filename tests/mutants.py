"""Measure what the tests protect: change one small thing of the core at a time, and see whether a test fails.

    python tests/mutants.py --count 100 --seed 14 --results mutants.json      (or: make mutants)

A mutant is the package with one operator, constant, condition or statement changed. It is killed
when a test fails, and has survived when all pass. Mutants are drawn from the seed alone, so two
versions of the tests are compared on the same mutants, with `--package` naming the same modules for
both. Results are kept as they come, and a run that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGETS = (
    "core/protocol/coordinator", "core/protocol/job_coordinator", "core/engine/server", "core/engine/server_chunk",
    "core/engine/push_intake", "core/engine/outgoing_weights", "core/protocol/worker_steps",
    "core/protocol/push_tracking", "core/data/sampler", "checkpoint/files",
)  # fmt: skip
#: tests that are likely to notice come first, so that most mutants cost seconds
DECIDING = [
    "coordinator",
    "leftovers",
    "commit_rules",
    "modes",
    "worker_replacement",
    "fault_scripts",
    "pushes",
]
FIRST = {
    "core/protocol/coordinator": DECIDING,
    "core/protocol/job_coordinator": DECIDING,
    "core/engine/server": [
        "server",
        "pushes",
        "modes",
        "snapshots",
        "weight_buffers",
        "precision",
        "fault_scripts",
        "step_messages",
        "table_jobs",
        "host_aggregator",
        "compression",
    ],
    "core/engine/outgoing_weights": [
        "server",
        "weight_buffers",
        "snapshots",
        "precision",
        "modes",
        "table_exports",
    ],
    "core/engine/push_intake": ["server", "pushes", "modes", "clip", "permissions", "replication"],
    "core/protocol/worker_steps": ["worker_steps", "modes", "fragments", "leftovers"],
    "core/engine/server_chunk": [
        "pushes",
        "clip",
        "optimizer",
        "modes",
        "one_copy",
        "precision",
        "permissions",
        "unusual_optimizers",
        "unfreezing",
        "loading_ahead",
    ],
    "core/protocol/push_tracking": [
        "commit_rules",
        "pushes",
        "coordinator",
        "modes",
        "clip",
        "fault_scripts",
    ],
    "core/data/sampler": ["sampler", "leftovers", "sources", "worker_replacement"],
    "checkpoint/files": [
        "checkpoint",
        "leftovers",
        "checkpoint_manager",
        "damage",
        "other_data",
        "table_checkpoints",
    ],
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield each small change of one node: what it is, and the node in its place."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            new.ops = [COMPARISONS[type(op)]()]
            yield f"{type(op).__name__} becomes {type(new.ops[0]).__name__}", new
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            new.op = ARITHMETIC[type(op)]()
            yield f"{type(op).__name__} becomes {type(new.op).__name__}", new
        case ast.BoolOp(op=op):
            new.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield f"{type(op).__name__} becomes {type(new.op).__name__}", new
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not is dropped", operand
        case ast.Constant(value=bool() as value):
            new.value = not value
            yield f"{value} becomes {not value}", new
        case ast.Constant(value=int() as value):
            new.value = value + 1
            yield f"{value} becomes {value + 1}", new
        case ast.Name(id="min" | "max" as name):
            new.id = "max" if name == "min" else "min"
            yield f"{name} becomes {new.id}", new
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "the statement is dropped", ast.copy_location(ast.Pass(), node)
        case ast.If(test=test):
            new.test = ast.copy_location(ast.Constant(False), test)
            yield "the condition never holds", new


def mutants(source: str) -> list[tuple[str, str]]:
    """Return every mutant of a module: its description with the line, and its source."""
    tree = ast.parse(source)
    found = []
    types = [
        getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")
    ]
    kept = {id(node) for part in types if part is not None for node in ast.walk(part)}
    for parent in ast.walk(tree):
        if isinstance(parent, ast.Raise) or id(parent) in kept:
            continue  # wording of errors, and types
        for name, value in ast.iter_fields(parent):
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(child, ast.stmt | ast.expr) or name in (
                    "annotation",
                    "returns",
                    "decorator_list",
                ):
                    continue
                for what, new in changes(child):
                    _put(parent, name, index, new)
                    found.append((f"{child.lineno}: {what}", ast.unparse(tree)))
                    _put(parent, name, index, child)
    return found


def _put(parent: ast.AST, name: str, index: int, node: ast.AST) -> None:
    value = getattr(parent, name)
    if isinstance(value, list):
        value[index] = node
    else:
        setattr(parent, name, node)


def draw(count: int, seed: int, package: Path) -> list[tuple[str, str, str]]:
    """Return a random sample of mutants of all targets: target, description, source."""
    found = []
    for target in TARGETS:
        found += [(target, *mutant) for mutant in mutants((package / f"{target}.py").read_text())]
    return random.Random(seed).sample(found, count)


def survives(root: Path, target: str, source: str, marks: str, seconds: int, *, quick: bool) -> str:
    """Run the tests on one mutant; return "survived", or what killed it: the line of a failed test, or its time.

    Args:
        root: of the checkout whose tests and package are used.
        marks: which tests are run, as pytest's `-m` has it.
        seconds: of processor time for each half of the tests, more than they take: who needs more
            hangs.
        quick: run the likely half alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "checkout"
        shutil.copytree(
            root,
            copied,
            ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "wt"),
        )
        (copied / "steepest" / f"{target}.py").write_text(source)
        tests = {path.stem: path for path in (copied / "tests").glob("*/test_*.py")}
        first = [f"test_{name}" for name in FIRST[target] if f"test_{name}" in tests]
        for chosen in (first, [] if quick else sorted(set(tests) - set(first))):
            if not chosen:
                continue
            killer = _killer(
                copied, [str(tests[name].relative_to(copied)) for name in chosen], marks, seconds
            )
            if killer is not None:
                return killer
    return "survived"


def _killer(checkout: Path, files: list[str], marks: str, seconds: int) -> str | None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-m", marks, "-p", "no:cacheprovider", *files],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds)),
    )
    if done.returncode in (-signal.SIGKILL, -signal.SIGXCPU):
        return f"more than {seconds} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (lines or done.stdout.splitlines()[-1:] or ["no output"])[0][:200]


def main() -> None:
    """Draw mutants, run the tests on each, and print and keep what became of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument(
        "--seconds", type=int, default=900, help="of processor time for each half of the tests"
    )
    parser.add_argument(
        "--quick", action="store_true", help="run only the tests that are likely to notice"
    )
    parser.add_argument(
        "--marks", default="not ray and not cluster and not long and not full", help="of the tests"
    )
    parser.add_argument("--package", type=Path, default=ROOT / "steepest", help="what is mutated")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose tests are run")
    parser.add_argument("--results", type=Path, default=Path("mutants.json"))
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    for number, (target, what, source) in enumerate(
        draw(options.count, options.seed, options.package)
    ):
        name = f"{number} {target}.py:{what}"
        if name not in results:
            results[name] = survives(
                options.root, target, source, options.marks, options.seconds, quick=options.quick
            )
            options.results.write_text(json.dumps(results, indent=1))
            print(f"{name}: {results[name]}", flush=True)
    killed = sum(outcome != "survived" for outcome in results.values())
    print(f"{killed} of {len(results)} mutants killed")


if __name__ == "__main__":
    main()
