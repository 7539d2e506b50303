"""A pod of KubeRay's becomes ready with ray[default] alone: see `make test-loggers`, whose environment has it."""

from __future__ import annotations

import http.client
import importlib.util
import sys
import urllib.error
import urllib.request

import pytest

from steepest.core.system import system
from steepest.places import pod
from tests.ray_hosts import FORK, Place, place  # noqa: F401 - a fixture

SECONDS = 150.0
AGENT, DASHBOARD = 28263, 28264
#: What KubeRay has the kubelet ask of each pod with Ray 2.53 or later, and the submitter of the head; no token is sent.
URLS = (f"http://127.0.0.1:{AGENT}/api/healthz", f"http://127.0.0.1:{DASHBOARD}/api/gcs_healthz")


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200 and b"success" in answer.read())
    except (http.client.HTTPException, urllib.error.URLError, OSError):
        return False


@pytest.mark.cluster
def test_a_head_that_the_check_lets_pass_answers_probes(place: Place) -> None:  # noqa: F811
    if importlib.util.find_spec("aiohttp_cors") is None:
        pytest.skip("needs ray[default]: make test-loggers")
    assert pod.check() == 0
    command = (
        f"{FORK}\nimport sys; from ray.scripts.scripts import main\n"
        f"sys.argv = ['ray', 'start', '--head', '--port=27398', '--num-cpus=0', '--block', "
        f"'--dashboard-port={DASHBOARD}', '--dashboard-agent-listen-port={AGENT}', "
        f"'--temp-dir={place.directory}', '--disable-usage-stats']\nmain()\n"
    )
    until = system().now() + SECONDS
    with place.start(sys.executable, "-c", command) as head:
        try:
            while not all(answers(url) for url in URLS):
                assert head.poll() is None, head.communicate()[0]
                assert system().now() < until, "no answer"
        finally:
            place.kill()
