"""The script of which ``benchmarks.own_loop --start`` takes the time up to its first step.

    steepest run benchmarks/own_loop_start.py --workers 2 -- FILE

The first worker writes to FILE the time of day at which its first ``optimizer.step()`` has returned.
"""

import sys
import time
from pathlib import Path

import torch.nn.functional as F

import steepest
from benchmarks.models import WORKLOADS
from benchmarks.own_loop_data import loader

workload = WORKLOADS["convnet"]
network = workload.build()
model, optimizer, batches = steepest.prepare(
    network, workload.optimizer(network, fused=None), loader(workload)
)
for _ in steepest.epochs(1):
    for number, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        F.nll_loss(model(x), y).backward()
        optimizer.step()
        if not number and not steepest.rank():
            Path(sys.argv[1]).write_text(str(time.time()))
