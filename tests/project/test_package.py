"""What a release consists of: the files that an index gets, their metadata, and the README on an index's page."""

from __future__ import annotations

import email
import email.message
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import steepest
from release.package import wrong_in_metadata, wrong_in_sources, wrong_in_wheel
from release.project_address import RELATIVE, absolute_links, project_urls, write_address
from tests.page_examples import ROOT

HOME = "https://example.org/owner/steepest"
tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or later reads TOML")


def test_links_become_absolute_but_for_those_that_are() -> None:
    text = "[a](docs/a.md#b) ![p](docs/p.svg) [w](https://x.org/y) [h](#here) `f(x)[0](1, 2)`"
    assert absolute_links(text, HOME, "v1") == (
        f"[a]({HOME}/blob/v1/docs/a.md#b) ![p]({HOME}/raw/v1/docs/p.svg) [w](https://x.org/y) [h](#here) "
        "`f(x)[0](1, 2)`"
    )


def test_a_release_names_its_address_and_its_readme_has_no_relative_link(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    assert RELATIVE.search((tmp_path / "README.md").read_text())
    write_address(tmp_path, HOME, "v1")
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Changelog"] == f"{HOME}/blob/v1/CHANGELOG.md"
    assert project["scripts"] == {"steepest": "steepest.cli.main:main"}
    assert not RELATIVE.search((tmp_path / "README.md").read_text())
    with pytest.raises(ValueError, match=r"has \[project.urls\] already"):
        write_address(tmp_path, HOME, "v1")


@pytest.mark.parametrize("address", ["example.org/a/b", "http://example.org/a", f"{HOME}/", "x y"])
def test_an_address_that_is_none_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(ValueError, match="give https://host/owner/name"):
        write_address(tmp_path, address, "v1")


def test_the_package_and_its_metadata_have_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == steepest.__version__


def test_urls_are_toml() -> None:
    assert set(tomllib.loads(project_urls(HOME, "v1"))["project"]["urls"]) >= {
        "Homepage",
        "Changelog",
    }


def test_no_extra_takes_a_release_that_is_known_to_be_malicious() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    found = [line for extra in extras.values() for line in extra if line.startswith("lightning")]
    assert found
    assert all("!=2.6.2" in line and "!=2.6.3" in line for line in found)


def test_what_a_wheel_lacks_or_has_too_much_is_named(tmp_path: Path) -> None:
    package = tmp_path / "steepest"
    package.mkdir()
    for name in ("__init__.py", "py.typed"):
        (package / name).touch()
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("steepest/__init__.py", "")
        archive.writestr("tests/conftest.py", "")
        archive.writestr("x.dist-info/METADATA", "Name: steepest\n\n[a](docs/a.md)")
    found = wrong_in_wheel(wheel, tmp_path, published=True)
    assert {"the wheel lacks steepest/py.typed", "the wheel has tests/conftest.py"} <= set(found)
    assert "the README links to docs/a.md, which an index does not have" in found
    assert "the metadata has no Version" in found
    assert "the sdist lacks constraints.txt" in wrong_in_sources(tmp_path)


def test_metadata_without_an_address_are_not_published() -> None:
    about = email.message.Message()
    assert "the metadata has no Project-URL" in wrong_in_metadata(about, published=True)
    assert "the metadata has no Project-URL" not in wrong_in_metadata(about, published=False)


@pytest.mark.long
def test_a_release_is_built_from_what_it_contains(tmp_path: Path) -> None:
    command = ["--contents-only", "--out", str(tmp_path), "--repository", HOME, "--ref", "v1"]
    done = subprocess.run(
        [sys.executable, "-m", "release.package", *command],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".gz", ".whl"]
