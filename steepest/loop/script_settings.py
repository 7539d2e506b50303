"""The settings of a script's optimizers and schedulers, which hold if a changed script goes on from a checkpoint.

A run that goes on from a checkpoint has the place of that, in the data and in its schedules, and the settings of
the script: learning rates, weight decay, schedules and their lengths, epochs. Where they differ, schedules are as
if they had been these from the beginning. What no script knows stays as it was: what the loop has set by hand, and
what `ReduceLROnPlateau` has made of metrics.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from steepest.errors import ConfigurationError
from steepest.loop.closures import LOADED, SCHEDULED
from steepest.loop.kept import Kept, pack
from steepest.loop.losses import line_of_user
from steepest.loop.prepared import Prepared

Scheduler = LRScheduler | ReduceLROnPlateau
#: Of a state: the place of a schedule, no setting; or what follows from others.
_PLACE = ("last_epoch", "_step_count", "_last_lr", "base_lrs", "_get_lr_called_within_step")
_OF_METRICS = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch", "_last_lr")


class ScriptSettings:
    """The settings of one script, as they are in `prepare`.

    Args:
        prepared: the arguments of its `prepare`.

    Attributes:
        state: these, as plain values; "epochs" are those that it wants, None before it has said so.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._schedulers = [copy.deepcopy(each.state_dict()) for each in prepared.schedulers]
        names = [type(each).__name__ for each in prepared.schedulers]
        self.state: dict[str, Any] = {
            "epochs": None,
            "groups": [own for _, own in prepared.model.optimizer_spec.groups],
            "schedulers": [list(each) for each in zip(names, self._schedulers, strict=True)],
        }

    def go_on(
        self,
        begun: Mapping[str, Any],
        state: Mapping[str, Any],
        steps: Sequence[Callable[[], None]],
    ) -> str:
        """Set optimizers' groups and schedulers to their values at a state's place; describe changed settings.

        Args:
            begun: the settings of the script that made the state.
            state: with "groups" and "schedulers".
            steps: functions that step each scheduler once.

        Raises:
            ConfigurationError: there are other schedulers, or one that is over by then.
        """
        before, now = begun["schedulers"], self.state["schedulers"]
        if len(before) != len(now):
            raise ConfigurationError(
                f"steepest.prepare() was given {_listed(now)}, and the checkpoint is of a run with {_listed(before)}: "
                "give as many, or begin another run, with its own checkpoints, with the weights of result.state_dict"
            )
        if not self._differ(begun, state):
            self._set(state["schedulers"])
            self._prepared.set_groups(state["groups"])
            return self._told(begun, [], ())
        self._prepared.set_groups([{}] * len(state["groups"]))
        fresh = [dict(group) for group in self._prepared.groups]
        self._set(self._schedulers)
        for scheduler, own, step in zip(
            self._prepared.schedulers, state["schedulers"], steps, strict=True
        ):
            self._replay(scheduler, own, step)
        of_schedules = {
            key
            for group, before in zip(self._prepared.groups, fresh, strict=True)
            for key in before
            if key != "params" and group[key] is not before[key] and group[key] != before[key]
        }
        if not all(isinstance(each, ReduceLROnPlateau) for each in self._prepared.schedulers):
            of_schedules |= {"lr", "initial_lr"}
        stays = [
            {key: value for key, value in own.items() if key not in of_schedules}
            for own in state["groups"]
        ]
        by_schedules = [
            {key: group[key] for key in of_schedules if key in group}
            for group in self._prepared.groups
        ]
        self._prepared.set_groups(
            [{**made, **own} for made, own in zip(by_schedules, stays, strict=True)]
        )
        return self._told(begun, stays, of_schedules)

    def _set(self, states: Sequence[Mapping[str, Any]]) -> None:
        for scheduler, own in zip(self._prepared.schedulers, states, strict=True):
            scheduler.load_state_dict(copy.deepcopy(dict(own)))

    def _differ(self, begun: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
        """Return whether a script with other settings has come to a state."""
        own = self.state
        if any(not _same(begun[key], own[key]) for key in ("groups", "schedulers")):
            return True
        pairs = zip(self._prepared.schedulers, state["schedulers"], strict=True)
        return any(not _has_made(each, own) for each, own in pairs)

    def _replay(
        self, scheduler: Scheduler, at: Mapping[str, Any], step: Callable[[], None]
    ) -> None:
        """Bring a scheduler from its beginning to the place of a state."""
        if isinstance(scheduler, ReduceLROnPlateau):
            own = {key: at[key] for key in _OF_METRICS if key in at}
            scheduler.load_state_dict({**scheduler.state_dict(), **own})
            return
        self._prepared.tell_schedulers()
        times = at["last_epoch"] - scheduler.last_epoch
        part = at.get("T_cur", 0) % 1  # of CosineAnnealingWarmRestarts, within an epoch
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the optimizer has not stepped
                for _ in range(times):
                    step()
                if part:
                    scheduler.step(at["last_epoch"] + part)
        except ValueError as error:
            raise ConfigurationError(
                f"{type(scheduler).__name__} is over by the step of the checkpoint, its {at['last_epoch']}th: {error}; "
                "give it more steps, or begin another run, with its own checkpoints"
            ) from error

    def _told(self, begun: Mapping[str, Any], stays: Sequence[Mapping[str, Any]], made: Any) -> str:
        """Describe the script's settings that differ from those of the checkpoint's script; empty if there are none."""
        own, differences = self.state, []
        for number, (now, before) in enumerate(zip(own["groups"], begun["groups"], strict=True)):
            of_group = f" of group {number}" if len(own["groups"]) > 1 else ""
            for key in now:
                if key == "initial_lr" or (key in before and _same(now[key], before[key])):
                    continue
                kept = stays[number].get(key) if stays else None
                if kept is not None:
                    differences.append(
                        f"{key}{of_group} stays {kept}, as the loop or metrics have set it"
                    )
                else:
                    differences.append(f"{key}{of_group}={now[key]}, not {before.get(key)}")
        for (name, now), (before_name, before) in zip(
            own["schedulers"], begun["schedulers"], strict=True
        ):
            if name != before_name:
                differences.append(f"{name}, not {before_name}")
                continue
            differences += [
                f"{name}'s {key}={now[key]}, not {before.get(key)}"
                for key in now
                if key not in _PLACE
                and not key.startswith("_")
                and not _same(now[key], before.get(key))
            ]
        if not differences and made:
            differences.append("what the functions of its schedules return")
        if own["epochs"] != begun["epochs"] and None not in (own["epochs"], begun["epochs"]):
            differences.append(f"{own['epochs']} epochs, not {begun['epochs']}")
        return ", ".join(differences)


def _has_made(scheduler: Scheduler, state: Mapping[str, Any]) -> bool:
    """Return whether a scheduler's functions, which no state contains, give the learning rate of a state."""
    nested = getattr(scheduler, "_schedulers", None)
    if nested is not None:
        return all(map(_has_made, nested, state["_schedulers"]))
    if not isinstance(scheduler, LambdaLR) or type(scheduler).get_lr is not LambdaLR.get_lr:
        return True
    place, rates = state["last_epoch"], state.get("_last_lr")
    if rates is None:
        return True
    pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    expected = [float(base * made(place)) for base, made in pairs]
    return expected == [float(rate) for rate in rates]


def _same(one: Any, other: Any) -> bool:
    return torch.equal(pack({"": one}), pack({"": other}))


def _listed(schedulers: Sequence[Sequence[Any]]) -> str:
    names = [str(name) for name, _ in schedulers]
    return " and ".join(names) if names else "no scheduler"


def check_lengths(prepared: Prepared, epochs: int, size: int) -> None:
    """Check that no schedule was made for the steps of one worker's loader, of which the job has fewer.

    Args:
        prepared: what was given to `prepare`.
        epochs: of the loop.
        size: of the job, in workers.

    Raises:
        ConfigurationError: one is, as where it was made by `len` of the loader before `prepare`; a warning, where
            a batch may have several steps.
    """
    half = len(prepared.given) // 2
    pairs: Iterator[tuple[Any, Any]] = zip(
        prepared.given[:half], prepared.given[half:], strict=True
    )
    data = next((pair for pair in pairs if isinstance(pair[0], DataLoader)), None)
    if not prepared.schedulers or data is None or not hasattr(data[0].dataset, "__len__"):
        return
    before, after = len(data[0]), len(data[1])
    for scheduler in prepared.schedulers if before != after else ():
        for name, length in lengths_of(scheduler):
            if length != epochs * before:
                continue
            text = (
                f"{type(scheduler).__name__} was made for {name}={length}: {epochs} epochs of the {before} batches "
                f"that len(loader) says before steepest.prepare(). With {size} workers an epoch has {after} steps, and "
                f"the schedule would end with a part of it: keep the steps of one process by --global-batch-size "
                f"{data[0].batch_size}, or make it for {epochs * after}, such as by epochs * math.ceil(len(data) / "
                "samples) with the samples of all workers' batches together"
            )
            if len(prepared.optimizers) == 1:
                raise ConfigurationError(text)
            warnings.warn(text, stacklevel=2)


def tell_of_schedules(prepared: Prepared, kept: Kept | None) -> None:
    """Warn of schedules that begin anew in a successor because they were not given to steepest.

    Args:
        prepared: what was given to `prepare`.
        kept: what was given to `register`; None for nothing.
    """
    kept_ones = () if kept is None else vars(kept).values()
    known = {id(getattr(each, "optimizer", None)) for each in (*prepared.schedulers, *kept_ones)}
    for each in prepared.given:
        if not isinstance(each, torch.optim.Optimizer) or id(each) in known:
            continue
        if getattr(each.step, SCHEDULED, None) == LOADED:
            continue
        if any("initial_lr" in group for group in each.param_groups):
            known.add(id(each))
            warnings.warn(
                f"a scheduler of this {type(each).__name__}, which has set initial_lr, was given neither to "
                "steepest.prepare() nor, as one that is made behind that, to steepest.register(scheduler=scheduler): "
                "it begins anew in a worker that takes another's place, and where the run goes on from a checkpoint",
                stacklevel=line_of_user(),
            )


def lengths_of(scheduler: Any) -> Iterator[tuple[str, int]]:
    """Yield the numbers of steps that a schedule was made for, by name; those in its functions too.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> list(lengths_of(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)))
        [('T_max', 30)]
    """
    for name in ("total_steps", "T_max", "total_iters"):
        if isinstance(value := getattr(scheduler, name, None), int):
            yield name, value
    nested: Sequence[Any] = getattr(scheduler, "_schedulers", ())
    for each in nested:
        yield from lengths_of(each)
    milestones: Sequence[int] = getattr(scheduler, "_milestones", ())
    if milestones:
        for name, last in lengths_of(nested[-1]):
            yield f"milestones and then {name}", milestones[-1] + last
    for function in getattr(scheduler, "lr_lambdas", ()):
        named = dict(getattr(function, "keywords", {}))  # of a functools.partial
        if inspect.isfunction(function):
            named |= inspect.getclosurevars(function).nonlocals
        yield from ((name, each) for name, each in named.items() if type(each) is int)
