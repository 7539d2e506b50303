"""Distributed SGD on Ray: one model, one ``strategy=``, from a laptop to a cluster."""

from steepest.config import ParameterServerStrategy, RunSettings, SimpleStrategy
from steepest.model import Computed, Model, ParameterLayout
from steepest.models.numpy import NumpyLogisticRegression
from steepest.models.torch import TorchModel, accuracy
from steepest.observe.progress import Callback
from steepest.observe.results import EvaluationResult, Stats, StepResult
from steepest.optimizer import OptimizerSpec
from steepest.sgd import DistributedSGD

__all__ = [
    "Callback",
    "Computed",
    "DistributedSGD",
    "EvaluationResult",
    "Model",
    "NumpyLogisticRegression",
    "OptimizerSpec",
    "ParameterLayout",
    "ParameterServerStrategy",
    "RunSettings",
    "SimpleStrategy",
    "Stats",
    "StepResult",
    "TorchModel",
    "accuracy",
]
__version__ = "0.1.0"
