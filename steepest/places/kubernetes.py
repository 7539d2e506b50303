"""Render a RayJob for KubeRay, or a RayCluster, and apply it if asked to."""

from __future__ import annotations

import argparse
import logging
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from steepest.errors import ConfigurationError, DeadlineError
from steepest.places import spot_nodes
from steepest.places.program import (
    add_program_arguments,
    job_name,
    pairs_of,
    program_of,
    write,
)
from steepest.places.ray_job import KubeRayJob, Pods, manifests
from steepest.places.values import read_values

log = logging.getLogger(__name__)
_KUBECTL_SECONDS = 60.0
#: Without --server-side kubectl keeps each object in an annotation of 262,144 bytes at most.
_APPLY = ("apply", "--server-side")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill in the parser of `steepest launch kubernetes`."""
    add_program_arguments(parser, optional=True)
    what = parser.add_argument_group("what runs")
    what.add_argument("--image", required=True, help="container image with Ray, torch and steepest")
    what.add_argument("--file", action="append", default=[], help="a module of the program; again")
    what.add_argument("--in-image", action="store_true", help="the script's path is in the image")
    what.add_argument("--cluster", action="store_true", help="a RayCluster, without a program")
    what.add_argument("--checkpoints", metavar="CLAIM|URL", help="a volume claim, or a bucket")
    what.add_argument("--retries", type=int, default=3, help="starts after a failure (default 3)")
    what.add_argument("--keep", type=int, default=300, help="seconds that the cluster outlives it")
    what.add_argument("--namespace", help="where the job is made (default: kubectl's)")
    what.add_argument("--values", metavar="FILE", help="YAML that is merged into what is written")
    what.add_argument("--ray-version", default=None, help="in the image (default: as here)")
    what.add_argument("--apply", action="store_true", help="call kubectl apply --server-side")
    pods = parser.add_argument_group("pods")
    pods.add_argument("--workers", type=int, required=True, help="worker pods to start with")
    pods.add_argument("--min-workers", type=int, help="for the autoscaler (default: --workers)")
    pods.add_argument("--max-workers", type=int, help="for the autoscaler (default: --workers)")
    pods.add_argument("--cpus", type=int, default=1, help="of a worker pod (default 1)")
    pods.add_argument("--gpus", type=int, default=0, help="of a worker pod (default 0)")
    pods.add_argument("--memory", default="4Gi", help="of a worker pod (default 4Gi)")
    pods.add_argument("--head-cpus", type=int, default=2, help="of the head pod (default 2)")
    pods.add_argument("--head-memory", default="8Gi", help="of the head pod (default 8Gi)")
    pods.add_argument("--grace", type=int, help="seconds to leave a node (default: the cloud's)")
    nodes = parser.add_argument_group("nodes")
    nodes.add_argument("--spot", action="store_true", help="workers on spot nodes alone")
    nodes.add_argument(
        "--cloud",
        choices=["any", *spot_nodes.LABELS],
        default="any",
        help="whose labels spot nodes have",
    )
    nodes.add_argument(
        "--spot-label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a label that spot nodes have; again",
    )


def run(options: argparse.Namespace) -> int:
    """Write the YAML, or apply it; return the exit status.

    Raises:
        ConfigurationError: an option is wrong, or there is no kubectl.
        DeadlineError: kubectl did not end in time.
    """
    text = as_yaml(_manifests(options))
    if not options.apply:
        write(text, options.output)
        return 0
    if options.output is not None:
        write(text, options.output)
    return apply(text)


def as_yaml(objects: Sequence[dict[str, Any]]) -> str:
    """Return objects as YAML documents, keys in their order, texts of several lines as they stand."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, data: str) -> yaml.Node:
        style = "|" if "\n" in data else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    Dumper.add_representer(str, text)
    written: str = yaml.dump_all(
        objects, Dumper=Dumper, sort_keys=False, explicit_start=True, allow_unicode=True, width=100
    )
    return (
        f"# made by steepest launch kubernetes; kubectl {' '.join(_APPLY)} -f applies it\n{written}"
    )


def apply(text: str) -> int:
    """Hand YAML to `kubectl apply`; return its exit status; ConfigurationError: no kubectl."""
    # DeadlineError: over a minute.
    command = ["kubectl", *_APPLY, "-f", "-"]
    try:
        return subprocess.run(
            command, input=text, text=True, timeout=_KUBECTL_SECONDS, check=False
        ).returncode
    except FileNotFoundError:
        raise ConfigurationError(
            "--apply needs kubectl, which is not on this machine: install it, or give --output FILE "
            "and apply that elsewhere"
        ) from None
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"kubectl apply did not end within {_KUBECTL_SECONDS:g} s: is the Kubernetes API server of "
            "the present context up (kubectl cluster-info)?"
        ) from None


def _manifests(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the objects that the options describe."""
    if options.cluster == (options.script is not None):
        raise ConfigurationError(
            "give a script, or --cluster without one: programs are then submitted with `ray job submit`"
        )
    if options.in_image and options.file:
        raise ConfigurationError(
            "--file has no use with --in-image, where all files are in the image: leave one of them out"
        )
    program = None if options.cluster else program_of(options, exists=not options.in_image)
    named = [] if program is None or options.in_image else [program.script]
    files = {Path(path).name: _text_of(path) for path in [*named, *options.file]}
    if len(files) < len(named) + len(options.file):
        raise ConfigurationError(
            "two of the files have the same name, and they travel in one folder: rename one"
        )
    job = KubeRayJob(
        name=job_name(options),
        program=program,
        files=files,
        checkpoints=options.checkpoints,
        retries=options.retries,
        keep=options.keep,
        namespace=options.namespace,
    )
    if job.retries and not job.checkpoints and not options.cluster:
        log.warning(
            "--retries=%d without --checkpoints: each start begins at step 0, unless the program keeps "
            "checkpoints where the next head's pod finds them",
            job.retries,
        )
    return manifests(job, _pods(options), cluster=options.cluster)


def _pods(options: argparse.Namespace) -> Pods:
    """Return the pods that the options describe."""
    own = pairs_of("--spot-label", options.spot_label)
    return Pods(
        image=options.image,
        ray_version=version("ray") if options.ray_version is None else options.ray_version,
        workers=options.workers,
        least=options.workers if options.min_workers is None else options.min_workers,
        most=options.workers if options.max_workers is None else options.max_workers,
        cpus=options.cpus,
        gpus=options.gpus,
        memory=options.memory,
        head_cpus=options.head_cpus,
        head_memory=options.head_memory,
        grace=spot_nodes.GRACE[options.cloud] if options.grace is None else options.grace,
        spot=(own or spot_nodes.labels_of(options.cloud)) if options.spot else None,
        never=spot_nodes.labels_of(options.cloud) | own,
        values={} if options.values is None else read_values(options.values),
    )


def _text_of(path: str) -> str:
    """Return the text of a file that travels in a ConfigMap."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path!r} cannot be read as a text ({error}): put it into the image, and use --in-image"
        ) from None
