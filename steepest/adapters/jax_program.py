"""The functions that JAX compiles for a `JaxModel`: a batch's loss, gradients and metrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from steepest.core.models.scalars import describe
from steepest.errors import ModelError

_OFFERED = ("rng", "state", "train")  # what a loss may have as keyword arguments

#: The loss, the metrics by name, the batch's weight (None for its number of samples), the new state.
Outcome = tuple[Any, dict[str, Any], Any, Any]


@dataclass(frozen=True, eq=False)
class JaxProgram:
    """A user's loss as compiled functions of arrays, which keep none of them."""

    loss: Callable[..., Any]  # the user's, see `steepest.adapters.jax.JaxModel`
    skeleton: Any  # a pytree like the parameters', whose leaves are their names
    # functions of (aux, batch) by name; None for the aux itself
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None
    weight: Callable[[Any], Any] | None  # function of the batch, or None
    stateful: bool  # whether the loss returns a new state
    # of (trained, frozen, state, batch, seed: two uint32) the `Outcome` and gradients, all by name
    gradients: Callable[..., tuple[Outcome, dict[str, Any]]] = field(init=False)
    # the same without gradients and randomness, in evaluation mode
    evaluation: Callable[..., Outcome] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gradients", jax.jit(self._gradients))
        object.__setattr__(self, "evaluation", jax.jit(self._evaluation))

    def _gradients(
        self, trained: Any, frozen: Any, state: Any, batch: Any, seed: Any
    ) -> tuple[Outcome, dict[str, Any]]:
        def objective(trained: Any) -> tuple[Any, Outcome]:
            outcome = self._run({**frozen, **trained}, state, batch, seed, True)
            return outcome[0], outcome

        (_, outcome), gradients = jax.value_and_grad(objective, has_aux=True)(trained)
        return outcome, gradients

    def _evaluation(self, trained: Any, frozen: Any, state: Any, batch: Any) -> Outcome:
        seed = jnp.zeros(2, "uint32")
        return self._run({**frozen, **trained}, state, batch, seed, False)

    def _run(self, values: Any, state: Any, batch: Any, seed: Any, train: bool) -> Outcome:
        params = jax.tree.map(lambda name: values[name], self.skeleton)
        offered: dict[str, Callable[[], Any]] = {
            "rng": lambda: jax.random.fold_in(jax.random.key(seed[0]), seed[1]),
            "state": lambda: state,
            "train": lambda: train,
        }
        wanted = {name: offered[name]() for name in wanted_by(self.loss)}
        loss, aux, after = self._parts(self.loss(params, batch, **wanted))
        if after is not None and train:
            _check_state(state, after)
            state = after
        weight = None if self.weight is None else self.weight(batch)
        return checked_loss(loss), self._found(aux, batch), weight, state

    def _parts(self, result: Any) -> tuple[Any, Any, Any]:
        parts = result if isinstance(result, tuple) else (result,)
        if len(parts) == 3 and self.stateful:
            return parts
        if len(parts) > 2 or self.stateful:
            forms = "(loss, aux, state)" if self.stateful else "the loss alone, or (loss, aux)"
            remedy = "" if self.stateful else "; for (loss, aux, state) give state= to JaxModel"
            raise ModelError(
                f"the loss function returned {len(parts)} values: return {forms}{remedy}"
            )
        return parts[0], parts[1] if len(parts) == 2 else None, None

    def _found(self, aux: Any, batch: Any) -> dict[str, Any]:
        """Return the metrics of a batch, narrow floating-point types widened."""
        measured = aux if isinstance(aux, Mapping) else {}
        if self.metrics is not None:
            measured = {name: metric(aux, batch) for name, metric in self.metrics.items()}
        for name, value in measured.items():
            number = isinstance(value, (int, float, np.generic, np.ndarray, jax.Array))
            if not isinstance(name, str) or not number or jnp.ndim(value):
                raise ModelError(
                    f"metric {name!r:.80} is {described(value)}: return a number by a string; "
                    "with metrics={} a loss may return any aux"
                )
        values = {name: jnp.asarray(value) for name, value in measured.items()}
        return {
            name: v.astype("float32") if v.dtype.itemsize < 4 and v.dtype.kind not in "bui" else v
            for name, v in values.items()
        }


def wanted_by(loss: Callable[..., Any]) -> list[str]:
    """Return the keyword arguments of a loss that a `JaxProgram` gives it."""
    try:
        parameters = inspect.signature(loss).parameters
    except ValueError:  # some functions in C have none
        return []
    return [name for name in _OFFERED if name in parameters]


def checked_loss(loss: Any) -> Any:
    """Return a loss as an array without dimensions; ModelError: it is not one real floating-point number."""
    array = isinstance(loss, jax.Array)
    if not array or loss.size != 1 or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ModelError(
            f"the loss is {described(loss)}: return the batch's mean as one real number, "
            "computed from the parameters"
        )
    return loss.reshape(())


def described(value: Any) -> str:
    """Return the type, and shape and dtype, of what was given instead of a number."""
    if isinstance(value, jax.Array):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    return describe(value)


def _check_state(before: Any, after: Any) -> None:
    """Check that a loss returned a state like the one that it was given; ModelError otherwise."""
    old, new = jax.tree.structure(before), jax.tree.structure(after)
    if old != new:
        raise ModelError(f"the loss was given a state {old}, and returned {new}: return the same")
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if (jnp.shape(a), a.dtype) != (jnp.shape(b), jnp.asarray(b).dtype):
            raise ModelError(
                f"the loss was given a state of shape {a.shape} and dtype {a.dtype}, and returned "
                f"{described(b)}: return the same"
            )
