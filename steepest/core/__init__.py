"""Training with plain processes: a dense PyTorch model, one machine, no Ray; and what all of the package stands on.

`trainer` is what a user drives, with `settings`; `crew` its worker processes, `worker_process` what each of these runs;
`runtime` is the protocol by which processes are started and called, `processes` that protocol with `multiprocessing`.
The driver's process holds the coordinator and, unless a strategy puts them in the workers, the servers. The names below
are loaded when they are first used. The packages in here import nothing else of steepest but its errors and checks.
"""

from typing import TYPE_CHECKING

from steepest.lazy import lazily

if TYPE_CHECKING:  # what type checkers and editors see; `_MODULES` says the same to Python
    from steepest.core.models.torch import TorchModel as TorchModel
    from steepest.core.processes import ProcessRuntime as ProcessRuntime
    from steepest.core.runtime import Process as Process
    from steepest.core.runtime import Runtime as Runtime
    from steepest.core.settings import Settings as Settings
    from steepest.core.trainer import Trainer as Trainer

_MODULES = {
    "Process": "runtime",
    "ProcessRuntime": "processes",
    "Runtime": "runtime",
    "Settings": "settings",
    "TorchModel": "models.torch",
    "Trainer": "trainer",
}
__all__ = sorted(_MODULES)
__getattr__, __dir__ = lazily(__name__, _MODULES)
