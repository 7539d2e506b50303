"""A transformers.Trainer's model here and under the Trainer itself; see `make test-adapters`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import steepest
from steepest import DistributedSGD, HuggingFaceModel
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

    with (
        Simulation(1).running(),
        DistributedSGD(create, workers, strategy=strategy, run_config=run_config()) as sgd,
    ):
        last = sgd.fit(steps=STEPS, progress=False)
        assert difference(sgd.weights(), expected) < 1e-6  # transformers' loss is in float32
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


def test_a_training_step_of_ones_own_is_refused(tmp_path: Path) -> None:
    kind = type("Own", (Weighted,), {"training_step": lambda self, *batch: None})
    with pytest.raises(ModelError, match="Own overrides training_step, which is not called"):
        HuggingFaceModel(trainer(tmp_path, kind))


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
    assert said_by("hugging_face.md", monkeypatch) == "learned: True\n"
    said = said_by("hugging_face.md", monkeypatch, 1)
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
