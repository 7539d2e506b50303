"""The address of the repository, which a release names: in its metadata, and in the links of the README.

The files of the repository link relatively, so that they work in every copy. The page of a package on an index shows
the README alone, where relative links lead nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path

#: a link or picture of Markdown whose target is a file of the repository
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def absolute_links(text: str, repository: str, ref: str) -> str:
    """Return Markdown whose links to files lead to the repository's pages, and whose pictures to its bytes.

    Args:
        text: a page at the root of the repository.
        repository: its address, as that of a GitHub repository, without a slash at the end.
        ref: the tag or commit whose files are meant.
    """

    def absolute(found: re.Match[str]) -> str:
        picture, label, target = found.groups()
        # a picture may be the label of a link
        return f"{picture}[{label}]({repository}/{'raw' if picture else 'blob'}/{ref}/{target})"

    return RELATIVE.sub(absolute, text)


def project_urls(repository: str, ref: str) -> str:
    """Return the table `[project.urls]` of pyproject.toml."""
    pages = {
        "Homepage": repository,
        "Documentation": f"{repository}/tree/{ref}/docs",
        "Repository": repository,
        "Changelog": f"{repository}/blob/{ref}/CHANGELOG.md",
    }
    return "[project.urls]\n" + "".join(f'{name} = "{page}"\n' for name, page in pages.items())


def write_address(source: Path, repository: str, ref: str) -> None:
    """Write the address into the metadata and the README of a copy of the repository.

    Raises:
        ValueError: the address is not that of a web page, or the metadata has one.
    """
    if not re.fullmatch(r"https://[^\s/]+/[^\s]*[^\s/]", repository):
        raise ValueError(
            f"{repository!r} is no address: give https://host/owner/name, without a slash at the end"
        )
    project = source / "pyproject.toml"
    text = project.read_text()
    if "\n[project.urls]" in text:
        raise ValueError(f"{project} has [project.urls] already")
    project.write_text(
        text.replace("[project.scripts]", f"{project_urls(repository, ref)}\n[project.scripts]")
    )
    readme = source / "README.md"
    readme.write_text(absolute_links(readme.read_text(), repository, ref))
