"""What is committed out of order, when a job goes on as another one: each sample once per epoch, in every mode."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from steepest.core.data.sampler import Remaining, SamplePlan
from steepest.core.engine.optimizer_slices import assemble, disassemble
from steepest.core.messages.gradients import Report
from steepest.core.messages.membership import Failed
from steepest.core.messages.message import Kind, Message
from steepest.testing import InProcessCluster
from tests.modes import MODES, counters, hand_over, make, trained
from tests.random_examples import seeds
from tests.reference import Task, same_bits, samples, sgd

SAMPLES = 23
TASK = Task(optimizer=sgd(momentum=0.9), data=samples(SAMPLES))


class Life:
    """One of the jobs that train the same weights one after the other.

    Attributes:
        seen: how often each (epoch, place in its permutation) was committed, in this life and those
            before.
    """

    def __init__(
        self,
        name: str,
        workers: int,
        seed: int | None = None,
        before: Life | None = None,
        servers: int = 2,
    ) -> None:
        self.cluster = make(name, TASK, workers, servers=servers, shuffle=seed, replaces=True)
        self.seen: Counter[tuple[int, int]] = Counter()
        plan = self.cluster.job.plan()
        assert plan is not None
        self.plan = plan
        if before is not None:
            self._take_up(before)

    @property
    def remaining(self) -> Remaining:
        """What of the samples is still to come."""
        told, job = counters(self.cluster), self.cluster.job
        return self.plan.remaining(told["following"], told["returned"], job.shares, job.parts)

    def _take_up(self, before: Life) -> None:
        """As `StateTransfer` does it."""
        told, snapshot = counters(before.cluster), before.cluster.snapshot("state")
        cluster, layout = self.cluster, before.cluster.job.description.layout
        weights, records = None, []
        if cluster.job.strategy.cut == before.cluster.job.strategy.cut:
            hand_over(before.cluster, cluster)
        else:
            state, plain = assemble(layout, snapshot.records)
            weights = cluster.job.description.layout.allocate()
            cluster.job.description.layout.write(weights, layout.named(snapshot.weights))
            records = disassemble(cluster.job.description.layout, state, plain)
        version = told["step"] * cluster.job.versions_per_step
        cluster.wait(cluster.client.install(version, weights, records), "the installation")
        plan = cluster.job.plan(told["step"], before.remaining)
        assert plan is not None
        self.plan = plan
        for worker in cluster.workers:
            use = worker.at_version(
                cluster.coordinator.generation, version, lambda replicas: replicas.use_plan(plan, 0)
            )
            cluster.wait(use, "the plan")
        self.seen = before.seen.copy()

    def train(self, steps: int) -> None:
        """Takes steps, of which some may fail half-way; counts what was committed."""
        told = len(self.cluster.log().commits)
        self.cluster.step(steps)
        for commit in self.cluster.log().commits[told:]:
            for push in commit.pushes:
                at = self.plan.position(push.share // self.cluster.job.shares)
                places = [place for begin, end in at.ranges for place in range(begin, end)]
                step, part = divmod(push.share, self.cluster.job.shares)
                order = self.plan.permutation(at.epoch).tolist()
                mine = self.plan.share(step, part, self.cluster.job.shares).tolist()
                assert set(mine) <= {order[place] for place in places}
                self.seen.update((at.epoch, sample) for sample in mine)

    def check(self) -> None:
        """Each sample of each epoch that was begun is committed once, or still to come."""
        rest = self.remaining
        expected = Counter(
            {(epoch, i): 1 for epoch in range(rest.epoch + 1) for i in range(SAMPLES)}
        )
        for epoch, begin, end in (*rest.left, (rest.epoch, rest.offset, SAMPLES)):
            expected.subtract((epoch, int(i)) for i in self.plan.permutation(epoch)[begin:end])
        assert self.seen == +expected


def deaths(cluster: InProcessCluster, rng: random.Random) -> None:
    """Now and then a worker dies as it sends a gradient or a report, and is replaced."""

    def die(message: Message) -> list[Message]:
        source, kinds = message.source, (Kind.PUSH, Kind.REPORT)
        if (
            source is None
            or source.role != "worker"
            or message.kind not in kinds
            or rng.random() > 0.01
        ):
            return [message]
        cluster.kill(source.index)
        return []

    cluster.network.filter = die


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODES)
@seeds(1)
def test_each_sample_comes_once_whatever_follows_in_whichever_mode(name: str, seed: int) -> None:
    rng = random.Random(seed)
    life = Life(name, rng.randint(2, 3), seed)
    for number in range(3):
        life.train(rng.randint(1, 5))
        life.check()
        life = Life(rng.choice([name, *MODES]), rng.randint(2, 4), seed + number, life)
        life.check()
    life.train(8)
    life.check()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODES)
@seeds(1)
def test_whatever_sizes_a_job_has_while_workers_die(name: str, seed: int) -> None:
    """As when the others go on without somebody, and take a successor in, and servers come and go."""
    rng = random.Random(seed)
    life = Life(name, rng.randint(2, 4), seed)
    for number in range(4):
        if life.cluster.job.workers_are_replaced:
            deaths(life.cluster, rng)
        life.train(rng.randint(1, 4))
        life.check()
        weights = life.cluster.weights()
        life = Life(name, rng.randint(2, 4), seed + number, life, servers=rng.randint(1, 3))
        assert same_bits(life.cluster.weights(), weights)
        life.check()
    life.train(8)
    life.check()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["backup", "async", "async-drop", "ssp-0"])
@seeds(1, "first")
def test_shares_of_those_that_die_come_back(name: str, first: int) -> None:
    found: set[bool] = set()
    for seed in range(first, first + (100 if name == "backup" else 4)):
        if True in found:
            break
        life = Life(name, 3, seed)
        deaths(life.cluster, random.Random(seed))
        for _ in range(2):
            life.train(2)
            life.check()
            found.add(bool(life.remaining.left))
        life = Life("sync", 2, None, life)
        life.train(7)
        life.check()
    assert (True in found) == (
        name == "backup"
    )  # where none is taken beyond the step, none is left over


@pytest.mark.parametrize("name", ["async", "ssp-2"])
@seeds(3, "shuffle")
def test_a_step_that_was_given_up_half_way_is_neither_repeated_nor_forgotten(
    name: str, shuffle: int
) -> None:
    life = Life(name, 3, shuffle)
    life.train(2)

    passed: list[Message] = []

    def fail(message: Message) -> list[Message]:
        """One report is heard; when what it tells of is committed, whoever reports then has failed."""
        if message.kind is Kind.REPORT:
            if passed and life.cluster.coordinator.version == 6:
                return []
            if passed:
                report: Report = message.body
                place = report.generation, report.incarnation, report.pulled
                message.kind = Kind.FAILED
                message.body = Failed(*place, "an accident", "")
            passed.append(message)
        return [message]

    life.cluster.network.filter = fail
    life.train(2)
    told = counters(life.cluster)
    assert told["version"] == 7, "in the middle of a step"
    assert told["following"] - len(told["returned"]) == told["version"]
    life.check()
    life = Life("sync", 2, None, life)
    life.train(9)
    life.check()


def test_without_leftovers_a_synchronous_job_goes_on_to_the_bit() -> None:
    straight = Life("sync", 3)
    straight.train(11)
    life = Life("sync", 3)
    life.train(4)
    again = Life("sync", 3, None, life)
    assert again.plan.left == ()
    trained(again.cluster, 7)
    assert same_bits(again.cluster.weights(), straight.cluster.weights())


def test_a_plan_of_its_own_is_what_workers_follow() -> None:
    """Not only what the log says: gradients are those of the samples that were left over."""
    life = Life("sync", 2)
    rest = Remaining(1, 8, ((0, 2, 3), (0, 20, 23), (1, 1, 2)))
    plan = SamplePlan(SAMPLES, 4, 0, 0, rest.epoch, rest.offset, left=rest.left)
    for worker in life.cluster.workers:
        life.cluster.wait(
            worker.at_version(1, 0, lambda replicas: replicas.use_plan(plan, 0)), "the plan"
        )
    told = [result.samples for result in trained(life.cluster, 5)]
    assert told == [4, 4, 4, 4, 4]
    order = plan.permutation(1)
    assert plan.share(1, 0, 1).tolist() == order[[1, 8, 9, 10]].tolist()
