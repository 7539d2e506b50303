"""The roles in the server processes of a parameter server: servers and the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from steepest.core.engine.coordinator_role import CoordinatorRole
from steepest.core.engine.server import Server, ServerMode
from steepest.core.engine.topology import HostMap, Topology
from steepest.core.messages.gradients import CommitOrder, Decision
from steepest.core.messages.message import COORDINATOR, server_peer
from steepest.core.optim.arriving import arriving_state
from steepest.core.optim.several import as_one
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.protocol.commit_rules import CommitEach
from steepest.core.protocol.commit_state import CommitState
from steepest.core.transport.router import Router
from steepest.errors import ConfigurationError
from steepest.parameter_server.arrays import ArrayTree, called, element_type, named_arrays
from steepest.parameter_server.group import ServerGroup
from steepest.parameter_server.open_coordinator import OpenCoordinator

#: Builds a torch optimizer over the parameters, given in the order of their names.
OptimizerFactory = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]


def read_optimizer(optimizer: OptimizerFactory, initial: ArrayTree) -> OptimizerSpec:
    """Return the recipe of the optimizer that a user's function, called once with zeros, builds over the arrays.

    Raises:
        ConfigurationError: it builds none over all arrays, or some array is not of floating-point numbers.
    """
    named = named_arrays(initial, "initial")
    elements = {name: element_type(value, name) for name, value in named.items()}
    for name, element in elements.items():
        if not element.is_floating_point:
            raise ConfigurationError(
                f"{called(name)} is {element.name}: only floating-point arrays take an optimizer"
            )
    if not callable(optimizer):
        raise ConfigurationError(
            f"optimizer= is a {type(optimizer).__name__}: give a function that builds a torch "
            "optimizer over a list of parameters"
        )
    parameters = {
        name: torch.nn.Parameter(torch.zeros(tuple(value.shape), dtype=elements[name].dtype))
        for name, value in named.items()
    }
    chosen = as_one(optimizer(list(parameters.values())))
    names = {id(p): n for n, p in parameters.items()}
    spec = OptimizerSpec.read(chosen, names)
    if arriving_state(chosen, names, spec) is not None:
        raise ConfigurationError(
            f"{spec.name} arrives with state, of which a parameter server begins without any: give "
            "one that has taken no step, and what state_dict() of such servers returned to their "
            "load_state_dict()"
        )
    missing = parameters.keys() - spec.trainable()
    if missing:
        raise ConfigurationError(
            f"the optimizer leaves out {called(min(missing))}: build it over all of them"
        )
    return spec


def host_server(
    group: ServerGroup,
    spec: OptimizerSpec | None,
    router: Router,
    index: int,
    weights: torch.Tensor,
    version: int = 0,
) -> Server:
    """Host a server on a router, and the coordinator if its index is 0; return the server.

    Args:
        group: the servers' arrays.
        spec: the optimizer; None where updates are added to the arrays.
        router: of this process.
        index: of the server.
        weights: (layout.nbytes,) of uint8, with the initial values of the chunks that the server
            holds.
        version: of the weights, with which successors go on.
    """
    peer = server_peer(index)
    server = Server(
        index,
        Topology(group.arrays.layout, group.holders, HostMap.apart(0, group.num_servers)),
        spec,
        weights,
        router.sender(peer),
        router.in_use,
        mode=ServerMode(stages_each=True, versions_differ=True, open_to_all=True),
    )
    server.version = version
    router.host(peer, server)
    router.admit(group.admission)
    if index == 0:
        _host_coordinator(group, router, version)
    return server


def committed_in(decisions: Iterable[Decision]) -> dict[tuple[int, int], int]:
    """Return the pushes that decisions have committed: by user and number, the version."""
    return {
        (push.worker, push.sequence): decision.version
        for decision in decisions
        if isinstance(decision, CommitOrder)
        for push in decision.pushes
    }


def _host_coordinator(group: ServerGroup, router: Router, version: int) -> None:
    """Host the coordinator on a router."""
    state = CommitState(
        members=frozenset(),
        servers=tuple(range(group.num_servers)),
        holding=frozenset(server for servers in group.holders for server in servers),
        rule=CommitEach(),
        witnessed=group.replication > 1,
    )
    state.go_on_from(version)
    coordinator = OpenCoordinator(state, group.nonfinite)
    router.host(COORDINATOR, CoordinatorRole(coordinator, router.sender(COORDINATOR)))
