"""For tests: a whole job in one thread on virtual time, scripted faults, the replay of a log, proof of a script."""

from steepest.testing.cluster import InProcessCluster, server_peers
from steepest.testing.collective import InProcessCollective
from steepest.testing.faults import Fault, Moment
from steepest.testing.models import linear_model_creator
from steepest.testing.network import InProcessTransport, Link, Network
from steepest.testing.processes import with_faults
from steepest.testing.replay import replay
from steepest.verification.report import VerifiedRun, VerifyReport
from steepest.verification.verifying import verify

__all__ = [
    "Fault",
    "InProcessCluster",
    "InProcessCollective",
    "InProcessTransport",
    "Link",
    "Moment",
    "Network",
    "VerifiedRun",
    "VerifyReport",
    "linear_model_creator",
    "replay",
    "server_peers",
    "verify",
    "with_faults",
]
