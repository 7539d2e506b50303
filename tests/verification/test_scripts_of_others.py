"""Whole scripts with a mistake that people make, and such without one: `verify` names the mistake, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verified_loops import BACKWARD, STEP, loop, verified

pytestmark = [pytest.mark.long, pytest.mark.full]

AUGMENTED = """
import numpy as np
class Augmented(torch.utils.data.Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(3)
    def __len__(self):
        return len(data)
    def __getitem__(self, number):
        x, y = data[number]
        return x + float({}), y
loader = DataLoader(Augmented(), batch_size=8, shuffle=True)
"""
BATCHES = """
class Batch:
    def __init__(self, rows):
        self.x, self.y = (torch.stack(column) for column in zip(*rows))
    def __iter__(self):
        return iter((self.x, self.y))
loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=Batch)
"""
TEACHER = """
import copy
class Teacher:
    def __init__(self):
        self.net = copy.deepcopy(model).requires_grad_(False)
    def follow(self):
        with torch.no_grad():
            for own, other in zip(self.net.parameters(), model.parameters()):
                own.lerp_(other, 0.2)
teacher = Teacher()
"""
WARMUP = """
def warmup():
    done = 0
    def warm():
        nonlocal done
        done += 1
        return 0.01 * done
    return warm
warm = warmup()
"""
HIDDEN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 8), nn.Linear(8, 2)
model, hidden = Net(), None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
CLIP = """
def clip(limit):
    norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
    for p in model.parameters():
        p.grad *= min(1.0, limit / float(norm))
"""
PLATEAU = """
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=9)
"""
LOSS = "        loss = F.cross_entropy(model(x), y)\n"
AUTOCAST = (
    "        with torch.autocast('cpu', torch.bfloat16):\n"
    "            loss = F.cross_entropy(model(x), y)\n"
)

#: Scripts, whether several workers are as expected, and the beginnings of notes.
CORRECT = {
    "few bits by autocast": (loop((LOSS, AUTOCAST)), False, []),
    "losses that add up": (
        loop(
            (LOSS, "        loss = F.cross_entropy(model(x), y, reduction='sum')\n"),
            ("report(loss=loss)", "report(loss=loss / len(x))"),
            before="optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n",
            prepare="model, optimizer, loader = steepest.prepare(model, optimizer, loader, reduction='sum')\n",
        ),
        False,
        [],
    ),
    "batches of a class of its own": (loop(before=BATCHES), False, []),
    "augmentation": (loop(before=AUGMENTED.format("np.random.rand()")), True, []),
    "a schedule that is too long": (
        loop(before="optimizer.param_groups[0]['lr'] = 1 / len(loader)\n"),
        False,
        ["len(loader) at train.py:12, before prepare(), is 12"],
    ),
    "a rate that is to fall by one worker's loss": (
        loop(
            ("    steepest.report(loss=loss)", "    scheduler.step(loss.item())"),
            before=PLATEAU,
            prepare="model, optimizer, scheduler, loader = steepest.prepare(model, optimizer, scheduler, loader)\n",
        ),
        False,
        ["the ReduceLROnPlateau given to prepare() has best="],
    ),
}
#: Scripts, the run that differs, and what is said.
WRONG = {
    "a counter of a closure": (
        loop(
            (STEP, "        optimizer.param_groups[0]['lr'] = warm()\n" + STEP),
            before=WARMUP,
        ),
        "stopped at step 3, resumed",
        "`done` (train.py:17) is 3 there, and began anew in the successor",
    ),
    "a teacher that follows": (
        loop(
            (BACKWARD, "        loss = loss + F.mse_loss(model(x), teacher.net(x))\n" + BACKWARD),
            (STEP, STEP + "        teacher.follow()\n"),
            before=TEACHER,
        ),
        "worker 0 killed at step 5",
        "`teacher.net` (train.py:",
    ),
    "a hidden state": (
        loop(
            (
                LOSS,
                "        hidden = model.cell(x, None if hidden is None else hidden.detach())\n"
                "        loss = F.cross_entropy(model.out(hidden), y)\n",
            ),
            before=HIDDEN,
        ),
        "worker 1 killed at step 3",
        "`hidden` (train.py:",
    ),
    "gradients that are left": (
        loop(("        optimizer.zero_grad()\n", "")),
        "worker 0 killed at step 5",
        "gradients of the steps before are left",
    ),
    "clipping by hand": (
        loop((STEP, "        clip(0.05)\n" + STEP), before=CLIP),
        "2 workers, batch 8 each",
        "steepest.clip_grad_norm_(model.parameters(), max_norm) clips the mean of all",
    ),
    "a generator of the data set's own": (
        loop(before=AUGMENTED.format("self.rng.normal()")),
        "2 workers, batch 8 each",
        "draws from a generator of its own, `self.rng`",
    ),
    "contrasts within a worker's part": (
        loop((LOSS, "        loss = F.cross_entropy(x @ x.T * model(x).sum(), torch.arange(len(x)))\n")),
        "2 workers, batch 8 each",
        "steepest.gather(outputs)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_script_is_no_false_alarm(tmp_path: Path, name: str) -> None:
    text, is_expected, notes = CORRECT[name]
    found = verified(tmp_path, text)
    found.assert_equal()
    assert found.rows[1].verdict == ("as expected" if is_expected else "equal"), str(found)
    assert len(found.notes) == len(notes)
    assert all(note.startswith(begin) for note, begin in zip(found.notes, notes, strict=True))


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named_where_it_is(tmp_path: Path, name: str) -> None:
    text, run, said = WRONG[name]
    found = verified(tmp_path, text)
    (row,) = (each for each in found.rows if each.run == run)
    assert not row.is_well
    assert any(said in each for each in (row.found, *row.causes)), str(found)


def test_a_module_beside_the_script_is_looked_into(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text(
        "tau = 1.0\ndef cool():\n    global tau\n    tau *= 0.9\n"
    )
    cooling = loop(
        (LOSS, LOSS.replace("model(x)", "model(x) / beside_it.tau")),
        (STEP, STEP + "        beside_it.cool()\n"),
    )
    found = verified(tmp_path, "import beside_it\n" + cooling)
    for row in found.rows[2:]:
        assert "`tau` (beside_it.py:4) is" in row.causes[0]


def test_batches_that_cannot_be_kept_are_said_to_be(tmp_path: Path) -> None:
    class_with_slots = BATCHES.replace("class Batch:", "class Batch:\n    __slots__ = ('x', 'y')")
    found = verified(tmp_path, loop(before=class_with_slots))
    found.assert_equal()
    assert "are of a class that cannot be kept" in found.rows[0].causes[0]
