"""What `steepest launch kubernetes` writes is what KubeRay takes, and says what was asked."""

from __future__ import annotations

import http.server
import json
import logging
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from steepest.cli.main import main
from steepest.places import kubernetes
from steepest.places import pod as in_pod
from steepest.places.spot_nodes import LABELS
from tests.kuberay import check, pods_of, refused, rendered

SCRIPT = 'print("héllo")\nif True:\n\tprint("tab")   \n'
EVERY = (
    "--min-workers=2 --max-workers=9 --cpus=3 --gpus=2 --memory=12Gi --head-cpus=4 --head-memory=9Gi "
    "--grace=110 --spot --cloud=karpenter --checkpoints=s3://bucket/run --retries=0 --keep=0 "
    "--namespace=team --ray-version=2.60.0 --name=other --arguments='a;b'"
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train_model.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


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
    documents = rendered(capsys, "--cluster" if cluster else script, *shlex.split(options))
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
    code, job = rendered(capsys, script, "--file", helper, "--arguments=--lr 0.1")
    assert job["spec"]["entrypoint"] == "python /mnt/code/train_model.py --lr 0.1"
    assert code["data"] == {"train_model.py": SCRIPT, "helper.py": "x = 1\n"}
    assert code["metadata"]["name"] == job["metadata"]["name"] == "train-model"
    for pod in pods_of(job):
        (container,) = pod["containers"]
        assert {"name": "code", "configMap": {"name": "train-model"}} in pod["volumes"]
        assert {"name": "code", "mountPath": "/mnt/code", "readOnly": True} in container[
            "volumeMounts"
        ]
        # the image's own PYTHONPATH stays, in the shell in which KubeRay starts Ray after these words
        started = subprocess.run(
            ["bash", "-c", "--", f"{container['args'][0]} && echo $PYTHONPATH"], text=True, check=True,
            capture_output=True, env={"PATH": no_check(tmp_path), "PYTHONPATH": "/app"},
        )  # fmt: skip
        assert started.stdout == "/mnt/code:/app\n"


def no_check(folder: Path) -> str:
    """A PATH with a Python that does nothing."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "python").write_text("#!/bin/sh\n")
    (folder / "bin" / "python").chmod(0o755)
    return f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"


WORDS = [
    "a;b",
    "*.py",
    "$HOME",
    "s3://b/x?a=1&b=2",
    "a b",
    "",
    "it's",
    '"q"',
    "~",
    "`id`",
    "line\nend",
    "--lr=0.1",
]


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["configmap", "image"])
def test_arguments_reach_the_program_through_all_shells_that_read_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, where: str
) -> None:
    """KubeRay has bash read `ray job submit ... -- ENTRYPOINT ;`, and Ray's head has a shell read what that sends."""
    script = tmp_path / "train.py"
    script.write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    given = [str(script), *(["--in-image"] if where == "image" else [])]
    for words in (WORDS, ["--lr", "0.1"]):
        documents = rendered(capsys, *given, f"--arguments={shlex.join(words)}")
        entrypoint = documents[-1]["spec"]["entrypoint"]
        # the ConfigMap, as a folder; this machine has no /mnt/code
        code = tmp_path / "code"
        code.mkdir(exist_ok=True)
        for document in documents[:-1]:
            for name, text in document["data"].items():
                (code / name).write_text(text.replace("/mnt/code", str(code)))
        entrypoint = entrypoint.replace("/mnt/code", str(code))
        for sent in submitted(entrypoint):
            done = subprocess.run(sent, shell=True, text=True, capture_output=True, cwd=tmp_path)
            assert (done.returncode, json.loads(done.stdout)) == (0, words), sent


def submitted(entrypoint: str) -> list[str]:
    """What the head's shell reads: of Ray since 2.60, of Ray before, and where nothing but an HTTP request is sent."""
    command = ["/bin/bash", "-ce", "--", f"printf '%s\\0' {entrypoint} ;"]
    words = subprocess.check_output(command, text=True).split("\0")[:-1]
    return [shlex.join(words), subprocess.list2cmdline(words), entrypoint]


def test_the_entrypoint_is_plain_where_it_can_be_and_its_file_has_a_name_of_its_own(
    capsys: pytest.CaptureFixture[str], script: Path, tmp_path: Path
) -> None:
    job = rendered(capsys, script, "--arguments=--lr 0.1 --data=s3://b/x")[-1]
    assert job["spec"]["entrypoint"] == "python /mnt/code/train_model.py --lr 0.1 --data=s3://b/x"
    (tmp_path / "command.sh").write_text("")
    said = refused(capsys, script, "--file", tmp_path / "command.sh", "--arguments='a b'")
    assert "the name 'command.sh' is taken" in said


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
    assert notice == "python -m steepest.places.pod leave 105"
    assert "lifecycle" not in head["containers"][0]


@pytest.mark.parametrize(
    ("cloud", "seconds"), [("any", 15), ("gke", 15), ("eks", 110), ("aks", 25)]
)
def test_a_pod_has_the_time_that_its_cloud_gives(
    capsys: pytest.CaptureFixture[str], script: Path, cloud: str, seconds: int
) -> None:
    for pod in pods_of(rendered(capsys, script, f"--cloud={cloud}")[-1]):
        assert pod["terminationGracePeriodSeconds"] == seconds


def test_rays_command_takes_the_notice_as_it_is_written() -> None:
    """Ray's own parser reads the options; its control store is not there to ask."""
    from click.testing import CliRunner
    from ray.scripts import scripts

    words = in_pod.drain_command(10)
    assert words[:2] == ["ray", "drain-node"]
    context = scripts.drain_node.make_context("drain-node", words[2:])
    assert context.params["reason"] == "DRAIN_NODE_REASON_PREEMPTION"
    assert context.params["reason_message"] == "the pod goes"
    assert context.params["deadline_remaining_seconds"] == 10
    assert CliRunner().invoke(scripts.drain_node, ["--reason", "spot"]).exit_code == 2


@pytest.mark.parametrize("head", ["gone", "goes"])
def test_a_pod_does_not_wait_where_the_whole_cluster_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    """Else the end of each job would last as long as a cloud's notice. It hangs if the hour is waited for."""
    told = tmp_path / "told"
    (tmp_path / "ray").write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
    (tmp_path / "ray").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(in_pod, "_LOOK_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{listener.getsockname()[1]}")
        if head == "gone":
            listener.close()
        else:
            answers = threading.Thread(
                target=lambda: [listener.accept()[0].close() for _ in range(3)]
            )
            answers.start()
            leaving = threading.Thread(target=in_pod.leave, args=(3600,))
            leaving.start()
            answers.join()
            listener.close()
            leaving.join(30)
            assert not leaving.is_alive()
            assert told.read_text().startswith("drain-node --reason DRAIN_NODE_REASON_PREEMPTION")
            return
    assert in_pod.leave(3600) == 0
    assert not told.exists()


def test_an_image_without_what_probes_ask_for_says_so_where_its_pod_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray.dashboard.optional_deps", types.ModuleType("_"))
    assert in_pod.main(["check"]) == 0
    monkeypatch.setitem(sys.modules, "ray.dashboard.optional_deps", None)
    assert in_pod.main(["check"]) == 1
    assert "install 'steepest[kubernetes]' in it" in capsys.readouterr().err


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
    # a fresh volume is of root, and Ray's images are not
    assert ("fsGroup" in head.get("securityContext", {})) == (given == "claim")
    assert all("persistentVolumeClaim" not in volume for volume in worker["volumes"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--workers=0", "--workers"),
        ("--max-workers=7", "--workers=8 --max-workers=7: they must not fall"),
        ("--min-workers=9", "--min-workers=9 --workers=8"),
        ("--min-workers=-1", "--min-workers"),
        ("--memory=much", "--memory='much': give a number of bytes, or such as '16Gi'"),
        ("--memory=4000000K", "--memory='4000000K': give a number of bytes"),
        ("--gpus=-1", "--gpus"),
        ("--grace=3", "--grace"),
        ("--retries=-1", "--retries"),
        ("--name=Big_Job", "--name='Big_Job': give small letters"),
        ("--checkpoints=a@b", "give the name of a volume claim, or the URL"),
        ("--checkpoints=s3://key:secret@bucket", "without credentials in it"),
        ("--values=absent.yaml", "--values='absent.yaml' cannot be read as YAML"),
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
    assert (tmp_path / "words").read_text() == "apply --server-side -f -\n"
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

    def do_PATCH(self) -> None:
        """Server-side apply; refuses, as the real one does, annotations of over 256 KiB."""
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        notes = sent.get("metadata", {}).get("annotations", {})
        assert sum(len(key) + len(value) for key, value in notes.items()) <= 262_144
        assert self.headers["Content-Type"] == "application/apply-patch+yaml"
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
    rendered(capsys, script, *shlex.split(EVERY), "--output", path)
    command = ["kubectl", "create", "--dry-run=client", "--validate=false", "-o", "name", "-f"]
    done = subprocess.run(
        [*command, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["configmap/other", "rayjob.ray.io/other"]
    assert created == []


def test_kubectl_applies_files_that_its_annotation_would_not_take(
    capsys: pytest.CaptureFixture[str], script: Path, tmp_path: Path, created: list[dict[str, Any]]
) -> None:
    script.write_text("#" * 400_000)
    path = tmp_path / "job.yaml"
    rendered(capsys, script, "--output", path)
    first = path.read_text().splitlines()[0]
    assert "kubectl apply --server-side -f" in first
    command = ["kubectl", "apply", "--server-side", "--validate=false", "-f", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert [each["kind"] for each in created] == ["ConfigMap", "RayJob"]
    assert created[0]["data"]["train_model.py"] == "#" * 400_000


def test_retries_that_begin_from_nothing_are_warned_of(
    capsys: pytest.CaptureFixture[str], script: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "steepest")
    rendered(capsys, script, "--checkpoints=claim")
    rendered(capsys, script, "--retries=0")
    assert caplog.text == ""
    rendered(capsys, script)
    assert "--retries=3 without --checkpoints: each start begins at step 0" in caplog.text


def test_nothing_takes_the_heads_node_away_and_gpus_taints_keep_no_worker_off(
    capsys: pytest.CaptureFixture[str], script: Path
) -> None:
    job = rendered(capsys, script, "--gpus=1")[-1]
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    assert head["metadata"]["annotations"] == {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert taint in pods_of(job)[1]["tolerations"]
    assert "tolerations" not in pods_of(job)[0]
