"""What a user chooses of a job of plain processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steepest.core.strategies.allreduce import AllreduceStrategy
from steepest.core.strategies.parameter_server import ParameterServerStrategy
from steepest.core.strategies.strategy import Strategy
from steepest.errors import ConfigurationError
from steepest.validation import require_choice, require_count, require_positive

STRATEGIES: dict[str, Strategy] = {
    "ps": ParameterServerStrategy(),
    "async": ParameterServerStrategy(mode="async"),
    "ssp": ParameterServerStrategy(mode="ssp"),
    "allreduce": AllreduceStrategy(),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a job of plain processes runs.

    Attributes:
        on_death: "replace" a worker's process that died by another one, "continue" with fewer
            workers, or "raise" PeerLostError.
        step_timeout: seconds within which a step is committed, or an answer comes.
        start_timeout: seconds within which processes start, make their models and connect.
        snapshot_every: steps between two copies of the state in the driver, where workers alone
            hold parts of it: under allreduce, and of models with buffers.
        threads: with which torch computes in each worker.
        device: "cpu", or "cuda" for models on GPUs, of which worker i has number i, counted round
            and round: two workers share the only one. Another kind of GPU by torch's name for it,
            where torch has that. Not yet run on one.

    Raises:
        ConfigurationError: a value is out of range.
    """

    on_death: str = "replace"
    step_timeout: float = 300.0
    start_timeout: float = 120.0
    snapshot_every: int = 20
    threads: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        require_choice("on_death", self.on_death, ("replace", "continue", "raise"))
        require_positive("step_timeout", self.step_timeout)
        require_positive("start_timeout", self.start_timeout)
        require_count("snapshot_every", self.snapshot_every)
        require_count("threads", self.threads)
        own = torch.accelerator.current_accelerator()
        kinds = ("cpu", "cuda") if own is None else tuple(dict.fromkeys(("cpu", "cuda", own.type)))
        require_choice("device", self.device, kinds)


def strategy_for(strategy: str | Strategy, num_workers: int) -> Strategy:
    """Return a strategy by its name, or as it is.

    Raises:
        ConfigurationError: plain processes have none such, or not for so many workers.
    """
    if isinstance(strategy, str):
        require_choice("strategy", strategy, tuple(STRATEGIES))
        return STRATEGIES[strategy]
    if not isinstance(strategy, (AllreduceStrategy, ParameterServerStrategy)):
        names = ", ".join(map(repr, STRATEGIES))
        raise ConfigurationError(
            f"strategy={strategy!r:.80}: give one of {names}, or an AllreduceStrategy(...) or "
            "ParameterServerStrategy(...)"
        )
    strategy.check_workers(num_workers)
    if strategy.transport not in ("wire", "tcp"):
        raise ConfigurationError(
            f'transport="{strategy.transport}": plain processes talk over TCP; give "tcp"'
        )
    return strategy
