"""What `steepest launch kubernetes` prints, and KubeRay's own definitions, by which it is validated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from steepest.cli.main import main


def rendered(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    """The documents that the command prints."""
    given = ["launch", "kubernetes", "--image=app:1", "--workers=8", *map(str, arguments)]
    assert main(given) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command says when it refuses."""
    assert main(["launch", "kubernetes", "--image=app:1", "--workers=8", *map(str, arguments)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


@cache
def schema(kind: str) -> dict[str, Any]:
    """KubeRay's schema of a kind, in which unknown fields are errors: a cluster would drop them in silence."""
    folder = os.environ.get("STEEPEST_DATA")
    path = Path(folder or "/nonexistent") / "kuberay" / f"ray.io_{kind.lower()}s.yaml"
    if not path.exists():
        pytest.skip(f"KubeRay's definitions are not in STEEPEST_DATA/kuberay ({path.name})")
    definition = yaml.load(path.read_text(), yaml.CSafeLoader)
    (found,) = (each for each in definition["spec"]["versions"] if each["name"] == "v1")
    return strict(found["schema"]["openAPIV3Schema"])


def strict(part: Any) -> Any:
    """A part of an OpenAPI schema as JSON Schema that takes no field it does not name."""
    if isinstance(part, list):
        return [strict(each) for each in part]
    if not isinstance(part, Mapping):
        return part
    if part.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"], **{k: part[k] for k in ("pattern",) if k in part}}
    found = {key: strict(value) for key, value in part.items() if not key.startswith("x-")}
    known = isinstance(part.get("properties"), Mapping) and part.get("type") == "object"
    if known and not part.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    if part.get("nullable") and "type" in found:
        found["type"] = [found["type"], "null"]
    return found


def check(document: Mapping[str, Any]) -> None:
    """Validate a RayJob or RayCluster."""
    assert document["apiVersion"] == "ray.io/v1"
    found = schema(str(document["kind"]))
    jsonschema.Draft7Validator.check_schema(found)
    jsonschema.Draft7Validator(found).validate(document)


def pods_of(document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The specifications of the head's pod and of the workers'."""
    spec = document["spec"].get("rayClusterSpec", document["spec"])
    (group,) = spec["workerGroupSpecs"]
    return spec["headGroupSpec"]["template"]["spec"], group["template"]["spec"]
