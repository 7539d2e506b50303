"""A user's own loop as a model: the engine's shares go to the loop, and its gradients to the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from steepest.errors import ConfigurationError, ModelError
from steepest.loop.session import Batch, Progress, Session
from steepest.models.protocol import Arrive, Computed, Ready, Where, all_here
from steepest.models.step_size import step_size
from steepest.models.torch import TorchModel


class LoopModel(TorchModel):
    """The replica of a worker whose user trains in a loop of their own.

    Args:
        session: in which the user's function runs, in `prepare`.
        module, optimizer, loader: that it has given there.

    Attributes:
        hyper: of the last step, see `steepest.models.protocol.Model`.
    """

    def __init__(
        self,
        session: Session,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
    ) -> None:
        super().__init__(module, data=loader, optimizer=lambda _: optimizer)
        self.session = session
        self._where = Where(0, 0, 0)
        if self.tables:
            raise ConfigurationError(
                "embedding tables (steepest.Embedding) in a loop of your own are not supported yet: train them with "
                "DistributedSGD and TorchModel"
            )
        if self.data.size is None:
            raise ConfigurationError(
                "steepest.prepare() was given a loader over data without a length, whose epochs cannot be counted: "
                "give one over a map-style dataset"
            )

    def is_trained(self, name: str) -> bool:
        """Return whether a parameter is trained."""
        return name in self._trainable

    @property
    def hyper(self) -> list[dict[str, Any]] | None:
        """The hyperparameters of the last step that differ from those in `prepare`, by group."""
        return self.session.hyper

    def take_place(self, where: Where, replica: int, replicas: int) -> None:
        """Note the place of the next batch, and which of the workers this is."""
        self._where = where
        self.session.rank, self.session.size = replica, replicas

    def _follow(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Leave gradients where the user's own backward passes put them."""

    def compute_gradients(
        self, batch: Any, ready: Ready, metrics: bool, arrive: Arrive = all_here
    ) -> Computed:
        """Let the user's loop go on with a batch up to its `optimizer.step()`, and take the gradients.

        See `steepest.models.protocol.Model.compute_gradients`. Where it takes no step there is no gradient: an update
        in which no worker has one changes nothing.
        """
        arrive(None)
        assert self._share is not None
        session, samples = self.session, self._share.samples
        with self._writes.refused():
            stepped = session.compute(Batch(self._to_device(batch), self._where, samples))
        self._weight = session.weight if stepped else 0.0
        for index, entry in enumerate(self.layout.entries):
            if entry.trainable:
                parameter, view = self._parameters[entry.name], self._gradients[entry.name]
                if not stepped or parameter.grad is None:
                    view.zero_()
                    ready(index, self._weight, False)
                else:
                    self._write(index, parameter, parameter.grad, view, ready)
        found, session.fresh = session.fresh if metrics else {}, {}
        return Computed(
            float(session.loss), self._weight, 0 if session.has_ended else samples, found
        )

    def advance(self, epoch: int) -> Progress:
        """Let the user's function go on between two steps, see `Session.advance`."""
        return self.session.advance(epoch)

    def look_ahead(self, batch: Any) -> None:
        """Look at nothing: only the loop knows what it does with a batch."""

    def evaluate(self, batch: Any) -> NoReturn:
        """Refuse: only the loop knows how its model is evaluated."""
        raise ModelError(
            "evaluate() with a loop of your own: evaluate in the loop, on batches of a second loader"
        )


@dataclass(frozen=True)
class LoopCreator:
    """Makes the model of each worker, by running the user's function up to `prepare`.

    Args:
        function: the user's.
    """

    function: Callable[[], Any]

    def __call__(self, worker_index: int, device_index: int) -> LoopModel:
        """Begin the function in a worker's process; see `steepest.engine.job.ModelCreator`."""
        model: LoopModel = Session(self.function, worker_index, step_size().batches).begin()
        return model
