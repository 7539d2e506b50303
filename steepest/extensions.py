"""All that the library attaches to the workers of the engine: who builds their roles passes it on."""

from __future__ import annotations

from steepest.engine.extension import Extension
from steepest.local_sgd.extension import LocalSgd

EXTENSIONS: tuple[Extension, ...] = (LocalSgd(),)
