"""JaxModel: a pytree of parameters with its loss, data and optax optimizer, as a `Model`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from steepest.adapters.jax_arrays import on_cpu, path_name, to_numpy, to_torch, torch_dtype
from steepest.adapters.optax_rules import optax_spec
from steepest.core.data.protocol import Source
from steepest.core.models.losses import samples_of
from steepest.core.models.protocol import (
    Computed,
    Model,
    Ready,
    Share,
    checked_metrics,
    checked_weight,
)
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.tensors.dtypes import same_bits
from steepest.core.tensors.layout import ChunkSpec, ParameterLayout
from steepest.data.sources import as_source
from steepest.errors import ConfigurationError, ModelError
from steepest.validation import require_number

import jax  # isort: skip - the modules above say what to install where it is missing
import numpy as np

from steepest.adapters.jax_program import JaxProgram, Outcome


class JaxModel(Model):
    """One replica: a pytree of parameters with a loss, data, batch size and optax optimizer.

    The loss is called as ``loss(params, batch)``, and with those of these keyword arguments that
    it has: `rng`, a key for randomness, different in each step and share of the samples and the
    same whenever these are computed again; `state`, as given; `train`, False in evaluation. It
    returns the batch's mean loss, or (loss, aux); with `state` (loss, aux, new state). It is
    compiled by `jax.jit`, once more for each other size of a batch, such as an epoch's last one.
    For a module of Flax there is `from_flax`.

    Args:
        params: a pytree of arrays, which are copied; parameters are named by their paths, as in
            "dense/kernel".
        loss: see above.
        optimizer: an `optax.GradientTransformation` in which each parameter's update depends on
            that parameter alone. Servers run it as it is, so they need JAX and optax.
        data: as of `TorchModel`; JAX's arrays are taken too. Batches arrive as NumPy arrays.
        batch_size: samples per replica and step.
        metrics: functions of (aux, batch), each a mean over the batch, by name; compiled with the
            loss. By default an aux that is a dict of numbers.
        state: a pytree of arrays that the loss itself changes, such as running means; replicas keep
            their own.
        frozen: tells from a parameter's name whether it is left as it is.
        weight: function of a batch that returns its weight in means, where that is not its number
            of samples; compiled with the loss.
        learning_rate: a factor of the optimizer's updates, or a function of the step that returns
            it. With ``optax.adam(1.0)`` it is the learning rate, which results show then and
            `set_learning_rate` sets. The function gets the number of steps before: 0 in the first
            step, whose `StepResult.step` is 1.

    Raises:
        ModelError: bad parameters or state, or nothing to train.
        ConfigurationError: bad data, batch size, or another argument; an optimizer that needs all
            parameters at once.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax
        >>> def loss(params, batch):
        ...     x, y = batch
        ...     return jnp.mean((x @ params["w"] - y) ** 2)
        >>> data = np.ones((8, 3), np.float32), np.ones(8, np.float32)
        >>> model = JaxModel({"w": jnp.zeros(3)}, loss=loss, optimizer=optax.sgd(0.1), data=data,
        ...                  batch_size=4)
        >>> [entry.name for entry in model.layout.entries]
        ['w']
    """

    def __init__(  # noqa: PLR0913 - keywords of a user, most of them optional
        self,
        params: Any,
        *,
        loss: Callable[..., Any],
        optimizer: Any,
        data: Any,
        batch_size: int | None = None,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
        state: Any = None,
        frozen: Callable[[str], bool] | None = None,
        weight: Callable[[Any], Any] | None = None,
        learning_rate: float | Callable[[int], float] = 1.0,
    ) -> None:
        _check_functions(loss, metrics, frozen, weight)
        if not callable(learning_rate):
            require_number("learning_rate", learning_rate)
        self.data, self.batch_size = as_source(_from_jax(data), batch_size)
        self._x64 = bool(jax.config.jax_enable_x64)
        skeleton, self._values = _named("parameter", params, self._x64)
        self._state_skeleton, self._state = _named("state", state, self._x64)
        if both := self._values.keys() & self._state.keys():
            raise ModelError(
                f"a parameter and a part of the state are named {min(both)!r}: rename one"
            )
        self._trainable = {n for n in self._values if frozen is None or not frozen(n)}
        if not self._trainable:
            raise ModelError(
                "nothing to train: params has no leaf that is not frozen; name fewer by frozen="
            )
        trained = {name: v for name, v in self._values.items() if name in self._trainable}
        if bad := [name for name, value in trained.items() if not value.is_floating_point()]:
            raise ModelError(
                f"parameter {bad[0]!r} is {self._values[bad[0]].dtype}: only floating-point "
                "parameters can be trained; name it by frozen="
            )
        forms = {name: _abstract(value) for name, value in trained.items()}
        self.optimizer_spec: OptimizerSpec = optax_spec(
            optimizer, forms, skeleton, x64=self._x64, learning_rate=learning_rate
        )
        metrics = None if metrics is None else dict(metrics)
        self._program = JaxProgram(loss, skeleton, metrics, weight, state is not None)
        self.layout = self._plan(ChunkSpec())
        self._gradients: list[tuple[int, str, Any]] = []  # arrays in the flat vector
        self._vector: torch.Tensor | None = None  # the flat weights, after `bind`
        self._share: Share | None = None  # of the next batch

    @classmethod
    def from_flax(
        cls, module: Any, variables: Any = None, *, loss: Callable[..., Any], **settings: Any
    ) -> JaxModel:
        """Return the model of a Flax module, for batches ``(*inputs, target)``.

        Args:
            module: a `flax.linen.Module`, or a `flax.nnx.Module`, which is not changed. An argument
                of its `__call__` that tells training from evaluation is set; an nnx module's `rngs`
                is an `nnx.Rngs` of the step and the share of the samples. An nnx module, and a linen
                module's field that tells them apart, is trained as it was given (call an nnx
                module's `train` before), and set to evaluation mode in `evaluate`.
            variables: of the linen module, as its `init` returns them; what is not in "params" is
                state. Dropout gets its key in each step.
            loss: called as ``loss(output, target)``, returns the batch's mean.
            settings: further arguments of `JaxModel`; metrics are functions of (output, target).
        """
        from steepest.adapters.flax import parts_of

        parts = parts_of(module, variables, loss)
        metrics = settings.pop("metrics", None) or {}
        _check_functions(loss, metrics, None, None)
        by_target = {name: _of_target(metric) for name, metric in metrics.items()}
        model = cls(parts.params, loss=parts.loss, state=parts.state, metrics=by_target, **settings)
        model.notice = parts.notice
        return model

    @staticmethod
    def named(tree: Any) -> dict[str, torch.Tensor]:
        """Return copies of a pytree's arrays by their names, as `set_weights` takes them."""
        return _named("parameter", tree, True)[1]

    @staticmethod
    def tree(weights: Mapping[str, torch.Tensor], like: Any) -> Any:
        """Return weights by name, such as `DistributedSGD.weights` returns, as a pytree.

        Args:
            weights: must have the names of all leaves of `like`.
            like: a pytree of the same structure as the parameters.
        """
        return _filled(_named("parameter", like, True)[0], weights)

    def _plan(self, cut: ChunkSpec) -> ParameterLayout:
        values = self._values.items()
        return ParameterLayout.plan(
            [(n, tuple(v.shape), v.dtype, n in self._trainable) for n, v in values],
            split_tensors=self.optimizer_spec.elementwise and not cut.whole,
            chunk_bytes=cut.chunk_bytes,
            fragments=cut.fragments,
            aligned=True,  # XLA computes on them where they lie
        )

    @property
    def params(self) -> Any:
        """A copy of the parameters as they are now, as the pytree that was given."""
        return _filled(self._program.skeleton, self._values)

    # -- Model ---------------------------------------------------------------------------------

    def relayout(self, cut: ChunkSpec) -> None:
        """Cut `layout` into other chunks; see `steepest.core.models.protocol.Model.relayout`.

        Raises:
            ModelError: a frozen parameter is to be trained.
        """
        if more := cut.unfrozen - self._trainable:
            raise ModelError(f"{min(more)!r} is frozen here: leave it out of JaxModel's frozen=")
        self.layout = self._plan(cut)

    def bind(self, weights: torch.Tensor, gradients: torch.Tensor) -> None:
        """Move the parameters into flat vectors; see `steepest.core.models.protocol.Model.bind`.

        Raises:
            ConfigurationError: the vectors are not in the CPU's memory.
        """
        if weights.device.type != "cpu":
            raise ConfigurationError("a JaxModel computes on the CPU: leave gpu=True out")
        for index, entry in enumerate(self.layout.entries):
            self.layout.entry_view(weights, index).copy_(self._values[entry.name])
        self._gradients = [
            (index, entry.name, to_numpy(self.layout.entry_view(gradients, index)))
            for index, entry in enumerate(self.layout.entries)
            if entry.trainable
        ]
        self.move(weights)

    def move(self, weights: torch.Tensor) -> None:
        """Make trained parameters views of another vector.

        See `steepest.core.models.protocol.Model.move`.
        """
        self._vector = weights
        for index, entry in enumerate(self.layout.entries):
            if entry.trainable:
                self._values[entry.name] = self.layout.entry_view(weights, index)

    def _arguments(self) -> tuple[dict[str, Any], dict[str, Any], Any]:
        """Return the trained and the frozen parameters by name, and the state, where they lie."""
        values = {name: to_numpy(value) for name, value in self._values.items()}
        trained = {name: values.pop(name) for name in self._trainable}
        state = {name: to_numpy(value) for name, value in self._state.items()}
        return trained, values, jax.tree.map(state.__getitem__, self._state_skeleton)

    def compute_gradients(self, batch: Any, ready: Ready, metrics: bool) -> Computed:
        """Compute a batch's loss and gradients.

        See `steepest.core.models.protocol.Model.compute_gradients`.
        """
        seed = np.array(divmod(torch.initial_seed(), 1 << 32), np.uint32)  # of step and share
        batch = _to_numpy(batch)
        with on_cpu(self._x64):
            outcome, gradients = self._program.gradients(*self._arguments(), batch, seed)
            # weights may change once the first gradient is reported, in the memory that XLA reads
            jax.block_until_ready((outcome, gradients))
            computed = _computed(outcome, batch, self._share, metrics)
            self._keep_state(outcome[-1])
            for index, name, view in self._gradients:
                np.copyto(view, np.asarray(gradients[name]))
                ready(index, computed.weight, True)
        return computed

    def expect(self, share: Share | None) -> None:
        """Take the number of samples of the next batch; see `steepest.core.models.protocol.Model`."""
        self._share = share

    def _keep_state(self, state: Any) -> None:
        for name, value in zip(self._state, jax.tree.leaves(state), strict=True):
            self._state[name] = to_torch(value).clone()  # it may be an argument, or a gradient

    def evaluate(self, batch: Any) -> Computed:
        """Return loss and metrics of one batch; see `steepest.core.models.protocol.Model.evaluate`."""
        batch = _to_numpy(batch)
        with on_cpu(self._x64):
            outcome = self._program.evaluation(*self._arguments(), batch)
            jax.block_until_ready(outcome)
            return _computed(outcome, batch, self._share, True)

    def source(self, data: Any, batch_size: int) -> Source:
        """Return a source of batches for `evaluate`."""
        return as_source(_from_jax(data), batch_size)[0]

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of the state, and of frozen parameters that are not as installed."""
        values = {name: value.clone() for name, value in self._state.items()}
        for name, installed in self._frozen().items():
            if not same_bits(self._values[name], installed):
                values[name] = self._values[name].clone()
        return values

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the values that `state` returned.

        Frozen parameters that it does not name get the installed ones.

        Raises:
            ModelError: there is no state or frozen parameter of that name, or of another shape.
        """
        frozen = self._frozen()
        known = self._state | {n: v for n, v in self._values.items() if n not in self._trainable}
        for name, value in state.items():
            if name in self._trainable:
                continue
            if name not in known or known[name].shape != value.shape:
                own = f"has shape {tuple(known[name].shape)}" if name in known else "is unknown"
                raise ModelError(
                    f"state {name!r} of shape {tuple(value.shape)} {own} here: was it made by "
                    "another model?"
                )
        for name, value in {**frozen, **state}.items():
            if name in known:
                place = self._state if name in self._state else self._values
                place[name] = value.to(known[name].dtype, copy=True)

    def _frozen(self) -> dict[str, torch.Tensor]:
        """Return the installed values of frozen parameters by name; none before `bind`."""
        if (vector := self._vector) is None:
            return {}
        entries = enumerate(self.layout.entries)
        return {e.name: self.layout.entry_view(vector, i) for i, e in entries if not e.trainable}


def _of_target(metric: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda output, batch: metric(output, batch[-1])


def _computed(outcome: Outcome, batch: Any, share: Share | None, metrics: bool) -> Computed:
    loss, measured, weight, _ = outcome
    samples = samples_of(batch, share, weighed=weight is not None)
    weighs = float(samples) if weight is None else checked_weight(np.asarray(weight))
    values = checked_metrics({n: np.asarray(v) for n, v in measured.items()}) if metrics else {}
    return Computed(float(loss), weighs, samples, values)


def _check_functions(loss: Any, metrics: Any, frozen: Any, weight: Any) -> None:
    """Check the functions of a `JaxModel`; ConfigurationError: one of them is none."""
    if not callable(loss):
        raise ConfigurationError(
            f"loss is of type {type(loss).__name__}: give a function of (params, batch)"
        )
    for name, value, example in (
        ("frozen", frozen, 'a parameter\'s name, such as lambda name: name.startswith("encoder/")'),
        ("weight", weight, "a batch"),
    ):
        if value is not None and not callable(value):
            raise ConfigurationError(
                f"{name} is of type {type(value).__name__}: give a function of {example}"
            )
    if metrics is not None and not (
        isinstance(metrics, Mapping) and all(map(callable, metrics.values()))
    ):
        raise ConfigurationError(
            f"metrics={metrics!r:.80}: give functions of (aux, batch) by name, or let the loss "
            "return (loss, dict of numbers)"
        )


def _named(what: str, tree: Any, x64: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a pytree whose leaves are their names, and copies of its arrays by name, in order.

    Raises:
        ModelError: a leaf is no array of a dtype that JAX and torch have, or two have one name.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    tensors: dict[str, torch.Tensor] = {}
    for path, leaf in leaves:
        name = path_name(path) or "params"
        dtype = torch_dtype(getattr(leaf, "dtype", None))
        if dtype is None or not hasattr(leaf, "__array__"):
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            raise ModelError(f"{what} {name!r} is {kind}: give arrays of numbers")
        if dtype.itemsize == 8 and not dtype.is_complex and not x64:
            raise ModelError(
                f"{what} {name!r} is {dtype}, of which JAX would make 32 bits: give it "
                'those, or call jax.config.update("jax_enable_x64", True) in model_creator'
            )
        if name in tensors:
            raise ModelError(f"two leaves of the pytree are named {name!r}: names must be unique")
        raw = np.array(leaf)
        bits = raw.reshape(-1).view(np.uint8) if raw.size else np.zeros(0, np.uint8)
        tensors[name] = torch.from_numpy(bits).view(dtype).view(raw.shape)
    return jax.tree.unflatten(structure, tensors), tensors


def _filled(skeleton: Any, values: Mapping[str, torch.Tensor]) -> Any:
    """Return a pytree of copies of values, with types of 64 bits whatever JAX is set to."""
    with on_cpu(True):
        return jax.tree.map(lambda name: jax.numpy.array(to_numpy(values[name])), skeleton)


def _abstract(value: torch.Tensor) -> Any:
    dtype = str(value.dtype).removeprefix("torch.")
    return jax.ShapeDtypeStruct(tuple(value.shape), jax.numpy.dtype(dtype))


def _from_jax(data: Any) -> Any:
    """Return data with NumPy's arrays in the place of JAX's."""
    if isinstance(data, (tuple, list)) and any(isinstance(part, jax.Array) for part in data):
        return tuple(map(_from_jax, data))
    return np.asarray(data) if isinstance(data, jax.Array) else data


def _to_numpy(batch: Any) -> Any:
    """Return a batch with NumPy's arrays in the place of torch's tensors."""

    return jax.tree.map(lambda x: to_numpy(x) if isinstance(x, torch.Tensor) else x, batch)
