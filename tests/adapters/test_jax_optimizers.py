"""Optax's transformations on slices of tensors: the updates of optax, or a refusal that says why."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jax", reason="needs JAX: make test-jax")

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import torch

from steepest.adapters.optax_rules import optax_spec
from steepest.core.optim.spec import OptimizerSpec
from steepest.errors import ConfigurationError

SHAPES = {"a": {"bias": (3,), "weight": (4, 6)}, "b": (256, 130)}
NAMES = {"a": {"bias": "a/bias", "weight": "a/weight"}, "b": "b"}
LABELS = {"a": {"bias": "plain", "weight": "adam"}, "b": "adam"}


def drawn(seed: int) -> Any:
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: generator.normal(size=shape), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )


def by_name(tree: Any) -> dict[str, Any]:
    return dict(zip(jax.tree.leaves(NAMES), jax.tree.leaves(tree), strict=True))


def spec_of(transformation: Any, **settings: Any) -> OptimizerSpec:
    spec = optax_spec(transformation, by_name(drawn(0)), NAMES, x64=True, **settings)
    return cloudpickle.loads(cloudpickle.dumps(spec))


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda value: value.ndim > 1, params)


#: Transformations, and whether tensors may be split.
ALLOWED: dict[str, tuple[Any, bool]] = {
    "sgd": (optax.sgd(0.1), True),
    "momentum": (optax.sgd(0.1, momentum=0.9), True),
    "nesterov": (optax.sgd(0.1, momentum=0.9, nesterov=True), True),
    "adam": (optax.adam(0.01), True),
    "adamw": (optax.adamw(0.01, weight_decay=0.1), True),
    "adamw-masked-by-path": (optax.adamw(0.01, mask={"a": True, "b": False}), True),
    "adamw-masked-by-shape": (optax.adamw(0.01, mask=matrices), False),
    "adagrad": (optax.adagrad(0.1), True),
    "rmsprop": (optax.rmsprop(0.01, momentum=0.9), True),
    "lion": (optax.lion(0.01), True),
    "schedule": (optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 4)), True),
    "clip": (optax.chain(optax.clip(0.5), optax.sgd(0.1)), True),
    "by-label": (
        optax.multi_transform({"plain": optax.sgd(0.1), "adam": optax.adam(0.1)}, LABELS),
        True,
    ),
    "every-two": (optax.MultiSteps(optax.adam(0.1), 2), True),
    "injected": (optax.inject_hyperparams(optax.adam)(learning_rate=0.1), True),
    "schedule-free": (optax.contrib.schedule_free_sgd(0.1), True),
    "lookahead": (optax.lookahead(optax.sgd(0.1, momentum=0.9), 2, 0.5), True),
    "lookahead-resets": (
        optax.chain(optax.clip(0.5), optax.lookahead(optax.adam(0.1), 3, 0.3, reset_state=True)),
        True,
    ),
    "lamb": (optax.lamb(0.1), False),
    "adafactor": (optax.adafactor(0.1), False),
    "muon": (optax.contrib.muon(0.1), False),
    "centralized": (optax.chain(optax.centralize(), optax.sgd(0.1)), False),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_slices_are_updated_as_by_optax(name: str) -> None:
    transformation, elementwise = ALLOWED[name]
    spec = spec_of(transformation)
    assert spec.elementwise is elementwise
    tensors = {n: torch.from_numpy(value) for n, value in by_name(drawn(0)).items()}
    parts = [
        (n, slice(begin, begin + size))
        for n, tensor in tensors.items()
        for size in [-(-tensor.numel() // 2) if elementwise else tensor.numel()]
        for begin in range(0, tensor.numel(), size)
    ]
    views = [tensors[n].view(-1)[where] for n, where in parts]
    if not elementwise:
        views = [tensors[n] for n, _ in parts]
    pairs = [(n, torch.nn.Parameter(v)) for (n, _), v in zip(parts, views, strict=True)]
    # in chunks as servers have them: several parameters in one, one parameter in several
    halves = [spec.build(pairs[0::2])[0], spec.build(pairs[1::2])[0]]
    with jax.enable_x64(True):
        params: Any = jax.tree.map(jnp.asarray, drawn(0))
        if name.startswith("lookahead"):
            params = optax.LookaheadParams.init_synced(params)
        state = transformation.init(params)
        update = jax.jit(transformation.update)
        for step in range(1, 5):
            gradients = drawn(step)
            for (n, where), (_, parameter) in zip(parts, pairs, strict=True):
                own = torch.from_numpy(by_name(gradients)[n]).view(-1)[where].clone()
                parameter.grad = own.view(parameter.shape)
            for optimizer in halves:
                optimizer.step()
            updates, state = update(gradients, state, params)
            params = optax.apply_updates(params, updates)
    for n, value in by_name(getattr(params, "fast", params)).items():
        np.testing.assert_allclose(tensors[n].numpy(), np.asarray(value), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("transformation", "said"),
    [
        (
            optax.chain(optax.clip_by_global_norm(1e9), optax.sgd(0.1)),
            "give the strategy clip_norm=",
        ),
        (optax.apply_if_finite(optax.sgd(0.1), 3), "needs all parameters at once"),
        (optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)), "draws random numbers"),
        (optax.lbfgs(), "parameters alone .*value"),
        (optax.sgd, "give an optax.GradientTransformation"),
        (torch.optim.SGD, "give an optax.GradientTransformation"),
    ],
)
def test_what_servers_cannot_run_is_refused(transformation: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        spec_of(transformation)


def test_a_rate_beside_lookahead_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="inside of lookahead the rate"):
        spec_of(optax.lookahead(optax.sgd(1.0), 2, 0.5), learning_rate=lambda step: 0.1)
    spec = spec_of(optax.lookahead(optax.sgd(0.1), 2, 0.5))
    assert "lr" not in spec.groups[0][1]  # so that none can be set


def test_the_name_tells_transformations_apart() -> None:
    assert spec_of(optax.adam(0.1)).name == "optax(0.count, 0.mu, 0.nu)"
    assert spec_of(optax.sgd(0.1)).name != spec_of(optax.sgd(0.1, momentum=0.9)).name


def test_state_of_another_transformation_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(256, 130, dtype=torch.float64))
    optimizer, _ = spec_of(optax.sgd(0.1, momentum=0.9)).build([("b", parameter)])
    optimizer.state[parameter] = {"0.mu": torch.zeros(256, 130, dtype=torch.float64)}
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(ValueError, match=r"has \['0.mu'\], .* has \['0.trace'\]"):
        optimizer.step()


def test_state_keeps_no_memory_of_the_weights() -> None:
    """A transformation may keep the parameters themselves, which are overwritten later."""
    keep = optax.GradientTransformation(
        lambda params: params, lambda updates, state, params: (updates, params)
    )
    parameter = torch.nn.Parameter(torch.arange(32.0, dtype=torch.float64))
    whole = {"w": parameter.detach()}
    optimizer, _ = optax_spec(keep, {"w": np.zeros(32)}, {"w": "w"}, x64=True).build(
        [("w", parameter)]
    )
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["w"], torch.arange(32.0, dtype=torch.float64))
    whole["w"].fill_(7.0)
    assert torch.equal(optimizer.state[parameter]["w"], torch.arange(32.0, dtype=torch.float64))


def test_the_learning_rate_is_a_factor_of_the_updates() -> None:
    updates = []
    for settings in ({}, {"learning_rate": 0.25}):
        parameter = torch.nn.Parameter(torch.zeros(256, 130, dtype=torch.float64))
        optimizer, _ = spec_of(optax.adam(1.0), **settings).build([("b", parameter)])
        parameter.grad = torch.from_numpy(drawn(1)["b"])
        optimizer.step()
        updates.append(parameter.detach())
    assert torch.allclose(updates[0] * 0.25, updates[1], rtol=1e-12)


def test_state_that_was_taken_stays_as_it_was_and_state_that_was_set_is_used() -> None:
    spec = optax_spec(optax.sgd(0.1, momentum=0.5), {"b": drawn(0)["b"]}, "b", x64=True)
    parameter = torch.nn.Parameter(torch.zeros(256, 130, dtype=torch.float64))
    optimizer, _ = spec.build([("b", parameter)])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    (key,) = state
    taken = state[key]
    optimizer.step()  # in the memory of the state, unless a tensor has it
    assert torch.equal(taken, torch.ones_like(taken))
    assert torch.equal(optimizer.state[parameter][key], torch.full_like(taken, 1.5))
    optimizer.state[parameter][key] = torch.full_like(taken, 8.0)
    optimizer.step()
    assert torch.equal(optimizer.state[parameter][key], torch.full_like(taken, 5.0))
