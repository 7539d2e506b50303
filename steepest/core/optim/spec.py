"""Torch's optimizers as recipes, read off the user's and rebuilt over slices of the flat vector."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import logging
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from steepest.core.optim.detached_schedule import check_scheduler
from steepest.core.optim.json_values import from_json, to_json
from steepest.core.optim.own_values import group_key, is_own
from steepest.core.optim.probe import Findings, try_optimizer
from steepest.core.optim.rules import ByRules, Ruled, WithRules
from steepest.core.optim.several import as_one
from steepest.core.optim.torch_without_compiler import take_step, without_compiler
from steepest.errors import ConfigurationError

log = logging.getLogger(__name__)
Hyperparameters = dict[str, Any]
#: The state from which a schedule continues, JSON-able; see `Schedule.state`.
ScheduleState = dict[str, Any]

#: Greatest size of a step's hyperparameters, and of a schedule's state, as JSON: one message.
MOST_BYTES = 1 << 20
_MANY_GROUPS = 2500  # the hyperparameters of fewer groups are smaller than that in any case
_CATCH_UP = 400_000  # calls of a scheduler, times groups, in one turn: a fraction of a second
_TRIED_STEPS = 4
# findings by optimizer, hyperparameters and shapes, which replicas have in common
_FOUND: dict[Any, Findings] = {}
_MOST_FOUND = 32
_STATELESS_FLAGS = (
    "foreach", "fused", "capturable", "differentiable", "maximize", "nesterov", "decoupled_weight_decay",
)  # fmt: skip


def stateful(flags: Mapping[str, bool]) -> dict[str, bool]:
    """Return those of `state_flags` that are on and change which state is kept, in any version of torch.

    An optimizer of another version of torch may lack a switch, which then counts as off.
    """
    return {
        key: on for key, on in flags.items() if on and key.split(".", 1)[1] not in _STATELESS_FLAGS
    }


@dataclass(frozen=True)
class OptimizerSpec:
    """A recipe for an optimizer: class, defaults, parameter groups by name, and its schedule.

    Attributes:
        cls: any `torch.optim.Optimizer` subclass whose step needs no closure.
        defaults: keyword arguments for its constructor.
        groups: (parameter names, hyperparameters) of each group.
        elementwise: whether each element's update depends on that element alone, so that a tensor
            may be split over servers; found by trying.
        coupled: whether a parameter's update depends on other parameters, so that one server has to
            update all of them together; found by trying.
        own: the keys (see `steepest.core.optim.own_values`) of values that a step changes beside
            parameters and their state, such as a count in a parameter group; found by trying.
        lr_scheduler: makes a torch scheduler for an optimizer; stepped once per training step.
        learning_rate: instead of `lr_scheduler`, the learning rate of every group as a function of
            the step.
        schedule_id: identifies a scheduler whose state can be carried, as far as its first steps
            distinguish it from another; empty if there is none, or if it can only be computed from its
            beginning.
        ruled: parameters that are in no group, because they have rules of their own; they lie whole in
            chunks apart from the others, or with all others in one chunk, see `joins`.
    """

    cls: type[torch.optim.Optimizer]
    defaults: Hyperparameters
    groups: tuple[tuple[tuple[str, ...], Hyperparameters], ...]
    elementwise: bool = True
    lr_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    learning_rate: Callable[[int], float] | None = None
    schedule_id: str = ""
    coupled: bool = False
    own: frozenset[str] = frozenset()
    ruled: tuple[Ruled, ...] = ()

    @classmethod
    def read(
        cls,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        names: Mapping[int, str],
        *,
        lr_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        learning_rate: Callable[[int], float] | None = None,
    ) -> OptimizerSpec:
        """Return the recipe of an optimizer.

        Args:
            optimizer: built by the user over the module's parameters; or several optimizers, over
                disjoint parameters.
            names: parameter name by `id(parameter)`.
            lr_scheduler, learning_rate: the schedule, at most one of them.

        Raises:
            ConfigurationError: `optimizer` is not an optimizer, holds a parameter that is not the
                module's, cannot be rebuilt or needs a closure, or its schedule cannot run.
        """
        optimizer = as_one(optimizer)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(
                f"the optimizer factory returned {type(optimizer).__name__}: return a "
                "torch.optim.Optimizer"
            )
        if lr_scheduler is not None and learning_rate is not None:
            raise ConfigurationError(
                "both lr_scheduler= and learning_rate= are given: give one of them"
            )
        if learning_rate is not None and not all("lr" in group for group in optimizer.param_groups):
            raise ConfigurationError(
                f"learning_rate= with {type(optimizer).__name__}, which has a parameter group without a learning rate "
                "('lr'): give lr_scheduler=, or leave it out"
            )
        groups = []
        for group in optimizer.param_groups:
            unknown = [p for p in group["params"] if id(p) not in names]
            if unknown:
                raise ConfigurationError(
                    f"the optimizer holds a tensor of shape {tuple(unknown[0].shape)} that is not "
                    "a parameter of "
                    "the module: build it over module.parameters()"
                )
            hyper = {
                key: value for key, value in group.items() if key not in ("params", "param_names")
            }
            groups.append((tuple(names[id(p)] for p in group["params"]), hyper))
        _check_hooks(optimizer)
        defaults = {key: _plain(value) for key, value in optimizer.defaults.items()}
        spec = cls(type(optimizer), defaults, tuple(groups))
        shapes = [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
        findings = spec._tried(shapes)
        plain = tuple(
            (own, {k: v if group_key(k) in findings.own else _plain(v) for k, v in hyper.items()})
            for own, hyper in groups
        )
        spec = replace(
            spec,
            groups=plain,
            elementwise=findings.elementwise,
            coupled=findings.coupled,
            own=findings.own,
            lr_scheduler=lr_scheduler,
            learning_rate=learning_rate,
        )
        Schedule(spec).at(1)  # a schedule that cannot run is found here, not on a server
        return replace(spec, schedule_id=_identify(spec))

    @property
    def name(self) -> str:
        """The optimizer's class name, or the result of its class' function `describe`."""
        describe: Callable[[Hyperparameters], str] | None = getattr(self.cls, "describe", None)
        return self.cls.__name__ if describe is None else describe(self.defaults)

    @property
    def together(self) -> str:
        """The optimizer's name if it has to update all parameters at once; else empty."""
        return self.name if self.coupled else ""

    def _tried(self, shapes: Sequence[Sequence[tuple[int, ...]]]) -> Findings:
        """Return the findings of `try_optimizer` for the optimizer, with parameters' shapes by group.

        Groups that differ only in the learning rate are tried as one. ConfigurationError: there are no parameters.
        """
        kinds: dict[Any, tuple[Hyperparameters, list[tuple[int, ...]]]] = {}
        for (_, hyper), of_group in zip(self.groups, shapes, strict=True):
            lively = _lively({k: v for k, v in hyper.items() if k != "initial_lr"})
            _, tried_shapes = kinds.setdefault(_in_text(lively), (lively, []))
            tried_shapes += of_group
        tried = [(lively, tried_shapes) for lively, tried_shapes in kinds.values() if tried_shapes]
        if not tried:
            raise ConfigurationError(
                "the optimizer has no parameters: build it over module.parameters()"
            )

        shapes_of_kinds = [tried_shapes for _, tried_shapes in tried]
        texts = tuple(_in_text(hyper) for hyper in (self.defaults, *(h for h, _ in tried)))
        key = self.cls, texts, tuple(map(tuple, shapes_of_kinds))
        if key in _FOUND:
            return _FOUND[key]

        def build(slots: list[tuple[int, torch.nn.Parameter]]) -> torch.optim.Optimizer:
            named = [(f"{group}.{at}", group, p) for at, (group, p) in enumerate(slots)]
            groups = tuple(
                (tuple(name for name, own, _ in named if own == group), hyper)
                for group, (hyper, _) in enumerate(tried)
            )
            toy = replace(self, groups=groups)
            return toy.build([(name, p) for name, _, p in named])[0]

        known = self.cls.__module__.startswith("torch.optim.") or getattr(
            self.cls, "is_elementwise", False
        )
        findings = try_optimizer(self.name, shapes_of_kinds, build, is_known=known)
        if len(_FOUND) >= _MOST_FOUND:
            del _FOUND[next(iter(_FOUND))]
        _FOUND[key] = findings
        return findings

    def state_flags(self) -> dict[str, bool]:
        """Return the switches that change which state the optimizer keeps (amsgrad, centered).

        Returns:
            By "GROUP.NAME", the group's index and the hyperparameter's name.
        """
        return {
            f"{index}.{key}": value
            for index, (_, hyper) in enumerate(self.groups)
            for key, value in sorted(hyper.items())
            if isinstance(value, bool) and key not in _STATELESS_FLAGS
            if group_key(key) not in self.own
        }

    @property
    def fixed_groups(self) -> list[tuple[tuple[str, ...], Hyperparameters]]:
        """The groups without the values that the optimizer changes itself."""
        return [
            (names, {k: v for k, v in hyper.items() if group_key(k) not in self.own})
            for names, hyper in self.groups
        ]

    def trainable(self) -> set[str]:
        """Return the names of the parameters that the optimizer updates."""
        return {name for names, _ in self.groups for name in names} | self.apart

    @property
    def apart(self) -> frozenset[str]:
        """The names of the parameters that have rules of their own."""
        return frozenset(name for name, _ in self.ruled)

    @property
    def joins(self) -> bool:
        """Whether parameters that have rules of their own may lie in one chunk with others."""
        return self.cls.__module__.startswith("torch.optim") and not self.together

    def hyperparameters(self, changed: Sequence[Hyperparameters]) -> list[Hyperparameters]:
        """Return the hyperparameters of each group: those of the recipe, with changes.

        "fused" and "foreach", which `build` chooses for each optimizer, are left out, and so are values
        that the optimizer changes itself, except its learning rate.

        Args:
            changed: by group, the values that a schedule sets.
        """
        merged = [{**own, **now} for (_, own), now in zip(self.groups, changed, strict=True)]
        return [{k: v for k, v in g.items() if self._is_set(k)} for g in merged]

    def changed(
        self, groups: Sequence[Mapping[str, Any]], by_optimizer: Collection[str] = ()
    ) -> list[Hyperparameters]:
        """Return, by group, the hyperparameters of a similar optimizer that differ from the recipe's.

        Args:
            groups: its parameter groups, as many as the recipe has.
            by_optimizer: names of hyperparameters that its own steps change.
        """
        changed = []
        for (_, base), group in zip(self.groups, groups, strict=True):
            changes: Hyperparameters = {}
            if all(map(operator.is_, base.values(), map(group.get, base))):
                changed.append(changes)
                continue  # as in most steps
            for key, own in base.items():
                value = group.get(key)
                if value is own or not self._is_set(key, by_optimizer):
                    continue
                if (now := _plain(group[key])) != own:
                    changes[key] = now
            changed.append(changes)
        return changed

    def _is_set(self, key: str, by_optimizer: Collection[str] = ()) -> bool:
        """Return whether recipe and schedule, instead of the optimizer, set a group's hyperparameter in each step."""
        if key in ("fused", "foreach"):
            return False
        return key == "lr" or (key not in by_optimizer and group_key(key) not in self.own)

    @without_compiler()
    def build(
        self, slices: Sequence[tuple[str, torch.Tensor]]
    ) -> tuple[torch.optim.Optimizer, list[int]]:
        """Return an optimizer over slices of parameters, fused if torch has that.

        A class with ``takes_names=True`` is given (name, tensor) pairs, the others tensors.

        Args:
            slices: (parameter name, tensor) pairs.

        Returns:
            The optimizer, and for each of its groups the index of the group in `groups` from which it gets
            hyperparameters; -1 for none.
        """
        ruled = [pair for pair in slices if pair[0] in self.apart]
        if ruled and len(ruled) == len(slices):
            return self._by_rules(ruled)
        if ruled:
            optimizer, indices = self._by_optimizer([p for p in slices if p[0] not in self.apart])
            rules, followed = self._by_rules(ruled)
            return WithRules(optimizer, rules), indices + followed
        return self._by_optimizer(slices)

    def _by_optimizer(
        self, slices: Sequence[tuple[str, torch.Tensor]]
    ) -> tuple[torch.optim.Optimizer, list[int]]:
        """Return an optimizer over slices of parameters without rules, see `build`."""
        groups, indices = [], []
        for index, (names, hyper) in enumerate(self.groups):
            members = set(names)
            own = [pair for pair in slices if pair[0] in members]
            if own:
                named = getattr(self.cls, "takes_names", False)
                tensors = own if named else [tensor for _, tensor in own]
                groups.append({"params": tensors, **copy.deepcopy(hyper)})
                indices.append(index)
        arguments = self._arguments()
        if "fused" in arguments:
            for fused in (True, False) if self._may_fuse(slices) else (False,):
                try:
                    chosen = [{**group, "fused": fused} for group in groups]
                    return self.cls(chosen, **{**arguments, "fused": fused}), indices
                except RuntimeError:
                    if not fused:
                        raise  # else torch has no fused kernel for this dtype
        return self.cls(groups, **arguments), indices

    def _by_rules(self, whole: Sequence[tuple[str, torch.Tensor]]) -> tuple[ByRules, list[int]]:
        """Return the optimizer of parameters that have rules of their own, see `build`."""
        rules = dict(self.ruled)
        parameters = [(tensor, rules[name]) for name, tensor in whole]
        indices = [-1 if rule.follows is None else rule.follows for _, rule in parameters]
        first = [
            rule.lr if at < 0 else self.groups[at][1]["lr"]
            for (_, rule), at in zip(parameters, indices, strict=True)
        ]
        return ByRules(parameters, first), indices

    def _may_fuse(self, slices: Sequence[tuple[str, torch.Tensor]]) -> bool:
        """Return whether the user leaves the choice open and torch's fused kernels can be trusted.

        On the CPU fused SGD leaves most of a half-precision tensor unchanged (pytorch/pytorch#191763).
        """
        settled = any(self.defaults.get(key) for key in ("foreach", "capturable", "differentiable"))
        precise = all(tensor.dtype in (torch.float32, torch.float64) for _, tensor in slices)
        return precise and not settled and self.defaults.get("fused") is not False

    def _arguments(self) -> Hyperparameters:
        parameters = inspect.signature(self.cls.__init__).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return {key: value for key, value in self.defaults.items() if anything or key in parameters}


class Schedule:
    """The hyperparameters of each step, as a pure function of the step, independent of earlier calls.

    The scheduler is stepped once per training step, as in ``optimizer.step(); scheduler.step()``.
    An earlier step than the one before is computed from the beginning.

    Args:
        spec: of the optimizer and its schedule.
        per_step: how often the scheduler is stepped in a training step.
        first: how often it was before the first one.
    """

    def __init__(self, spec: OptimizerSpec, per_step: int = 1, first: int = 0) -> None:
        self._spec = spec
        self._per_step, self._first = per_step, first
        self._base = [dict(hyper) for _, hyper in spec.groups]
        self._step = 0
        self._scheduler: LRScheduler | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._by_optimizer: set[str] = set()  # what the optimizer's own step has changed

    def _count(self, step: int) -> int:
        """Return how often the scheduler is stepped before a training step."""
        return step * self._per_step + self._first

    def at(self, step: int) -> list[Hyperparameters]:
        """Return the hyperparameters of a step that differ from the recipe's, by group.

        Raises:
            ConfigurationError: a learning rate is not finite or needs more than the step, or the changes are too
                large for a message.
            Exception: whatever the user's schedule raises.
        """
        spec, step = self._spec, self._count(step)
        if spec.learning_rate is not None:
            rate = spec.learning_rate(step)
            if isinstance(rate, bool) or not isinstance(rate, Real) or not math.isfinite(rate):
                raise ConfigurationError(
                    f"learning_rate({step}) returned {rate!r}: return a finite number"
                )
            return [{"lr": float(rate)} for _ in self._base]
        if spec.lr_scheduler is None:
            return [{} for _ in self._base]
        self._advance(step, step + 1)
        assert self._optimizer is not None
        changed = spec.changed(self._optimizer.param_groups, self._by_optimizer)
        for key, value in ((key, value) for group in changed for key, value in group.items()):
            if not _is_plain(value):
                raise ConfigurationError(
                    f"{type(self._scheduler).__name__} set {key!r} to {value!r:.200} in step "
                    f"{step}: let it set numbers"
                )
        if len(changed) > _MANY_GROUPS and (size := len(json.dumps(changed))) > MOST_BYTES:
            raise ConfigurationError(
                f"the schedule changes {size} bytes of hyperparameters of {len(changed)} parameter "
                f"groups, at most {MOST_BYTES} fit into a commit: make fewer groups"
            )
        return changed

    def reach(self, step: int) -> bool:
        """Advance towards a step for a fraction of a second; return whether it is reached."""
        if self._spec.lr_scheduler is None:
            return True
        try:
            return self._advance(self._count(step), max(1, _CATCH_UP // max(len(self._base), 40)))
        except Exception:  # noqa: BLE001 - the user's schedule; `at` raises it again
            return True

    def _advance(self, step: int, most: int) -> bool:
        if self._optimizer is None or step < self._step:
            self._begin()
        assert self._optimizer is not None
        assert self._scheduler is not None
        # An optimizer of the user's own may change its hyperparameters as it steps, torch's do not.
        own = any(map(is_own, self._spec.own))
        try:
            for _ in range(min(step - self._step, most)):
                if own or self._step == 0:
                    self._step_optimizer(self._optimizer)
                self._scheduler.step()
                self._step += 1
        except Exception as error:
            name = type(self._scheduler).__name__
            self._scheduler = self._optimizer = None  # it may be half a step further
            if isinstance(error, TypeError):
                raise ConfigurationError(
                    f"{name} needs more than the step ({error}): use a scheduler of the step "
                    "alone, or learning_rate="
                ) from error
            raise
        return self._step == step

    def _step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the stand-in for the optimizer, and note which hyperparameters it changes."""
        before = [dict(group) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        take_step(optimizer)
        vars(optimizer)["_opt_called"] = True  # as by the `step` that schedulers look for
        for old, group in zip(before, optimizer.param_groups, strict=True):
            self._by_optimizer |= {k for k, v in group.items() if old.get(k) is not v}

    def state(self) -> ScheduleState | None:
        """Return JSON-able state of `MOST_BYTES` at most, from which `load_state` continues; None if it has none."""
        if not self._spec.schedule_id or self._scheduler is None or self._optimizer is None:
            return None
        groups = []
        for base, group in zip(self._base, self._optimizer.param_groups, strict=True):
            own = {
                key: value for key, value in group.items() if key not in ("params", "param_names")
            }
            groups.append(
                {
                    k: v
                    for k, v in own.items()
                    if k not in base or (type(v), v) != (type(base[k]), base[k])
                }
            )
        try:
            scheduler, changed = to_json(self._scheduler.state_dict()), to_json(groups)
        except Exception:  # noqa: BLE001 - the user's scheduler, whose state is no longer plain
            return None
        state = {
            "schedule": self._spec.schedule_id,
            "step": self._step,
            "scheduler": scheduler,
            "groups": changed,
        }
        return None if len(groups) > _MANY_GROUPS and len(json.dumps(state)) > MOST_BYTES else state

    def load_state(self, state: ScheduleState | None) -> None:
        """Continue from another schedule's state, if it is the state of the same schedule.

        Otherwise, or if the scheduler refuses the state, `at` computes the steps from the beginning.

        Args:
            state: as `state` returned it, or None.
        """
        same = isinstance(state, dict) and state.get("schedule") == self._spec.schedule_id
        if state is None or not self._spec.schedule_id or not same:
            return
        try:
            self._load(state)
        except Exception:  # of the user's scheduler, or of a state that was written by hand
            log.exception(
                "the schedule cannot go on from its state, and is computed from its beginning"
            )
            self._scheduler = self._optimizer = None

    def _load(self, state: ScheduleState) -> None:
        self._begin()
        assert self._optimizer is not None
        assert self._scheduler is not None
        # else the scheduler warns that no step was made before it
        self._step_optimizer(self._optimizer)
        self._scheduler.load_state_dict(from_json(state["scheduler"]))
        changes = from_json(state["groups"])
        for base, group, changed in zip(
            self._base, self._optimizer.param_groups, changes, strict=True
        ):
            group.update({**base, **changed})
        if not isinstance(state["step"], int) or state["step"] < 0:
            raise ValueError(f"a schedule cannot stand at step {state['step']!r}")
        self._step = state["step"]

    def _begin(self) -> None:
        assert self._spec.lr_scheduler is not None
        groups = [
            {"params": [torch.nn.Parameter(torch.zeros(1, 1))], **copy.deepcopy(hyper)}
            for _, hyper in self._spec.groups
        ]  # a matrix, because Muon takes nothing else
        self._by_optimizer.clear()
        self._optimizer = self._spec.cls(groups, **self._spec._arguments())
        self._scheduler = self._spec.lr_scheduler(self._optimizer)
        made = type(self._scheduler).__name__
        check_scheduler(self._scheduler, f"lr_scheduler= returned {made}")
        self._step = 0


def _identify(spec: OptimizerSpec) -> str:
    """Return a digest of a scheduler's state at the beginning and after its first steps.

    It is empty if another scheduler that loads this state does not continue like the first one.
    """
    if spec.lr_scheduler is None:
        return ""
    spec = replace(spec, schedule_id="tried")
    straight, other = Schedule(spec), Schedule(spec)
    seen: list[Any] = [straight.at(0), straight.state()]
    for step in range(1, _TRIED_STEPS + 1):
        state = straight.state()
        if state is None:
            return ""
        try:
            seen.append(straight.at(step))
        except Exception:  # noqa: BLE001 - the user's schedule, which may be as short as that
            break
        try:
            other._load(json.loads(json.dumps(state)))
            if repr(other.at(step)) != repr(seen[-1]):
                return ""
        except Exception:  # noqa: BLE001 - the user's scheduler cannot continue from its state
            return ""
    return hashlib.sha256(json.dumps([spec.name, seen], default=repr).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Return a hyperparameter as plain Python: tensors and scalars as numbers, lists as tuples."""
    if isinstance(value, (torch.Tensor, np.generic)):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _is_plain(value: Any) -> bool:
    """Return whether a hyperparameter can be sent to servers."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _lively(hyper: Hyperparameters) -> Hyperparameters:
    """Return hyperparameters with a learning rate of 0.1; zero would hide every difference."""
    return {**hyper, "lr": 0.1} if "lr" in hyper else dict(hyper)


def _in_text(hyper: Hyperparameters) -> Any:
    """Return a key that is equal for equal hyperparameters; a unique object if they have no text."""
    classes: list[type] = []

    def number(value: Any) -> int | None:
        classes.extend([value] if isinstance(value, type) else [])
        return len(classes) if isinstance(value, type) else None

    try:
        return json.dumps(to_json(hyper, number)), tuple(classes)
    except TypeError:
        return object()


def _check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer has no hooks, which the rebuilt one would lack; ConfigurationError otherwise."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    if any(getattr(optimizer, name, None) for name in names):
        raise ConfigurationError(
            f"{type(optimizer).__name__} has hooks of its step, which would not run on servers: "
            "override step() in a subclass instead"
        )
