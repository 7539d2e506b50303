"""The documents tell the truth: the README's code runs, examples in docstrings run, names are documented."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import ray

import steepest
import steepest.core.config
import steepest.strategies
import steepest.tables
from tests.page_examples import ROOT, blocks_of, run_block

DOCS = sorted(path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md"))
#: Pages that name files of the package, some by their last parts.
PAGES_OF_THE_CODE = (
    "ARCHITECTURE.md",
    "docs/decisions.md",
    "docs/explanation/ways.md",
    "docs/explanation/internals.md",
)
SOURCES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("steepest", "tests", "benchmarks", "release")
    for path in (ROOT / folder).rglob("*.py")
]
PLAIN = [
    f"docs/howto/{name}.md"
    for name in (
        "choose_strategy", "table_rows", "table_memory", "security", "server_hosts", "plan_tables"
    )
]  # fmt: skip
NEED_JAX = re.compile(r"steepest\.\w+\.(jax|flax|optax)")  # make test-jax has it
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(steepest.__path__, "steepest.")
    if module.name != "steepest.cli.main" and (find_spec("jax") or not NEED_JAX.match(module.name))
)


@pytest.mark.few(55)
@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    if name.startswith("steepest.adapters.keras_"):
        pytest.importorskip("tensorflow", reason="needs TensorFlow: make test-tensorflow has it")
    if name == "steepest.adapters.torchmetrics":
        pytest.importorskip("torchmetrics", reason="pip install 'steepest[metrics]'")
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


@pytest.fixture
def address(ray_cluster: None) -> str:
    """Where the tests' cluster is found; tests/runtime/test_ray_places.py has programs that start their own."""
    found = ray.get_runtime_context().gcs_address
    assert isinstance(found, str)
    return found


@pytest.mark.long
@pytest.mark.parametrize(("number", "said"), [(0, "{'loss': "), (1, "EvaluationResult(loss=")])
def test_the_examples_of_readme_and_trainer_run_as_they_stand(
    tmp_path: Path, number: int, said: str
) -> None:
    pytest.importorskip(
        "sklearn", reason="the example uses scikit-learn's digits: pip install 'steepest[demo]'"
    )
    blocks = [*blocks_of("README.md"), *blocks_of("docs/howto/trainer.md")]
    assert len(blocks) == 2
    assert said in run_block(blocks[number], tmp_path)
    assert (tmp_path / "checkpoint" / "manifest.json").exists() == (number == 1)


@pytest.mark.ray
@pytest.mark.long
def test_the_example_of_a_parameter_server_runs_as_it_stands(tmp_path: Path, address: str) -> None:
    (block,) = blocks_of("docs/howto/parameter_server.md")
    assert "20.0 20.0" in run_block(block, tmp_path, address)


@pytest.mark.long
def test_the_example_of_a_loop_of_ones_own_runs_as_it_stands(tmp_path: Path) -> None:
    assert "['0.bias', " in run_block(blocks_of("docs/howto/own_loop.md")[0], tmp_path)


@pytest.mark.full
@pytest.mark.long
def test_the_tutorial_of_a_strategy_of_ones_own_runs_as_it_stands(tmp_path: Path) -> None:
    (block,) = blocks_of("docs/howto/collectives.md")
    assert "after: 0.000" in run_block(block, tmp_path)


@pytest.mark.long
def test_the_example_of_training_data_runs_as_it_stands(tmp_path: Path) -> None:
    said = run_block(blocks_of("docs/howto/streams.md")[0], tmp_path)
    assert "epochs: 4 steps: 120 loss: 0.000" in said


@pytest.mark.long
def test_the_example_of_a_growing_log_runs_as_it_stands(tmp_path: Path) -> None:
    said = run_block(blocks_of("docs/howto/growing_log.md")[0], tmp_path)
    assert "{'clicks-0': (0, 500), 'clicks-1': (0, 300)} steps: 40" in said
    assert "{'clicks-0': (500, 500), 'clicks-1': (300, 700)} steps: 60" in said
    assert said.endswith("nothing new\n")


@pytest.mark.full  # Ray Data takes its time
@pytest.mark.long
@pytest.mark.ray
def test_the_example_of_a_ray_dataset_runs_as_it_stands(tmp_path: Path, address: str) -> None:
    assert "rows: 400" in run_block(blocks_of("docs/howto/ray_data.md")[0], tmp_path, address)


@pytest.mark.full
@pytest.mark.long
def test_the_example_of_early_stopping_runs_as_it_stands(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (block,) = blocks_of("docs/howto/validation.md")
    assert "best: True" in run_block(block, tmp_path)


@pytest.mark.full
@pytest.mark.long
def test_the_example_of_metrics_runs_as_it_stands(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics", reason="pip install 'steepest[metrics]'")
    (block,) = blocks_of("docs/howto/auc.md")
    assert "{'auc': 1.0, 'calibration': " in run_block(block, tmp_path)


def test_the_example_of_scripted_faults_runs_as_it_stands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (block,) = blocks_of("docs/howto/testing.md")
    exec(compile(block, "docs/howto/testing.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == "10 steps, 1 worker replaced\n"


@pytest.mark.full
@pytest.mark.long
def test_the_example_of_embedding_tables_runs_as_it_stands(tmp_path: Path) -> None:
    assert "'right': 1.0" in run_block(blocks_of("docs/howto/embedding.md")[0], tmp_path)


@pytest.mark.long
def test_the_example_of_tables_in_one_process_runs_as_it_stands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    block = blocks_of("docs/howto/embedding.md")[1]
    exec(compile(block, "docs/howto/embedding.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == "loss: 0.000\n"


@pytest.mark.parametrize("page", PLAIN)
def test_an_example_without_processes_runs_as_it_stands(page: str) -> None:
    for block in blocks_of(page):
        exec(compile(block, page, "exec"), {"__name__": "__main__"})


def test_each_example_is_run_by_a_test_and_each_fragment_is_python() -> None:
    """Blocks marked `python` run as they stand; those marked `py` leave something out, and are parsed."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for page in DOCS:
        text = (ROOT / page).read_text()
        if "\n```python\n" in text and page.parent.name != "tutorials":
            named = (str(page).removeprefix("docs/"), f'"{page.stem}"')
            assert any(name in tests for name in named), f"no test runs the examples of {page}"
        for block in re.findall(r"^```py\n(.*?)```", text, flags=re.MULTILINE | re.DOTALL):
            compile(block, str(page), "exec")


def test_every_public_name_is_exported_and_documented() -> None:
    text = "".join(
        (ROOT / page).read_text()
        for page in ("README.md", "ARCHITECTURE.md", "docs/reference/api.md")
    )
    for package in (steepest, steepest.tables):
        for name in package.__all__:
            assert getattr(package, name).__doc__, f"{name} has no docstring"
            assert f"`{name}" in text, f"{name} is not documented"
    assert {name for name in dir(steepest) if not name.startswith("_")} == set(steepest.__all__)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        *map(str, DOCS),
    ],
)
def test_what_a_page_refers_to_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    missing = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    named = re.findall(r"`((?:steepest|tests|docs|examples|benchmarks)/[\w./-]+)`", text)
    missing += [name for name in named if not (ROOT / name).exists()]
    modules = re.findall(r"`(?:python -m )?((?:steepest|benchmarks)(?:\.[a-z_]+)+)[`( ]", text)
    missing += [name for name in modules if not is_there(name)]
    if page in PAGES_OF_THE_CODE:
        modules = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", text)
        missing += [
            name for name in modules if not any(f"/{path}".endswith(f"/{name}") for path in SOURCES)
        ]
    assert missing == []


MENTION = re.compile(r"(?<![\w/.-])docs/[\w/.-]*\.(?:md|png|json|csv)(?:#[\w-]+)?")
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s]+)\)")


def headings_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in plain}


def test_each_page_and_heading_that_a_file_names_exists() -> None:
    """In links of pages, and in messages, docstrings and comments of all modules."""
    folders = ("steepest", "examples", "benchmarks", "release", "tests", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    missing = []
    for path in [*files, *ROOT.glob("*.md"), ROOT / "Makefile"]:
        if path.suffix not in (".py", ".md", "") or path.name == "test_package.py":
            continue
        text = path.read_text()
        named = [ROOT / each for each in MENTION.findall(text)]
        if path.suffix == ".md":
            links = LINK.findall(text)
            named += [
                Path(f"{path}{each}") if each[0] == "#" else path.parent / each for each in links
            ]
        for each in named:
            page, _, heading = str(each).partition("#")
            if not Path(page).exists() or (heading and heading not in headings_of(Path(page))):
                missing.append(f"{path.relative_to(ROOT)}: {each}")
    assert missing == []


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", *map(str, DOCS)])
def test_methods_and_arguments_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    called = set(re.findall(r"\bsgd\.(\w+)", text))
    assert called <= set(dir(steepest.DistributedSGD))
    for name in set(steepest.__all__) - {"JaxModel", "TensorFlowModel"}:  # make test-jax has them
        for arguments in re.findall(rf"(?<![\w.]){name}\(([^()]*)\)", text):
            known = inspect.signature(getattr(steepest, name)).parameters
            if any(each.kind is each.VAR_KEYWORD for each in known.values()):
                continue
            assert set(re.findall(r"(\w+)=", arguments)) <= set(known), f"{name}({arguments})"


def test_symptoms_are_quoted_from_messages_of_the_package() -> None:
    texts = []
    for path in (ROOT / "steepest").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    each.value if isinstance(each, ast.Constant) else "" for each in node.values
                )
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    page = (ROOT / "docs" / "howto" / "troubleshooting.md").read_text()
    quoted = re.findall(r'^\| "(.+?)" \|', page, flags=re.MULTILINE)
    assert len(quoted) > 8
    for words in quoted:
        for part in words.split(" ... "):
            assert any(part in text for text in texts), f"no message says {part!r}"


def test_defaults_of_settings_and_options_stand_in_the_reference_alone() -> None:
    for page in DOCS:
        if page.parent.name != "reference":
            tables = re.findall(
                r"^\| (?:setting|option) \| default \|", (ROOT / page).read_text(), re.M
            )
            assert tables == [], page


def is_there(name: str) -> bool:
    """Whether a dotted name is a module's, or that of something in one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_architecture_page_names_every_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"^\| [-\d] \| `(\w+)` \| ", text, flags=re.MULTILINE)
    packages = {found.name for found in pkgutil.iter_modules(steepest.__path__)} - {"__main__"}
    assert set(named) == packages


def test_the_readme_is_short_and_its_first_screen_has_a_program_and_how_to_run_it() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100
    first = "\n".join(lines[:52])
    for wanted in (
        "![",
        "```python",
        "whl/cpu",
        "pip install '.[demo]'",
        "python train.py",
        "verify",
    ):
        assert wanted in first, f"{wanted} is not on the README's first screen"


def test_the_readmes_comparison_is_read_at_a_glance() -> None:
    rows = re.findall(r"^\| (.+) \|$", (ROOT / "README.md").read_text().split("## Where")[0], re.M)
    for row in rows:
        for cell in row.split(" | "):
            assert len(cell.split()) <= 8, cell


def test_examples_are_named_on_their_page() -> None:
    page = (ROOT / "docs" / "howto" / "examples.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        if "def main(" in path.read_text():  # the others are imported by these
            assert f"\npython examples/{path.name} " in page, f"{path.name} is not on the page"


def test_tests_do_not_sleep_and_the_package_does_not_unpickle() -> None:
    for path in [*(ROOT / "tests").glob("*.py"), *(ROOT / "tests").glob("*/test_*.py")]:
        assert not re.search(r"\bsleep\(", path.read_text().replace(r"\bsleep\(", "")), path.name
    # between parent and child, which no other process has, and what Ray, or such a pipe, has brought from a worker
    pipes = [
        ROOT / "steepest" / name
        for name in ("runtime/machine/parcels.py", "runtime/remote_functions.py")
    ]
    for path in (ROOT / "steepest").rglob("*.py"):
        found = re.findall(r"pickle\.loads?\(|torch\.load\(", path.read_text())
        assert len(found) == (path in pipes), path.name
