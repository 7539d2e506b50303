"""Strategies and run settings: frozen, validated when made; the only reader of environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from numbers import Integral

from steepest.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class SimpleStrategy:
    """Gradients averaged centrally on the driver, through Ray's object store: the reference."""

    name = "simple"


@dataclass(frozen=True, kw_only=True)
class ParameterServerStrategy:
    """Synchronous parameter server: servers average all workers' gradients, then apply the optimizer once.

    Attributes:
        num_servers: server processes; by default one for each node that has workers.
        chunk_bytes: size of a chunk; by default 1 to 4 MB by the size of the model.

    Raises:
        ConfigurationError: a value out of range.
    """

    name = "ps"
    num_servers: int | None = None
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                require_count(field.name, value)


StrategyConfig = SimpleStrategy | ParameterServerStrategy
_BY_NAME: dict[str, type[SimpleStrategy] | type[ParameterServerStrategy]] = {
    "simple": SimpleStrategy,
    "ps": ParameterServerStrategy,
}
STRATEGY_NAMES = tuple(_BY_NAME)


def as_strategy(strategy: str | StrategyConfig) -> StrategyConfig:
    """A strategy's settings from its name, or as given.

    Raises:
        ConfigurationError: no strategy of that name.
    """
    if isinstance(strategy, (SimpleStrategy, ParameterServerStrategy)):
        return strategy
    if not isinstance(strategy, str) or strategy not in _BY_NAME:
        names = ", ".join(repr(name) for name in STRATEGY_NAMES)
        raise ConfigurationError(
            f"strategy={strategy!r}: give one of {names}, or SimpleStrategy(...), ParameterServerStrategy(...)"
        )
    return _BY_NAME[strategy]()


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How processes are run; the defaults suit most.

    Attributes:
        cpus_per_worker: CPUs reserved for each worker, and torch threads in it.
        start_timeout: seconds within which the cluster must place all processes and these must be up.
        step_timeout: seconds after which a step that does not commit is given up with an error.
        call_timeout: seconds after which `evaluate`, `warmup` and the `foreach_` functions are.

    Raises:
        ConfigurationError: a value out of range.
    """

    cpus_per_worker: int = 1
    start_timeout: float = 30.0
    step_timeout: float = 300.0
    call_timeout: float = 3600.0

    def __post_init__(self) -> None:
        require_count("cpus_per_worker", self.cpus_per_worker)
        for name in ("start_timeout", "step_timeout", "call_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigurationError(f"{name}={value!r}: give a positive number of seconds")


def require_count(name: str, value: object, least: int = 1) -> int:
    """An integer (NumPy's too) of at least `least`.

    Raises:
        ConfigurationError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ConfigurationError(f"{name}={value!r}: give an integer of at least {least}")
    return int(value)


def cluster_address() -> str | None:
    """The running Ray cluster named by RAY_ADDRESS, or None when it is not set."""
    return os.environ.get("RAY_ADDRESS") or None
