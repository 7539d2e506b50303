"""Fragments of the how-tos, marked `py`, run with what they leave out: loops on two workers, calls of a trainer."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from pathlib import Path

import pytest

import steepest
from tests.page_examples import ROOT
from tests.simulation.run import Simulation

LOOP = """
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
import steepest

torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=4)
"""
#: by page and number: what stands before the fragment, and behind it
LOOPS = {
    ("evaluate", 0): ("test_loader = DataLoader(data, batch_size=4)\n", ""),
    ("evaluate", 1): (
        "test_loader = DataLoader(data, batch_size=4)\n"
        "model, optimizer, loader = steepest.prepare(model, optimizer, loader)\n"
        "for epoch in steepest.epochs(1):\n    for x, y in loader:\n"
        "        F.cross_entropy(model(x), y).backward()\n        optimizer.step()\n",
        "",
    ),
    ("evaluate", 2): (
        "model, optimizer, loader = steepest.prepare(model, optimizer, loader)\n"
        "contrast = lambda own, every: F.cross_entropy(own @ every.T, torch.zeros(len(own)).long())\n"
        "for epoch in steepest.epochs(1):\n    for x, y in loader:\n",
        "        optimizer.step()\n",
    ),
    ("own_loop_data", 0): (
        "weights = torch.rand(32)\n",
        "for epoch in steepest.epochs(1):\n    for x, y in loader:\n"
        "        F.cross_entropy(model(x), y).backward()\n        optimizer.step()\n",
    ),
    ("own_loop_gradients", 0): (
        "loss_of = F.cross_entropy\n"
        "model, optimizer, loader = steepest.prepare(model, optimizer, loader)\n"
        "for epoch in steepest.epochs(1):\n",
        "",
    ),
    ("own_loop_state", 0): (
        "import collections\nbuffer, hidden, ahead = collections.deque(), torch.zeros(3), []\n"
        "average = torch.optim.swa_utils.AveragedModel(model)\naccuracy, transition = 0.5, (1.0, 2)\n"
        "model, optimizer, loader = steepest.prepare(model, optimizer, loader)\n",
        "    for x, y in loader:\n        F.cross_entropy(model(x), y).backward()\n        optimizer.step()\n"
        "assert kept.best == 0.5 and len(buffer) == 3\n",
    ),
    ("several_optimizers", 0): (
        "generator, discriminator = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)\n"
        "g_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)\n"
        "d_optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.1)\n"
        "loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)\n"
        "fake = lambda: generator(torch.randn(4, 2))\n"
        "d_loss = lambda real: discriminator(fake().detach()).mean() - discriminator(real).mean()\n"
        "g_loss = lambda: -discriminator(fake()).mean()\n",
        "",
    ),
    ("several_optimizers", 1): (
        "policy = model\nplay = lambda policy, seed: policy(torch.full((3, 4), float(seed)))\n"
        "loss_of = lambda games: games.square().mean()\n",
        "",
    ),
}
TRAINER = """
import os
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import steepest
import steepest.testing
from steepest import *
from steepest.testing import Fault, linear_model_creator, with_faults

model_creator = linear_model_creator()
dataset = TensorDataset(torch.randn(8, 3), torch.randint(0, 2, (8,)))
x, y = dataset.tensors
net = torch.nn.Linear(3, 2)
optimizer = lambda module: torch.optim.SGD(module.parameters(), lr=0.1)
"""
WITH = "with DistributedSGD(model_creator, num_workers=2) as sgd:\n    sgd.fit(steps=2, progress=False)\n"
CALLS = {
    ("audit", 0): ("", "sgd.shutdown()"),
    ("checkpoints", 1): (f"{WITH}    sgd.save('pretrained')\n", ""),
    ("choose_strategy", 0): (WITH, ""),
    ("data", 0): ("", ""),
    ("failures", 0): ("", "sgd.shutdown()"),
    ("failures", 1): (WITH, ""),
    ("fewer_bytes", 0): ("", ""),
    ("metrics", 1): (WITH, ""),
    ("several_losses", 0): ("", ""),
    ("slow_links", 0): ("", ""),
    ("testing", 1): ("", ""),
    ("timeline", 0): (WITH, ""),
    ("uneven_workers", 0): ("", ""),
    ("uneven_workers", 1): ("", ""),
}
TABLES = """
class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = Embedding(Table("words", 4)), torch.nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(self.words(ids)).squeeze(1)


def model_creator(worker_index, device_index):
    data = (torch.arange(16) % 5, torch.ones(16))
    return TorchModel(Words(), loss=F.mse_loss, data=data, batch_size=4, optimizer=optimizer)


ids, matrix = torch.tensor([1, 2]), torch.ones(2, 4)
"""
SERVING = [0, 1, 2]


def fragment(page: str, number: int) -> str:
    text = (ROOT / "docs" / "howto" / f"{page}.md").read_text()
    found = re.findall(r"^```py\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)[number]
    return re.sub(r"(epochs|steps)(=|\()[\d]+", r"\1\g<2>3", found)


def joined(before: str, found: str, behind: str) -> str:
    """A fragment below what stands before it: in its block, where that opens one."""
    opened = re.match(r" *", (before.rstrip().splitlines() or [""])[-1])
    assert opened
    last = (before.rstrip() or " ").splitlines()[-1]
    indent = opened[0] + "    " * last.endswith(":") if last.strip() else ""
    return before + textwrap.indent(found, indent) + behind


@pytest.mark.parametrize("workers", [0, 2], ids=["alone", "two workers"])
@pytest.mark.parametrize(("page", "number"), LOOPS)
def test_a_fragment_of_a_loop_runs(
    page: str, number: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = LOOP + joined(LOOPS[page, number][0], fragment(page, number), LOOPS[page, number][1])
    program = compile(code, f"{page} {number}", "exec")
    if not workers:
        exec(program, {})
        return
    monkeypatch.setattr("steepest.runtime.process.keep_freed_memory", lambda: False)
    with Simulation(2).running():
        result = steepest.run(lambda: exec(program, {}), num_workers=workers, progress=False)
        assert result.state_dict


@pytest.mark.parametrize(("page", "number"), [*CALLS, *(("table_serving", n) for n in SERVING)])
def test_a_fragment_of_calls_runs(
    page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("steepest.runtime.process.keep_freed_memory", lambda: False)
    if page == "table_serving":
        pytest.importorskip("numba")
    if (page, number) == ("metrics", 1):
        pytest.importorskip("pandas")
    before, behind = CALLS.get((page, number), (TABLES + WITH, ""))
    if (page, number) == ("table_serving", 2):
        before += "    sgd.export_table('words').save('words.safetensors')\n"
    code = TRAINER + joined(before, fragment(page, number), behind)
    with Simulation(4).running(), contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, f"{page} {number}", "exec"), {"__name__": "__main__"})
