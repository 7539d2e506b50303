"""LightningModules here and under Lightning's own Trainer; see `make test-adapters`."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from steepest import Checkpoints, DistributedSGD, LightningModel
from steepest.core.data.sampler import SamplePlan
from steepest.core.optim.spec import Schedule
from steepest.errors import ConfigurationError, ModelError
from tests.page_examples import blocks_of, run_block, said_by
from tests.reference import difference, same_bits, samples, snapshot
from tests.simulation.run import Simulation, run_config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning.pytorch", reason="make test-adapters installs it")
    torchmetrics = pytest.importorskip("torchmetrics")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
EPOCHS, STEPS, STEP = 5, 4, 12  # steps of an epoch, samples of a step
X, Y = samples(STEPS * STEP)


def plateau(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Net(lightning.LightningModule):
    """A module as users write them; what `configure_optimizers` returns is drawn by `form`."""

    def __init__(self, form: str = "step") -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
        ).double()
        self.error = torchmetrics.MeanAbsoluteError()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        if (self.hparams.form == "none" and batch_idx % 2) or self.hparams.form == "never":
            return None
        x, y = batch
        output = self(x)
        loss = torch.nn.functional.mse_loss(output, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log_dict({"largest": output.abs().max(), "batch": float(batch_idx)}, on_epoch=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        output = self(x)
        self.log("val_loss", torch.nn.functional.mse_loss(output, y))
        self.error(output, y)
        self.log("error", self.error)

    def configure_optimizers(self) -> Any:
        schedulers = torch.optim.lr_scheduler
        groups = [
            {"params": self.body[0].parameters(), "lr": 0.02},
            {"params": self.body[2].parameters()},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        if self.hparams.form == "step":
            total = self.trainer.estimated_stepping_batches
            one = schedulers.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=total)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": one, "interval": "step"}}
        if self.hparams.form == "epoch":
            return [optimizer], [schedulers.ExponentialLR(optimizer, gamma=0.5)]
        if self.hparams.form in ("third", "none"):  # 4 steps are an epoch
            third = schedulers.ExponentialLR(optimizer, gamma=0.5)
            return [optimizer], [{"scheduler": third, "interval": "step", "frequency": 3}]
        if self.hparams.form == "frequency":
            warm = schedulers.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warm()))
            late = schedulers.StepLR(optimizer, step_size=1, gamma=0.5)
            both = schedulers.SequentialLR(optimizer, [warm, late], milestones=[3])
            return [optimizer], [{"scheduler": both, "interval": "step", "frequency": 2}]
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def warm(self) -> int:
        return 3


def under_lightning(form: str, batches: list[Any]) -> dict[str, torch.Tensor]:
    """The weights that Lightning's Trainer ends with, in the order of samples that steepest takes."""
    module = Net(form)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(X, Y), batch_sampler=InTurn(batches)
    )
    return fitted(module, loader)


def fitted(module: Any, data: Any) -> dict[str, torch.Tensor]:
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, data)
    assert trainer.global_step == EPOCHS * STEPS
    return snapshot(module)


class InTurn:
    """A batch sampler that yields other batches in each epoch."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = iter(batches)

    def __iter__(self) -> Any:
        return iter([next(self.batches) for _ in range(STEPS)])

    def __len__(self) -> int:
        return STEPS


def creator(form: str, workers: int) -> Any:
    def create(worker_index: int, device_index: int) -> LightningModel:
        return LightningModel(
            Net(form), data=(X, Y), batch_size=STEP // workers, steps_per_epoch=STEPS, epochs=EPOCHS
        )

    return create


@pytest.mark.parametrize(
    ("form", "workers", "strategy"),
    [
        ("step", 2, "allreduce"),
        ("epoch", 3, "ps"),
        ("frequency", 2, "ps"),
        ("plain", 1, "ps"),
        ("third", 1, "ps"),
        ("none", 2, "ps"),
        ("none", 3, "allreduce"),
    ],
)
def test_a_module_ends_with_the_weights_that_lightning_gives_it(
    form: str, workers: int, strategy: str
) -> None:
    plan = SamplePlan(len(X), STEP, seed=0)
    expected = under_lightning(form, [plan.share(n, 0, 1) for n in range(EPOCHS * STEPS)])
    begin = snapshot(Net(form))
    assert difference(expected, begin) > 0.05
    config = run_config(audit=0.0 if form == "plain" else 1.0)  # which changes nothing
    with (
        Simulation(1).running(),
        DistributedSGD(
            creator(form, workers), workers, strategy=strategy, run_config=config
        ) as sgd,
    ):
        last = sgd.fit(epochs=EPOCHS, progress=False)
        assert "difference" not in [event.kind for event in sgd.stats().events]
        assert difference(sgd.weights(), expected) < 1e-12
        if form != "none":  # its last batches have no loss
            assert last.metrics.keys() == {"train_loss", "largest", "batch"}
            assert last.metrics["train_loss"] == pytest.approx(last.loss, rel=1e-12)
            assert last.metrics["batch"] == STEPS - 1
        found = sgd.evaluate((X, Y))
    module = Net(form)
    module.load_state_dict(expected, strict=False)
    output = module(X)
    assert found.loss == pytest.approx(torch.nn.functional.mse_loss(output, Y).item(), rel=1e-9)
    assert found.metrics["val_loss"] == found.loss
    assert found.metrics["error"] == pytest.approx((output - Y).abs().mean().item(), rel=1e-6)


def test_a_schedule_goes_on_from_a_checkpoint_and_travels_to_other_processes() -> None:
    spec = ray.cloudpickle.loads(
        ray.cloudpickle.dumps(creator("frequency", 2)(0, 0).optimizer_spec)
    )
    straight, late = Schedule(spec), Schedule(spec)
    rates = [[group.get("lr") for group in straight.at(step)] for step in range(15)]
    assert spec.schedule_id, "its state cannot be carried"
    assert len({rate for rate, _ in rates}) > 4
    straight.at(9)
    late.load_state(straight.state())
    assert [[group.get("lr") for group in late.at(step)] for step in range(9, 15)] == rates[9:]


@pytest.mark.parametrize("form", ["step", "epoch"])
def test_a_program_that_is_started_again_ends_with_the_same_bits(form: str, tmp_path: Path) -> None:
    def program(path: Path, *steps: int) -> dict[str, torch.Tensor]:
        weights = {}
        with Simulation(1).running():
            for end in steps:
                with DistributedSGD(
                    creator(form, 2), 2, run_config=run_config(), checkpoints=Checkpoints(path)
                ) as sgd:
                    sgd.fit(steps=end, progress=False)
                    weights = sgd.weights()
        return weights

    straight = program(tmp_path / "straight", EPOCHS * STEPS)
    assert same_bits(program(tmp_path / "resumed", 7, EPOCHS * STEPS), straight)


def changed(**methods: Any) -> Any:
    """A module of a class that overrides some methods."""
    return type("Changed", (Net,), methods)("plain")


@pytest.mark.parametrize(
    ("module", "settings", "error", "says"),
    [
        (torch.nn.Linear(3, 2), {}, ModelError, "is a Linear: give a LightningModule"),
        (lightning.LightningModule(), {}, ModelError, "has no training_step"),
        (changed(automatic_optimization=False), {}, ModelError, "automatic_optimization=False"),
        (changed(on_train_epoch_end=print), {}, ModelError, r"ignore_hooks=\['on_train_epoch_end'\]"),
        (changed(optimizer_step=print), {}, ModelError, "overrides optimizer_step"),
        (Net("epoch"), {}, ConfigurationError, r"LightningModel\(steps_per_epoch=\)"),
        (Net("third"), {}, ConfigurationError, "ExponentialLR is stepped once in 3 steps of each"),
        (Net("step"), {"steps_per_epoch": 4}, ModelError, "'estimated_stepping_batches'"),
        (Net("plain"), {"epochs": 0}, ConfigurationError, "epochs=0"),
        (
            changed(configure_optimizers=lambda self: [Net("plain").configure_optimizers()] * 2),
            {}, ConfigurationError, "2 optimizers",
        ),
        (changed(configure_optimizers=lambda self: None), {}, ConfigurationError, "NoneType"),
        (changed(configure_optimizers=plateau), {}, ConfigurationError, "steepest.ReduceOnPlateau"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(
    module: Any, settings: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        LightningModel(module, data=(X, Y), batch_size=4, **settings)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (lambda self, batch: 1.0, "training_step returned float"),
        (lambda self, batch: {"los": self(X).sum()}, "training_step returned dict"),
        (lambda self, batch: self.trainer.current_epoch, "asks its trainer for 'current_epoch'"),
        (lambda self, batch: self.log("most", 1.0, reduce_fx="max"), "reduce_fx='max'"),
        (lambda self, batch: self.logger.experiment, "asks its trainer for 'logger'"),
    ],
)
def test_what_a_step_does_wrong_is_told(step: Any, says: str) -> None:
    model = LightningModel(changed(training_step=step), data=(X, Y), batch_size=4)
    with pytest.raises(ModelError, match=says):
        model.loss((X, Y))


def test_a_collection_of_metrics_is_computed_for_each_batch() -> None:
    """Two of them share a list of all outputs, two share counts."""
    names = ("BinaryAUROC", "BinaryAveragePrecision", "BinaryPrecision", "BinaryRecall")

    def made() -> dict[str, Any]:
        return {name: getattr(torchmetrics.classification, name)() for name in names}

    def step(self: Any, batch: Any) -> Any:
        self.several.update(*batch)
        self.log_dict(self.several)
        return self(X).mean()

    module = changed(training_step=step)
    module.several = torchmetrics.MetricCollection(made())
    model = LightningModel(module, data=(X, Y), batch_size=4)
    for begin in (0, 16, 32):
        output, target = (a[begin : begin + 16, 0] for a in (X.sigmoid(), Y > 0))
        model.loss((output, target.long()))
        expected = {name: metric(output, target.long()).item() for name, metric in made().items()}
        assert dict(model.metrics(None)) == pytest.approx(expected)
    assert len(module.several.compute_groups) == 2


def test_metrics_of_an_evaluation_are_computed_once_of_all_its_batches() -> None:
    names = ("BinaryAUROC", "BinaryAveragePrecision", "BinaryPrecision", "BinaryRecall")

    def made() -> dict[str, Any]:
        return {name: getattr(torchmetrics.classification, name)() for name in names}

    def step(self: Any, batch: Any) -> None:
        self.several.update(*batch)
        self.log_dict(self.several)
        self.log("val_loss", self(X).mean())

    def model_of(begins: list[int]) -> Any:
        module = changed(validation_step=step)
        module.several = torchmetrics.MetricCollection(made())
        model = LightningModel(module, data=(X, Y), batch_size=4)
        for _ in range(2):  # the first one is given up
            model.begin_evaluation()
            for begin, end in itertools.pairwise(begins):
                model.evaluate((output[begin:end], target[begin:end]))
        return model

    output, target = X[:, 0].sigmoid(), (Y[:, 0] > 0).long()
    expected = {name: metric(output, target).item() for name, metric in made().items()}
    models = [model_of([0, 7, 20, 31]), model_of([31, len(X)])]
    states = [model.metric_states() for model in models]
    for model in models:
        assert model.metric_values(states) == pytest.approx(expected)


def test_a_step_may_return_a_dict_and_take_no_index_and_data_may_be_the_modules_own() -> None:
    module = changed(
        training_step=lambda self, batch: {"loss": self(batch[0]).square().mean()},
        train_dataloader=lambda self: torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(X, Y), batch_size=4
        ),
        on_train_epoch_end=print,
        validation_step=lightning.LightningModule.validation_step,
    )
    model = LightningModel(module, ignore_hooks=["on_train_epoch_end"])
    assert model.batch_size == 4
    assert model.loss((X, Y)).item() == model.module(X).square().mean().item()
    assert "log" not in vars(model.module)
    with pytest.raises(ModelError, match="has no validation_step"):
        model.evaluate((X, Y))


def test_a_worker_without_a_loss_counts_for_nothing() -> None:
    plan = SamplePlan(len(X), STEP, seed=0)
    expected = under_lightning("plain", [plan.share(n, 0, 2) for n in range(EPOCHS * STEPS)])

    def create(worker_index: int, device_index: int) -> LightningModel:
        form = "plain" if worker_index == 0 else "never"
        return LightningModel(Net(form), data=(X, Y), batch_size=STEP // 2)

    with Simulation(1).running(), DistributedSGD(create, 2, run_config=run_config()) as sgd:
        sgd.fit(steps=EPOCHS * STEPS, progress=False)
        assert difference(sgd.weights(), expected) < 1e-12


class Boxed:
    """A batch of a type that only `transfer_batch_to_device` knows."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows


def boxed(rows: list[Any]) -> Boxed:
    return Boxed(torch.utils.data.default_collate(rows))


class Data(lightning.LightningDataModule):
    """Data with hooks of their own."""

    def __init__(self, **chosen: Any) -> None:
        super().__init__()
        self.chosen, self.rows = chosen, ()

    def setup(self, stage: str) -> None:
        self.rows = torch.utils.data.TensorDataset(X, Y)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.rows, collate_fn=boxed, **self.chosen)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert dataloader_idx == 0
        return Boxed((batch.rows[0] + 1, batch.rows[1]))

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [each.to(device) for each in batch.rows]


class Scaling(Net):
    """Its hook is called, too, as the data module has none of this name."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return 2 * x, y


def test_hooks_of_batches_are_called_those_of_a_data_module_first() -> None:
    plan = SamplePlan(len(X), STEP, seed=0)
    batches = [plan.share(n, 0, 1) for n in range(EPOCHS * STEPS)]
    expected = fitted(Scaling("plain"), Data(batch_sampler=InTurn(batches)))

    def create(worker_index: int, device_index: int) -> LightningModel:
        return LightningModel(Scaling("plain"), data=Data(batch_size=STEP // 2))

    with Simulation(1).running(), DistributedSGD(create, 2, run_config=run_config()) as sgd:
        sgd.fit(epochs=EPOCHS, progress=False)
        assert difference(sgd.weights(), expected) < 1e-12
        loader = Data(batch_size=STEP)
        loader.setup("validate")
        found = sgd.evaluate(loader.train_dataloader())
    module = Net("plain")
    module.load_state_dict(expected)
    loss = torch.nn.functional.mse_loss(module(2 * (X + 1)), Y)
    assert found.loss == pytest.approx(loss.item(), rel=1e-9)
    own = type("Own", (Data,), {"state_dict": lambda self: {}})()
    with pytest.raises(ModelError, match="Own overrides state_dict, which is not called here"):
        LightningModel(Net("plain"), data=own, batch_size=4)


def test_a_batch_has_its_number_in_the_epoch_and_in_the_evaluation() -> None:
    seen: list[tuple[str, int]] = []

    class Numbered(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(("t", batch_idx))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(("v", batch_idx))
            super().validation_step(batch, batch_idx)

    with (
        Simulation(1).running(),
        DistributedSGD(
            lambda *_: LightningModel(Numbered("plain"), data=(X, Y), batch_size=STEP // 2),
            1, accumulate=2, run_config=run_config(),
        ) as sgd,
    ):  # fmt: skip
        sgd.fit(epochs=2, progress=False)
        for _ in range(2):
            sgd.evaluate((X, Y), batch_size=len(X) // 3)
    assert seen[-22:] == [("t", n) for n in range(8)] * 2 + [("v", n) for n in range(3)] * 2


PAGE_SAYS = "equal to rounding: True ['train_accuracy', 'train_loss'] ['val_accuracy', 'val_loss']"


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:.*num_workers")
def test_the_page_runs_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said_by("howto/from_lightning.md", monkeypatch).splitlines()[-1] == PAGE_SAYS


@pytest.mark.full
def test_the_page_runs_as_it_stands_on_a_ray_of_its_own(tmp_path: Path) -> None:
    (block,) = blocks_of("docs/howto/from_lightning.md")
    assert run_block(block, tmp_path).splitlines()[-1] == PAGE_SAYS
