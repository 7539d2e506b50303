"""The generated pages of the reference are what docstrings, signatures and parsers say, and leave nothing out."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil

import pytest

import steepest
import steepest.core.config
import steepest.strategies
from release.reference import (
    CONFIGURED,
    FOLDER,
    GROUPS,
    MODULES,
    PAGES,
    described,
    name_pages,
    names_page,
    settings_page,
    with_links,
)
from steepest import errors


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_the_code_says(page: str) -> None:
    assert (FOLDER / page).read_text() == PAGES[page](), "run python -m release.reference"


def test_each_public_name_stands_in_one_group_and_has_a_page() -> None:
    names = [name for group in GROUPS.values() for name in group]
    assert len(names) == len(set(names))
    assert {*names} == {*steepest.__all__} | {"JaxModel"}  # which needs its extra
    pages = name_pages()
    assert ".. autoclass:: DistributedSGD\n   :members:\n" in pages["DistributedSGD.rst"]
    assert pages["RunConfig.rst"].endswith(".. autoclass:: RunConfig\n")
    assert ".. autofunction:: run\n" in pages["run.rst"]
    assert ".. autoclass:: Adagrad\n" in pages["steepest.tables.rst"]
    assert len(pages) == len(names) + len(MODULES)


def test_a_name_leads_to_its_page() -> None:
    page = with_links(names_page())
    assert "| [`run`](run.rst) | " in page
    assert "| [`JaxModel`](JaxModel.rst) | " in page


def test_each_configuration_has_its_settings_listed() -> None:
    modules = [
        importlib.import_module(f"{room.__name__}.{each.name}")
        for room in (steepest.core.config, steepest.strategies)
        for each in pkgutil.iter_modules(room.__path__)
    ]
    configured = [
        name
        for found in modules
        for name, cls in vars(found).items()
        if dataclasses.is_dataclass(cls) and name in steepest.__all__
        if cls.__module__ == found.__name__ and name != "Strategy"  # the base of strategies
    ]
    assert {"RunConfig", "LocalStrategy", "TopK"} <= {*configured} <= {*CONFIGURED}
    page = settings_page()
    for name in inspect.signature(steepest.LocalStrategy).parameters:
        assert f"\n| `{name}` | " in page


def test_a_text_of_several_arguments_belongs_to_each_and_base_classes_count() -> None:
    class Base:
        """One.

        Args:
            first, second: of a kind
                and more.
        """

    class Derived(Base):
        """Two.

        Attributes:
            second: another.
        """

    assert described(Derived) == {"first": "of a kind and more.", "second": "another."}


def test_each_error_says_when_it_is_raised() -> None:
    page = PAGES["errors.md"]()
    for name, found in vars(errors).items():
        if isinstance(found, type) and issubclass(found, errors.SteepestError):
            assert f"\n## {name}\n" in page, name
