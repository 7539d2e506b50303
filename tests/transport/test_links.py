"""Links between nodes that are cut for a while, or slow, and lose frames; see tests/recovery/test_node_failures.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.failing_nodes import Nodes, run
from tests.network_namespaces import NEEDS_NAMESPACES

pytestmark = NEEDS_NAMESPACES


@pytest.fixture(scope="module")
def linked() -> Iterator[Nodes]:
    """Three nodes, none of which a test ends."""
    made = Nodes()
    try:
        made.add(3)
        yield made
    finally:
        made.close()


@pytest.mark.full
def test_a_link_is_cut_for_a_while(linked: Nodes) -> None:
    """Shorter than the heartbeat, and nobody is replaced; longer, and the successor comes to the same node.

    Then Ray has not given the node up, and the dead worker is still there when the link is whole
    again.
    """
    common = {"strategy": "ParameterServerStrategy(num_servers=1)", "moves": False}
    run(linked, disaster="self.cut(2.0)", heartbeat=20.0, replaced=0, **common)
    run(linked, disaster="self.cut(6.0)", heartbeat=2.0, replaced=1, **common)


@pytest.mark.full
def test_slow_and_lossy_links_change_nothing(linked: Nodes) -> None:
    linked.delay(50, 5)
    run(linked, disaster="pass", moves=False, replaced=0, steps=10)
    came, lost = linked.lost()
    assert lost > 20, f"{lost} of {came} frames lost"
