"""A job's processes on Ray: where they run, how they start, are called, are watched and end."""

from steepest.runtime.job_runtime import use
from steepest.runtime.ray_runtime import RayRuntime

use(RayRuntime())  # until a block uses another one
