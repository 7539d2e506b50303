"""Training with plain processes: a dense PyTorch model, one machine, no Ray.

`trainer` is what a user drives, with `settings`; `crew` its worker processes, `worker_process` what each of these runs;
`runtime` is the protocol by which processes are started and called, `processes` that protocol with `multiprocessing`.
The driver's process holds the coordinator and, unless a strategy puts them in the workers, the servers.
"""

from steepest.core.processes import ProcessRuntime
from steepest.core.runtime import Process, Runtime
from steepest.core.settings import Settings
from steepest.core.trainer import Trainer

__all__ = ["Process", "ProcessRuntime", "Runtime", "Settings", "Trainer"]
