"""Room for a job's workers: what could never be placed is refused at once, and who holds the room is named."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from steepest import (
    Callback,
    Checkpoints,
    DeadlineConfig,
    DistributedSGD,
    ParameterServer,
    RunConfig,
)
from steepest.errors import ConfigurationError, ResourcesError
from steepest.runtime.driver.fit_loop import check_callbacks
from steepest.runtime.room import check_possible
from steepest.testing import linear_model_creator

CPU = {"CPU": 1.0}


def node(cpus: float, gpus: float = 0.0) -> dict[str, float]:
    return {"CPU": cpus, "memory": 1e9} | ({"GPU": gpus} if gpus else {})


@pytest.mark.parametrize(
    ("workers", "bundle", "nodes", "named"),
    [
        (8, CPU, [node(2)], r"8 workers never fit: asked {CPU: 8}.* is {CPU: 2}, 2 workers' worth"),
        (3, CPU, [node(2)], r"share cores \(ray.init\(num_cpus=3\) before\), or connect"),
        (1, CPU, [node(0)], "1 worker never fits"),
        (1, CPU, [], "1 worker never fits"),
        (1, {"CPU": 1.0, "GPU": 1.0}, [node(8)], "fewer workers, with gpu=False, or connect"),
        (
            3,
            {"CPU": 1.0, "GPU": 2.0},
            [node(8, 4)],
            r"asked {CPU: 3, GPU: 6}.*{CPU: 8, GPU: 4}, 2 workers' worth",
        ),
        (1, {"CPU": 4.0}, [node(2), node(2)], "each worker's on one node"),
    ],
)
def test_what_never_fits_is_refused_unless_nodes_may_join(
    workers: int, bundle: dict[str, float], nodes: list[dict[str, float]], named: str
) -> None:
    with pytest.raises(ResourcesError, match=named):
        check_possible(workers, bundle, nodes, False)
    check_possible(workers, bundle, nodes, True)


def test_what_fits_is_not_refused() -> None:
    check_possible(8, CPU, [node(8)], False)
    check_possible(4, {"CPU": 2.0, "GPU": 0.5}, [node(5, 1), node(4, 1)], False)


class Whole:
    """A callback that is derived from nothing."""

    def on_fit_begin(self, sgd: Any, steps: int) -> None: ...
    def on_step(self, sgd: Any, result: Any) -> None: ...
    def on_event(self, sgd: Any, event: Any) -> None: ...
    def on_length(self, sgd: Any, steps: int) -> None: ...
    def on_evaluation(self, sgd: Any, result: Any) -> None: ...
    def on_epoch_end(self, sgd: Any, result: Any) -> None: ...
    def on_fit_end(self, sgd: Any) -> None: ...


@pytest.mark.parametrize(
    ("callbacks", "named"),
    [
        ([print], r"no on_fit_begin\(\): derive it from steepest.Callback"),
        ([Callback(), None], "callbacks has None"),
        ([Callback], r"the class Callback: give Callback\(...\)"),
        (Callback(), "give a list"),
        (3, "callbacks=3"),
        (None, "callbacks=None"),
    ],
)
def test_callbacks_are_checked(callbacks: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        check_callbacks(callbacks)
    check_callbacks([Callback(), Whole()])
    check_callbacks(())


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_workers": 0}, {"num_workers": 2.0}, {"num_workers": (2, 1)}, {"num_workers": [1, 2]},
        {"num_workers": "2"}, {"devices_per_worker": 0}, {"gpu": "yes"}, {"gpu": None}, {"strategy": "pss"},
        {"strategy": 3}, {"strategy": ParameterServer}, {"accumulate": 0}, {"accumulate": 1.5},
        {"seed": -1}, {"seed": None},
        {"run_config": {"keep_log": True}}, {"run_config": RunConfig}, {"checkpoints": "here"},
        {"checkpoints": Checkpoints},
    ],
    ids=str,
)  # fmt: skip
def test_the_trainers_arguments_are_checked_before_anything_starts(wrong: dict[str, Any]) -> None:
    import ray

    connected = ray.is_initialized()
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        DistributedSGD(linear_model_creator(), **wrong)
    assert ray.is_initialized() == connected


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_servers": 0}, {"optimizer": torch.optim.SGD([torch.zeros(1)])}, {"nonfinite": "no"},
        {"transport": "smoke"}, {"timeout": 0}, {"timeout": "1"}, {"max_in_flight": 0}, {"initial": "weights"},
        {"initial": {}}, {"initial": {"a": 3}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)  # fmt: skip
def test_the_parameter_servers_arguments_are_checked_before_anything_starts(
    wrong: dict[str, Any],
) -> None:
    import ray

    connected = ray.is_initialized()
    with pytest.raises(ConfigurationError):
        ParameterServer(**{"initial": torch.zeros(3), **wrong})
    assert ray.is_initialized() == connected


# -- on Ray ---------------------------------------------------------------------------------------------


@pytest.fixture
def quick(ray_cluster: None) -> Iterator[RunConfig]:
    yield RunConfig(deadlines=DeadlineConfig(start=20.0))
    gc.collect()


class Raising(Callback):
    def on_step(self, sgd: Any, result: Any) -> None:
        raise KeyError("the user's own")


@pytest.mark.long
@pytest.mark.ray
def test_a_trainer_that_is_dropped_gives_its_room_to_the_next(
    quick: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight of eight CPUs, also after a fit that raised; one warning says what to do."""
    trainer = DistributedSGD(linear_model_creator(), num_workers=8, run_config=quick)
    try:
        trainer.fit(steps=2, callbacks=[Raising()], progress=False)
    except KeyError:
        pass
    else:
        pytest.fail("the callback's error is raised")
    with pytest.raises(
        ResourcesError
    ) as caught:  # the old one is there until the name is bound to the new one
        trainer = DistributedSGD(
            linear_model_creator(),
            num_workers=8,
            run_config=RunConfig(deadlines=DeadlineConfig(start=1.0)),
        )
    assert 'this process holds a trainer with strategy="ps" (CPU: 8): call shutdown()' in str(
        caught.value
    )
    assert "in a notebook before the name is bound to the next one" in str(caught.value)
    del caught
    trainer.step()  # it is as it was
    alive = weakref.ref(trainer)
    gc.collect()
    gc.disable()
    try:
        del trainer
        assert alive() is None, "a cycle or a thread keeps it"
    finally:
        gc.enable()
    with DistributedSGD(
        linear_model_creator(), num_workers=8, strategy="allreduce", run_config=quick
    ) as trainer:
        trainer.step()
    told = [
        record
        for record in caplog.records
        if "was dropped without shutdown()" in record.getMessage()
    ]
    assert [record.levelno for record in told] == [logging.WARNING]
    assert "with DistributedSGD(...) as sgd:" in told[0].getMessage()


@pytest.mark.ray
def test_one_that_is_shut_down_says_nothing(
    quick: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = DistributedSGD(linear_model_creator(), run_config=quick)
    trainer.shutdown()
    del trainer
    gc.collect()
    assert "dropped" not in caplog.text
