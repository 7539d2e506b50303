"""Distributed SGD on Ray: one model, one ``strategy=``, from a laptop to a cluster."""

from steepest.checkpoint import Checkpoints
from steepest.config import (
    AllreduceStrategy,
    Int8,
    LocalStrategy,
    ParameterServerStrategy,
    PowerSGD,
    SimpleStrategy,
    TopK,
)
from steepest.data import IndexedStream
from steepest.model import Computed, Model, ParameterLayout
from steepest.models.numpy import NumpyLogisticRegression
from steepest.models.torch import TorchModel, accuracy
from steepest.observe.commits import Commit, CommitLog, LoggedPush
from steepest.observe.progress import Callback
from steepest.observe.results import EvaluationResult, Staleness, Stats, StepResult
from steepest.optimizer import OptimizerSpec
from steepest.parameter_server import ParameterServer
from steepest.ring import ring_allreduce
from steepest.runtime.ray_data import RayDataset
from steepest.settings import RunSettings
from steepest.sgd import DistributedSGD

__all__ = [
    "AllreduceStrategy",
    "Callback",
    "Checkpoints",
    "Commit",
    "CommitLog",
    "Computed",
    "DistributedSGD",
    "EvaluationResult",
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
    "RunSettings",
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
