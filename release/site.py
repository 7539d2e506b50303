"""Build the site of the documentation with Sphinx and MyST: a front page, four doors, and a page for each public name.

    python -m release.site --out build/site        # needs the extra `docs`

The pages are those of the repository, in the order of `docs/README.md`. The front page is made of the README's first
screen, so that both say the same. Nothing is loaded from elsewhere, neither while the site is built nor by its pages.

Every warning is an error: a link to a page or a heading that is not there, a page without a place in the navigation, a
docstring that cannot be shown.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import steepest
from release.diagrams import drawn
from release.notebooks import as_markdown
from release.reference import name_pages, tree_of_names, with_links

ROOT = Path(__file__).resolve().parent.parent
#: where the contents stand, by which people find pages in the repository, too
CONTENTS = ROOT / "docs" / "README.md"
#: the doors: the caption's first words in the contents, the page, and what is behind it
DOORS = {
    "Tutorials": ("tutorials", "Learn by doing: a first run, a loop of your own, a table."),
    "How-to": ("howto", "One job a page, code first."),
    "Reference": ("reference", "Names, commands, settings and errors, to look up."),
    "Explanation": ("explanation", "How it works, and why it is so."),
}
_LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)\s#]+)")

_CONF = """\
from release.reference import prepare

project, author, version = "steepest", "The steepest developers", {version!r}
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
html_theme = "furo"
html_title = {title!r}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = html_show_copyright = False
html_theme_options = {options!r}
default_role = "py:obj"  # docstrings have names in single backticks: links, where they are public
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["jax", "flax", "optax"]  # so that its adapter is shown, too
maximum_signature_line_length = 72
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
napoleon_use_rtype = False
napoleon_use_ivar = True  # a field that a docstring and the class name is shown once
suppress_warnings = ["misc.highlighting_failure"]  # of files that lexers do not know wholly


def setup(app):
    prepare(app)
"""


@dataclass(frozen=True)
class Group:
    """Pages under one heading of the contents.

    Attributes:
        door: a key of `DOORS`.
        title: what the pages have in common; empty where they are all of the door.
        entries: lines of Markdown, a page each, with links from the root of the repository.
        pages: the pages without their ending, from the root of the repository.
    """

    door: str
    title: str
    entries: tuple[str, ...]
    pages: tuple[str, ...]


def navigation() -> list[Group]:
    """Return the pages in the order of the contents, without the README, which becomes the front page.

    Raises:
        ValueError: a heading of the contents is behind none of the doors.
    """
    found = []
    for section in CONTENTS.read_text().split("\n## ")[1:]:
        caption, _, rest = section.partition("\n")
        door, _, title = caption.partition(": ")
        if door not in DOORS:
            raise ValueError(f"{CONTENTS}: {caption!r} begins with none of {', '.join(DOORS)}")
        entries, pages = [], []
        for entry in re.findall(r"^- (\[.+?\]\(.+?\).*)$", rest, flags=re.MULTILINE):
            target = re.findall(r"\((.+?)\.(?:md|ipynb)", entry)[0]
            page = os.path.normpath(f"docs/{target}")
            if page != "README":
                entries.append(_moved(entry, "docs", "."))
                pages.append(page)
        found.append(Group(door, title.capitalize(), tuple(entries), tuple(pages)))
    return found


def front_page(readme: str, repository: str = "") -> str:
    """Return the first page, of the README's first paragraph, its picture and how to install it.

    With the address of the repository on the web the page links it, and clones it.
    """
    first = re.findall(r"\A# .+\n+((?:[^\n]+\n)+)", readme)[0]
    picture = re.findall(r"^!\[[^\n]+\)$", readme, flags=re.MULTILINE)[0]
    install = re.findall(
        r"```(?:sh|bash)\n((?:(?!```).*\n)*?.*pip install(?:(?!```).*\n)*)", readme
    )[0]
    lines = re.sub(r"^(\S.*?) {2,}(#.*)$", r"\2\n\1", install.rstrip(), flags=re.MULTILINE)
    version = f"Version {steepest.__version__}"
    if repository:
        lines = lines.replace("<this repository>", repository)
        version += f", [repository]({repository})"
    doors = "".join(
        f"```{{container}} door\n**[{door}]({page}.md)**\n\n{about}\n```\n"
        for door, (page, about) in DOORS.items()
    )
    tree = "\n".join(page for page, _ in DOORS.values())
    return (
        f"# steepest\n\n{first}\n```sh\n{lines}\n```\n\n{picture}\n\n{version}\n\n"
        f"````{{container}} doors\n{doors}````\n\n"
        f"```{{toctree}}\n:hidden:\n:maxdepth: 3\n\n{tree}\n```\n"
    )


def door_pages(door: str) -> dict[str, str]:
    """Return the page behind a door, and those of its groups if it has several, by name without ending."""
    page, about = DOORS[door]
    groups = [group for group in navigation() if group.door == door]
    if len(groups) == 1:
        return {page: f"# {door}\n\n{about}\n\n{_entries(groups[0])}{_tree(groups[0].pages)}"}
    names = {f"{page}_{number}": group for number, group in enumerate(groups, 1)}
    sections = "".join(f"\n## {group.title}\n\n{_entries(group)}" for group in groups)
    found = {page: f"# {door}\n\n{about}\n{sections}{_tree(tuple(names))}"}
    for name, group in names.items():
        found[name] = f"# {group.title}\n\n{_entries(group)}{_tree(group.pages)}"
    return found


def _entries(group: Group) -> str:
    return "".join(f"- {entry}\n" for entry in group.entries)


def _tree(pages: tuple[str, ...]) -> str:
    named = "\n".join(pages)
    return f"\n```{{toctree}}\n:hidden:\n\n{named}\n```\n"


def stage(folder: Path, repository: str = "", *, draw: bool = True) -> None:
    """Write what Sphinx reads into a folder: the pages where the repository has them, so that their links hold.

    Args:
        folder: an empty one.
        repository: the address of it on the web; empty for none.
        draw: whether diagrams become pictures, which needs the extra `docs`.
    """
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / "docs" / "README.md").unlink()  # the doors have it
    for path in [*ROOT.glob("*.md"), ROOT / "LICENSE"]:
        shutil.copy(path, folder)
    shutil.copytree(ROOT / "benchmarks" / "history", folder / "benchmarks" / "history")
    shutil.copy(ROOT / "benchmarks" / "RESULTS.md", folder / "benchmarks")
    (folder / "README.md").rename(folder / "index.md")
    (folder / "index.md").write_text(front_page((folder / "index.md").read_text(), repository))
    for door in DOORS:
        for page, text in door_pages(door).items():
            (folder / f"{page}.md").write_text(text)
    (folder / "examples").mkdir()
    for path in (ROOT / "examples").glob("*.ipynb"):
        (folder / "examples" / f"{path.stem}.md").write_text(as_markdown(path.read_text()))
    for name, text in name_pages().items():
        (folder / "docs" / "reference" / name).write_text(text)
    for name, tree in (("api.md", tree_of_names()), ("settings.md", "")):
        path = folder / "docs" / "reference" / name
        path.write_text(with_links(path.read_text()) + tree)
    for path in folder.rglob("*.md"):
        text = _as_on_site(path.read_text(), path.parent.relative_to(folder))
        path.write_text(drawn(text, path) if draw else text)


def settings(repository: str = "") -> str:
    """Return the settings of Sphinx, as Python; `repository` is the address of one on the web, if there is one."""
    options: dict[str, object] = {"sidebar_hide_name": False, "top_of_page_buttons": []}
    if repository:
        link = {"name": "Repository", "url": repository, "html": "Repository", "class": ""}
        options["footer_icons"] = [link]
    title = f"steepest {steepest.__version__}"
    return _CONF.format(version=steepest.__version__, title=title, options=options)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m release.site", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--repository", default="", help="address of it on the web, to be linked")
    options = parser.parse_args(arguments)
    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        stage(folder, options.repository)
        (folder / "conf.py").write_text(settings(options.repository))
        (folder / "_static").mkdir()
        shutil.copy(ROOT / "release" / "site.css", folder / "_static")
        shutil.rmtree(options.out, ignore_errors=True)  # no page of before stays
        status = build_main(["-q", "-W", "--keep-going", "-b", "html", temporary, str(options.out)])
    if status:
        raise SystemExit(status)
    print(f"open {options.out / 'index.html'}")


def _moved(text: str, old: str, new: str) -> str:
    """Return Markdown whose relative links were written for one folder, for another one."""

    def link(found: re.Match[str]) -> str:
        return f"]({os.path.relpath(os.path.join(old, found[1]), new)}"

    return _LINK.sub(link, text)


def _as_on_site(text: str, folder: Path) -> str:
    """Return Markdown of a folder whose links to README, contents and notebooks hold on the site."""

    def link(found: re.Match[str]) -> str:
        target = os.path.normpath(folder / found[1])
        if target in ("README.md", "docs/README.md"):
            return f"]({os.path.relpath('index.md', folder)}"
        return found[0].replace(".ipynb", ".md")

    return _LINK.sub(link, text)


if __name__ == "__main__":
    main()
