"""Loops of users' own, and the same loops in one process on the whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import steepest
from steepest.core.data.sampler import SamplePlan, step_seed
from tests.reference import Weights, perceptron, samples, sgd, snapshot
from tests.simulation.run import pause

BATCH = 2
SAMPLES = 13
Loader = Any


@dataclass
class Parts:
    """What a script makes before its loop."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any
    schedulers: tuple[Any, ...] = ()


@dataclass
class Whole:
    """A loader that yields the whole batches of all workers, in the job's order; alone it stands for the job's."""

    data: tuple[torch.Tensor, ...]
    batch: int
    seed: int = 0
    epoch: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[Any]:
        plan = SamplePlan(len(self.data[0]), self.batch, self.seed)
        first, self.epoch = self.epoch * plan.steps_per_epoch, self.epoch + 1
        for step in range(first, first + plan.steps_per_epoch):
            index = torch.from_numpy(plan.share(step, 0, 1))
            yield [column[index] for column in self.data]

    def __len__(self) -> int:
        return -(-len(self.data[0]) // self.batch)


@dataclass
class WholeDraws:
    """A loader that yields the whole batches of all workers, of what a sampler draws in each epoch."""

    data: tuple[torch.Tensor, ...]
    sampler: Callable[[int], Any]
    workers: int
    seed: int = 0
    epoch: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[Any]:
        sampler, before = self.sampler(len(self.data[0])), torch.get_rng_state()
        torch.manual_seed(step_seed(self.seed, self.epoch, (1 << 32) - 1))
        if getattr(sampler, "generator", None) is not None:
            sampler.generator.manual_seed(torch.initial_seed())
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        drawn = list(islice(sampler, 1000))  # one may be without end
        torch.set_rng_state(before)
        whole = self.workers * (1 if hasattr(sampler, "batch_size") else BATCH)
        for begin in range(0, len(drawn), whole):
            some = drawn[begin : begin + whole]
            index = [i for each in some for i in each] if isinstance(some[0], list) else some
            yield [column[index] for column in self.data]
        self.epoch += 1


def data() -> Any:
    """A loader of a worker's batches; of those of all workers where there is one process."""
    loader: Any = DataLoader(TensorDataset(*samples(SAMPLES)), batch_size=BATCH, shuffle=True)
    workers = ALONE.get("workers")
    return loader if workers is None else Whole(samples(SAMPLES), workers * BATCH, 0)


def alone(script: Callable[[], None], workers: int) -> Weights:
    """The weights that a script finds that runs without workers, on the data of so many together."""
    ALONE["workers"] = workers
    torch.manual_seed(0)
    try:
        script()
    finally:
        ALONE.clear()
    return FOUND[script.__name__]


@dataclass(frozen=True)
class Script:
    """A training script: what it makes, and how it loops over that.

    Attributes:
        loop: called with the parts and the number of epochs.
        sampler: of samples, or, where it has an attribute `batch_size`, of batches.
    """

    loop: Callable[..., None]
    model: Callable[[], nn.Module] = perceptron
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = field(default_factory=sgd)
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    data: tuple[torch.Tensor, ...] = field(default_factory=lambda: samples(SAMPLES))
    epochs: int = 3
    shuffles: bool = True
    reduction: str = "mean"
    sampler: Callable[[int], Any] | None = None  # called with the number of samples

    def _parts(self, loader: Any) -> Parts:
        model = self.model()
        optimizer = self.optimizer(model)
        schedulers = () if self.schedule is None else (self.schedule(optimizer),)
        return Parts(model, optimizer, loader, schedulers)

    def __call__(self) -> None:
        """The script as steepest runs it."""
        data = TensorDataset(*self.data)
        loader: Any = DataLoader(data, batch_size=BATCH, shuffle=self.shuffles)
        if self.sampler is not None:
            sampler = self.sampler(len(data))
            of_batches = hasattr(sampler, "batch_size")
            chosen = {"batch_sampler": sampler} if of_batches else {"sampler": sampler}
            loader = DataLoader(data, **chosen, **({} if of_batches else {"batch_size": BATCH}))
        parts = self._parts(loader)
        model, optimizer, loader, *schedulers = steepest.prepare(
            parts.model,
            parts.optimizer,
            parts.loader,
            *parts.schedulers,
            reduction=self.reduction,
        )
        self.loop(Parts(model, optimizer, loader, tuple(schedulers)), self.epochs)

    def alone(self, workers: int, seed: int = 0, loader: Any = None) -> Weights:
        """The weights of the same loop without steepest's workers, on the batches of so many, or a loader's."""
        torch.manual_seed(seed)
        whole: Any = loader or Whole(self.data, workers * BATCH, seed)
        if self.sampler is not None:
            whole = WholeDraws(self.data, self.sampler, workers, seed)
        elif not self.shuffles:
            whole = DataLoader(TensorDataset(*self.data), batch_size=workers * BATCH)
        parts = self._parts(whole)
        self.loop(parts, self.epochs)
        return snapshot(parts.model)


def plain(parts: Parts, epochs: int, more: Callable[[], dict[str, Any]] = dict) -> None:
    """The usual loop, with a scheduler by step if there is any; reports what `more` returns beside the loss."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            loss = nn.functional.mse_loss(parts.model(x), y)
            loss.backward()
            parts.optimizer.step()
            for scheduler in parts.schedulers:
                scheduler.step()
        steepest.report(loss=loss, **more())


def meeting(parts: Parts, epochs: int) -> None:
    """The usual loop, whose workers gather and read their optimizer's state at the end of each epoch."""

    def found() -> dict[str, Any]:
        ranks = steepest.gather(torch.tensor([float(steepest.rank())]))
        return {"ranks": ranks.sum(), "states": len(parts.optimizer.state_dict()["state"])}

    plain(parts, epochs, found)


def accumulating(parts: Parts, epochs: int, batches: int = 2) -> None:
    """A step of the optimizer after several batches."""
    for _ in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader):
            loss = nn.functional.mse_loss(parts.model(x), y) / batches
            loss.backward()
            if (number + 1) % batches == 0:
                parts.optimizer.step()
                parts.optimizer.zero_grad()


def several_passes(parts: Parts, epochs: int) -> None:
    """No step for some batches, several for others."""
    for _ in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader):
            for _ in range(number % 3):
                parts.optimizer.zero_grad()
                nn.functional.mse_loss(parts.model(x), y).backward()
                parts.optimizer.step()


def several_steps(parts: Parts, epochs: int) -> None:
    """One step, two or three for a batch, whose samples weigh as their tokens."""
    for _ in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader):
            tokens = 1 + (y[:, :1] > 0).double()
            steepest.weight(tokens.sum().item())
            for _ in range(1 + number % 3):
                parts.optimizer.zero_grad()
                errors = (parts.model(x) - y).square() * tokens
                (errors.sum() / tokens.sum()).backward()
                pause(1e-3)
                parts.optimizer.step()


def by_epoch(parts: Parts, epochs: int) -> None:
    """A scheduler that is stepped at the end of each epoch."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()
        for scheduler in parts.schedulers:
            scheduler.step()


def by_hand(parts: Parts, epochs: int) -> None:
    """Learning rates and momentum that are set by hand."""
    for epoch in steepest.epochs(epochs):
        for x, y in parts.loader:
            for group in parts.optimizer.param_groups:
                group["lr"] = 0.1 / (1 + epoch)
                group["momentum"] = 0.5 + 0.1 * epoch
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()


def clipping(parts: Parts, epochs: int) -> None:
    """The whole gradient is clipped by its norm."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            steepest.clip_grad_norm_(parts.model.parameters(), 0.5)
            parts.optimizer.step()


def scaling(parts: Parts, epochs: int) -> None:
    """Autocast, and a scaler of the loss."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    steepest.register(scaler=scaler)
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            loss = nn.functional.mse_loss(parts.model(x), y)
            scaler.scale(loss).backward()
            scaler.step(parts.optimizer)
            scaler.update()


def adding_up(parts: Parts, epochs: int) -> None:
    """The loss is a sum over samples, now and then over two batches."""
    for epoch in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader):
            nn.functional.mse_loss(parts.model(x), y, reduction="sum").backward()
            if epoch == 1 and number == 0:
                continue
            parts.optimizer.step()
            parts.optimizer.zero_grad()


def adding_up_often(parts: Parts, epochs: int) -> None:
    """The loss is a sum over samples, in two steps for each batch."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            for _ in range(2):
                parts.optimizer.zero_grad()
                nn.functional.mse_loss(parts.model(x), y, reduction="sum").backward()
                parts.optimizer.step()


def with_token_weights(parts: Parts, epochs: int) -> None:
    """The loss is the mean over tokens, of which samples have different numbers."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            tokens = (y > 0).double()
            steepest.weight(tokens.sum().item())
            parts.optimizer.zero_grad()
            errors = (parts.model(x) - y).square() * tokens
            (errors.sum() / tokens.sum().clamp_min(1.0)).backward()
            parts.optimizer.step()


def by_tokens(parts: Parts, epochs: int) -> None:
    """Means over tokens, of which samples have different numbers, of two batches for each step."""
    for _ in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader, 1):
            tokens = 1 + (y[:, :1] > 0).double()
            steepest.weight(tokens.sum().item())
            errors = (parts.model(x) - y).square() * tokens
            (errors.sum() / tokens.sum()).backward()
            if number % 2 == 0 or number == len(parts.loader):
                parts.optimizer.step()
                parts.optimizer.zero_grad()


def by_both(parts: Parts, epochs: int) -> None:
    """A scheduler that is stepped after each step, and once more at the end of an epoch."""
    (scheduler,) = parts.schedulers
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()
            scheduler.step()
        scheduler.step(None)


def adversarial(alternate: int = 1) -> None:
    """Two networks with an optimizer each, stepped in turns, at different rates."""
    data, seed = samples(SAMPLES + 2), 0
    generator, critic = (
        perceptron(),
        nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double(),
    )
    first = torch.optim.Adam(critic.parameters(), lr=0.02)
    second = torch.optim.SGD(generator.parameters(), lr=0.05, momentum=0.9)
    falling = torch.optim.lr_scheduler.ExponentialLR(first, 0.9)
    loader: Any = DataLoader(TensorDataset(*data), batch_size=BATCH, shuffle=True)
    workers = ALONE.get("workers")
    if workers is not None:
        loader = Whole(data, workers * BATCH, seed)
    generator, critic, first, second, falling, loader = steepest.prepare(
        generator, critic, first, second, falling, loader
    )
    kept = steepest.register(count=0)  # a successor takes the same turns
    for _ in steepest.epochs(3):
        for x, y in loader:
            kept.count += 1
            pause(1e-3)
            first.zero_grad()
            critic_loss = critic(generator(x).detach()).mean() - critic(y).mean()
            (critic_loss + critic(y).square().mean()).backward()
            first.step()
            if kept.count % 2:
                continue
            second.zero_grad()
            nn.functional.softplus(-critic(generator(x))).mean().backward()
            steepest.clip_grad_norm_(generator.parameters(), 0.05)
            second.step()
        falling.step()
    FOUND["adversarial"] = snapshot(nn.ModuleList([generator, critic]))


def of_some_samples(parts: Parts, epochs: int, lacking: list[bool]) -> None:
    """Learns of some samples alone: a part of the whole batch may have none of them, and no gradient."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            wanted = x[:, 0] > 0
            lacking.append(not wanted.any())
            if wanted.any():
                (
                    nn.functional.mse_loss(parts.model(x), y, reduction="none").mean(1) * wanted
                ).mean().backward()
            parts.optimizer.step()


def clipped_apart() -> None:
    """Two networks with an optimizer each, both clipped before both step."""
    columns = samples(SAMPLES)
    first, second = (nn.Linear(columns[0].shape[1], 1).double() for _ in range(2))
    one, two = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (first, second))
    first, second, one, two, loader = steepest.prepare(first, second, one, two, data())
    for _ in steepest.epochs(2):
        for x, y in loader:
            one.zero_grad()
            two.zero_grad()
            (first(x) + 3 * second(x) - y[:, :1]).square().mean().backward()
            steepest.clip_grad_norm_(first.parameters(), 0.1)
            steepest.clip_grad_norm_(second.parameters(), 0.2)
            two.step()
            one.step()
    FOUND["clipped_apart"] = snapshot(nn.ModuleList([first, second]))


#: How many workers a loop stands for that runs alone; what loops have found.
ALONE: dict[str, int] = {}
FOUND: dict[str, Weights] = {}


def without_loader() -> None:
    """Each worker makes data of its own, by its number."""
    policy = perceptron()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    policy, optimizer = steepest.prepare(policy, optimizer)
    ranks = range(ALONE["workers"]) if ALONE else [steepest.rank()]
    for number in steepest.epochs(5):
        for again in range(2):
            pause(1e-3)
            x = torch.cat([rollout(number, rank) for rank in ranks])
            optimizer.zero_grad()
            (policy(x).square().mean() + again * policy(x).mean()).backward()
            optimizer.step()
    FOUND["without_loader"] = snapshot(policy)


def rollout(number: int, rank: int) -> torch.Tensor:
    """What a worker sees in a round."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def sharpness_aware(parts: Parts, epochs: int) -> None:
    """The gradient at the worst place nearby, from which the loop comes back before the step."""
    parameters = list(parts.model.parameters())
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            with torch.no_grad():
                moves = [0.05 * p.grad.sign() for p in parameters if p.grad is not None]
                for parameter, move in zip(parameters, moves, strict=True):
                    parameter.add_(move)
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            with torch.no_grad():
                for parameter, move in zip(parameters, moves, strict=True):
                    parameter.sub_(move)
            parts.optimizer.step()


def with_closures(parts: Parts, epochs: int) -> None:
    """The optimizer is given what computes the loss."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:

            def closure(x: Any = x, y: Any = y) -> torch.Tensor:
                parts.optimizer.zero_grad()
                loss = nn.functional.mse_loss(parts.model(x), y)
                loss.backward()
                return loss

            assert parts.optimizer.step(closure) > 0


def penalised(parts: Parts, epochs: int) -> None:
    """A penalty on the gradient by the input: a backward pass through a backward pass."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            x.requires_grad_()
            output = parts.model(x)
            (slopes,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            loss = nn.functional.mse_loss(output, y) + 0.1 * slopes.square().sum(dim=1).mean()
            loss.backward()
            parts.optimizer.step()


def clamp(name: str, values: torch.Tensor) -> None:
    """Keeps a critic's weights small, as of a Wasserstein GAN."""
    if name.startswith("1."):
        values.clamp_(-0.3, 0.3)


def clamped() -> None:
    """Two networks, of which one is clamped after each step of its optimizer."""
    data = samples(SAMPLES + 2)
    generator, critic = (
        perceptron(),
        nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double(),
    )
    first = torch.optim.RMSprop(critic.parameters(), lr=0.05)
    second = torch.optim.RMSprop(generator.parameters(), lr=0.02)
    loader: Any = DataLoader(TensorDataset(*data), batch_size=BATCH, shuffle=True)
    if workers := ALONE.get("workers"):
        loader = Whole(data, workers * BATCH, 0)
    generator, critic, first, second, loader = steepest.prepare(
        generator, critic, first, second, loader, project=clamp
    )
    for _ in steepest.epochs(2):
        for x, y in loader:
            first.zero_grad()
            (critic(generator(x).detach()).mean() - critic(y).mean()).backward()
            first.step()
            if workers:
                with torch.no_grad():
                    for parameter in critic.parameters():
                        clamp("1.", parameter)
            second.zero_grad()
            (-critic(generator(x)).mean()).backward()
            second.step()
    FOUND["clamped"] = snapshot(nn.ModuleList([generator, critic]))


#: Loops that do what one process does, by what is particular in them.
ALIKE = {
    "accumulating": Script(accumulating, optimizer=sgd(momentum=0.9), data=samples(24)),
    "adamw": Script(
        plain, lambda: perceptron(), lambda m: torch.optim.AdamW(m.parameters(), lr=0.05)
    ),
    "a scheduler by epoch": Script(
        by_epoch, schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    ),
    "rates by hand": Script(by_hand, optimizer=sgd(momentum=0.9)),
    "clipping": Script(clipping, optimizer=sgd(momentum=0.9)),
    "a scaler": Script(scaling, optimizer=sgd(momentum=0.9)),
    "closures": Script(with_closures, optimizer=sgd(momentum=0.9)),
    "a gradient penalty": Script(penalised),
    "token weights": Script(with_token_weights),
    "token weights, added up": Script(by_tokens, optimizer=sgd(momentum=0.9)),
    "sums": Script(adding_up, optimizer=sgd(lr=0.02, momentum=0.9), reduction="sum"),
    "sums, several steps for a batch": Script(
        adding_up_often, optimizer=sgd(lr=0.02), reduction="sum"
    ),
    "the order of the data set": Script(plain, optimizer=sgd(momentum=0.9), shuffles=False),
    "several steps for a batch": Script(several_passes, optimizer=sgd(momentum=0.9)),
    "several steps, of tokens": Script(several_steps, optimizer=sgd(momentum=0.9)),
    "several steps in order": Script(several_passes, shuffles=False),
}
