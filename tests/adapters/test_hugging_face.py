"""A transformers.Trainer's model here and under the Trainer itself; see `make test-adapters`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import steepest
from steepest import DistributedSGD, HuggingFaceModel
from steepest.adapters.hugging_face_trainer import (
    FOLLOWED,
    OF_EVALUATION,
    OF_USERS,
    REFUSED,
    WITHOUT_EFFECT,
    methods_of,
    overridden,
)
from steepest.errors import ConfigurationError, ModelError
from tests.page_examples import said_by
from tests.reference import difference, snapshot
from tests.simulation.run import Simulation, run_config

transformers = pytest.importorskip("transformers", reason="make test-adapters installs it")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
STEPS = 10
TEXT = torch.randint(0, 16, (12, 9), generator=torch.Generator().manual_seed(1))
LENGTHS = [9, 3, 5, 2, 9, 9, 4, 2, 2, 7, 9, 6]  # of which the rest is padding


def examples() -> list[dict[str, Any]]:
    found = []
    for row, length in zip(TEXT, LENGTHS, strict=True):
        labels = row.clone()
        labels[length:] = -100
        found.append({"input_ids": row, "labels": labels, "name": torch.tensor(1)})
    return found


class Weighted(transformers.Trainer):
    """A Trainer with a loss of its own, as users write them."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **settings: Any) -> Any:
        loss, outputs = super().compute_loss(
            model, inputs, *args, **settings | {"return_outputs": True}
        )
        loss = 0.5 * loss
        return (loss, outputs) if settings.get("return_outputs") else loss


def trainer(folder: Path, kind: Any = transformers.Trainer, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=16, n_embd=8, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    chosen: dict[str, Any] = {
        "max_steps": STEPS,
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": len(LENGTHS),
    }
    chosen["per_device_eval_batch_size"] = len(LENGTHS)
    chosen["save_strategy"] = "no"
    args = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True,
        learning_rate=0.01, weight_decay=0.1, **chosen | settings,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).double()
    return kind(model=model, args=args, train_dataset=examples(), eval_dataset=examples())


def share_of_right(output: Any, labels: torch.Tensor) -> torch.Tensor:
    right = output.logits[:, :-1].argmax(dim=-1) == labels[:, 1:]
    return right.double().mean()


@pytest.mark.parametrize(
    ("kind", "workers", "strategy", "settings"),
    [
        (transformers.Trainer, 2, "allreduce", {"lr_scheduler_type": "linear", "warmup_steps": 3}),
        (transformers.Trainer, 3, "ps", {"lr_scheduler_type": "constant", "optim": "adagrad"}),
        (Weighted, 2, "ps", {"lr_scheduler_type": "cosine", "label_smoothing_factor": 0.1}),
    ],
)
def test_a_model_ends_with_the_weights_that_its_trainer_gives_it(
    tmp_path: Path, kind: Any, workers: int, strategy: str, settings: dict[str, Any]
) -> None:
    theirs = trainer(tmp_path, kind, **settings)
    begin = snapshot(theirs.model)
    theirs.train()
    expected = snapshot(theirs.model)
    assert difference(expected, begin) > 0.05

    def create(worker_index: int, device_index: int) -> HuggingFaceModel:
        size = len(LENGTHS) // workers
        ours = trainer(tmp_path, kind, per_device_train_batch_size=size, **settings)
        return HuggingFaceModel(ours, metrics={"right": share_of_right})

    config = run_config(audit=float(kind is transformers.Trainer))  # which changes nothing
    with (
        Simulation(1).running(),
        DistributedSGD(create, workers, strategy=strategy, run_config=config) as sgd,
    ):
        last = sgd.fit(steps=STEPS, progress=False)
        assert difference(sgd.weights(), expected) < 1e-6  # transformers' loss is in float32
        assert "difference" not in [event.kind for event in sgd.stats().events]
        assert 0 < last.metrics["right"] < 1
        found = sgd.evaluate(examples())
    assert found.samples == len(LENGTHS)
    if "label_smoothing_factor" not in settings:
        assert found.loss == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"train_sampling_strategy": "group_by_length"}, "leave it out: samples come in an order"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
            "give checkpoints=Checkpoints.path, best=",
        ),
        ({"gradient_accumulation_steps": 4}, "give accumulate=4 to DistributedSGD"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        (
            {
                "lr_scheduler_type": "reduce_lr_on_plateau",
                "eval_strategy": "steps",
                "eval_steps": 5,
            },
            "steepest.ReduceOnPlateau",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        HuggingFaceModel(trainer(tmp_path, **settings))


def test_a_trainer_with_nearly_default_arguments_trains_as_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It clips, here at a smaller norm; its schedule ends with its epochs; what has no effect is said once."""
    by_default = {"max_steps": -1, "max_grad_norm": 0.1, "save_strategy": "steps"}

    def make(batch_size: int) -> Any:
        made = trainer(tmp_path, per_device_train_batch_size=batch_size, **by_default)
        made.compute_metrics = lambda prediction: {}
        return made

    theirs = make(len(LENGTHS))
    theirs.train()
    assert theirs.state.max_steps == 3

    def create(worker_index: int, device_index: int) -> HuggingFaceModel:
        return HuggingFaceModel(make(len(LENGTHS) // 2))

    with (
        Simulation(1).running(),
        DistributedSGD(create, 2, strategy="ps", run_config=run_config()) as sgd,
    ):
        sgd.fit(epochs=3, progress=False)
        assert difference(sgd.weights(), snapshot(theirs.model)) < 1e-6
    (said,) = [r.getMessage() for r in caplog.records if "has no effect here" in r.getMessage()]
    assert "save_strategy='steps' (instead: DistributedSGD(checkpoints=" in said
    assert "compute_metrics (instead: HuggingFaceModel(metrics=" in said
    assert "eval_strategy" not in said


class Drawing(torch.utils.data.Sampler[int]):
    """Draws some rows more often than others; as many rows as there are."""

    def __iter__(self) -> Any:
        return iter([3, 3, 0, 11, 3, 5, 7, 7, 0, 1, 3, 2])

    def __len__(self) -> int:
        return 12


class InOrder(transformers.Trainer):
    """A Trainer with samples in order, as users write it; it notes where each loss was computed."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **settings: Any) -> Any:
        state = self.state
        self.noted = (state.global_step, round(state.epoch, 9), state.max_steps, model.training)
        SEEN.append(self.noted)
        assert type(inputs) is transformers.BatchEncoding
        return super().compute_loss(model, inputs, *args, **settings)


class Drawn(InOrder):
    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return Drawing()


class Loading(InOrder):
    """Its loader, not wrapped by accelerate, has a batch size of its own."""

    def get_train_dataloader(self) -> Any:
        size = self.args.per_device_train_batch_size // 3
        collate = self.data_collator
        return torch.utils.data.DataLoader(
            self.train_dataset, batch_size=size, sampler=Drawing(), collate_fn=collate
        )


class Preparing(InOrder):
    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        inputs["labels"] = inputs["labels"].clone()
        inputs["labels"][:, :2] = -100
        return inputs


SEEN: list[Any] = []


def collate(rows: list[Any]) -> Any:
    found = transformers.default_data_collator(rows)
    return transformers.BatchEncoding({name: found[name] for name in ("input_ids", "labels")})


@pytest.mark.parametrize("kind", [InOrder, Drawn, Loading, Preparing])
def test_what_a_trainer_overrides_is_followed(tmp_path: Path, kind: Any) -> None:
    """Samplers, loaders and what is done to a batch; it says to its loss at which step it is, in training mode."""

    def make(batch: int) -> Any:
        batch *= 3 if kind is Loading else 1
        settings = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": batch}
        made = trainer(tmp_path, kind, **settings)
        made.data_collator = collate
        made.model.eval()  # as `from_pretrained` leaves it
        return made

    SEEN.clear()
    theirs = make(4)
    theirs.train()
    expected, SEEN[:] = list(SEEN), []
    assert expected[-1] == (5, pytest.approx(5 / 3), 6, True)
    with (
        Simulation(1).running(),
        DistributedSGD(
            lambda *_: HuggingFaceModel(make(2)), 2, strategy="ps", run_config=run_config()
        ) as sgd,
    ):
        sgd.fit(steps=6, progress=False)
        assert difference(sgd.weights(), snapshot(theirs.model)) < 1e-6
    assert sorted(set(SEEN)) == expected
    assert len(SEEN) == 2 * len(expected)


def test_every_method_that_may_be_overridden_is_on_one_list() -> None:
    """A release of transformers with a new one fails here, and such an override is refused."""
    lists = [FOLLOWED, OF_USERS, OF_EVALUATION, WITHOUT_EFFECT, frozenset(REFUSED)]
    known = methods_of(transformers.Trainer) | methods_of(transformers.Seq2SeqTrainer)
    assert sorted(name for each in lists for name in each) == sorted(known)


def test_what_counts_as_overridden(tmp_path: Path) -> None:
    assert list(overridden(trainer(tmp_path))) == []
    made = trainer(tmp_path, Drawn)
    made.log = print
    assert list(overridden(made)) == ["_get_train_sampler", "compute_loss", "log"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("training_step", "override compute_loss, create_optimizer or create_scheduler"),
        ("_clip_grad_norm", "set max_grad_norm, or a strategy's clip_norm"),
        ("train", "write a loop of your own"),
    ],
)
def test_a_method_that_is_not_called_is_refused(tmp_path: Path, name: str, says: str) -> None:
    kind = type("Own", (Weighted,), {name: lambda self, *batch: None})
    with pytest.raises(
        ModelError, match=f"Own overrides {name}, which is not called here: .*{says}"
    ):
        HuggingFaceModel(trainer(tmp_path, kind))
    made = trainer(tmp_path)
    setattr(made, name, print)
    with pytest.raises(ModelError, match=f"Trainer overrides {name}"):
        HuggingFaceModel(made)


def test_what_has_no_effect_is_named(tmp_path: Path) -> None:
    kind = type("Own", (Weighted,), dict.fromkeys(["_save_checkpoint", "prediction_step"], print))
    made = trainer(tmp_path, kind)
    made.add_callback(transformers.EarlyStoppingCallback)
    model = HuggingFaceModel(made)
    assert "the callbacks EarlyStoppingCallback (instead: fit(callbacks=[...]))" in model.notice
    assert "its own _save_checkpoint (instead: fit(" in model.notice
    with pytest.raises(ModelError, match="Own overrides prediction_step, which is not called"):
        model.evaluate(next(model.data.open([np.arange(2)])))


class Batches(torch.utils.data.BatchSampler):
    """Batches that no sampler's samples make."""


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (
            torch.utils.data.DataLoader(examples(), batch_sampler=Batches(Drawing(), 2, False)),
            "a Batches, whose batches cannot be dealt out",
        ),
        (
            torch.utils.data.DataLoader(
                examples(), sampler=torch.utils.data.DistributedSampler(examples(), 2, 0)
            ),
            "DistributedSampler, which divides samples by itself",
        ),
        ([examples()], "get_train_dataloader returned a list: return a torch.utils.data"),
    ],
)
def test_a_loader_that_cannot_be_dealt_out_is_refused(
    tmp_path: Path, loader: Any, says: str
) -> None:
    made = trainer(tmp_path)
    made.get_train_dataloader = lambda: loader
    with pytest.raises((ModelError, ConfigurationError), match=says):
        HuggingFaceModel(made)


def test_a_stream_of_samples_is_trained_on(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(examples())

    theirs = trainer(tmp_path, lr_scheduler_type="constant")
    theirs.train_dataset = Stream()
    model = HuggingFaceModel(theirs)
    theirs.args.lr_scheduler_type, theirs.args.max_steps = "linear", -1
    with pytest.raises(ConfigurationError, match="data have no length: set max_steps"):
        HuggingFaceModel(theirs)
    batch = next(model.data.open(iter([])))
    assert batch["input_ids"].shape == (len(LENGTHS), 9)
    assert torch.isfinite(model.loss(batch)[0])


def test_a_model_alone_is_refused() -> None:
    with pytest.raises(ModelError, match=r"is a Linear: give a transformers.Trainer"):
        HuggingFaceModel(torch.nn.Linear(1, 1))


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert said_by("howto/hugging_face.md", monkeypatch) == "learned: True\n"
    said = said_by("howto/hugging_face.md", monkeypatch, 1)
    assert said.endswith("equal to the rounding of float32: True\n")


TUNED: dict[str, Any] = {}


def tuned() -> None:
    """A script's own loop: groups of parameters, a warm-up, means over tokens, a norm that is clipped."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=16, n_embd=8, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).double()
    plain = [p for p in model.parameters() if p.dim() < 2]
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer: Any = torch.optim.AdamW(groups, lr=0.01)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 2, 8)
    data: Any = [{name: row[name] for name in ("input_ids", "labels")} for row in examples()]
    loader: Any = torch.utils.data.DataLoader(data, batch_size=TUNED["batch"])
    model, optimizer, scheduler, loader = steepest.prepare(model, optimizer, scheduler, loader)
    for _ in steepest.epochs(4):
        for batch in loader:
            steepest.weight((batch["labels"][:, 1:] != -100).sum().item())
            loss = model(**batch).loss
            loss.backward()
            steepest.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        steepest.report(loss=loss)
    TUNED["weights"] = snapshot(model)


@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_a_loop_of_ones_own_equals_one_process(strategy: str) -> None:
    TUNED["batch"] = 6
    tuned()
    expected = TUNED["weights"]
    TUNED["batch"] = 3
    with Simulation(seed=1).running():
        found = steepest.run(
            tuned, num_workers=2, strategy=strategy, run_config=run_config(), progress=False
        )
        weights = {name: found.state_dict[name] for name in expected}
        tied = found.state_dict["lm_head.weight"], found.state_dict["transformer.wte.weight"]
        assert torch.equal(*tied)
    assert difference(weights, expected) < 1e-6  # its losses are of float32
