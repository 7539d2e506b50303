"""Embedding tables: rows that are made when ids are first trained, and updated row by row.

The names below say what a `Table` is like: how pushes change its rows, how rows begin, which ids
get one, and which rows go. They are loaded when they are first used.

They need no Ray, no torch, no sockets; numba, from ``pip install 'steepest[embedding]'``.
"""

from typing import TYPE_CHECKING

from steepest.lazy import lazily

if TYPE_CHECKING:  # what type checkers and editors see; `_MODULES` says the same to Python
    from steepest.tables.rows.admission import CBFFilter as CBFFilter
    from steepest.tables.rows.admission import CounterFilter as CounterFilter
    from steepest.tables.rows.admission import ProbabilityFilter as ProbabilityFilter
    from steepest.tables.rows.eviction import LFU as LFU
    from steepest.tables.rows.eviction import LRU as LRU
    from steepest.tables.rows.eviction import GlobalStepEvict as GlobalStepEvict
    from steepest.tables.rows.eviction import L2WeightEvict as L2WeightEvict
    from steepest.tables.rows.initial import Constant as Constant
    from steepest.tables.rows.initial import Normal as Normal
    from steepest.tables.rows.initial import TruncatedNormal as TruncatedNormal
    from steepest.tables.rows.initial import Uniform as Uniform
    from steepest.tables.rows.initial import Zeros as Zeros
    from steepest.tables.rows.local import LocalRows as LocalRows
    from steepest.tables.rows.row_optimizers import FTRL as FTRL
    from steepest.tables.rows.row_optimizers import SGD as SGD
    from steepest.tables.rows.row_optimizers import Adagrad as Adagrad
    from steepest.tables.rows.row_optimizers import Adam as Adam
    from steepest.tables.rows.row_optimizers import RowWiseAdagrad as RowWiseAdagrad
    from steepest.tables.rows.table import Table as Table
    from steepest.tables.rows.texts import text_ids as text_ids

_MODULES = {
    "Adagrad": "rows.row_optimizers",
    "Adam": "rows.row_optimizers",
    "CBFFilter": "rows.admission",
    "Constant": "rows.initial",
    "CounterFilter": "rows.admission",
    "FTRL": "rows.row_optimizers",
    "GlobalStepEvict": "rows.eviction",
    "L2WeightEvict": "rows.eviction",
    "LFU": "rows.eviction",
    "LRU": "rows.eviction",
    "LocalRows": "rows.local",
    "Normal": "rows.initial",
    "ProbabilityFilter": "rows.admission",
    "RowWiseAdagrad": "rows.row_optimizers",
    "SGD": "rows.row_optimizers",
    "Table": "rows.table",
    "TruncatedNormal": "rows.initial",
    "Uniform": "rows.initial",
    "Zeros": "rows.initial",
    "text_ids": "rows.texts",
}
__all__ = sorted(_MODULES)
__getattr__, __dir__ = lazily(__name__, _MODULES)
