"""For tests: a whole job in one thread on virtual time, scripted faults, the replay of a log, proof of a script.

The names below are loaded when they are first used: `steepest verify` needs no simulation.
"""

from typing import TYPE_CHECKING

from steepest.lazy import lazily

if TYPE_CHECKING:  # what type checkers and editors see; `_MODULES` says the same to Python
    from steepest.testing.cluster import InProcessCluster as InProcessCluster
    from steepest.testing.cluster import server_peers as server_peers
    from steepest.testing.collective import InProcessCollective as InProcessCollective
    from steepest.testing.faults import Fault as Fault
    from steepest.testing.faults import Moment as Moment
    from steepest.testing.log_replay import replay as replay
    from steepest.testing.models import linear_model_creator as linear_model_creator
    from steepest.testing.network import InProcessTransport as InProcessTransport
    from steepest.testing.network import Link as Link
    from steepest.testing.network import Network as Network
    from steepest.testing.processes import with_faults as with_faults
    from steepest.testing.verification.report import VerifiedRun as VerifiedRun
    from steepest.testing.verification.report import VerifyReport as VerifyReport
    from steepest.testing.verification.verifying import verify as verify

_MODULES = {
    "Fault": "faults",
    "InProcessCluster": "cluster",
    "InProcessCollective": "collective",
    "InProcessTransport": "network",
    "Link": "network",
    "Moment": "faults",
    "Network": "network",
    "VerifiedRun": "verification.report",
    "VerifyReport": "verification.report",
    "linear_model_creator": "models",
    "replay": "log_replay",
    "server_peers": "cluster",
    "verify": "verification.verifying",
    "with_faults": "processes",
}
__all__ = sorted(_MODULES)
__getattr__, __dir__ = lazily(__name__, _MODULES)
