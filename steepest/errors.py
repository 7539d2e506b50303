"""The exceptions of steepest.

SteepestError
├── ConfigurationError (ValueError)     an argument is wrong; nothing was started
│   └── ModelError                      a model breaks the protocol, or replicas disagree
├── ResourcesError                      the cluster cannot place what was asked
├── StepError                           a step was not committed; weights are those of the last commit
│   ├── ModelRaisedError                the user's model raised (its traceback is the cause)
│   ├── NonFiniteError                  a gradient holds NaN or infinity
│   └── DeadlineError (TimeoutError)    something was awaited in vain; names the peer and the step
├── PeerLostError (ConnectionError)     a process died; names it, its node and its last log lines
├── ProtocolError                       a frame is malformed, truncated, oversized or out of place
│   └── AuthenticationError             a peer did not prove the job's token
├── CheckpointError                     a checkpoint is missing, damaged or of another model, or its place is taken
└── ShutdownError                       the trainer was used after `shutdown()`
"""

from __future__ import annotations

import traceback


class SteepestError(Exception):
    """Every error that steepest raises on purpose."""


class ConfigurationError(SteepestError, ValueError):
    """An argument is wrong: says what was given, what is allowed and what to do."""


class ModelError(ConfigurationError):
    """A model breaks the `Model` protocol, or two replicas of it disagree."""


class ResourcesError(SteepestError):
    """The cluster cannot place what was asked: says what was asked and what is free."""


class StepError(SteepestError):
    """A step was not committed; weights and optimizer state are those of the last commit."""


class ModelRaisedError(StepError):
    """The user's model raised; the original traceback is attached as the cause."""


class NonFiniteError(StepError):
    """A gradient holds NaN or infinity; names the parameter and the worker."""


class DeadlineError(StepError, TimeoutError):
    """Something did not happen in time; names what was awaited, from whom, and in which step."""


class PeerLostError(SteepestError, ConnectionError):
    """A worker or server process died or closed its connection."""


class ProtocolError(SteepestError):
    """A frame is malformed, truncated, oversized or out of place; its connection is closed."""


class AuthenticationError(ProtocolError):
    """A peer did not prove that it knows the job's token."""


class CheckpointError(SteepestError):
    """A checkpoint is missing, damaged or belongs to another model; or another driver keeps its own in that place."""


class ShutdownError(SteepestError):
    """The trainer was used after `shutdown()`."""


def describe_error(error: BaseException) -> dict[str, str]:
    """An exception of the user's code as text that fits a message: "error" in a line, and its "traceback"."""
    text = "".join(traceback.format_exception(error))
    return {"error": f"{type(error).__name__}: {error}"[:2000], "traceback": text[-20000:]}


class RemoteTraceback(Exception):  # noqa: N818 - a carrier of text, not an error of its own
    """The traceback of an exception raised in another process, as text; attached as a cause."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n--- traceback in the other process ---\n{self.text.rstrip()}"
