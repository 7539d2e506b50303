"""Training with plain processes: a dense PyTorch model, one machine, no Ray.

`trainer` is what a user drives, `worker_process` what each worker's process runs, `runtime` the protocol by which the
trainer starts and calls processes, `processes` that protocol with `multiprocessing`. The driver's process holds the
coordinator and, unless a strategy puts them in the workers, the servers.
"""

from steepest.core.processes import ProcessRuntime
from steepest.core.runtime import Process, Runtime
from steepest.core.trainer import Settings, Trainer

__all__ = ["Process", "ProcessRuntime", "Runtime", "Settings", "Trainer"]
