"""Build the site of the documentation with Sphinx and MyST: the pages in order, and a reference of all public names.

    python -m release.site --out build/site        # needs the extra `docs`

Every warning is an error: a link to a page or a heading that is not there, a page without a place in the navigation, a
docstring that cannot be shown.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
from pathlib import Path

import steepest

ROOT = Path(__file__).resolve().parent.parent
#: where the contents stand, by which people find pages in the repository, too
CONTENTS = ROOT / "docs" / "README.md"


def navigation() -> dict[str, tuple[str, ...]]:
    """Return the pages by caption, without their ending, as the contents have them."""
    found: dict[str, tuple[str, ...]] = {}
    for section in CONTENTS.read_text().split("\n## ")[1:]:
        links = re.findall(r"^- \[.+?\]\((.+?)\.md\)", section, flags=re.MULTILINE)
        pages = [os.path.normpath(f"docs/{link}") for link in links]
        caption = section.splitlines()[0]
        found[caption] = ("reference", *pages) if caption == "Reference" else tuple(pages)
    return found


_CONF = """\
from pygments.lexers.special import TextLexer
from sphinx.highlighting import lexers

project, author, version = "steepest", "The steepest developers", {version!r}
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
html_theme = "furo"
default_role = "literal"  # docstrings have names in single backticks
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
napoleon_use_rtype = False
napoleon_use_ivar = True  # a field that a docstring and the class name is shown once
suppress_warnings = ["misc.highlighting_failure"]  # of files that lexers do not know wholly
lexers["mermaid"] = TextLexer()  # shown as text: a drawing would load a program from elsewhere
"""


def index() -> str:
    """Return the first page, which has the navigation."""
    parts = ["steepest\n========\n"]
    for caption, pages in navigation().items():
        named = "".join(f"   {page}\n" for page in pages)
        parts.append(f".. toctree::\n   :caption: {caption}\n   :maxdepth: 1\n\n{named}")
    return "\n".join(parts)


def reference() -> str:
    """Return the page of all public names with their docstrings."""
    text = "Reference\n=========\n\nAll names of ``steepest``, from their docstrings.\n"
    for name in steepest.__all__:
        found = getattr(steepest, name)
        kind = "class" if isinstance(found, type) else "function"
        text += f"\n{name}\n{'-' * len(name)}\n\n.. auto{kind}:: steepest.{name}\n"
        if kind == "class":
            text += "   :members:\n"
    return text


def stage(folder: Path) -> None:
    """Write what Sphinx reads into a folder: the pages where the repository has them, so that their links hold."""
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / "docs" / "README.md").unlink()  # the navigation has it
    for path in [*ROOT.glob("*.md"), ROOT / "LICENSE"]:
        shutil.copy(path, folder)
    (folder / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks" / "RESULTS.md", folder / "benchmarks")
    (folder / "index.rst").write_text(index())
    (folder / "reference.rst").write_text(reference())
    (folder / "conf.py").write_text(_CONF.format(version=steepest.__version__))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m release.site", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site")
    out = parser.parse_args(arguments).out
    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory() as temporary:
        stage(Path(temporary))
        status = build_main(["-q", "-W", "--keep-going", "-b", "html", temporary, str(out)])
    if status:
        raise SystemExit(status)
    print(f"open {out / 'index.html'}")


if __name__ == "__main__":
    main()
