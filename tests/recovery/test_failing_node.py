"""A node on which processes die again and again: who is there moves away, and nobody is placed there any more."""

from __future__ import annotations

import pytest

from tests.ray_hosts import (
    Place,
    place,  # noqa: F401 - a fixture
)

pytestmark = pytest.mark.cluster


@pytest.mark.full
def test_a_node_that_fails_again_and_again_is_left_out(place: Place) -> None:  # noqa: F811
    place.python(
        """
        import signal
        from ray.cluster_utils import Cluster
        from steepest import Callback, FailureConfig, RunConfig
        from steepest.core.messages.message import worker_peer

        class Trouble(Callback):
            '''Kills each process of worker 3 on a node; ends training when something has been said.'''

            def __init__(self, node):
                self.node, self.killed = node, []

            def on_step(self, sgd, result):
                at = sgd._live().places.get(worker_peer(3))
                if at is not None and at.node == self.node and at.pid not in self.killed:
                    self.killed.append(at.pid)
                    os.kill(at.pid, signal.SIGKILL)

        def train_until(sgd, trouble, text):
            while not any(text in event.line for event in sgd.stats().events):
                sgd.fit(steps=50, callbacks=[trouble], progress=False)

        if __name__ == "__main__":
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
            ray.init(address=cluster.address)
            creator, run_config = linear_model_creator(), RunConfig(failure=FailureConfig(max_failures=1, spares=0))
            with DistributedSGD(creator, num_workers=2, strategy="ps", run_config=run_config) as sgd:
                bad = cluster.add_node(num_cpus=3).node_id
                sgd.resize(num_workers=4)
                assert [sgd._live().places[worker_peer(i)].node == bad for i in range(4)] == [False, False, True, True]
                trouble = Trouble(bad)
                train_until(sgd, trouble, "so is the node")
                assert len(trouble.killed) == 4, trouble.killed
                other = cluster.add_node(num_cpus=2).node_id
                train_until(sgd, trouble, "failed again and again: ")
                while sgd.num_workers < 4:
                    sgd.fit(steps=50, callbacks=[trouble], progress=False)
                assert len(trouble.killed) == 4, trouble.killed
                nodes = [sgd._live().places[worker_peer(i)].node for i in range(4)]
                assert sorted(nodes[2:]) == [other, other] and bad not in nodes, (nodes, bad)
                assert bad not in [at.node for at in sgd._live().places.values()]
                for event in sgd.stats().events:
                    print(event.line, flush=True)
            ray.shutdown()
            cluster.shutdown()
        """
    )
