"""The exceptions of steepest.

SteepestError
├── ConfigurationError (ValueError)       an argument is wrong; nothing has begun
├── ResourcesError                        the cluster cannot place what was asked
├── StepError                             the job's processes did not do what they were asked
│   ├── ModelError (ConfigurationError)   a model breaks the protocol, or replicas disagree
│   │   └── UnfrozenError                 a step trains what was frozen; you never see it
│   ├── ModelRaisedError                  your code or data raised
│   ├── NonFiniteError                    a gradient holds NaN or infinity
│   ├── DeadlineError (TimeoutError)      something did not happen in time
│   ├── DataPlaneError (ConnectionError)  workers that live cannot add up gradients
│   └── PeerLostError (ConnectionError)   a process died
├── MessageTooLargeError                  a message does not fit into a frame
├── ProtocolError                         a frame is malformed or out of place
│   └── AuthenticationError               a peer did not prove the job's token
├── CheckpointError                       a checkpoint is missing or damaged
└── ShutdownError                         the trainer was used after `shutdown()`

`DistributedSGD.step` and `fit` raise a StepError for a step that is not committed; each subclass names
a cause. Weights and optimizer state are then those of the last commit, less what a dead process alone
held. If the optimizer raised on a server, they are those of the last snapshot, and the message says
which.

Other calls raise the same classes for the same causes: a start, an evaluation, a push or a collective
operation can meet an exception of your code, a deadline or a dead process as a step can.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class SteepestError(Exception):
    """The base of every error that steepest raises on purpose.

    Any other exception that leaves a call of steepest comes from a callback of yours, from Ray or from Python, or is a
    mistake of steepest.
    """


class ConfigurationError(SteepestError, ValueError):
    """An argument is wrong.

    Constructors and calls raise it before they start or change anything. The message says what was given, what is
    allowed and what to do.
    """


class ResourcesError(SteepestError):
    """The cluster cannot place what was asked.

    The constructor of `DistributedSGD`, `steepest.run`, `resize` and a job that replaces dead processes raise it. The
    message says what was asked and what is free.
    """


class StepError(SteepestError):
    """The job's processes did not do what they were asked.

    `step` and `fit` raise one of its subclasses if a step is not committed. Weights and optimizer state are then those
    of the last commit, or of the last snapshot if the optimizer raised on a server.
    """


class ModelError(StepError, ConfigurationError):
    """A model breaks the `Model` protocol, or two replicas of it disagree.

    It is raised when the model is built, and by steps. The message names the parameter or method and the workers.
    """


class UnfrozenError(ModelError):
    """A step of a loop of your own has a gradient of a parameter that was frozen so far.

    You never see it: the trainer has the parameter trained from then on, and takes the step again.
    """


class ModelRaisedError(StepError):
    """Your code or data raised in a worker or server.

    The original traceback is the cause. If your code raised a class of your own that the driver has imported, the error
    is of that class, too: ``except Mine`` catches it.
    """


class NonFiniteError(StepError):
    """A gradient, or an update of a `ParameterServer`, holds NaN or infinity.

    It is raised under ``nonfinite="refuse"``, the default; the update is not applied. The message names the parameter
    and the worker.
    """


class DeadlineError(StepError, TimeoutError):
    """Something did not happen in time: a start, a handshake, a step, an answer.

    `DeadlineConfig` has the times. The message names what was awaited, and the processes that it was awaited from.
    """


class PeerLostError(StepError, ConnectionError):
    """A worker or server process died or closed its connection, and could not be replaced.

    The message names the process, its node and the last lines of its log. With ``FailureConfig(max_failures=0)`` every
    death is one.
    """


class DataPlaneError(StepError, ConnectionError):
    """A process group in which workers add up gradients failed, although no process died.

    It is raised with ``AllreduceStrategy(data_plane=)`` alone. The message names the worker, the step and what the
    group says.
    """


class MessageTooLargeError(SteepestError):
    """A message has more beside its payload than fits into a frame.

    The sender raises it. The message of the error names the kind of the message, its size and the limit.
    """


class ProtocolError(SteepestError):
    """A frame is malformed, truncated, oversized or out of place.

    The process that received it closes the connection.
    """


class AuthenticationError(ProtocolError):
    """A peer did not prove that it knows the job's token, or has another certificate.

    Its connection is closed, and the job goes on with the others.
    """


class CheckpointError(SteepestError):
    """A checkpoint is missing, damaged or of another model, or another driver keeps checkpoints in its directory.

    `save`, `restore`, and constructors and `fit` with `Checkpoints` raise it. A damaged file is named.
    """


class ShutdownError(SteepestError):
    """The trainer was used after `shutdown()`, or after the block of its ``with`` ended."""


_MESSAGE_LIMIT, _TRACEBACK_LIMIT = 4_000, 20_000  # characters
_NEVER_USERS = frozenset({"steepest", "ray"})
#: Packages whose frames lead from a process' threads to user code.
_LEADING = _NEVER_USERS | {"concurrent", "contextlib", "functools", "threading"}


def describe_error(error: BaseException) -> dict[str, str]:
    """Describe an exception of any class as text that fits into a message.

    Returns:
        "error", its class and message; its "traceback", see `_traceback_of`; and "kind": the class
        of this module that it is of, or else of what `_rebuilt` makes one of the user's class.
    """
    kinds = (base.__name__ for base in type(error).__mro__ if base.__module__ == __name__)
    described = {
        "error": _shortened(f"{type(error).__name__}: {_message_of(error)}", _MESSAGE_LIMIT),
        "traceback": _shortened(_traceback_of(error), _TRACEBACK_LIMIT),
    }
    kind = next(kinds, None) or _rebuilding(error)
    return described if kind is None else described | {"kind": kind}


def _traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception, and of its causes, with the frames of user code alone.

    Frames of steepest, of Ray, and of what leads from these to user code are left out. An error
    that steepest raises on purpose has none where no user code took part. An error that comes of
    steepest's own code, or of Ray's, keeps all frames.
    """
    shown = traceback.TracebackException.from_exception(error)
    frames = [_package_of(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    on_purpose = isinstance(error, SteepestError)
    if not on_purpose and (not frames or frames[-1] == "steepest" or not any(_of_user(frames))):
        return "".join(shown.format())
    if on_purpose and not any(_of_user(frames)):
        return ""
    pairs: list[tuple[traceback.TracebackException, BaseException]] = [(shown, error)]
    while pairs:
        part, raised = pairs.pop()
        frames = [_package_of(frame) for frame, _ in traceback.walk_tb(raised.__traceback__)]
        if len(frames) == len(part.stack):
            part.stack[:] = itertools.compress(part.stack, _of_user(frames))
        for name in ("__cause__", "__context__"):
            if getattr(part, name) is not None:
                pairs.append((getattr(part, name), getattr(raised, name)))
        pairs += zip(
            getattr(part, "exceptions", None) or (), getattr(raised, "exceptions", ()), strict=False
        )
    return "".join(shown.format())


def describe_stack(frame: FrameType, *, whole: bool = False) -> str:
    """Return where a thread is, as text, outermost frame first.

    Args:
        frame: the innermost of the thread.
        whole: return all frames but those with which a thread begins, instead of those of user code
            alone.
    """
    walked = list(traceback.walk_stack(frame))
    frames = reversed(traceback.StackSummary.extract(iter(walked)))
    packages = [_package_of(each) for each, _ in reversed(walked)]
    chosen = _of_user(packages)
    if whole:
        begun = list(itertools.accumulate(package != "threading" for package in packages))
        chosen = [count > 0 for count in begun]
    shown = traceback.StackSummary.from_list(itertools.compress(frames, chosen))
    return _shortened("".join(shown.format()), _TRACEBACK_LIMIT)


def listed(names: Iterable[object], most: int = 8) -> str:
    """Return names for a sentence, each once; of more than `most` the first, and how many more."""
    each = list(dict.fromkeys(map(str, names)))
    more = [f"{len(each) - most} more"] if len(each) > most else []
    return ", ".join([*each[:most], *more])


def _package_of(frame: FrameType) -> str:
    """Return the name of the package whose code a frame runs."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _of_user(packages: list[str]) -> list[bool]:
    """Return of each frame's package, outermost first, whether it is user code."""
    first = next(
        (at for at, package in enumerate(packages) if package not in _LEADING), len(packages)
    )
    return [at >= first and package not in _NEVER_USERS for at, package in enumerate(packages)]


#: In the message of an exception of a DataLoader's process, before its traceback, which the error's own one has, too.
_OF_LOADER = "\nOriginal Traceback (most recent call last):\n"


def _message_of(error: BaseException) -> str:
    try:
        message = f"{error}{_directory_of(error)}"
    except BaseException as failure:  # noqa: BLE001 - the user's `__str__` may do anything
        return f"(its __str__ raised {type(failure).__name__})"
    what, is_of_loader, traceback_of_loader = message.partition(_OF_LOADER)
    if not is_of_loader:
        return message
    return f"{what.rstrip('.')}: {traceback_of_loader.rstrip().splitlines()[-1]}"


def _directory_of(error: BaseException) -> str:
    """Return where a file was looked for that was not found, if its path is relative: a worker may be elsewhere."""
    if not isinstance(error, FileNotFoundError) or not isinstance(error.filename, str):
        return ""
    if not error.filename or os.path.isabs(error.filename):
        return ""
    return f" (seen from {os.getcwd()}, the directory of this process: give an absolute path)"


def _shortened(text: str, limit: int) -> str:
    """Return a text with its middle left out, if it is longer than `limit` characters."""
    # A traceback begins with the frames, and ends with the exception.
    if len(text) > limit:
        text = f"{text[: limit // 2]}\n[...]\n{text[-limit // 2 :]}"
    # It may hold halves of surrogate pairs, which UTF-8 has not.
    return text.encode("utf-8", "backslashreplace").decode()


def described_error(described: Mapping[str, str], prefix: str = "") -> SteepestError | None:
    """Return the exception that `describe_error` described, if its class is of this module.

    Return None for one of another class.

    Its message is the original's after a prefix, its cause a `RemoteTraceback` if user code took
    part.
    """
    kind = globals().get(described.get("kind", ""))
    if not (isinstance(kind, type) and issubclass(kind, SteepestError)):
        return None
    error = kind(prefix + described["error"].partition(": ")[2])
    # None hides the exception that is being handled, Ray's, as `raise ... from None` does
    error.__cause__ = RemoteTraceback(described["traceback"]) if described["traceback"] else None
    return error


def described_by(message: Any) -> dict[str, str]:
    """Return what `describe_error` returned, of a message that has it as attributes."""
    return {"error": message.error, "traceback": message.traceback, "kind": message.kind}


def raised_by_user(message: str, described: Mapping[str, str]) -> ModelRaisedError:
    """Return the error for what `describe_error` described; its cause is the `RemoteTraceback`.

    It is of the user's class, too, with the same `args` and attributes, where this process has that class, which is no
    built-in one, and these are plain values: text, numbers, None, lists and dicts of these.
    """
    own = _rebuilt(described.get("kind", ""))
    error = ModelRaisedError(message) if own is None else _of_both(message, own)
    error.__cause__ = RemoteTraceback(described["traceback"])
    return error


def _rebuilding(error: BaseException) -> str | None:
    """Return that of which `_rebuilt` makes an exception of the same class; None where it could not."""
    kind = type(error)
    if not isinstance(error, Exception) or kind.__module__ == "builtins":
        return None
    content = {
        "class": [kind.__module__, kind.__qualname__],
        "args": list(error.args),
        "attributes": {name: value for name, value in vars(error).items() if name[:2] != "__"},
    }
    try:
        text = json.dumps(content)
        return text if len(text) < _MESSAGE_LIMIT and json.loads(text) == content else None
    except (TypeError, ValueError, RecursionError):
        return None


def _rebuilt(text: str) -> Exception | None:
    """Return an exception of a user's class; None where this process lacks it. Nothing is imported, or called."""
    try:
        content = json.loads(text)
        module, name = content["class"]
        kind = operator.attrgetter(name)(sys.modules[module])
        if module == "builtins" or not issubclass(kind, Exception):
            return None
        if issubclass(kind, (SteepestError, StopIteration)):
            return None
        made: Exception = Exception.__new__(kind)  # TypeError for one that is built in C
        made.args = tuple(content["args"])
        vars(made).update(content["attributes"])
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    return made


def _of_both(message: str, own: Exception) -> ModelRaisedError:
    """Return a ModelRaisedError that is of the class of a user's exception, too, with what that has."""
    kind: Any = type(own)
    made: ModelRaisedError = Exception.__new__(_class_of_both(kind))
    made.args = own.args
    vars(made).update(vars(own), _message=message)
    return made


@functools.cache
def _class_of_both(kind: type[Exception]) -> Any:
    def told(error: Exception) -> str:
        message: str = vars(error)["_message"]
        return message

    plain = {"__str__": told, "__reduce__": lambda each: (ModelRaisedError, (told(each),))}
    name = f"ModelRaisedError, {kind.__qualname__}"
    return type(name, (ModelRaisedError, kind), {**plain, "__module__": __name__})


def folds_frames(function: Callable[P, T]) -> Callable[P, T]:
    """Have a public function raise our errors without the frames inside of it, which tell a user nothing."""

    @functools.wraps(function)
    def called(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            return function(*arguments, **named)
        except SteepestError as error:
            raise error.with_traceback(None)  # noqa: B904 - it is the same, with its own cause

    return called


class RemoteTraceback(Exception):  # noqa: N818 - a carrier of text, not an error of its own
    """The traceback of an exception raised in another process, as text; attached as a cause."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n--- traceback in the other process ---\n{self.text.rstrip()}"
