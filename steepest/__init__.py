"""Distributed SGD: one model, one ``strategy=``, from a laptop to a Ray cluster.

Names are loaded when they are first used: torch takes seconds to import, and not every process
needs it.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from steepest.lazy import lazily

if TYPE_CHECKING:  # what type checkers and editors see; `_MODULES` says the same to Python
    from steepest.adapters.hugging_face import HuggingFaceModel as HuggingFaceModel
    from steepest.adapters.jax import JaxModel as JaxModel
    from steepest.adapters.lightning import LightningModel as LightningModel
    from steepest.adapters.tensorflow import TensorFlowModel as TensorFlowModel
    from steepest.checkpoint.files import Checkpoints as Checkpoints
    from steepest.checkpoint.stream_offsets import next_offsets as next_offsets
    from steepest.cli.planning.forecast import Forecast as Forecast
    from steepest.cli.planning.plan import plan as plan
    from steepest.cli.planning.table_plan import plan_tables as plan_tables
    from steepest.core.config.compression import Int2 as Int2
    from steepest.core.config.compression import Int4 as Int4
    from steepest.core.config.compression import Int8 as Int8
    from steepest.core.config.compression import PowerSGD as PowerSGD
    from steepest.core.config.compression import TopK as TopK
    from steepest.core.config.run import DeadlineConfig as DeadlineConfig
    from steepest.core.config.run import FailureConfig as FailureConfig
    from steepest.core.config.run import ResourceConfig as ResourceConfig
    from steepest.core.config.run import RunConfig as RunConfig
    from steepest.core.config.run import TLSConfig as TLSConfig
    from steepest.core.data.offset_stream import OffsetStream as OffsetStream
    from steepest.core.data.sources import IndexedStream as IndexedStream
    from steepest.core.engine.commit_log import Commit as Commit
    from steepest.core.engine.commit_log import CommitLog as CommitLog
    from steepest.core.engine.commit_log import LoggedPush as LoggedPush
    from steepest.core.models.protocol import Computed as Computed
    from steepest.core.models.protocol import Model as Model
    from steepest.core.models.torch import accuracy as accuracy
    from steepest.core.optim.spec import OptimizerSpec as OptimizerSpec
    from steepest.core.strategies.strategy import Strategy as Strategy
    from steepest.core.tensors.codec import Codec as Codec
    from steepest.core.tensors.layout import ParameterLayout as ParameterLayout
    from steepest.data.ray_dataset import RayDataset as RayDataset
    from steepest.loop.calls import clip_grad_norm_ as clip_grad_norm_
    from steepest.loop.calls import epochs as epochs
    from steepest.loop.calls import evaluate as evaluate
    from steepest.loop.calls import gather as gather
    from steepest.loop.calls import leaving as leaving
    from steepest.loop.calls import prepare as prepare
    from steepest.loop.calls import rank as rank
    from steepest.loop.calls import register as register
    from steepest.loop.calls import report as report
    from steepest.loop.calls import size as size
    from steepest.loop.calls import weight as weight
    from steepest.loop.run import RunResult as RunResult
    from steepest.loop.run import run as run
    from steepest.observe.evaluations import EarlyStopping as EarlyStopping
    from steepest.observe.evaluations import ReduceOnPlateau as ReduceOnPlateau
    from steepest.observe.history import History as History
    from steepest.observe.loggers import MLflow as MLflow
    from steepest.observe.loggers import TensorBoard as TensorBoard
    from steepest.observe.loggers import Trackio as Trackio
    from steepest.observe.loggers import WandB as WandB
    from steepest.observe.open_telemetry import OpenTelemetry as OpenTelemetry
    from steepest.observe.progress import Callback as Callback
    from steepest.observe.results import EvaluationResult as EvaluationResult
    from steepest.observe.results import Event as Event
    from steepest.observe.results import ProcessInfo as ProcessInfo
    from steepest.observe.results import Staleness as Staleness
    from steepest.observe.results import Stats as Stats
    from steepest.observe.results import StepResult as StepResult
    from steepest.parameter_server.api import ParameterServer as ParameterServer
    from steepest.runtime.driver.prometheus import Prometheus as Prometheus
    from steepest.runtime.driver.trainer import DistributedSGD as DistributedSGD
    from steepest.strategies.allreduce import AllreduceStrategy as AllreduceStrategy
    from steepest.strategies.collectives.ring import ring_allreduce as ring_allreduce
    from steepest.strategies.local import LocalStrategy as LocalStrategy
    from steepest.strategies.parameter_server import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from steepest.strategies.simple import SimpleStrategy as SimpleStrategy
    from steepest.tables.files.changed_rows import TableRows as TableRows
    from steepest.tables.files.exported_table import ExportedTable as ExportedTable
    from steepest.tables.files.served_table import ServedTable as ServedTable
    from steepest.tables.modules.bucketize import Bucketize as Bucketize
    from steepest.tables.modules.collection import EmbeddingCollection as EmbeddingCollection
    from steepest.tables.modules.embedding import Embedding as Embedding
    from steepest.tables.modules.embedding import EmbeddingBag as EmbeddingBag
    from steepest.tables.modules.embedding import connect as connect
    from steepest.tables.modules.torch_model import TorchModel as TorchModel
    from steepest.tables.rows.table import Table as Table

__version__ = "0.1.0"

_MODULES = {
    "AllreduceStrategy": "strategies.allreduce",
    "Bucketize": "tables.modules.bucketize",
    "Callback": "observe.progress",
    "Checkpoints": "checkpoint.files",
    "Codec": "core.tensors.codec",
    "Commit": "core.engine.commit_log",
    "CommitLog": "core.engine.commit_log",
    "Computed": "core.models.protocol",
    "DeadlineConfig": "core.config.run",
    "DistributedSGD": "runtime.driver.trainer",
    "EarlyStopping": "observe.evaluations",
    "EvaluationResult": "observe.results",
    "Embedding": "tables.modules.embedding",
    "EmbeddingBag": "tables.modules.embedding",
    "EmbeddingCollection": "tables.modules.collection",
    "Event": "observe.results",
    "ExportedTable": "tables.files.exported_table",
    "TableRows": "tables.files.changed_rows",
    "ServedTable": "tables.files.served_table",
    "FailureConfig": "core.config.run",
    "History": "observe.history",
    "Forecast": "cli.planning.forecast",
    "HuggingFaceModel": "adapters.hugging_face",
    "IndexedStream": "core.data.sources",
    "Int2": "core.config.compression",
    "Int4": "core.config.compression",
    "Int8": "core.config.compression",
    "JaxModel": "adapters.jax",
    "LightningModel": "adapters.lightning",
    "LocalStrategy": "strategies.local",
    "LoggedPush": "core.engine.commit_log",
    "MLflow": "observe.loggers",
    "Model": "core.models.protocol",
    "OffsetStream": "core.data.offset_stream",
    "OpenTelemetry": "observe.open_telemetry",
    "OptimizerSpec": "core.optim.spec",
    "ParameterLayout": "core.tensors.layout",
    "ParameterServer": "parameter_server.api",
    "ParameterServerStrategy": "strategies.parameter_server",
    "PowerSGD": "core.config.compression",
    "ProcessInfo": "observe.results",
    "Prometheus": "runtime.driver.prometheus",
    "RayDataset": "data.ray_dataset",
    "ReduceOnPlateau": "observe.evaluations",
    "ResourceConfig": "core.config.run",
    "RunConfig": "core.config.run",
    "SimpleStrategy": "strategies.simple",
    "Strategy": "core.strategies.strategy",
    "Staleness": "observe.results",
    "Stats": "observe.results",
    "StepResult": "observe.results",
    "TLSConfig": "core.config.run",
    "Table": "tables.rows.table",
    "TensorBoard": "observe.loggers",
    "TensorFlowModel": "adapters.tensorflow",
    "TopK": "core.config.compression",
    "TorchModel": "tables.modules.torch_model",
    "Trackio": "observe.loggers",
    "WandB": "observe.loggers",
    "accuracy": "core.models.torch",
    "connect": "tables.modules.embedding",
    "ring_allreduce": "strategies.collectives.ring",
    "RunResult": "loop.run",
    "clip_grad_norm_": "loop.calls",
    "epochs": "loop.calls",
    "evaluate": "loop.calls",
    "gather": "loop.calls",
    "leaving": "loop.calls",
    "next_offsets": "checkpoint.stream_offsets",
    "plan": "cli.planning.plan",
    "plan_tables": "cli.planning.table_plan",
    "prepare": "loop.calls",
    "rank": "loop.calls",
    "register": "loop.calls",
    "report": "loop.calls",
    "run": "loop.run",
    "size": "loop.calls",
    "weight": "loop.calls",
}
_NEED_NUMBA = {
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "Table",
    "connect",
    "plan_tables",
}
_NEEDS = {"numba": _NEED_NUMBA, "jax": {"JaxModel"}}
# what `from steepest import *` takes can be had without an extra
__all__ = sorted(
    _MODULES.keys() - {name for extra in _NEEDS if not find_spec(extra) for name in _NEEDS[extra]}
)
__getattr__, __dir__ = lazily(__name__, _MODULES)
