"""Embedding tables: rows that are made when ids are first trained, and updated row by row.

The names below say what a `Table` is like: how pushes change its rows, how rows begin, which ids
get one, and which rows go. They are loaded when they are first used.

It needs no Ray, no torch, no sockets; numba, from ``pip install 'steepest[embedding]'``.
"""

from typing import TYPE_CHECKING

from steepest.lazy import lazily

if TYPE_CHECKING:  # what type checkers and editors see; `_MODULES` says the same to Python
    from steepest.tables.admission import CBFFilter as CBFFilter
    from steepest.tables.admission import CounterFilter as CounterFilter
    from steepest.tables.admission import ProbabilityFilter as ProbabilityFilter
    from steepest.tables.eviction import LFU as LFU
    from steepest.tables.eviction import LRU as LRU
    from steepest.tables.eviction import GlobalStepEvict as GlobalStepEvict
    from steepest.tables.eviction import L2WeightEvict as L2WeightEvict
    from steepest.tables.initial import Constant as Constant
    from steepest.tables.initial import Normal as Normal
    from steepest.tables.initial import TruncatedNormal as TruncatedNormal
    from steepest.tables.initial import Uniform as Uniform
    from steepest.tables.initial import Zeros as Zeros
    from steepest.tables.local import LocalRows as LocalRows
    from steepest.tables.row_optimizers import FTRL as FTRL
    from steepest.tables.row_optimizers import SGD as SGD
    from steepest.tables.row_optimizers import Adagrad as Adagrad
    from steepest.tables.row_optimizers import Adam as Adam
    from steepest.tables.row_optimizers import RowWiseAdagrad as RowWiseAdagrad
    from steepest.tables.table import Table as Table
    from steepest.tables.texts import text_ids as text_ids

_MODULES = {
    "Adagrad": "row_optimizers",
    "Adam": "row_optimizers",
    "CBFFilter": "admission",
    "Constant": "initial",
    "CounterFilter": "admission",
    "FTRL": "row_optimizers",
    "GlobalStepEvict": "eviction",
    "L2WeightEvict": "eviction",
    "LFU": "eviction",
    "LRU": "eviction",
    "LocalRows": "local",
    "Normal": "initial",
    "ProbabilityFilter": "admission",
    "RowWiseAdagrad": "row_optimizers",
    "SGD": "row_optimizers",
    "Table": "table",
    "TruncatedNormal": "initial",
    "Uniform": "initial",
    "Zeros": "initial",
    "text_ids": "texts",
}
__all__ = sorted(_MODULES)
__getattr__, __dir__ = lazily(__name__, _MODULES)
