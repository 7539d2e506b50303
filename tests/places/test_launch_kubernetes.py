"""What `steepest launch kubernetes` writes is what KubeRay takes, and says what was asked."""

from __future__ import annotations

import http.server
import json
import os
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from steepest.cli.main import main
from steepest.places import kubernetes
from steepest.places.spot_nodes import LABELS

SCRIPT = 'print("héllo")\nif True:\n\tprint("tab")   \n'
EVERY = (
    "--min-workers=2 --max-workers=9 --cpus=3 --gpus=2 --memory=12Gi --head-cpus=4 --head-memory=9Gi "
    "--grace=110 --spot --cloud=karpenter --node=pool=big --head-node=pool=small --toleration=a=b:NoExecute "
    "--toleration=c:NoSchedule --checkpoints=s3://bucket/run --retries=0 --keep=0 --namespace=team "
    "--token-secret=mine --service-account=writer --ray-version=2.60.0 --name=other"
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train_model.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


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


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    ["", "--spot", "--spot --spot-label=mine=yes", "--checkpoints=claim", "--min-workers=0", EVERY],
)
@pytest.mark.parametrize("cluster", [False, True])
def test_kuberay_takes_what_is_written(
    capsys: pytest.CaptureFixture[str], script: Path, options: str, cluster: bool
) -> None:
    documents = rendered(capsys, "--cluster" if cluster else script, *options.split())
    check(documents[-1])
    assert documents[-1]["kind"] == ("RayCluster" if cluster else "RayJob")
    assert [each["kind"] for each in documents[:-1]] == ([] if cluster else ["ConfigMap"])


@pytest.mark.long
def test_the_validation_finds_what_a_cluster_would_drop(
    capsys: pytest.CaptureFixture[str], script: Path
) -> None:
    def spoil(path: str, value: object) -> dict[str, Any]:
        document = rendered(capsys, script)[-1]
        *way, last = path.split(".")
        part: Any = document
        for key in way:
            part = part[int(key) if key.isdigit() else key]
        part[last] = value
        return document

    worker = "spec.rayClusterSpec.workerGroupSpecs.0"
    for path, value in (
        ("spec.entryPoint", "python a.py"),
        (f"{worker}.maxReplica", 3),
        (f"{worker}.template.spec.containers.0.lifecycle.prestop", {}),
        (f"{worker}.template.spec.tolerations", [{"keys": "a"}]),
        (f"{worker}.replicas", "8"),
        ("spec.rayClusterSpec.authOptions.mode", "tokens"),
    ):
        with pytest.raises(jsonschema.ValidationError):
            check(spoil(path, value))


def test_the_script_travels_as_it_is_and_is_what_runs(
    capsys: pytest.CaptureFixture[str], script: Path, tmp_path: Path
) -> None:
    helper = tmp_path / "helper.py"
    helper.write_text("x = 1\n")
    code, job = rendered(capsys, script, "--file", helper, "--arguments=--lr 0.1 --name 'a b; rm'")
    assert code["data"] == {"train_model.py": SCRIPT, "helper.py": "x = 1\n"}
    assert code["metadata"]["name"] == job["metadata"]["name"] == "train-model"
    assert job["spec"]["entrypoint"] == "python /mnt/code/train_model.py --lr 0.1 --name 'a b; rm'"
    for pod in pods_of(job):
        (container,) = pod["containers"]
        assert {"name": "code", "configMap": {"name": "train-model"}} in pod["volumes"]
        assert {"name": "code", "mountPath": "/mnt/code", "readOnly": True} in container[
            "volumeMounts"
        ]
        assert {"name": "PYTHONPATH", "value": "/mnt/code"} in container["env"]


def test_a_script_in_the_image_needs_no_configmap(capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = rendered(capsys, "/app/train.py", "--in-image")
    assert job["spec"]["entrypoint"] == "python /app/train.py"
    assert all("volumes" not in pod for pod in pods_of(job))


@pytest.mark.parametrize("cloud", ["any", *LABELS])
def test_workers_are_on_spot_nodes_alone_and_nothing_else_is(
    capsys: pytest.CaptureFixture[str], script: Path, cloud: str
) -> None:
    job = rendered(capsys, script, "--spot", f"--cloud={cloud}")[-1]
    submitter = job["spec"]["submitterPodTemplate"]["spec"]
    head, worker = pods_of(job)
    labels = LABELS.values() if cloud == "any" else [LABELS[cloud]]
    for key, value in labels:
        on = {key: value}
        assert takes(worker, on)
        assert not takes(head, on)
        assert not takes(submitter, on)
        taint = {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}
        assert taint in worker["tolerations"]
    assert not takes(worker, {"other": "true"})
    assert takes(head, {"other": "true"})
    assert takes(submitter, {})
    assert "tolerations" not in head
    assert "tolerations" not in submitter


def takes(pod: Mapping[str, Any], node: Mapping[str, str]) -> bool:
    """Whether a node's labels satisfy a pod's affinity, as Kubernetes defines it."""
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]

    def holds(expression: Mapping[str, Any]) -> bool:
        inside = node.get(expression["key"]) in expression["values"]
        return inside == {"In": True, "NotIn": False}[expression["operator"]]

    return any(
        all(holds(each) for each in term["matchExpressions"])
        for term in required["nodeSelectorTerms"]
    )


def test_without_spot_workers_run_anywhere_and_the_head_still_not_on_spot_nodes(
    capsys: pytest.CaptureFixture[str], script: Path
) -> None:
    head, worker = pods_of(rendered(capsys, script, "--spot-label=mine=yes")[-1])
    assert "affinity" not in worker
    assert not takes(head, {"mine": "yes"})
    assert not takes(head, {"cloud.google.com/gke-spot": "true"})


def test_a_pod_that_goes_drains_its_ray_node_before_it_is_killed(
    capsys: pytest.CaptureFixture[str], script: Path
) -> None:
    head, worker = pods_of(rendered(capsys, script, "--grace=110")[-1])
    assert head["terminationGracePeriodSeconds"] == worker["terminationGracePeriodSeconds"] == 110
    (container,) = worker["containers"]
    shell, flag, notice = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, flag) == ("/bin/sh", "-c")
    assert notice.startswith("ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION ")
    assert notice.endswith("--deadline-remaining-seconds 105; sleep 105")
    assert "lifecycle" not in head["containers"][0]


@pytest.mark.parametrize(
    ("cloud", "seconds"), [("any", 15), ("gke", 15), ("eks", 110), ("aks", 25)]
)
def test_a_pod_has_the_time_that_its_cloud_gives(
    capsys: pytest.CaptureFixture[str], script: Path, cloud: str, seconds: int
) -> None:
    for pod in pods_of(rendered(capsys, script, f"--cloud={cloud}")[-1]):
        assert pod["terminationGracePeriodSeconds"] == seconds


def test_rays_command_takes_the_notice_as_it_is_written(
    capsys: pytest.CaptureFixture[str], script: Path, tmp_path: Path
) -> None:
    """Ray's own parser reads the hook's options; its control store is not there to ask."""
    from click.testing import CliRunner
    from ray.scripts import scripts

    _, worker = pods_of(rendered(capsys, script)[-1])
    notice = worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][2]
    words = shlex.split(notice.partition(";")[0])
    assert words[:2] == ["ray", "drain-node"]
    context = scripts.drain_node.make_context("drain-node", words[2:])
    assert context.params["reason"] == "DRAIN_NODE_REASON_PREEMPTION"
    assert context.params["reason_message"] == "the pod goes"
    assert context.params["deadline_remaining_seconds"] == 10
    assert CliRunner().invoke(scripts.drain_node, ["--reason", "spot"]).exit_code == 2


def test_the_number_of_workers_is_fixed_or_kept_between_bounds(
    capsys: pytest.CaptureFixture[str], script: Path
) -> None:
    def group(*options: str) -> tuple[object, ...]:
        spec = rendered(capsys, script, *options)[-1]["spec"]["rayClusterSpec"]
        (found,) = spec["workerGroupSpecs"]
        scaling = spec.get("enableInTreeAutoscaling", False)
        return found["minReplicas"], found["replicas"], found["maxReplicas"], scaling

    assert group() == (8, 8, 8, False)
    assert group("--min-workers=2", "--max-workers=20") == (2, 8, 20, True)


def test_the_token_is_never_in_the_file(capsys: pytest.CaptureFixture[str], script: Path) -> None:
    job = rendered(capsys, script)[-1]
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    job = rendered(capsys, script, "--token-secret=mine")[-1]
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token", "secretName": "mine"}
    assert "RAY_AUTH_TOKEN" not in json.dumps(job)


@pytest.mark.parametrize(
    ("given", "told"), [("claim", "/checkpoints"), ("gs://bucket/run", "gs://bucket/run")]
)
def test_the_driver_is_told_where_checkpoints_are(
    capsys: pytest.CaptureFixture[str], script: Path, given: str, told: str
) -> None:
    head, worker = pods_of(rendered(capsys, script, f"--checkpoints={given}")[-1])
    (container,) = head["containers"]
    assert {"name": "STEEPEST_CHECKPOINTS", "value": told} in container["env"]
    mounted = [volume for volume in head["volumes"] if "persistentVolumeClaim" in volume]
    claims = [volume["persistentVolumeClaim"] for volume in mounted]
    assert claims == ([{"claimName": "claim"}] if given == "claim" else [])
    assert all("persistentVolumeClaim" not in volume for volume in worker["volumes"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--workers=0", "--workers"),
        ("--max-workers=7", "--workers=8 --max-workers=7: they must not fall"),
        ("--min-workers=9", "--min-workers=9 --workers=8"),
        ("--min-workers=-1", "--min-workers"),
        ("--memory=much", "--memory='much': give a number of bytes, or such as '16Gi'"),
        ("--gpus=-1", "--gpus"),
        ("--grace=3", "--grace"),
        ("--retries=-1", "--retries"),
        ("--name=Big_Job", "--name='Big_Job': give small letters"),
        ("--checkpoints=a@b", "give the name of a volume claim, or the URL"),
        ("--checkpoints=s3://key:secret@bucket", "without credentials in it"),
        ("--node=pool", "--node='pool': give KEY=VALUE"),
        ("--toleration=a=b", "give KEY=VALUE:EFFECT or KEY:EFFECT"),
        ("--arguments='", "cannot be divided into words"),
        ("--file=absent.py", "'absent.py' cannot be read as a text"),
        ("--in-image --file=a.py", "--file has no use with --in-image"),
        ("--cluster", "give a script, or --cluster without one"),
    ],
)
def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], script: Path, options: str, said: str
) -> None:
    assert said in refused(capsys, script, *options.split())


def test_files_that_cannot_travel_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, script: Path
) -> None:
    assert "there is no program 'absent.py'" in refused(capsys, "absent.py")
    large = tmp_path / "large.py"
    large.write_text("#" * 1_000_001)
    assert "use --in-image" in refused(capsys, large)
    binary = tmp_path / "binary.py"
    binary.write_bytes(b"\xff\xfe")
    assert "cannot be read as a text" in refused(capsys, binary)
    spaced = tmp_path / "my file.py"
    spaced.write_text("")
    assert "takes no file of the name 'my file.py'" in refused(capsys, spaced)
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / script.name
    twin.write_text("")
    assert "two of the files have the same name" in refused(capsys, script, "--file", twin)


def test_it_writes_a_file(capsys: pytest.CaptureFixture[str], script: Path, tmp_path: Path) -> None:
    printed = rendered(capsys, script)
    assert rendered(capsys, script, "--output", tmp_path / "job.yaml") == []
    assert list(yaml.safe_load_all((tmp_path / "job.yaml").read_text())) == printed
    assert "cannot be written" in refused(capsys, script, "--output", tmp_path / "no" / "job.yaml")


def test_without_kubectl_apply_says_so(
    capsys: pytest.CaptureFixture[str], script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "--apply needs kubectl" in refused(capsys, script, "--apply")


@pytest.mark.parametrize("status", [0, 3])
def test_apply_hands_the_same_text_to_kubectl(
    capsys: pytest.CaptureFixture[str],
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    status: int,
) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f'#!/bin/sh\necho "$@" > "{tmp_path}/words"\ncat > "{tmp_path}/text"\nexit {status}\n'
    )
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    printed = rendered(capsys, script)
    given = ["launch", "kubernetes", "--image=app:1", "--workers=8", str(script), "--apply"]
    assert main(given) == status
    assert (tmp_path / "words").read_text() == "apply -f -\n"
    assert list(yaml.safe_load_all((tmp_path / "text").read_text())) == printed


def test_a_kubectl_that_does_not_end_is_given_up(
    capsys: pytest.CaptureFixture[str],
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text("#!/bin/sh\nexec sleep 60\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(kubernetes, "_KUBECTL_SECONDS", 0.2)
    said = refused(capsys, script, "--apply")
    assert "kubectl apply did not end within 0.2 s: is the Kubernetes API server" in said


class ApiServer(http.server.BaseHTTPRequestHandler):
    """As much of a Kubernetes API server as kubectl asks for: which kinds there are, and creating objects."""

    created: list[dict[str, Any]]
    KINDS = {
        "/api/v1": [("configmaps", "ConfigMap")],
        "/apis/ray.io/v1": [("rayjobs", "RayJob"), ("rayclusters", "RayCluster")],
    }

    def do_GET(self) -> None:
        version = {"groupVersion": "ray.io/v1", "version": "v1"}
        group = {"name": "ray.io", "versions": [version], "preferredVersion": version}
        path = self.path.partition("?")[0]
        if path == "/api":
            self.answer(200, {"kind": "APIVersions", "versions": ["v1"]})
        elif path == "/apis":
            self.answer(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]})
        elif path in self.KINDS:
            verbs = ["create", "get", "patch"]
            resources = [
                {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": verbs}
                for name, kind in self.KINDS[path]
            ]
            of = path.removeprefix("/apis/").removeprefix("/api/")
            self.answer(
                200, {"kind": "APIResourceList", "groupVersion": of, "resources": resources}
            )
        else:
            about = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "reason": "NotFound",
            }
            self.answer(404, about | {"code": 404})

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.created.append(sent)
        self.answer(201, sent)

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What kubectl creates on an API server that is this process."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed here")
    objects: list[dict[str, Any]] = []
    handler = type("Handler", (ApiServer,), {"created": objects})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            cluster = {"server": f"http://127.0.0.1:{server.server_port}"}
            config = {
                "apiVersion": "v1", "kind": "Config", "current-context": "test",
                "clusters": [{"name": "test", "cluster": cluster}],
                "users": [{"name": "test", "user": {}}],
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            }  # fmt: skip
            (tmp_path / "config").write_text(json.dumps(config))
            monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
            monkeypatch.setenv("HOME", str(tmp_path))  # for its cache
            yield objects
        finally:
            server.shutdown()
            thread.join()


def test_kubectl_reads_every_document(
    capsys: pytest.CaptureFixture[str], script: Path, tmp_path: Path, created: list[dict[str, Any]]
) -> None:
    path = tmp_path / "job.yaml"
    rendered(capsys, script, *EVERY.split(), "--output", path)
    command = ["kubectl", "create", "--dry-run=client", "--validate=false", "-o", "name", "-f"]
    done = subprocess.run(
        [*command, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["configmap/other", "rayjob.ray.io/other"]
    assert created == []
