"""The script of `benchmarks.own_loop_start` with DistributedDataParallel.

    torchrun --nproc-per-node 2 -m benchmarks.one_machine_ddp FILE

The first worker writes to FILE the time of day at which its first ``optimizer.step()`` has returned.
"""

import sys
import time
from pathlib import Path

import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.models import WORKLOADS
from benchmarks.own_loop_data import as_it_is, loader

dist.init_process_group("gloo")
workload = WORKLOADS["convnet"]
network = workload.build()
model, optimizer = DistributedDataParallel(network), workload.optimizer(network, fused=None)
dataset = loader(workload).dataset
batches = DataLoader(
    dataset, workload.batch_size, sampler=DistributedSampler(dataset), collate_fn=as_it_is
)
for number, (x, y) in enumerate(batches):
    optimizer.zero_grad()
    F.nll_loss(model(x), y).backward()
    optimizer.step()
    if not number and not dist.get_rank():
        Path(sys.argv[1]).write_text(str(time.time()))
dist.destroy_process_group()
