"""Values of a YAML file, merged into the rendered objects: settings that no option has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steepest.errors import ConfigurationError

#: The pods of a RayJob: their sections, beside "pods", which stands for all of them.
PODS = ("head", "workers", "submitter")
_SECTIONS = ("metadata", "job", "cluster", "pods", *PODS, "objects")
_POD = ("metadata", "spec", "container")
#: By what an item of a list is known, so that it is changed and not added; the first one that it has.
_NAMES = ("groupName", "mountPath", "containerPort", "name")


def read_values(path: str) -> dict[str, Any]:
    """Return the values of a YAML file, by section.

    Raises:
        ConfigurationError: the file cannot be read, is no YAML, or has an unknown section.
    """
    import yaml

    option = f"--values={path!r}"
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{option} cannot be read as YAML: {error}") from None
    values = {} if values is None else values
    _check_names(option, "", values, _SECTIONS)
    for section in ("pods", *PODS):
        _check_names(option, section, values.get(section) or {}, _POD)
    objects = values.get("objects") or []
    if not isinstance(objects, list) or not all(isinstance(each, Mapping) for each in objects):
        raise ConfigurationError(f"{option}: 'objects' is a list of Kubernetes' objects")
    return dict(values)


def _check_names(option: str, section: str, values: Any, allowed: Sequence[str]) -> None:
    """Check that a section is a mapping with known names only."""
    where = f" in {section!r}" if section else ""
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{option}:{where} give names and values, not {values!r}")
    unknown = [str(name) for name in values if name not in allowed]
    if unknown:
        raise ConfigurationError(
            f"{option} has {', '.join(unknown)}{where}: give {', '.join(allowed)}"
        )


def merged(base: Any, over: Any, where: str) -> Any:
    """Return a value with another one merged into it, as Kubernetes merges patches.

    Mappings are merged name by name, and a name whose value is None is removed. Items of lists that
    have the same name (of a group too), mount path or container port are merged, others are added behind.

    Args:
        base: the value; None where there is none.
        over: the value to merge into it.
        where: the place of `over`, for errors.

    Raises:
        ConfigurationError: one is a mapping, or a list, and the other is not.
    """
    if base is None:
        return _without_none(over)
    for kind, name in ((Mapping, "names and values"), (list, "a list")):
        if isinstance(base, kind) != isinstance(over, kind):
            wanted = name if isinstance(base, kind) else "a single value"
            raise ConfigurationError(f"{where}: give {wanted}, not {over!r}")
    if isinstance(base, Mapping):
        result = dict(base)
        for name, value in over.items():
            if value is None:
                result.pop(name, None)
            else:
                result[name] = merged(result.get(name), value, f"{where}: {name}")
        return result
    if isinstance(base, list):
        items = list(base)
        for each in over:
            at = _place_of(each, items)
            if at is None:
                items.append(_without_none(each))
            else:
                items[at] = merged(items[at], each, where)
        return items
    return over


def _place_of(item: Any, items: Sequence[Any]) -> int | None:
    """Return the index of a list's item of the same name; None if there is none."""
    if not isinstance(item, Mapping):
        return None
    name = next((each for each in _NAMES if each in item), None)
    same = (i for i, other in enumerate(items) if isinstance(other, Mapping))
    return next((i for i in same if name and items[i].get(name) == item[name]), None)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(each) for name, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def pod_with(template: dict[str, Any], values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the template of a pod with one container, with the values of all pods and of its kind.

    Args:
        template: of the pod.
        values: as of `read_values`.
        kind: "head", "workers" or "submitter".
    """
    for section in ("pods", kind):
        fields = dict(values.get(section) or {})
        container = fields.pop("container", None)
        template = merged(template, fields, section)
        if container is not None:
            first, *others = template["spec"]["containers"]
            first = merged(first, container, f"{section}: container")
            spec = {**template["spec"], "containers": [first, *others]}
            template = {**template, "spec": spec}
    return template
