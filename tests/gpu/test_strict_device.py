"""The device that stands for a GPU refuses what a GPU does not forgive, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.gpu import models, strict_device

pytestmark = pytest.mark.skipif(
    models.DEVICE != strict_device.NAME, reason="tests what stands for a GPU where there is none"
)


def numbers(count: int = 8) -> torch.Tensor:
    """As many on the device, written by the present stream."""
    return torch.arange(float(count)).to(models.DEVICE).mul_(1.0)


@pytest.mark.parametrize(
    "mixed",
    [
        lambda there, here: there + here,
        lambda there, here: there.add_(here),
        lambda there, here: torch.cat([there, here]),
        lambda there, here: torch.dot(there, here),
        lambda there, here: torch.add(here, here, out=there),
    ],
)
def test_operands_of_the_host_are_refused(
    mixed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(RuntimeError, match=r"device"):
        mixed(numbers(), torch.ones(8))
    assert (numbers() * 2.0 + torch.tensor(1.0)).tolist() == [1.0 + 2 * i for i in range(8)]


def test_memory_of_the_device_is_no_memory_of_the_host() -> None:
    with pytest.raises(TypeError, match="can't convert strict"):
        numbers().numpy()


def test_what_two_streams_write_and_read_has_to_be_put_in_order() -> None:
    values, other = numbers(), torch.Stream(models.DEVICE)
    with other, pytest.raises(RuntimeError, match=r"reads what stream \d+ writes"):
        values.sum()
    written = torch.accelerator.current_stream().record_event()
    other.wait_event(written)
    with other:
        total = values.sum()
    read = other.record_event()
    with pytest.raises(RuntimeError, match="and nothing puts them in order"):
        values.fill_(1.0)
    read.synchronize()
    values.fill_(1.0)
    assert total.item() == 28.0


def test_memory_may_not_be_freed_while_another_stream_may_use_it() -> None:
    other = torch.Stream(models.DEVICE)
    for recorded in (True, False):
        values = numbers()
        other.wait_event(torch.accelerator.current_stream().record_event())
        with other:
            values.add_(1.0)
        if recorded:
            values.record_stream(other)
        del values
        if recorded:
            numbers()
    with pytest.raises(RuntimeError, match=r"was freed while stream \d+ may use it"):
        numbers()


def test_parts_of_a_vector_and_readers_need_no_order() -> None:
    values, other = numbers(), torch.Stream(models.DEVICE)
    torch.accelerator.synchronize()
    with other:
        values[:4].fill_(1.0)
    values[4:].fill_(2.0)
    torch.accelerator.synchronize()
    with other:
        first = values.sum()
    second = values.sum()
    other.synchronize()
    assert first.item() == second.item() == 12.0


def test_a_copy_that_nobody_has_waited_for_shows_garbage() -> None:
    out, values = torch.zeros(8), numbers()
    out.copy_(values, non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    assert out.tolist() != list(range(8))
    event.synchronize()
    assert out.tolist() == list(range(8))


def test_bytes_between_the_host_and_the_device_are_counted() -> None:
    values = numbers(16)
    with strict_device.copied() as found:
        values.mul_(2.0)
        values.cpu()
        values.copy_(torch.ones(16))
        assert values[0].item() == 1.0
    assert (found.to_host, found.to_device) == (64 + 4, 64)
