"""One word has one meaning: the glossary is short, its classes are there, and no two classes share a name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.page_examples import ROOT

PACKAGE = ROOT / "steepest"
#: Classes that share a name, and why: in each of these pairs the second derives from the first.
SHARED = {
    "AllreduceStrategy": "the core's, and the public one, which has compression besides",
    "ParameterServerStrategy": "the core's, and the public one, which has compression besides",
    "TorchModel": "the core's, and the public one, which has tables besides",
}
MOST_WORDS = 40


def classes(root: Path) -> dict[str, list[str]]:
    """The modules that define each class, by its name without underscores."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(str(path.relative_to(root)))
    return found


def shared(found: dict[str, list[str]]) -> dict[str, list[str]]:
    """Those that several modules define."""
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_no_two_classes_share_a_name() -> None:
    assert shared(classes(PACKAGE)).keys() == SHARED.keys()


def test_classes_that_share_a_name_are_found(tmp_path: Path) -> None:
    """So the test above can fail."""
    (tmp_path / "one.py").write_text("class Place: ...\nclass Seat: ...\n")
    (tmp_path / "two.py").write_text("def f():\n    class _Place: ...\n")
    assert shared(classes(tmp_path)) == {"Place": ["one.py", "two.py"]}


def test_the_glossaries_are_short_and_their_classes_are_there() -> None:
    """Those of users, and those of the code, which have no word in common."""
    section = (ROOT / "ARCHITECTURE.md").read_text().split("\n## Words\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([\w ,]+) \| (.+) \|$", section, re.MULTILINE)[1:]
    page = (ROOT / "docs" / "reference" / "glossary.md").read_text()
    of_code = [word.strip() for first, _ in rows for word in first.split(",")]
    of_users = re.findall(r"^### (.+)$", page, re.MULTILINE)
    assert {"chunk", "commit", "generation", "lease", "round", "share", "version"} <= {*of_users}
    for words in (of_code, of_users):
        assert 0 < len(words) <= MOST_WORDS
    assert len([*of_code, *of_users]) == len({*of_code, *of_users})
    known = classes(PACKAGE)
    named = {name for _, meaning in rows for name in re.findall(r"`([A-Z]\w+)`", meaning)}
    assert named
    assert named <= known.keys()
