"""Process groups of NCCL, as far as a stand-in over Gloo shows them, and what refuses them; no GPU is used."""

from __future__ import annotations

import os

import pytest
import torch

from steepest import AllreduceStrategy, DistributedSGD
from steepest.errors import ConfigurationError
from steepest.strategies.process_groups import nccl_groups, torch_groups
from steepest.strategies.process_groups.nccl_groups import NcclGroups
from steepest.strategies.process_groups.torch_groups import TorchGroup
from steepest.testing.models import linear_model_creator
from tests.group_members import SECONDS, Member, added, group
from tests.modes import make
from tests.processes import until
from tests.reference import Task
from tests.simulation.run import Simulation, run_config
from tests.standing_in_for_nccl import StandInBackend, StandInGroups


def backend(member: Member) -> StandInBackend:
    assert isinstance(member.group, TorchGroup)
    assert isinstance(member.group._backend, StandInBackend)
    return member.group._backend


def test_a_group_that_is_left_amid_an_operation_is_aborted_at_once() -> None:
    """NCCL's kernels wait for ever; Gloo's time is over after half a minute."""
    before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
    with group(2, groups=StandInGroups()) as members:
        for member in members:
            member.run(added)
        for member in members:
            member.done.get(timeout=SECONDS)
        members[0].run(added)
        until(lambda: members[0].group._doing == "a test is added up")  # type: ignore[attr-defined]
        members[0].router.call(members[0].group.end).result(SECONDS)
        until(lambda: backend(members[0]).made[0].aborted == 1)
        assert backend(members[1]).made[0].aborted == 0
        assert members[0].failures.empty()
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before, "other groups are as they would be"


def test_a_member_that_does_nothing_is_waited_for_some_time_and_those_that_share_a_gpu_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_groups, "_GRACE", 0.0)
    with group(2, 0.5, StandInGroups()) as members:
        members[0].run(added)
        text = str(members[0].failures.get(timeout=SECONDS))
        assert text.startswith("NCCL, while a test is added up: ")
        # Gloo, which stands in, may say it first
        assert "timed out after 0.5 s" in text or "Timed out waiting 500ms" in text
        assert backend(members[0]).made[0].aborted == 1
    with group(2, groups=StandInGroups(shared=True)) as members:
        for member in members:
            text = str(member.failures.get(timeout=SECONDS))
            assert text.startswith("NCCL, while the members meet: workers 0 and 1 share one GPU, ")


def test_what_nccl_needs_and_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    router = make("sync", Task()).client_router
    with pytest.raises(ConfigurationError, match="this torch has no NCCL"):
        NcclGroups().check(router, torch.device("cpu"))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    with pytest.raises(ConfigurationError, match='data_plane="nccl" in a simulation'):
        NcclGroups().check(router, torch.device("cpu"))
    monkeypatch.setattr(nccl_groups, "check_process", lambda plane, router: None)
    with pytest.raises(ConfigurationError, match=r"models on CPUs: .* give gpu=True"):
        NcclGroups().check(router, torch.device("cpu"))


def test_a_job_on_cpus_is_refused_before_its_models_are_made() -> None:
    strategy = AllreduceStrategy(data_plane="nccl")
    with (
        Simulation(seed=1, cpus=(8,)).running(),
        pytest.raises(ConfigurationError, match='data_plane="nccl" and models on CPUs'),
    ):
        DistributedSGD(linear_model_creator(), 2, strategy=strategy, run_config=run_config())
