"""Optimizers as users write them: coupled ones, and such that keep other state than tensors and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

Gradients = Iterator[tuple[dict[str, Any], torch.nn.Parameter, torch.Tensor]]


class Unusual(torch.optim.Optimizer):
    """An optimizer without a closure."""

    def gradients(self) -> Gradients:
        """Each parameter that has a gradient, with its group."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter, parameter.grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the parameters."""
        self.update()

    def update(self) -> None:
        """Update the parameters, without gradients of it."""
        raise NotImplementedError


class WithoutRate(Unusual):
    """Names its learning rate otherwise than torch does."""

    def __init__(self, params: Any, step_size: float = 0.1) -> None:
        super().__init__(params, {"step_size": step_size})

    def update(self) -> None:
        for group, parameter, gradient in self.gradients():
            parameter.sub_(gradient, alpha=group["step_size"])


class Clipped(torch.optim.SGD):
    """Clips the norm of all of its gradients, as users of Apex and Horovod do."""

    def __init__(self, params: Any, lr: float = 0.5, most: float = 0.05) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.defaults["most"] = most
        for group in self.param_groups:
            group["most"] = most

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, self.param_groups[0]["most"])
        return super().step(closure)


class NoLuckError(Exception):
    """A user's."""


class Raising(torch.optim.SGD):
    """Momentum; raises after it has updated a chunk, when so many others have been updated as `left` says.

    Each number in `left` is of one exception; `before` is called before each.
    """

    left: list[int] = []
    before: Callable[[], None] = staticmethod(lambda: None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if self.left and self.left[0] == 0:
            del self.left[0]
            Raising.before()
            raise NoLuckError("no luck today")
        if self.left:
            self.left[0] -= 1


class Prodigy(Unusual):
    """Mishchenko and Defazio 2023, Prodigy: An Expeditiously Adaptive Parameter-Free Learner, algorithm 4.

    With beta3 = sqrt(beta2), and the estimate `d` in the parameter groups, as in the authors' code.
    """

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "d": d0, "d0": d0, "numerator": 0.0, "k": 0})

    def update(self) -> None:
        beta1, beta2 = 0.9, 0.999
        first = self.param_groups[0]
        d, d0, root = first["d"], first["d0"], beta2**0.5
        numerator, denominator = root * first["numerator"], 0.0
        for group, p, g in self.gradients():
            state = self.state[p]
            if not state:
                state["p0"] = p.flatten().clone()
                state["s"] = torch.zeros_like(p).flatten()
                state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
            step = d / d0 * d * group["lr"]
            numerator += step * float(torch.dot(g.flatten(), state["p0"] - p.flatten()))
            state["m"].mul_(beta1).add_(g, alpha=d * (1 - beta1))
            state["v"].mul_(beta2).addcmul_(g, g, value=d * d * (1 - beta2))
            state["s"].mul_(root).add_(g.flatten(), alpha=step)
            denominator += float(state["s"].abs().sum())
        if denominator:
            d = max(d, numerator / denominator)
        for group in self.param_groups:
            group["d"], group["numerator"], group["k"] = d, numerator, group["k"] + 1
        for group, p, _ in self.gradients():
            state = self.state[p]
            p.addcdiv_(state["m"], state["v"].sqrt() + d * 1e-8, value=-d * group["lr"])


class DAdaptSGD(Unusual):
    """Defazio and Mishchenko 2023, Learning-Rate-Free Learning by D-Adaptation, algorithm 2."""

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "d": d0, "weighted": 0.0, "k": 0})

    def update(self) -> None:
        first = self.param_groups[0]
        if first["k"] == 0:
            first["g0"] = float(sum(g.square().sum() for _, _, g in self.gradients())) ** 0.5
        d, weighted = first["d"], first["weighted"]
        rate = d * first["lr"] / first["g0"]
        for _, p, g in self.gradients():
            state = self.state[p]
            if not state:
                state["s"] = torch.zeros_like(p)
            weighted += rate * float((g * state["s"]).sum())
            state["s"].add_(g, alpha=rate)
            p.sub_(g, alpha=rate)
        norm = sum(float(self.state[p]["s"].square().sum()) for _, p, _ in self.gradients()) ** 0.5
        if norm:
            first["d"] = max(d, weighted / norm)
        first["weighted"], first["k"] = weighted, first["k"] + 1


class Lars(Unusual):
    """You et al. 2017, arXiv:1708.03888; the trust ratio is for parameters with weight decay alone."""

    def __init__(self, params: Any, lr: float = 0.05, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def update(self) -> None:
        for group, p, g in self.gradients():
            if group["weight_decay"]:
                g = g + group["weight_decay"] * p
                g = g * (p.norm() / (g.norm() + 1e-8))
            p.sub_(g, alpha=group["lr"])


class LargeOnly(Unusual):
    """Divides the update of large matrices by their mean square, as Adafactor factors those alone."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def update(self) -> None:
        for group, p, g in self.gradients():
            if p.ndim > 1 and min(p.shape) >= 128:
                g = g / g.square().mean().sqrt()
            p.sub_(g, alpha=group["lr"])


class Preconditioned(Unusual):
    """Keeps lists with None and an order, as SOAP and Shampoo do, and counts in group and attribute."""

    def __init__(self, params: Any, lr: float = 0.1, every: int = 2) -> None:
        super().__init__(params, {"lr": lr, "every": every, "k": 0, "seen": [None, []]})
        self.steps = 0

    def update(self) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["k"] += 1
            group["seen"][0] = group["k"] % 3 == 0
            group["seen"][1] = [*group["seen"][1], group["k"]][-2:]
        for group, p, g in self.gradients():
            state = self.state[p]
            if not state:
                state["n"], state["done"], state["how"] = 0, False, "none yet"
                state["GG"] = [torch.zeros(n, n, dtype=p.dtype) for n in p.shape]
                state["Q"] = None
                state["order"] = {"axes": (*range(p.ndim),), 7: p.new_zeros(2, 3)}
            state["n"] += 1
            assert type(state["n"]) is int
            for axis in state["order"]["axes"]:
                flat = g.movedim(axis, 0).flatten(1) if p.ndim > 1 else g[:, None]
                state["GG"][axis].add_(flat @ flat.T)
            if state["n"] % group["every"] == 0:
                state["Q"] = [torch.linalg.inv(each + torch.eye(len(each))) for each in state["GG"]]
                state["done"], state["how"] = True, f"after {state['n']}"
            for axis, q in enumerate(state["Q"] or ()):
                moved = torch.tensordot(q, g, dims=([1], [axis]))
                g = moved.movedim(0, axis)
            rate = group["lr"] / (1 + group["k"] + 0.5 * self.steps)
            if group["seen"][0]:
                rate *= 0.5 + 0.1 * len(group["seen"][1])
            p.sub_(g, alpha=rate)


class Counting(Unusual):
    """Elementwise, with a rate that falls by a count in the group."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    def update(self) -> None:
        for group in self.param_groups:
            group["k"] += 1
        for group, p, g in self.gradients():
            buffers = self.state[p].setdefault("buffers", [torch.zeros_like(p), None, 0])
            buffers[0].mul_(0.5).add_(g)
            buffers[2] += 1
            p.sub_(buffers[0], alpha=group["lr"] / group["k"])


class Writing(Unusual):
    """Changes its gradients, and throws in the end what it has made of them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def update(self) -> None:
        for group, p, g in self.gradients():
            g.mul_(2)
            p.sub_(g, alpha=group["lr"])
            g.zero_()


class LateClipped(Unusual):
    """Clips the norm of all gradients after its warm-up."""

    def __init__(self, params: Any, lr: float = 0.5, warm_up: int = 100) -> None:
        super().__init__(params, {"lr": lr, "warm_up": warm_up, "k": 0})

    def update(self) -> None:
        first = self.param_groups[0]
        first["k"] += 1
        if first["k"] > first["warm_up"]:
            torch.nn.utils.clip_grad_norm_([p for _, p, _ in self.gradients()], 0.5)
        for group, p, g in self.gradients():
            p.sub_(g, alpha=group["lr"])
