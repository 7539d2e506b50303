"""Nesterov's momentum for updates that come one by one: it moves once in several of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class DelayedNesterov(torch.optim.Optimizer):
    """SGD whose momentum is updated by the mean of every N gradients; each gradient counts at once, as 1/N.

    Args:
        params: to be updated.
        lr: learning rate.
        momentum: how much of the momentum is left after N gradients.
        every: N; with 1 it is SGD with Nesterov's momentum.

    Reference: Liu et al. 2024, Asynchronous Local-SGD Training for Language Modeling, arXiv:2401.09135 (with c = 0).
    """

    is_elementwise = True
    keeps_gradients = True

    def __init__(
        self, params: Iterable[Any], lr: float = 1.0, momentum: float = 0.9, every: int = 1
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        for group in self.param_groups:
            lr, momentum, every = group["lr"], group["momentum"], group["every"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, gradient = self.state[parameter], parameter.grad
                # one that follows another outer optimizer has that one's momentum
                for name in {"momentum_buffer", "gradient_buffer"} - state.keys():
                    state[name] = torch.zeros_like(parameter)
                state.setdefault("step", torch.zeros((), dtype=torch.float32))
                buffered = state["gradient_buffer"].add_(gradient)
                parameter.add_(gradient, alpha=-lr / every)
                state["step"] += 1
                if state["step"] >= every:
                    moved = state["momentum_buffer"].mul_(momentum).add_(buffered, alpha=1 / every)
                    parameter.add_(moved, alpha=-lr * momentum)
                    buffered.zero_()
                    state["step"].zero_()
