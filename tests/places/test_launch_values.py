"""Values of a cluster, merged into what `steepest launch kubernetes` writes: those of the page, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from steepest.errors import ConfigurationError
from steepest.places.values import merged, read_values
from tests.conftest import ROOT
from tests.kuberay import check, refused, rendered


def of_the_page() -> str:
    (found,) = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs/howto/kubernetes_values.md").read_text(), re.S
    )
    return str(found)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train_model.py"
    path.write_text("print()")
    return path


@pytest.fixture
def values(tmp_path: Path) -> Path:
    path = tmp_path / "values.yaml"
    path.write_text(of_the_page())
    return path


def restricted(template: Mapping[str, Any]) -> None:
    """Check a pod against https://kubernetes.io/docs/concepts/security/pod-security-standards, profile "restricted"."""
    spec = template["spec"]
    pod = spec.get("securityContext", {})
    for each in ("hostNetwork", "hostPID", "hostIPC"):
        assert not spec.get(each)
    kinds = {"configMap", "emptyDir", "persistentVolumeClaim", "secret", "projected", "downwardAPI"}
    for volume in spec.get("volumes", []):
        assert set(volume) - {"name"} <= kinds
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        own = container.get("securityContext", {})
        assert own.get("allowPrivilegeEscalation") is False
        assert not own.get("privileged")
        assert "ALL" in own["capabilities"]["drop"]
        assert set(own["capabilities"].get("add", [])) <= {"NET_BIND_SERVICE"}
        assert own.get("runAsNonRoot", pod.get("runAsNonRoot")) is True
        assert own.get("runAsUser", pod.get("runAsUser", 1)) != 0
        kind = own.get("seccompProfile", pod.get("seccompProfile", {})).get("type")
        assert kind in ("RuntimeDefault", "Localhost")
        assert not any("hostPort" in port for port in container.get("ports", []))


@pytest.mark.few(1)
@pytest.mark.parametrize("cluster", [False, True])
def test_the_pages_values_are_what_a_locked_cluster_takes(
    capsys: pytest.CaptureFixture[str], script: Path, values: Path, cluster: bool
) -> None:
    given = ("--gpus=1", "--min-workers=1", "--checkpoints=claim", f"--values={values}")
    *_, found, monitor = rendered(capsys, "--cluster" if cluster else script, *given)
    assert monitor["kind"] == "PodMonitor"
    assert found["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "training"}
    spec = found["spec"] if cluster else found["spec"]["rayClusterSpec"]
    (group,) = spec["workerGroupSpecs"]
    head, worker = spec["headGroupSpec"]["template"], group["template"]
    templates = [head, worker]
    if not cluster:
        templates.append(found["spec"]["submitterPodTemplate"])
        assert found["spec"]["activeDeadlineSeconds"] == 172800
    locked = spec["autoscalerOptions"]["securityContext"]
    assert locked["allowPrivilegeEscalation"] is False
    assert spec["autoscalerOptions"]["version"] == "v2"  # what was there stays
    for template in templates:
        restricted(template)
        pod = template["spec"]
        assert (pod["priorityClassName"], pod["imagePullSecrets"]) == (
            "batch",
            [{"name": "registry"}],
        )
        assert template["metadata"]["labels"] == {"team": "vision"}
        (container,) = pod["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "bucket-keys"}}]
        assert {"name": "OMP_NUM_THREADS", "value": "1"} in container["env"]
    # what is of one kind of pod, beside what was there
    assert {"name": "STEEPEST_CHECKPOINTS", "value": "/checkpoints"} in head["spec"]["containers"][
        0
    ]["env"]
    assert head["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
    assert head["spec"]["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    keys = [each["key"] for each in worker["spec"]["tolerations"]]
    assert keys == ["nvidia.com/gpu", "dedicated"]
    mounts = [each["mountPath"] for each in worker["spec"]["containers"][0]["volumeMounts"]]
    assert mounts == (["/data"] if cluster else ["/mnt/code", "/data"])
    check(found)


@pytest.mark.long
def test_kuberay_takes_a_store_for_its_control_and_a_token_of_ones_own(
    capsys: pytest.CaptureFixture[str], script: Path, tmp_path: Path
) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(
        "cluster: {authOptions: {secretName: mine}, gcsFaultToleranceOptions: {redisAddress: 'redis:6379'},"
        " workerGroupSpecs: [{groupName: workers, idleTimeoutSeconds: 600}]}"
    )
    job = rendered(capsys, script, f"--values={path}")[-1]
    check(job)
    spec = job["spec"]["rayClusterSpec"]
    assert spec["authOptions"] == {"mode": "token", "secretName": "mine"}
    assert spec["gcsFaultToleranceOptions"] == {"redisAddress": "redis:6379"}
    (group,) = spec["workerGroupSpecs"]
    assert (group["replicas"], group["idleTimeoutSeconds"]) == (8, 600)


def test_values_are_merged_as_patches_are() -> None:
    base = {"a": {"b": 1, "c": 2}, "list": [{"name": "x", "v": 1}, {"name": "y"}], "gone": 1}
    over = {
        "a": {"b": 3, "d": None},
        "list": [{"name": "x", "w": 2}, {"name": "z", "none": None}, {"other": 1}, 5],
        "gone": None,
        "new": {"kept": [1], "dropped": None},
    }
    assert merged(base, over, "here") == {
        "a": {"b": 3, "c": 2},
        "list": [{"name": "x", "v": 1, "w": 2}, {"name": "y"}, {"name": "z"}, {"other": 1}, 5],
        "new": {"kept": [1]},
    }
    assert base["list"] == [{"name": "x", "v": 1}, {"name": "y"}]
    mounts = [{"name": "data", "mountPath": "/a"}]
    added = {"name": "data", "mountPath": "/b"}
    assert merged(mounts, [added], "here") == [*mounts, added]


def test_a_value_may_take_away_what_is_written_by_itself(
    capsys: pytest.CaptureFixture[str], script: Path, tmp_path: Path
) -> None:
    path = tmp_path / "values.yaml"
    path.write_text("head: {metadata: {annotations: {karpenter.sh/do-not-disrupt: null}}}")
    job = rendered(capsys, script, f"--values={path}")[-1]
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    assert list(head["metadata"]["annotations"]) == [
        "cluster-autoscaler.kubernetes.io/safe-to-evict"
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "pod: {}",
            "has pod: give metadata, job, cluster, pods, head, workers, submitter, objects",
        ),
        ("head: {containers: []}", "has containers in 'head': give metadata, spec, container"),
        ("head: [1]", "in 'head' give names and values, not [1]"),
        ("a: [", "cannot be read as YAML"),
        ("- a", "give names and values"),
        ("objects: {}\npods: 3", "in 'pods' give names and values, not 3"),
        ("objects: [1]", "'objects' is a list"),
        ("head: {spec: {containers: 4}}", "head: spec: containers: give a list, not 4"),
        ("head: {spec: 4}", "head: spec: give names and values, not 4"),
        ("job: {entrypoint: [a]}", "job: entrypoint: give a single value, not ['a']"),
        ("metadata: {name: {a: 1}}", "metadata: name: give a single value"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], script: Path, tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(text)
    assert said in refused(capsys, script, f"--values={path}")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("# nothing yet\nhead:\n")
    assert read_values(str(tmp_path / "values.yaml")) == {"head": None}
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_values(str(tmp_path / "no.yaml"))
