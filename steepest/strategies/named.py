"""Strategies by name, and checked for a number of workers."""

from __future__ import annotations

import re
from dataclasses import fields

from steepest.core.config.job import JobConfig
from steepest.core.strategies.strategy import Strategy
from steepest.errors import ConfigurationError
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.local import LocalStrategy
from steepest.strategies.names import STRATEGY_NAMES
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.strategies.simple import SimpleStrategy

#: In the order of `STRATEGY_NAMES`.
_BY_NAME: dict[str, Strategy] = {
    "simple": SimpleStrategy(),
    "ps": ParameterServerStrategy(),
    "allreduce": AllreduceStrategy(),
    "local": LocalStrategy(),
    "async": ParameterServerStrategy(mode="async"),
    "ssp": ParameterServerStrategy(mode="ssp"),
}


def as_strategy(strategy: str | Strategy) -> Strategy:
    """Return the strategy with default settings that has this name; a strategy object as it is.

    Case, hyphens, underscores and spaces in a name do not matter.

    Raises:
        ConfigurationError: there is no strategy of that name.
    """
    if isinstance(strategy, Strategy):
        return strategy
    name = re.sub("[-_ ]", "", strategy).lower() if isinstance(strategy, str) else None
    if name not in _BY_NAME:
        names = ", ".join(repr(name) for name in STRATEGY_NAMES)
        raise ConfigurationError(
            f"strategy={strategy!r}: give one of {names}, or SimpleStrategy(...), "
            "ParameterServerStrategy(...), AllreduceStrategy(...), LocalStrategy(...), or a "
            "Strategy of your own"
        )
    return _BY_NAME[name]


def renewed(strategy: Strategy) -> Strategy:
    """Return a strategy pickled as the core's class as an instance of the class with all settings."""
    for now in (ParameterServerStrategy, AllreduceStrategy):
        settings = {each.name for each in fields(now)}
        if type(strategy) is now.__mro__[2] and "table_staleness" in vars(strategy):
            return now(**{name: own for name, own in vars(strategy).items() if name in settings})
    return strategy


def strategy_for(
    strategy: str | Strategy, num_workers: int, chosen: JobConfig | None = None
) -> Strategy:
    """Return the strategy of `as_strategy`, checked for a job of `num_workers` workers.

    Args:
        strategy: a name or a strategy object.
        num_workers: the number of workers, at least 1.
        chosen: the job's settings; the defaults if none are given.

    Raises:
        ConfigurationError: there is no such strategy, or the number of workers or
            `global_batch_size` does not go with it.
    """
    config, chosen = as_strategy(strategy), chosen or JobConfig()
    size = chosen.global_batch_size
    config.check_workers(num_workers)
    if size is None:
        return config
    if config.rule.versions_per_step(2) > 1:
        raise ConfigurationError(
            f"global_batch_size={size} under {config.name!r}: each worker's gradient is an "
            "update by itself, of devices_per_worker * accumulate * batch_size samples "
            "however many workers there are; leave global_batch_size out"
        )
    batches = num_workers * chosen.devices_per_worker * chosen.accumulate
    if size < batches:
        raise ConfigurationError(
            f"global_batch_size={size} with num_workers={num_workers}, devices_per_worker="
            f"{chosen.devices_per_worker} and accumulate={chosen.accumulate}: these compute "
            f"{batches} batches, and each needs a sample; give a greater global_batch_size, or "
            "fewer workers"
        )
    return config
