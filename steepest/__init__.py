"""Distributed SGD on Ray: one model, one ``strategy=``, from a laptop to a cluster."""

from steepest.checkpoint.files import Checkpoints
from steepest.collectives.ring import ring_allreduce
from steepest.config.compression import Int8, PowerSGD, TopK
from steepest.config.run import DeadlineConfig, FailureConfig, ResourceConfig, RunConfig
from steepest.config.strategies import AllreduceStrategy, LocalStrategy, ParameterServerStrategy, SimpleStrategy
from steepest.data.ray_dataset import RayDataset
from steepest.data.sources import IndexedStream
from steepest.engine.commit_log import Commit, CommitLog, LoggedPush
from steepest.models.numpy import NumpyLogisticRegression
from steepest.models.protocol import Computed, Model
from steepest.models.torch import TorchModel, accuracy
from steepest.observe.progress import Callback
from steepest.observe.results import EvaluationResult, Event, Staleness, Stats, StepResult
from steepest.optim.spec import OptimizerSpec
from steepest.parameter_server.api import ParameterServer
from steepest.tensors.layout import ParameterLayout
from steepest.trainer import DistributedSGD

__all__ = [
    "AllreduceStrategy",
    "Callback",
    "Checkpoints",
    "Commit",
    "CommitLog",
    "Computed",
    "DeadlineConfig",
    "DistributedSGD",
    "EvaluationResult",
    "Event",
    "FailureConfig",
    "IndexedStream",
    "Int8",
    "LocalStrategy",
    "LoggedPush",
    "Model",
    "NumpyLogisticRegression",
    "OptimizerSpec",
    "ParameterLayout",
    "ParameterServer",
    "ParameterServerStrategy",
    "PowerSGD",
    "RayDataset",
    "ResourceConfig",
    "RunConfig",
    "SimpleStrategy",
    "Staleness",
    "Stats",
    "StepResult",
    "TopK",
    "TorchModel",
    "accuracy",
    "ring_allreduce",
]
__version__ = "0.1.0"
