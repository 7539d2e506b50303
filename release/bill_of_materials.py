"""The bill of materials of an environment: each package that is installed for steepest, as CycloneDX 1.6.

    python -m release.bill_of_materials --out dist/steepest-0.1.0.cdx.json

The packages are those that steepest needs without extras, directly or through others, in the versions of the
environment of the Python that runs this. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import re
import uuid
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent


def needs(found: Distribution, extras: set[str]) -> list[Requirement]:
    """Return what a package needs on this machine, with these of its extras."""
    requirements = [Requirement(line) for line in found.requires or ()]
    return [
        each
        for each in requirements
        if each.marker is None
        or any(each.marker.evaluate({"extra": extra}) for extra in extras or {""})
    ]


def closure(name: str) -> tuple[dict[str, Distribution], dict[str, list[str]]]:
    """Return the package and all that it needs by name, and what each of them needs directly.

    Raises:
        SystemExit: one of them is not installed.
    """
    found: dict[str, Distribution] = {}
    edges: dict[str, set[str]] = {}
    done: set[tuple[str, frozenset[str]]] = set()
    waiting = [(canonicalize_name(name), frozenset[str]())]
    while waiting:
        item = waiting.pop()
        if item in done:
            continue
        done.add(item)
        package, extras = item
        try:
            found[package] = distribution(package)
        except PackageNotFoundError as error:
            raise SystemExit(f"{package} is not installed: run make check first") from error
        for each in needs(found[package], set(extras)):
            child = canonicalize_name(each.name)
            edges.setdefault(package, set()).add(child)
            waiting.append((child, frozenset(each.extras)))
    return found, {package: sorted(edges.get(package, ())) for package in found}


def component(package: str, found: Distribution) -> dict[str, Any]:
    """Return a package's entry."""
    entry: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference(package, found),
        "name": package,
        "version": found.version,
        "purl": reference(package, found),
    }
    license_expression = found.metadata.get("License-Expression")
    if license_expression:
        entry["licenses"] = [{"expression": license_expression}]
    elif named := [
        line.rpartition(" :: ")[2]
        for line in found.metadata.get_all("Classifier") or ()
        if line.startswith("License :: OSI Approved :: ")
    ]:
        entry["licenses"] = [{"license": {"name": name}} for name in named]
    return entry


def reference(package: str, found: Distribution) -> str:
    """Return a package's URL, see the standard "purl"; a local version such as +cpu is written %2B."""
    return f"pkg:pypi/{package}@{found.version.replace('+', '%2B')}"


def bill(name: str = "steepest") -> dict[str, Any]:
    """Return the bill of materials.

    It has no date, and a number made of its contents: the same packages give the same bytes.
    """
    found, edges = closure(name)
    components = [component(each, found[each]) for each in sorted(found) if each != name]
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(components, sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
        "metadata": {"component": component(name, found[name]) | {"type": "application"}},
        "components": components,
        "dependencies": [
            {
                "ref": reference(each, found[each]),
                "dependsOn": [reference(child, found[child]) for child in edges[each]],
            }
            for each in sorted(found)
        ],
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m release.bill_of_materials", description=__doc__.split("\n")[0]
    )
    version = re.findall(
        r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE
    )[0]
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / f"steepest-{version}.cdx.json")
    out = parser.parse_args(arguments).out
    found = bill()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found['components'])} packages in {out}")


if __name__ == "__main__":
    main()
