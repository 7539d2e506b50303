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
    from steepest.checkpoint.changed_rows import TableRows as TableRows
    from steepest.checkpoint.exported_table import ExportedTable as ExportedTable
    from steepest.checkpoint.files import Checkpoints as Checkpoints
    from steepest.checkpoint.served_table import ServedTable as ServedTable
    from steepest.checkpoint.stream_offsets import next_offsets as next_offsets
    from steepest.collectives.ring import ring_allreduce as ring_allreduce
    from steepest.config.compression import Int2 as Int2
    from steepest.config.compression import Int4 as Int4
    from steepest.config.compression import Int8 as Int8
    from steepest.config.compression import PowerSGD as PowerSGD
    from steepest.config.compression import TopK as TopK
    from steepest.config.run import DeadlineConfig as DeadlineConfig
    from steepest.config.run import FailureConfig as FailureConfig
    from steepest.config.run import ResourceConfig as ResourceConfig
    from steepest.config.run import RunConfig as RunConfig
    from steepest.config.run import TLSConfig as TLSConfig
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
    from steepest.embedding.bucketize import Bucketize as Bucketize
    from steepest.embedding.collection import EmbeddingCollection as EmbeddingCollection
    from steepest.embedding.modules import Embedding as Embedding
    from steepest.embedding.modules import EmbeddingBag as EmbeddingBag
    from steepest.embedding.modules import connect as connect
    from steepest.embedding.torch_model import TorchModel as TorchModel
    from steepest.loop.calls import clip_grad_norm_ as clip_grad_norm_
    from steepest.loop.calls import epochs as epochs
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
    from steepest.planning.forecast import Forecast as Forecast
    from steepest.planning.plan import plan as plan
    from steepest.runtime.driver.prometheus import Prometheus as Prometheus
    from steepest.runtime.driver.trainer import DistributedSGD as DistributedSGD
    from steepest.strategies.allreduce import AllreduceStrategy as AllreduceStrategy
    from steepest.strategies.local import LocalStrategy as LocalStrategy
    from steepest.strategies.parameter_server import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from steepest.strategies.simple import SimpleStrategy as SimpleStrategy
    from steepest.tables.table import Table as Table

__version__ = "0.1.0"

_MODULES = {
    "AllreduceStrategy": "strategies.allreduce",
    "Bucketize": "embedding.bucketize",
    "Callback": "observe.progress",
    "Checkpoints": "checkpoint.files",
    "Codec": "core.tensors.codec",
    "Commit": "core.engine.commit_log",
    "CommitLog": "core.engine.commit_log",
    "Computed": "core.models.protocol",
    "DeadlineConfig": "config.run",
    "DistributedSGD": "runtime.driver.trainer",
    "EarlyStopping": "observe.evaluations",
    "EvaluationResult": "observe.results",
    "Embedding": "embedding.modules",
    "EmbeddingBag": "embedding.modules",
    "EmbeddingCollection": "embedding.collection",
    "Event": "observe.results",
    "ExportedTable": "checkpoint.exported_table",
    "TableRows": "checkpoint.changed_rows",
    "ServedTable": "checkpoint.served_table",
    "FailureConfig": "config.run",
    "History": "observe.history",
    "Forecast": "planning.forecast",
    "HuggingFaceModel": "adapters.hugging_face",
    "IndexedStream": "core.data.sources",
    "Int2": "config.compression",
    "Int4": "config.compression",
    "Int8": "config.compression",
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
    "PowerSGD": "config.compression",
    "ProcessInfo": "observe.results",
    "Prometheus": "runtime.driver.prometheus",
    "RayDataset": "data.ray_dataset",
    "ReduceOnPlateau": "observe.evaluations",
    "ResourceConfig": "config.run",
    "RunConfig": "config.run",
    "SimpleStrategy": "strategies.simple",
    "Strategy": "core.strategies.strategy",
    "Staleness": "observe.results",
    "Stats": "observe.results",
    "StepResult": "observe.results",
    "TLSConfig": "config.run",
    "Table": "tables.table",
    "TensorBoard": "observe.loggers",
    "TensorFlowModel": "adapters.tensorflow",
    "TopK": "config.compression",
    "TorchModel": "embedding.torch_model",
    "Trackio": "observe.loggers",
    "WandB": "observe.loggers",
    "accuracy": "core.models.torch",
    "connect": "embedding.modules",
    "ring_allreduce": "collectives.ring",
    "RunResult": "loop.run",
    "clip_grad_norm_": "loop.calls",
    "epochs": "loop.calls",
    "gather": "loop.calls",
    "leaving": "loop.calls",
    "next_offsets": "checkpoint.stream_offsets",
    "plan": "planning.plan",
    "prepare": "loop.calls",
    "rank": "loop.calls",
    "register": "loop.calls",
    "report": "loop.calls",
    "run": "loop.run",
    "size": "loop.calls",
    "weight": "loop.calls",
}
_NEED_NUMBA = {"Embedding", "EmbeddingBag", "EmbeddingCollection", "Table", "connect"}
_NEEDS = {"numba": _NEED_NUMBA, "jax": {"JaxModel"}}
# what `from steepest import *` takes can be had without an extra
__all__ = sorted(
    _MODULES.keys() - {name for extra in _NEEDS if not find_spec(extra) for name in _NEEDS[extra]}
)
__getattr__, __dir__ = lazily(__name__, _MODULES)
