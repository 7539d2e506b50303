"""`steepest plan SCRIPT --tables`: what embedding tables will need, from a sample of their ids."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steepest.cli.files import write_whole
from steepest.cli.scripts import script_of
from steepest.errors import ConfigurationError

_OPTIMIZERS = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "FTRL")
_EVICTIONS = ("LRU", "LFU")
_BATCHES = 200


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of plans of tables."""
    group = parser.add_argument_group(
        "embedding tables, of a script or of a file of ids (.npz with an array for each table, .npy, or .txt)"
    )
    group.add_argument(
        "--tables",
        action="store_true",
        help=f"predict rows, memory, servers and disk instead; --batches is {_BATCHES} then",
    )
    group.add_argument(
        "--samples",
        type=float,
        metavar="N",
        help="of the whole data; of a file of ids, ids; default: as many as the script's data, or the file, have",
    )
    group.add_argument(
        "--memory", default="16GB", metavar="BYTES", help="of each server, for rows; default: 16GB"
    )
    group.add_argument(
        "--dim", type=int, default=16, metavar="N", help="of a file's tables; default: 16"
    )
    group.add_argument(
        "--optimizer",
        default="Adagrad",
        metavar="NAME",
        help=f"of a file's tables: {', '.join(_OPTIMIZERS)}; default: Adagrad",
    )
    group.add_argument(
        "--dtype", default="float32", metavar="NAME", help="of a file's tables; default: float32"
    )
    group.add_argument(
        "--capacity", type=int, metavar="N", help="of a file's tables, in rows; default: none"
    )
    group.add_argument(
        "--eviction",
        choices=_EVICTIONS,
        help="of a file's tables, if they have a --capacity; default: none",
    )
    group.add_argument(
        "--checkpoint",
        metavar="PATH",
        help="tell which of its rows the tables would remove, in place of the sample's",
    )
    group.add_argument(
        "--json", metavar="FILE", help="write it as JSON; - for standard output alone"
    )


def run(options: argparse.Namespace, workers: Sequence[int]) -> int:
    """Print the predictions for embedding tables, and of steps with numbers of workers; return the exit status."""
    path = None if options.json in (None, "-") else Path(options.json)
    if path is not None and not path.parent.is_dir():
        raise ConfigurationError(
            f"--json {path}: {path.parent} is no directory: make it, or give another path"
        )
    from steepest.cli.planning.forecast import as_text
    from steepest.cli.planning.id_samples import is_sample, samples_in
    from steepest.cli.planning.quantities import bytes_of
    from steepest.cli.planning.table_plan import of_samples, plan_tables

    source = Path(options.script)
    if is_sample(source):
        parts = samples_in(source, _described(options))
        memory = bytes_of(options.memory)
        plan = of_samples(parts, None, options.samples, memory, options.checkpoint)
    else:
        script = script_of(options)
        if options.json != "-":
            sys.stdout.write(f"counting the ids of {script.path} on this process\n")
            sys.stdout.flush()
        plan = plan_tables(
            script,
            samples=options.samples,
            memory=options.memory,
            batches=_BATCHES if options.batches is None else options.batches,
            seed=options.seed,
            checkpoint=options.checkpoint,
            workers=workers,
            servers=options.servers,
            bandwidth=options.bandwidth,
            latency=options.latency,
            one_host=options.one_host,
        )
    if options.json == "-":
        sys.stdout.write(plan.as_json())
        return 0
    sys.stdout.write(as_text(plan.table()) + "\n" + as_text(plan.hit_table()) + "\n")
    if len(removed := plan.eviction_table()) > 1:
        sys.stdout.write(as_text(removed) + "\n")
    if plan.steps:
        sys.stdout.write(as_text(plan.step_table()) + "\n")
    sys.stdout.write("".join(f"{line}\n" for line in plan.advice()))
    if path is not None:
        write_whole(path, plan.as_json().encode())
        sys.stdout.write(f"{path}\n")
    return 0


def _described(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `Table` for the tables of a file."""
    from steepest import tables

    if options.optimizer not in _OPTIMIZERS:
        raise ConfigurationError(
            f"--optimizer {options.optimizer}: give one of {', '.join(_OPTIMIZERS)}"
        )
    optimizer = getattr(tables, options.optimizer)()
    eviction = None if options.eviction is None else getattr(tables, options.eviction)()
    return {
        "dim": options.dim,
        "optimizer": optimizer,
        "dtype": options.dtype,
        "capacity": options.capacity,
        "eviction": eviction,
    }
