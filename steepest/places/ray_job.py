"""KubeRay's RayJob and RayCluster for a training program, as plain values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from steepest.errors import ConfigurationError
from steepest.places import spot_nodes
from steepest.places.program import Program
from steepest.places.values import merged, pod_with
from steepest.validation import require_count

#: Where the files of the ConfigMap, and the volume of checkpoints, are found in the containers.
CODE, CHECKPOINTS = "/mnt/code", "/checkpoints"
_API = "ray.io/v1"
_MOST_CODE = 1_000_000  # bytes; Kubernetes keeps 1 MiB in a ConfigMap
_COMMAND = (
    "command.sh"  # the file of the program's command line, where that does not pass shells as it is
)
_PLAIN = re.compile(r"[a-zA-Z0-9_@%+=:,./-]+")  # a word that every shell reads as itself
_GROUP = 1000  # of Ray's images; may write to the volume of checkpoints
#: Whatever makes room on nodes is to leave the head alone: with it the driver, and so the program, ends.
_STAYS = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
_MARGIN = 5  # seconds between what Ray is told, and the kubelet's SIGKILL
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([kMGTPE]|[KMGTPE]i)?")


@dataclass(frozen=True, kw_only=True)
class Pods:
    """The pods of a Ray cluster: one head, and workers; ConfigurationError: a value is out of range."""

    image: str  # with Ray, torch and steepest
    ray_version: str  # of Ray in the image
    workers: int  # pods with which the cluster starts
    least: int  # least and most: between them Ray's autoscaler keeps the number of workers
    most: int
    cpus: int = 1  # cpus, gpus and memory of each worker's pod; a Kubernetes quantity for memory
    gpus: int = 0
    memory: str = "4Gi"
    head_cpus: int = 2  # of the head's pod, which runs the driver and no worker
    head_memory: str = "8Gi"
    grace: int = 15  # seconds from the notice that a pod goes to its end
    # labels of spot nodes, on which workers run; None for nodes of any kind
    spot: Mapping[str, str] | None = None
    # labels of nodes on which the head does not run
    never: Mapping[str, str] = field(default_factory=dict)
    # what is merged into all that is rendered, by section (`steepest.places.values`)
    values: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, lowest in (
            ("workers", 1), ("cpus", 1), ("gpus", 0), ("head_cpus", 1), ("grace", 2 * _MARGIN),
        ):  # fmt: skip
            require_count(f"--{name.replace('_', '-')}", getattr(self, name), lowest)
        require_count("--min-workers", self.least, 0)
        if not self.least <= self.workers <= self.most:
            raise ConfigurationError(
                f"--min-workers={self.least} --workers={self.workers} --max-workers={self.most}: they "
                "must not fall; give them in ascending order"
            )
        for name in ("memory", "head_memory"):
            if not _QUANTITY.fullmatch(value := getattr(self, name)):
                raise ConfigurationError(
                    f"--{name.replace('_', '-')}={value!r}: give a number of bytes, or such as '16Gi'"
                )
        if re.search(r"\s", self.image) or not self.image:
            raise ConfigurationError(f"--image={self.image!r}: give the name of a container image")


@dataclass(frozen=True, kw_only=True)
class KubeRayJob:
    """A RayJob: a program that runs on a Ray cluster of its own, which ends with it."""

    # ConfigurationError: the files are too large for a ConfigMap, or a value is out of range.

    name: str  # of the RayJob; the ConfigMap has it too
    program: Program | None  # its script's path is in the image, where `files` is empty
    # texts by file name, the script among them, that travel in a ConfigMap
    files: Mapping[str, str] = field(default_factory=dict)
    # a volume claim, mounted in the head's pod, or a URL; the program finds it in STEEPEST_CHECKPOINTS
    checkpoints: str | None = None
    retries: int = 3  # how often all is started again after the program, or the head, has failed
    keep: int = 300  # seconds for which the cluster stays after the program's end, for its logs
    namespace: str | None = None

    def __post_init__(self) -> None:
        require_count("--retries", self.retries, 0)
        require_count("--keep", self.keep, 0)
        for name in self.files:
            if not re.fullmatch(r"[-._a-zA-Z0-9]+", name):
                raise ConfigurationError(
                    f"a ConfigMap takes no file of the name {name!r}: give letters, digits, '-', '_', '.'"
                )
        if self.command_file and _COMMAND in self.files:
            raise ConfigurationError(
                f"the name {_COMMAND!r} is taken by the file of the program's command line: rename yours"
            )
        size = sum(len(text.encode()) for text in self.texts.values())
        if size > _MOST_CODE:
            raise ConfigurationError(
                f"the files have {size:,} bytes, and a ConfigMap takes {_MOST_CODE:,}: put them into "
                "the image, and use --in-image"
            )
        if self.checkpoints is not None and not re.fullmatch(
            r"[a-z0-9]+://[^\s@]+|[a-z0-9]([-.a-z0-9]*[a-z0-9])?", self.checkpoints
        ):
            raise ConfigurationError(
                f"--checkpoints={self.checkpoints!r}: give the name of a volume claim, or the URL of a "
                "bucket, such as s3://bucket/run, without credentials in it: a service account or a "
                "Secret of --values has them"
            )

    @property
    def words(self) -> list[str]:
        """The words of the program's command line; none without a program."""
        if self.program is None:
            return []
        script = self.program.script
        where = f"{CODE}/{PurePosixPath(script).name}" if self.files else script
        return ["python", where, *self.program.arguments]

    @property
    def command_file(self) -> str:
        """The text of the file that runs the program, where one is needed; else empty."""
        # KubeRay has a shell read the entrypoint, and Ray has another one read what comes out
        if all(_PLAIN.fullmatch(word) for word in self.words):
            return ""
        return f"exec {shlex.join(self.words)}\n"

    @property
    def entrypoint(self) -> str:
        """The command that KubeRay runs, which means the same however many shells read it."""
        return f"bash {CODE}/{_COMMAND}" if self.command_file else " ".join(self.words)

    @property
    def texts(self) -> dict[str, str]:
        """All files of the ConfigMap by name."""
        return {**self.files, **({_COMMAND: self.command_file} if self.command_file else {})}

    @property
    def claim(self) -> str | None:
        """The volume claim of the checkpoints, if they are on one."""
        return None if self.checkpoints is None or "://" in self.checkpoints else self.checkpoints


def manifests(job: KubeRayJob, pods: Pods, *, cluster: bool = False) -> list[dict[str, Any]]:
    """Return the objects to apply: a RayJob, or a RayCluster on which nothing runs, and those of the values.

    Raises:
        ConfigurationError: a value does not fit what it is merged into.
    """
    # First a ConfigMap if files travel.
    metadata = {"name": job.name, **({"namespace": job.namespace} if job.namespace else {})}
    spec = merged(_cluster(job, pods), pods.values.get("cluster") or {}, "cluster")
    documents: list[dict[str, Any]] = []
    if job.texts:
        documents.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": job.texts}
        )
    kind = "RayCluster"
    if not cluster:
        kind = "RayJob"
        spec = {
            "entrypoint": job.entrypoint,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": job.keep,
            "backoffLimit": job.retries,
            "rayClusterSpec": spec,
            "submitterPodTemplate": pod_with(_submitter(pods), pods.values, "submitter"),
        }
        spec = merged(spec, pods.values.get("job") or {}, "job")
    merged_metadata = merged(metadata, pods.values.get("metadata") or {}, "metadata")
    documents.append({"apiVersion": _API, "kind": kind, "metadata": merged_metadata, "spec": spec})
    return [*documents, *(dict(each) for each in pods.values.get("objects") or ())]


def _cluster(job: KubeRayJob, pods: Pods) -> dict[str, Any]:
    """Return the specification of a Ray cluster."""
    spec: dict[str, Any] = {"rayVersion": pods.ray_version, "authOptions": {"mode": "token"}}
    if pods.least < pods.most:
        spec["enableInTreeAutoscaling"] = True
        spec["autoscalerOptions"] = {"version": "v2", "idleTimeoutSeconds": 120}
    spec["headGroupSpec"] = {
        "rayStartParams": {"num-cpus": "0"},  # no worker runs beside the driver
        "template": pod_with(_head(job, pods), pods.values, "head"),
    }
    group = {
        "groupName": "workers",
        "replicas": pods.workers,
        "minReplicas": pods.least,
        "maxReplicas": pods.most,
        "rayStartParams": {},
        "template": pod_with(_worker(job, pods), pods.values, "workers"),
    }
    spec["workerGroupSpecs"] = [group]
    return spec


def _head(job: KubeRayJob, pods: Pods) -> dict[str, Any]:
    """Return the template of the head's pod, which is protected from eviction."""
    container = _container(
        "ray-head", job, pods, {"cpu": pods.head_cpus, "memory": pods.head_memory}
    )
    container["ports"] = [
        {"name": name, "containerPort": port}
        for name, port in (("gcs-server", 6379), ("dashboard", 8265), ("client", 10001))
    ]
    spec = _pod(job, pods, container)
    if job.checkpoints is not None:
        place = CHECKPOINTS if job.claim else job.checkpoints
        container.setdefault("env", []).append({"name": "STEEPEST_CHECKPOINTS", "value": place})
    if job.claim:
        mounted = {"name": "checkpoints", "mountPath": CHECKPOINTS}
        container.setdefault("volumeMounts", []).append(mounted)
        volume = {"name": "checkpoints", "persistentVolumeClaim": {"claimName": job.claim}}
        spec.setdefault("volumes", []).append(volume)
        # a fresh volume is of root
        spec["securityContext"] = {"fsGroup": _GROUP, "fsGroupChangePolicy": "OnRootMismatch"}
    spec["affinity"] = spot_nodes.never_on(pods.never)
    return {"metadata": {"annotations": {**_STAYS}}, "spec": spec}


def _worker(job: KubeRayJob, pods: Pods) -> dict[str, Any]:
    """Return the template of a worker's pod, which tells Ray when the pod is about to end."""
    resources = {"cpu": pods.cpus, "memory": pods.memory}
    if pods.gpus:
        resources["nvidia.com/gpu"] = pods.gpus
    container = _container("ray-worker", job, pods, resources)
    container["lifecycle"] = {
        "preStop": {"exec": {"command": ["/bin/sh", "-c", drain_notice(pods)]}}
    }
    # KubeRay makes another pod; a container that was started again would be a node of the same name
    spec = {"restartPolicy": "Never", **_pod(job, pods, container)}
    tolerations: list[dict[str, str]] = []
    if pods.gpus:  # by which clouds keep others off nodes with GPUs
        tolerations.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    if pods.spot is not None:
        spec["affinity"] = spot_nodes.only_on(pods.spot)
        tolerations += spot_nodes.tolerations_of(pods.spot)
    if tolerations:
        spec["tolerations"] = tolerations
    return {"spec": spec}


def drain_notice(pods: Pods) -> str:
    """Return a shell command that tells Ray that its node will be removed, and waits until Ray has left it."""
    return f"python -m steepest.places.pod leave {pods.grace - _MARGIN}"


def _container(
    name: str, job: KubeRayJob, pods: Pods, resources: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a container of Ray, whose limits are what it asks for."""
    asked = {key: str(value) for key, value in resources.items()}
    container: dict[str, Any] = {"name": name, "image": pods.image}
    # KubeRay has its shell run this before Ray
    first = "python -m steepest.places.pod check"
    if job.files:  # an entry of `env` would take the place of the image's own PYTHONPATH
        first = f"export PYTHONPATH={CODE}${{PYTHONPATH:+:$PYTHONPATH}} && {first}"
    container["args"] = [first]
    if job.texts:
        container["volumeMounts"] = [{"name": "code", "mountPath": CODE, "readOnly": True}]
    return container | {"resources": {"requests": asked, "limits": {**asked}}}


def _pod(job: KubeRayJob, pods: Pods, container: dict[str, Any]) -> dict[str, Any]:
    """Return the specification of a pod with one container."""
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": pods.grace,
        "containers": [container],
    }
    if job.texts:
        spec["volumes"] = [{"name": "code", "configMap": {"name": job.name}}]
    return spec


def _submitter(pods: Pods) -> dict[str, Any]:
    """Return the pod that hands the program to Ray and shows its output; not on spot nodes either."""
    resources = {"cpu": "500m", "memory": "512Mi"}
    container = {
        "name": "submitter",
        "image": pods.image,
        "resources": {"requests": resources, "limits": {"cpu": "1", "memory": "1Gi"}},
    }
    spec: dict[str, Any] = {"restartPolicy": "Never", "containers": [container]}
    return {"spec": spec | {"affinity": spot_nodes.never_on(pods.never)}}
