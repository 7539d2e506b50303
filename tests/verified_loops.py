"""A script with a loop of its own, as tests change it, and what `steepest verify` finds of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steepest.loop.script import UserScript
from steepest.testing import VerifyReport, verify

BEGIN = """
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import steepest
torch.manual_seed(1)
x = torch.randn(96, 4)
data = TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(data, batch_size=8, shuffle=True)
"""
PREPARE = "model, optimizer, loader = steepest.prepare(model, optimizer, loader)\n"
LOOP = """
for epoch in steepest.epochs(4):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    steepest.report(loss=loss)
"""
BACKWARD, STEP = "        loss.backward()\n", "        optimizer.step()\n"


def verified(tmp_path: Path, text: str, **chosen: Any) -> VerifyReport:
    path = tmp_path / "train.py"
    path.write_text(text)
    return verify(UserScript.read(str(path)), **{"steps": 8, **chosen})


def loop(*changes: tuple[str, str], before: str = "", prepare: str = PREPARE) -> str:
    text = LOOP
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return BEGIN + before + prepare + text
