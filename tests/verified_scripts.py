"""Scripts that `steepest verify` is given, and the page with what it finds: `python -m tests.verified_scripts`."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from steepest.loop.script import UserScript
from steepest.testing import VerifiedRun, VerifyReport, verify
from tests.page_examples import ROOT, blocks_of

PAGE = ROOT / "docs" / "explanation" / "what_equals_what.md"
STEPS, WORKERS = 6, 2
_PAGES = (
    "README.md",
    "docs/howto/own_loop.md",
    "docs/howto/from_pytorch.md",
    "docs/howto/from_ddp.md",
    "docs/howto/from_horovod.md",
    "docs/howto/from_ray_train.md",
)
_EXAMPLES = {
    "own_loop_digits.py": ("--epochs", "2"),
    "own_loop_gan.py": ("--epochs", "2"),
    "own_loop_text.py": ("--steps", "20"),
    "reinforce.py": ("--rounds", "20", "--games", "8"),
}
#: Those that give a model creator to the trainer.
_JOBS = {
    "a9a_logistic_regression.py": (),
    "a9a_sparse.py": (),
    "character_transformer.py": (),
    "detection.py": (),
    "gan.py": (),
    "mnist_parameter_server.py": (),
    "own_model.py": (),
    "resnet101.py": ("--small",),
    "serve_top10.py": (),
    "wide_and_deep.py": (),
}
_BEGIN = """# What equals what

`python -m tests.verified_scripts` writes this table. It shows what [`steepest verify`](../howto/verify.md) finds for
the examples with their own loop, for the loops on these pages, and for the kinds of loops in the tests. Each loop takes
{steps} steps on {workers} workers. A test compares each line with a new result.

| script | one process | {workers} workers | a worker killed | stopped, resumed |
|---|---|---|---|---|
"""
_END = """
**equal**: on one worker what the plain script computes, on {workers} what one does, to rounding. **bits**: as if
nothing had happened. **as expected**: a batch's result depends on how it is divided, by what stands behind the colon;
when random numbers are drawn by sample, without dropout, all is equal. **not compared**: each worker makes data of its
own.
"""


def _same(script: Any) -> Any:
    return script


def scripts(folder: Path) -> Iterator[tuple[str, Callable[[], Callable[..., Any]]]]:
    """Yield a name, as the page has it, and what returns what `verify` is given; blocks go to a folder."""
    for name, arguments in _EXAMPLES.items():
        path = str(ROOT / "examples" / name)
        yield f"`examples/{name}`", partial(UserScript.read, path, arguments)
    for name, given in _JOBS.items():
        yield f"`examples/{name}`", partial(_creator_of, name, given)
    for page in _PAGES:
        blocks = [each for each in blocks_of(page) if _is_program(each)]
        for number, block in enumerate(blocks):
            path = folder / f"{Path(page).stem}_{number}.py"
            path.write_text(block)
            link = f"[{Path(page).name}]({os.path.relpath(ROOT / page, PAGE.parent)})"
            yield f"the loop of {link}", partial(UserScript.read, str(path))
    from tests.own_loops import ALIKE

    for name, script in ALIKE.items():
        yield f"a loop with {name}", partial(_same, script)


class _CreatorFoundError(Exception):
    """Carries the model creator that an example gives to the trainer."""


def _creator_of(name: str, arguments: Sequence[str]) -> Callable[[int, int], Any]:
    """Return the model creator of an example."""

    def found(creator: Callable[[int, int], Any], *_: Any, **__: Any) -> None:
        raise _CreatorFoundError(creator)

    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)  # where its classes are found in other processes
    module = importlib.import_module(name.removesuffix(".py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "DistributedSGD", found)
        with pytest.raises(_CreatorFoundError) as raised:
            module.main(arguments)
    creator: Callable[[int, int], Any] = raised.value.args[0]
    return creator


def _is_program(block: str) -> bool:
    return "import steepest" in block and "steepest.prepare(" in block


def row(name: str, found: VerifyReport) -> str:
    """Return the line of the page's table for a script."""
    if len(found.rows) < 4:
        return f"| {name} | {'; '.join(map(_in_short, found.rows))} | | | |"
    one, several, *deaths, stop = found.rows
    killed = {_in_short(each) for each in deaths}
    cells = [name, _in_short(one), _in_short(several), "; ".join(sorted(killed)), _in_short(stop)]
    return f"| {' | '.join(cells)} |"


def _in_short(run: VerifiedRun) -> str:
    if run.verdict == "equal" and run.found.startswith("bits"):
        return "bits"
    cause = run.causes[0] if run.causes else run.found
    if "draws random numbers" in cause:
        cause = "random numbers"
    cause = cause.split(": ")[0].split(" (")[0]
    return run.verdict if run.verdict in ("equal", "not compared") else f"{run.verdict}: {cause}"


def page(rows: dict[str, str]) -> str:
    """Return the text of the page."""
    facts = {"steps": STEPS, "workers": WORKERS}
    return _BEGIN.format(**facts) + "\n".join(rows.values()) + "\n" + _END.format(**facts)


def lines_of_page() -> dict[str, str]:
    """Return the lines of the page's table, by their first cell."""
    text = PAGE.read_text() if PAGE.exists() else ""
    found = [each for each in text.splitlines() if each.startswith("| ")]
    return {each.split(" | ")[0].removeprefix("| "): each for each in found[1:]}


def main() -> None:
    """Verify all scripts, or those whose names have one of the arguments in them, and write the page."""
    rows, kept = {}, lines_of_page()
    with tempfile.TemporaryDirectory() as folder:
        for name, script in scripts(Path(folder)):
            if len(sys.argv) > 1 and not any(each in name for each in sys.argv[1:]):
                rows[name] = kept[name]
                continue
            found = verify(script(), steps=STEPS, num_workers=WORKERS)
            rows[name] = row(name, found)
            sys.stdout.write(f"{rows[name]}\n" + (f"{found}\n" if not found.is_equal else ""))
            sys.stdout.flush()
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
