"""What an optax transformation's update of each parameter depends on, read off its trace.

Servers run a transformation parameter by parameter, and part by part where each element's update
depends on that element alone. Nothing is computed to find out whether they may.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from steepest.errors import ConfigurationError

#: JAX's primitives whose result has in each place what was computed from the values in that place
_ELEMENTWISE = frozenset(
    {
        "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt",
        "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma",
        "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
        "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max",
        "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "reduce_precision", "rem",
        "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient",
        "sub", "tan", "tanh", "xor",
    }
)  # fmt: skip
_RANDOM = ("random_", "threefry", "rng_")


class Flow:
    """The parameters, bits of an integer, on which each result of a traced function depends."""

    def __init__(self) -> None:
        # whether all that was computed from parameters was computed place by place
        self.elementwise = True
        # operations with constants, in order; equal for functions that differ in shapes alone
        self.said: list[Any] = []

    def follow(self, closed: Any, inputs: Sequence[int]) -> list[int]:
        """Return the set of each result of a closed jaxpr, given its inputs'.

        Raises:
            ConfigurationError: the function draws random numbers.
        """
        known = dict(zip(closed.jaxpr.invars, inputs, strict=True))
        for value in closed.consts:
            self.elementwise &= np.ndim(value) == 0
            self.said.append(repr(value) if np.ndim(value) == 0 else np.shape(value))

        def bits(variable: Any) -> int:
            return 0 if isinstance(variable, Literal) else known.get(variable, 0)

        for equation in closed.jaxpr.eqns:
            outputs = self._through(equation, [bits(v) for v in equation.invars])
            known.update(zip(equation.outvars, outputs, strict=True))
        return [bits(variable) for variable in closed.jaxpr.outvars]

    def _through(self, equation: Any, inputs: list[int]) -> list[int]:
        name, settings = equation.primitive.name, equation.params
        if name.startswith(_RANDOM):
            raise ConfigurationError(
                "the optax transformation draws random numbers, which would differ with the number "
                "of servers: leave add_noise and the like out"
            )
        if name == "cond":
            branches = [self.follow(branch, inputs[1:]) for branch in settings["branches"]]
            return [inputs[0] | _union(results) for results in zip(*branches, strict=True)]
        inner = settings.get("jaxpr", settings.get("call_jaxpr"))
        if hasattr(inner, "consts") and len(inner.jaxpr.invars) == len(inputs):
            return self.follow(inner, inputs)
        plain = {k: v for k, v in settings.items() if isinstance(v, (bool, int, float, str))}
        constants = [repr(v.val) for v in equation.invars if isinstance(v, Literal)]
        self.said.append((name, plain, constants))
        together = _union(inputs)
        if together:
            shapes = {v.aval.shape for v, own in zip(equation.invars, inputs, strict=True) if own}
            shapes |= {v.aval.shape for v in equation.outvars}
            self.elementwise &= name in _ELEMENTWISE and len(shapes) == 1
        return [together] * len(equation.outvars)


def _union(sets: Sequence[int]) -> int:
    union = 0
    for each in sets:
        union |= each
    return union


def is_elementwise(transformation: Any, params: Any, names: Sequence[str]) -> bool:
    """Return whether an `optax.GradientTransformation` may be run on parts of tensors.

    Args:
        params: a pytree of `jax.ShapeDtypeStruct`.
        names: of its leaves.

    Raises:
        ConfigurationError: it cannot be run on each parameter by itself; the message names the dependency.
    """
    flow = _checked_flow(transformation, params, names)
    if not flow.elementwise:
        return False
    flat = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((max(leaf.size // 2, 1),), leaf.dtype), params
    )
    try:  # parts of tensors are flat, and a rule may treat matrices in another way
        return _checked_flow(transformation, flat, names).said == flow.said
    except ConfigurationError:
        return False


def _checked_flow(transformation: Any, params: Any, names: Sequence[str]) -> Flow:
    leaves = [1 << i for i in range(len(names))]
    try:
        init, state = jax.make_jaxpr(transformation.init, return_shape=True)(params)
        update = jax.make_jaxpr(transformation.update)(params, state, params)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            "the optax transformation cannot be run on a server with gradients, its state and the "
            f"parameters alone ({type(error).__name__}: {error})"
        ) from error
    held = Flow().follow(init, leaves)
    while True:
        flow = Flow()
        flows = flow.follow(update, [*leaves, *held, *leaves])
        updates, after = flows[: len(names)], flows[len(names) :]
        merged = [old | new for old, new in zip(held, after, strict=True)]
        for own, needs, name in zip(leaves, updates, names, strict=True):
            if needs & ~own:
                _refuse(f"the update of {name!r}", needs & ~own, names)
        for needs in merged:
            if needs & (needs - 1):
                _refuse("a part of its state", needs, names)
        if merged == held:
            return flow
        held = merged


def _refuse(what: str, needs: int, names: Sequence[str]) -> None:
    needed = next(name for i, name in enumerate(names) if needs >> i & 1)
    raise ConfigurationError(
        f"the optax transformation needs all parameters at once ({what} depends on {needed!r}), but "
        "servers hold parts of them: leave clip_by_global_norm, apply_if_finite and the like out, "
        "and give the strategy clip_norm= or nonfinite= instead"
    )
