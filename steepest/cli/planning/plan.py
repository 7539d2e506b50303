"""`plan`: predict a model's speed with other strategies and numbers of workers, from a measurement on one process."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from steepest.cli.planning.events import Links
from steepest.cli.planning.forecast import Forecast
from steepest.cli.planning.measuring import measure
from steepest.cli.planning.profile import Profile
from steepest.cli.planning.quantities import bandwidth_of, seconds_of
from steepest.cli.planning.simulation import Prediction, predict
from steepest.core.strategies.strategy import Strategy
from steepest.errors import ConfigurationError
from steepest.loop.job_view import LoopKind
from steepest.loop.model import LoopCreator
from steepest.strategies.local import LocalStrategy
from steepest.strategies.named import as_strategy
from steepest.validation import require_choice, require_count

#: What is planned where nothing else is asked for.
STRATEGIES = ("ps", "allreduce", "async", "ssp", "local")
WORKERS = (1, 2, 4, 8, 16, 32, 64)
_EVERY, _FRAGMENTS, _DELAY = 100, 4, 20


def plan(  # noqa: PLR0913 - keywords of a user, most of them optional
    function: Callable[..., Any] | Profile,
    *,
    workers: Sequence[int] = WORKERS,
    bandwidth: str | float = "10Gbit",
    latency: str | float = "50us",
    strategies: Sequence[str | Strategy] | Mapping[str, str | Strategy] | None = None,
    servers: int | None = None,
    servers_apart: bool = False,
    one_host: bool = False,
    devices_per_worker: int = 1,
    batches: int = 12,
    seed: int = 0,
) -> Forecast:
    """Predict step times and samples a second of a model, for several strategies and numbers of workers.

    The model is measured on this process, then a few steps of each job are taken on virtual time, with the
    library's own coordinator and topology; see `docs/howto/plan.md`. Nothing is started.

    Args:
        function: a function without arguments as of `run`; a `model_creator` of two arguments as of
            `DistributedSGD`; or a `steepest.cli.planning.profile.Profile`, of which nothing is measured.
        workers: numbers of workers, each on a host of its own.
        bandwidth: of each host's link, each way: text such as "25Gbit", or bits a second.
        latency: from one host to another: text such as "50us", or seconds.
        strategies: names or strategies; a mapping gives them names of one's own. None for "ps", "allreduce",
            "async", "ssp" and "local", and, between hosts, settings of `LocalStrategy` for slow links.
        servers: processes, of strategies that have them; None for one for each worker's host.
        servers_apart: whether each server has a host of its own, rather than a worker's.
        one_host: whether all processes share this machine and its cores, so that there are no links.
        devices_per_worker: replicas of each worker, which compute at the same time.
        batches: to be measured.
        seed: of the measured job.

    Returns:
        The predictions, row by row. A strategy that cannot be had with this model or number of workers is in
        `refused`.

    Raises:
        ConfigurationError: an argument is wrong, or the model cannot be built.
        ModelRaisedError: the model raised while it was measured.

    Example:
        >>> forecast = steepest.plan(train, workers=[1, 2, 4, 8], bandwidth="1Gbit")     # doctest: +SKIP
        >>> forecast.best(8).strategy                                                    # doctest: +SKIP
        'local 100/4'
    """
    links = Links(bandwidth_of(bandwidth), seconds_of(latency))
    counts = sorted({require_count("workers", each) for each in workers})
    if not counts:
        raise ConfigurationError("workers=[]: give at least one number of workers")
    if servers is not None:
        require_count("servers", servers)
    require_choice("servers_apart", servers_apart, (False, True))
    require_choice("one_host", one_host, (False, True))
    if one_host and servers_apart:
        raise ConfigurationError("one_host=True with servers_apart=True: leave one of them out")
    cores = len(os.sched_getaffinity(0)) if one_host else None
    require_count("devices_per_worker", devices_per_worker)
    require_count("batches", batches)
    chosen = None if strategies is None else _named(strategies)
    profile = (
        function
        if isinstance(function, Profile)
        else measure(creator_of(function, seed), batches=batches, seed=seed)
    )
    if chosen is None:
        chosen = _named(STRATEGIES) | ({} if one_host else for_slow_links(profile))
    rows: list[Prediction] = []
    refused: list[tuple[str, str]] = []
    for name, strategy in chosen.items():
        try:
            predicted = _rows(
                profile,
                strategy,
                counts,
                links,
                servers,
                apart=servers_apart,
                devices=devices_per_worker,
                cores=cores,
            )
            rows += [replace(row, strategy=name) for row in predicted]
        except ConfigurationError as error:
            refused.append((name, f"not predicted: {error}"))
    return Forecast(profile, links, tuple(rows), tuple(refused), devices_per_worker, cores)


def _rows(
    profile: Profile,
    strategy: Strategy,
    counts: Sequence[int],
    links: Links,
    servers: int | None,
    *,
    apart: bool,
    devices: int,
    cores: int | None,
) -> Iterator[Prediction]:
    for count in counts:
        own = servers
        if own is None and strategy.has_servers and not strategy.in_workers and strategy.local:
            own = (
                1 if cores else count
            )  # a setting that these strategies need: one on each host, as "ps" has it
        yield predict(
            profile, strategy, count, links, own, apart=apart, devices=devices, cores=cores
        )


def for_slow_links(profile: Profile) -> dict[str, Strategy]:
    """Return settings of local SGD that use a link less and less, by a name that says how."""
    whole = LocalStrategy(sync_every=_EVERY)
    strategies: dict[str, Strategy] = {f"local {_EVERY}": whole}
    layout = profile.layout(whole.cut)
    name, parts = f"local {_EVERY}", whole
    if sum(entry.trainable for entry in layout.entries) >= 2 * _FRAGMENTS:
        delay = 0 if profile.own_loop else _DELAY
        name = f"local {_EVERY}/{_FRAGMENTS}" + (f" delay {delay}" if delay else "")
        strategies[name] = parts = replace(whole, fragments=_FRAGMENTS, delay=delay)
    # compressed both ways, by servers: without them each worker would send its changes to each other one
    packed = replace(parts, compression="int4", weights_compression="int4", num_servers=1)
    strategies[f"{name} int4"] = packed
    return strategies


def _named(
    strategies: Sequence[str | Strategy] | Mapping[str, str | Strategy],
) -> dict[str, Strategy]:
    """Return strategies by name, each once."""
    if isinstance(strategies, Mapping):
        return {name: as_strategy(strategy) for name, strategy in strategies.items()}
    if isinstance(strategies, str | Strategy):
        strategies = [strategies]
    by_name: dict[str, Strategy] = {}
    for each in strategies:
        strategy = as_strategy(each)
        name, number = strategy.name, 2
        while name in by_name and by_name[name] != strategy:
            name, number = f"{strategy.name} {number}", number + 1
        by_name[name] = strategy
    if not by_name:
        raise ConfigurationError("strategies=[]: give at least one, such as 'ps'")
    return by_name


def creator_of(function: Callable[..., Any], seed: int) -> Any:
    """Return what makes a worker's model, from a function without arguments or a `model_creator`."""
    if not callable(function):
        raise ConfigurationError(
            f"steepest.plan() was given {function!r:.200}: give a function without arguments that trains, a "
            "model_creator(worker_index, device_index), or a Profile"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a callable without a signature
        return LoopCreator(function, LoopKind(seed))
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return LoopCreator(function, LoopKind(seed)) if not needed else function
