"""Settings are refused when they are made, with words that help; errors form the tree that is drawn."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import steepest
from steepest import DistributedSGD, errors
from steepest.core.config.run import DeadlineConfig, FailureConfig, ResourceConfig, RunConfig
from steepest.core.engine.extension import Extension
from steepest.errors import ConfigurationError, SteepestError
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.local import LocalStrategy
from steepest.strategies.named import as_strategy
from steepest.strategies.names import STRATEGY_NAMES
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.strategies.simple import SimpleStrategy
from steepest.validation import require_count

CARRIERS = {"RemoteTraceback"}  # of text, attached as a cause; not raised on purpose


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize(
    ("creator", "words"),
    [
        (torch.nn.Linear(3, 2), "model_creator is a module itself (Linear), which each worker is"),
        (lambda worker: None, "too many positional arguments: give a function of (worker_index,"),
        (None, "model_creator=None: give a function of (worker_index, device_index)"),
    ],
)
def test_what_is_no_function_that_makes_models_is_refused(creator: Any, words: str) -> None:
    assert words in refused(lambda: DistributedSGD(creator))


@pytest.mark.parametrize("extensions", [Extension(), [Extension], 3])
def test_what_is_no_sequence_of_extensions_is_refused(extensions: Any) -> None:
    words = "give a sequence of steepest.core.engine.extension.Extension"
    assert words in refused(lambda: DistributedSGD(_no_model, extensions=extensions))


def _no_model(worker: int, device: int) -> None: ...


def test_a_page_without_plotly_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("steepest.observe.page.document.find_spec", lambda name: None)
    config = RunConfig(page=True)
    words = "plotly, which is not installed: pip install 'steepest[page]'"
    assert words in refused(lambda: DistributedSGD(lambda worker, device: None, run_config=config))


# -- strategies -----------------------------------------------------------------------------------


NAMED = {
    "simple": SimpleStrategy(),
    "ps": ParameterServerStrategy(mode="sync"),
    "allreduce": AllreduceStrategy(),
    "local": LocalStrategy(),
    "async": ParameterServerStrategy(mode="async"),
    "ssp": ParameterServerStrategy(mode="ssp"),
}


def test_there_are_these_names() -> None:
    assert tuple(NAMED) == STRATEGY_NAMES


@pytest.mark.parametrize("name", NAMED)
def test_a_name_stands_for_a_strategy_with_its_defaults(name: str) -> None:
    assert as_strategy(name) == NAMED[name]
    assert as_strategy(name).name == name


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("PS", "ps"),
        ("all-reduce", "allreduce"),
        ("AllReduce", "allreduce"),
        ("all_reduce", "allreduce"),
        ("All reduce", "allreduce"),
        ("Async", "async"),
        ("SSP", "ssp"),
    ],
)
def test_case_and_hyphens_of_a_name_do_not_matter(given: str, meant: str) -> None:
    assert as_strategy(given) == NAMED[meant]


def test_the_parameter_server_is_synchronous_unless_told_otherwise() -> None:
    assert ParameterServerStrategy() == ParameterServerStrategy(
        mode="sync",
        staleness=None,
        correction=None,
        backup_workers=0,
        nonfinite="refuse",
        transport="wire",
    )
    assert ParameterServerStrategy(backup_workers=1).name == "ps"


@pytest.mark.parametrize("settings", [{"staleness": 0}, {"staleness": 7}, {}])
def test_ssp_has_a_lead_of_three_steps_unless_told_otherwise(settings: dict[str, int]) -> None:
    found = ParameterServerStrategy(mode="ssp", **settings)
    assert (found.lead, found.name) == (settings.get("staleness", 3), "ssp")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("mode", ("sync", "async", "ssp")),
        ("correction", (None, "learning_rate", "drop")),
        ("nonfinite", ("refuse", "skip", "pass")),
        ("transport", ("wire", "shared", "unix", "tcp")),
    ],
)
@pytest.mark.parametrize("value", ["", "Sync", "other", 0, True, ("sync",)])
def test_choices_are_refused_with_those_there_are(
    field: str, values: tuple[Any, ...], value: Any
) -> None:
    message = refused(lambda: ParameterServerStrategy(**{field: value}))
    assert message == f"{field}={value!r}: give one of {', '.join(map(repr, values))}"


@pytest.mark.parametrize(
    ("field", "value"), [("staleness", 0), ("backup_workers", 0), ("staleness", np.int64(2))]
)
def test_none_at_all_may_be_given_where_it_makes_sense(field: str, value: Any) -> None:
    mode = "ssp" if field == "staleness" else "sync"
    assert getattr(ParameterServerStrategy(mode=mode, **{field: value}), field) == value


@pytest.mark.parametrize("field", ["staleness", "backup_workers"])
@pytest.mark.parametrize("value", [-1, 0.5, "2", True])
def test_bounds_and_backups_are_integers_from_zero(field: str, value: Any) -> None:
    message = refused(lambda: ParameterServerStrategy(mode="ssp", **{field: value}))
    assert message == f"{field}={value!r}: give an integer of at least 0"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"mode": "async", "backup_workers": 1},
            "backup_workers=1 with mode='async': they are for sync",
        ),
        (
            {"mode": "ssp", "backup_workers": 2},
            "backup_workers=2 with mode='ssp': they are for sync",
        ),
        ({"staleness": 3}, "with sync nothing is stale"),
        ({"staleness": 0}, "with sync nothing is stale"),
        ({"correction": "learning_rate"}, "with sync nothing is stale"),
        ({"correction": "drop", "staleness": 1}, "with sync nothing is stale"),
        ({"mode": "ssp", "correction": "drop"}, "ssp makes workers wait instead"),
        ({"mode": "async", "staleness": 2}, "staleness=2 and correction=None"),
        ({"mode": "async", "correction": "drop"}, "staleness=None and correction='drop'"),
        (
            {"mode": "async", "staleness": 2, "correction": "learning_rate"},
            "correction='learning_rate'",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], words: str) -> None:
    assert words in refused(lambda: ParameterServerStrategy(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "async"},
        {"mode": "async", "correction": "learning_rate"},
        {"mode": "async", "correction": "drop", "staleness": 0},
        {"mode": "ssp", "correction": "learning_rate", "staleness": 1},
        {"backup_workers": 2, "nonfinite": "skip"},
        {"mode": "ssp", "transport": "tcp", "nonfinite": "pass"},
        {"mode": "async", "transport": "shared"},
        {"transport": "unix", "num_servers": 2},
        {"transport": "tcp", "backup_workers": 1},
    ],
)
def test_settings_that_go_together_are_taken(settings: dict[str, Any]) -> None:
    found = ParameterServerStrategy(**settings)
    assert {name: getattr(found, name) for name in settings} == settings


def test_settings_are_taken_as_given() -> None:
    given = ParameterServerStrategy(num_servers=2, chunk_bytes=1 << 16)
    assert as_strategy(given) is given


@pytest.mark.parametrize(
    "strategy", ["pss", "P.S", "", "-", None, 1, ["ps"], ParameterServerStrategy]
)
def test_an_unknown_strategy_is_refused_with_the_names_there_are(strategy: Any) -> None:
    message = refused(lambda: as_strategy(strategy))
    assert f"strategy={strategy!r}: give one of" in message
    assert all(repr(name) in message for name in STRATEGY_NAMES)


@pytest.mark.parametrize("field", ["num_servers", "chunk_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "2", True])
def test_counts_are_positive_integers(field: str, value: Any) -> None:
    message = refused(lambda: ParameterServerStrategy(**{field: value}))
    assert f"{field}={value!r}: give an integer of at least 1" in message


RUN_CONFIGS = (RunConfig(), FailureConfig(), DeadlineConfig(), ResourceConfig())


@pytest.mark.parametrize(
    "settings", [*NAMED.values(), ParameterServerStrategy(num_servers=2), *RUN_CONFIGS]
)
def test_settings_are_frozen_values_by_keyword(settings: Any) -> None:
    for field in fields(settings):
        with pytest.raises(FrozenInstanceError):
            setattr(settings, field.name, 3)
    again = type(settings)(
        **{field.name: getattr(settings, field.name) for field in fields(settings)}
    )
    assert again == settings
    assert hash(again) == hash(settings)
    with pytest.raises(TypeError):
        type(settings)(1)


# -- how a job is run -----------------------------------------------------------------------------


def test_a_run_config_suits_most_as_it_is() -> None:
    config = RunConfig()
    assert config.resources.cpus_per_worker == 1
    assert 0 < config.deadlines.start < config.deadlines.step
    assert RunConfig(deadlines=DeadlineConfig(step=1)).deadlines.step == 1


@pytest.mark.parametrize(
    ("group", "wrong", "right"),
    [
        ("failure", {"max_failures": 3}, "FailureConfig"),
        ("failure", DeadlineConfig(), "FailureConfig"),
        ("deadlines", 30.0, "DeadlineConfig"),
        ("deadlines", None, "DeadlineConfig"),
        ("resources", ResourceConfig, "ResourceConfig"),
    ],
)
def test_a_run_config_is_made_of_its_groups(group: str, wrong: Any, right: str) -> None:
    message = refused(lambda: RunConfig(**{group: wrong}))
    assert message.startswith(f"{group}=")
    assert message.endswith(f"give a steepest.{right}(...)")


def test_numpy_integers_are_integers() -> None:
    assert type(require_count("num_workers", np.int64(3))) is int


@pytest.mark.parametrize("field", ["start", "step", "call"])
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "30", None, True])
def test_deadlines_are_positive_and_finite(field: str, value: Any) -> None:
    message = refused(lambda: DeadlineConfig(**{field: value}))
    assert f"DeadlineConfig {field}={value!r}: give a positive number of seconds" in message


@pytest.mark.parametrize("value", [None, "yes", 2])
def test_a_log_is_kept_or_not(value: Any) -> None:
    assert f"keep_log={value!r}: give one of False, True" in refused(
        lambda: RunConfig(keep_log=value)
    )
    assert "history_rows=0" in refused(lambda: RunConfig(history_rows=0))
    assert RunConfig().keep_log is False
    assert RunConfig(keep_log=True).keep_log is True


@pytest.mark.parametrize("value", [0, -2, 0.5, None, True])
def test_workers_have_whole_cpus(value: Any) -> None:
    assert f"cpus_per_worker={value!r}: give an integer" in refused(
        lambda: ResourceConfig(cpus_per_worker=value)
    )


def test_require_count_gives_the_count_back() -> None:
    assert require_count("steps", 3) == 3
    assert require_count("steps", 0, least=0) == 0
    assert "steps=1: give an integer of at least 2" in refused(
        lambda: require_count("steps", 1, least=2)
    )


def test_no_other_module_reads_the_environment() -> None:
    package = Path(inspect.getfile(steepest)).parent
    readers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(
            r"\bos\.(environ|getenv)\b|from os import .*(environ|getenv)", path.read_text()
        )
    }
    # a place to run is told of its job by variables, and hands them on to the program; a forked worker takes over
    # all of those with which Ray starts it, and programs that raylets start import nothing of the package
    forks = {
        f"runtime/{name}.py" for name in ("prefork/template", "prefork/worker_start", "no_agent")
    }
    assert readers == {"core/config/run.py", "places/sagemaker.py", *forks}


# -- errors ---------------------------------------------------------------------------------------


def drawn_tree() -> dict[str, set[str]]:
    """Each class drawn in the docstring of errors.py, with the names of its bases."""
    tree: dict[str, set[str]] = {}
    above: list[str] = []
    for line in inspect.getdoc(errors).splitlines():  # type: ignore[union-attr]
        found = re.match(
            r"(?P<indent>[│├└─ ]*)(?P<name>\w+)(?: \((?P<extra>\w+)\))?(?:\s{2,}|$)", line
        )
        if not found:
            continue
        depth = len(found["indent"]) // 4
        del above[depth:]
        parent = above[-1] if above else "Exception"
        tree[found["name"]] = {parent} | ({found["extra"]} if found["extra"] else set())
        above.append(found["name"])
    return tree


def defined() -> dict[str, type[BaseException]]:
    classes = inspect.getmembers(errors, inspect.isclass)
    return {
        name: cls
        for name, cls in classes
        if cls.__module__ == errors.__name__ and name not in CARRIERS
    }


def test_the_tree_of_errors_is_the_one_drawn() -> None:
    drawn = drawn_tree()
    assert drawn == {
        name: {base.__name__ for base in cls.__bases__} for name, cls in defined().items()
    }
    assert len(drawn) > 5


@pytest.mark.parametrize("name", sorted(defined()))
def test_every_error_is_a_steepest_error_and_says_when_it_is_raised(name: str) -> None:
    cls = defined()[name]
    assert issubclass(cls, SteepestError)
    assert cls.__doc__
    assert str(cls("what happened")) == "what happened"
    assert name.endswith("Error")


def test_a_step_error_is_what_a_step_may_raise() -> None:
    causes = {
        "ModelError",
        "UnfrozenError",
        "ModelRaisedError",
        "NonFiniteError",
        "DeadlineError",
        "DataPlaneError",
        "PeerLostError",
    }
    assert {name for name, cls in defined().items() if issubclass(cls, errors.StepError)} == {
        "StepError",
        *causes,
    }
    assert issubclass(errors.ModelError, errors.ConfigurationError)


def test_errors_can_be_caught_as_what_python_calls_them() -> None:
    assert issubclass(errors.ConfigurationError, ValueError)
    assert issubclass(errors.DeadlineError, TimeoutError)
    assert issubclass(errors.PeerLostError, ConnectionError)


def test_a_remote_traceback_is_shown_as_it_was() -> None:
    shown = str(errors.RemoteTraceback("Traceback:\n  line 1\nValueError: no\n"))
    assert shown == "\n--- traceback in the other process ---\nTraceback:\n  line 1\nValueError: no"
