"""Predictions equal those of a simulation with an event for each part of a message's way, as recorded from it.

That simulation had an event where a message is sent, where it leaves, where its link is free again, where it enters the
receiver's link, where it is there and where the receiver is free; now most of them are reckoned ahead. What has been
modelled since is recorded anew: the copies that a worker with weights of its own makes of those of its host's servers.
"""

from __future__ import annotations

import pytest

from steepest.cli.planning.events import Links
from steepest.cli.planning.plan import for_slow_links
from steepest.cli.planning.profile import Costs, Profile
from steepest.cli.planning.simulation import predict
from steepest.core.strategies.strategy import Strategy
from steepest.strategies.named import as_strategy
from tests.planning_profiles import made_up

COSTS = Costs(message=1e-5, sent=1e-10, received=1e-10, added=2e-10, applied=3e-10, checked=1e-10)
FAST, SLOW = Links(1.25e9, 50e-6), Links(12.5e6, 20e-3)
#: By strategy, workers, servers and links: seconds of a step, share of computing, processor seconds beside passes.
RECORDED = {
    ("ps", 8, 8, FAST): (0.12886036159585101, 0.7742881968343911, 0.12891595520000868),
    ("ps", 8, 8, SLOW): (4.449124673865204, 0.022425772334403685, 0.12891595520000634),
    ("allreduce", 32, None, FAST): (0.16106040646264208, 0.6216029738601997, 0.5144838207999807),
    ("async", 8, 8, FAST): (0.1261257219152598, 0.7956105325576421, 0.16175387466667646),
    ("ssp", 4, 4, FAST): (0.12213888011807017, 0.808030661848632, 0.07502087893333781),
    ("local", 4, None, FAST): (0.9145864112259433, 0.9554553929897296, 0.36471971852087764),
    ("local 100/4 delay 20", 8, None, FAST): (
        2.6981008783169265, 0.9985632956112038, 1.5759414498767244,
    ),
    ("local 100/4 delay 20 int4", 4, 4, FAST): (
        2.6926050384924882, 0.9997569843819859, 0.7819284949540192,
    ),
}  # fmt: skip


def strategy_of(name: str, profile: Profile) -> Strategy:
    return for_slow_links(profile).get(name) or as_strategy(name)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "case", RECORDED, ids=lambda case: f"{case[0]} {case[1]} {case[3].latency:g}"
)
def test_predictions_are_those_of_an_event_for_each_part(
    case: tuple[str, int, int | None, Links],
) -> None:
    name, workers, servers, links = case
    profile = made_up(at_end=False, costs=COSTS, variation=0.02)
    strategy = strategy_of(name, profile)
    found = predict(profile, strategy, workers, links, servers)
    seconds, computing, beside = RECORDED[case]
    # where workers do not wait for each other a step begins and ends in the middle of passes and messages, which take
    # longer or shorter by chance
    together = strategy.rule.needs_all
    assert found.seconds == pytest.approx(seconds, rel=1e-6 if together else 1e-2)
    assert found.computing == pytest.approx(computing, rel=1e-3 if together else 3e-2)
    assert found.beside == pytest.approx(beside, rel=1e-3 if together else 3e-2)
