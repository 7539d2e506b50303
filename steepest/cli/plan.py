"""The command `steepest plan SCRIPT ...`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from steepest.cli import plan_tables
from steepest.cli.files import check_outputs, write_whole
from steepest.cli.planning.quantities import bandwidth_of, numbers_of, seconds_of, size_in_words
from steepest.cli.scripts import script_of, script_parser, strategy_names
from steepest.errors import ConfigurationError
from steepest.strategies.names import STRATEGY_NAMES

_BATCHES = 12
_WORKERS = "1,2,4,8,16,32,64"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    description = (
        "measure a script's model in this process, and predict how long a step would take with other numbers of "
        "workers, under each strategy, on links of a given speed; nothing is started"
    )
    in_short = "predict what more workers would bring a script"
    parser = script_parser(commands, "plan", in_short, description)
    parser.add_argument(
        "--workers",
        metavar="NUMBERS",
        help=f"each on a host of its own; default: {_WORKERS}, with --one-host up to twice its cores",
    )
    parser.add_argument(
        "--one-host",
        action="store_true",
        help="all processes share this machine and its cores, and there are no links",
    )
    parser.add_argument(
        "--bandwidth",
        default="10Gbit",
        metavar="SPEED",
        help="of each host's link, each way, such as 25Gbit, 100Mbit or 3GB/s; default: 10Gbit",
    )
    parser.add_argument(
        "--latency",
        default="50us",
        metavar="TIME",
        help="from one host to another, such as 50us or 20ms; default: 50us",
    )
    parser.add_argument(
        "--strategies",
        metavar="NAMES",
        help=f"of {', '.join(STRATEGY_NAMES)}, with commas between them; default: all but simple, and settings of "
        "local for slow links",
    )
    parser.add_argument(
        "--servers",
        type=int,
        metavar="N",
        help="server processes; default: one for each worker's host",
    )
    parser.add_argument(
        "--servers-apart", action="store_true", help="each server has a host of its own"
    )
    parser.add_argument(
        "--devices", type=int, default=1, metavar="N", help="replicas of each worker; default: 1"
    )
    parser.add_argument(
        "--batches", type=int, metavar="N", help=f"to be measured; default: {_BATCHES}"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, order of samples and random state"
    )
    parser.add_argument("--csv", metavar="FILE", help="write all rows, in SI units")
    plan_tables.add_options(parser)
    parser.set_defaults(call=run)


def run(options: argparse.Namespace) -> int:
    """Measure, and print the predictions; return the exit status."""
    workers = numbers_of("--workers", options.workers or _workers(options))
    if options.tables:
        return plan_tables.run(options, workers)
    if options.json is not None:
        raise ConfigurationError("--json is for --tables; --csv writes step times")
    options.batches = _BATCHES if options.batches is None else options.batches
    bandwidth_of(options.bandwidth)
    seconds_of(options.latency)
    names = None if options.strategies is None else strategy_names(options.strategies)
    for name in ("servers", "devices", "batches"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigurationError(f"--{name} {value}: give a number from 1 on")
    csv = None if options.csv is None else Path(options.csv)
    if csv is not None:
        if csv.suffix.lower() != ".csv":
            raise ConfigurationError(f"--csv {csv}: give a name that ends with .csv")
        check_outputs([csv])
    script = script_of(options)
    from steepest.cli.planning.forecast import as_text, in_words
    from steepest.cli.planning.plan import plan

    sys.stdout.write(f"measuring {script.path} on this process\n")
    sys.stdout.flush()
    forecast = plan(
        script,
        workers=workers,
        bandwidth=options.bandwidth,
        latency=options.latency,
        strategies=names,
        servers=options.servers,
        servers_apart=options.servers_apart,
        one_host=options.one_host,
        devices_per_worker=options.devices,
        batches=options.batches,
        seed=options.seed,
    )
    profile = forecast.profile
    sys.stdout.write(
        f"one process: {profile.samples} samples in {in_words(profile.alone)}, {forecast.alone:,.4g} samples/s; "
        f"{size_in_words(profile.nbytes)} are trained; {_where(options, forecast.cores)}\n\n"
    )
    if forecast.rows:
        sys.stdout.write(as_text(forecast.table()))
    sys.stdout.write("\n" + "".join(f"{line}\n" for line in forecast.advice()))
    if csv is not None:
        write_whole(csv, forecast.csv().encode())
        sys.stdout.write(f"{csv}\n")
    return 0 if forecast.rows else 1


def _workers(options: argparse.Namespace) -> str:
    """Return the numbers of workers that are planned where none are given."""
    if not options.one_host:
        return _WORKERS
    most = 2 * len(os.sched_getaffinity(0))
    return ",".join(str(2**power) for power in range(most.bit_length()) if 2**power <= most)


def _where(options: argparse.Namespace, cores: int | None) -> str:
    """Return where the workers are."""
    if cores is None:
        return f"links of {options.bandwidth}, {options.latency}"
    return f"all processes share this machine's {cores} core{'s' if cores > 1 else ''}"
