"""Optax's lookahead for parameters that are no `optax.LookaheadParams`: the slow ones are state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax


class SyncedState(NamedTuple):
    """The state of a transformation with lookahead, and the slow parameters."""

    slow: Any
    inner: Any


class Synced:
    """A transformation of the fast parameters of another one, which updates `optax.LookaheadParams`."""

    # Zhang et al. 2019, Lookahead Optimizer: k steps forward, 1 step back, arXiv:1907.08610.

    def __init__(self, transformation: Any) -> None:
        self._transformation = transformation

    def init(self, params: Any) -> SyncedState:
        """Return the first state, in which slow parameters are equal to the fast ones."""
        from optax import LookaheadParams

        return SyncedState(params, self._transformation.init(LookaheadParams(params, params)))

    def update(self, updates: Any, state: SyncedState, params: Any) -> tuple[Any, SyncedState]:
        """Return the updates of the fast parameters, and the state after them."""
        from optax import LookaheadParams

        both = LookaheadParams(params, state.slow)
        new, inner = self._transformation.update(updates, state.inner, both)
        slow = jax.tree.map(
            lambda value, update: (value + update).astype(value.dtype), state.slow, new.slow
        )
        return new.fast, SyncedState(slow, inner)


def looks_ahead(transformation: Any, params: Any) -> bool:
    """Return whether an `optax.GradientTransformation` updates `optax.LookaheadParams` alone.

    Args:
        params: the pytree of its parameters as `jax.ShapeDtypeStruct`.
    """

    def update(values: Any) -> Any:
        return transformation.update(values, transformation.init(values), values)

    try:
        jax.eval_shape(update, params)
    except AttributeError as error:
        return error.name == "fast"
    except Exception:  # noqa: BLE001 - who looks at what the update depends on says it
        return False
    return False
