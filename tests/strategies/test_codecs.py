"""Formats of gradients: what travels and what is left make the gradient; error feedback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from steepest.core.tensors.codec import Codec
from steepest.core.tensors.layout import ParameterLayout
from steepest.errors import CheckpointError, ProtocolError
from steepest.strategies.compression.codecs import (
    BlockInt2,
    BlockInt4,
    BlockInt8,
    Half,
    Largest,
    LowRank,
    largest,
)
from steepest.strategies.compression.gradient_compressor import GradientCompressor, check_residuals

FORMATS = {
    "top-k": Largest(0.05),
    "top-k of all": Largest(0.97),
    "int8": BlockInt8(16),
    "int8 in large blocks": BlockInt8(1000),
    "int4": BlockInt4(16),
    "int4 in odd blocks": BlockInt4(33),
    "int2": BlockInt2(18),
    "PowerSGD": LowRank(2),
}
ALL = frozenset[int]()


def layout_of(*shapes: tuple[int, ...], **settings: Any) -> ParameterLayout:
    parameters = [(f"p{i}", shape, torch.float32, True) for i, shape in enumerate(shapes)]
    return ParameterLayout.plan(parameters, split_tensors=False, **settings)


def random(count: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def unpacked(
    codec: Codec, layout: ParameterLayout, packed: torch.Tensor, factor: float = 1.0
) -> torch.Tensor:
    chunk = layout.chunks[0]
    out = torch.zeros(chunk.nbytes // 4)
    codec.add(layout, chunk, [(packed, factor)], out)
    return out


def sent(
    codec: Codec, layout: ParameterLayout, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What arrives of some values, and what is left of them."""
    chunk = layout.chunks[0]
    size = codec.size(layout, chunk)
    assert size is not None
    out, left = torch.empty(size, dtype=torch.uint8), values.clone()
    assert codec.pack(layout, chunk, left, out, {})
    return unpacked(codec, layout, out), left


# -- formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "shapes", [((40, 30), (30,)), ((17, 23),), ((300, 700),), ((9, 5, 7, 3), (1,), (50, 4))]
)
def test_what_arrives_and_what_is_left_make_the_gradient(
    name: str, shapes: tuple[tuple[int, ...], ...]
) -> None:
    layout, codec = layout_of(*shapes), FORMATS[name]
    values = random(layout.chunks[0].nbytes // 4)
    arrived, left = sent(codec, layout, values)
    assert torch.allclose(arrived + left, values, atol=1e-5)
    assert float(left.norm()) < float(values.norm()), "nothing was sent"


@pytest.mark.parametrize(("codec", "bits"), [(BlockInt4(16), 4), (BlockInt2(16), 2)])
def test_few_bits_are_these_values(codec: Codec, bits: int) -> None:
    """Multiples of the greatest magnitude's seventh; or the four values that leave the least of a block."""
    layout = layout_of((5, 7))
    values = random(35) * 1e-3
    values[16:32] = 0.0
    values[20] = -8.0  # a block of one large element
    size = codec.size(layout, layout.chunks[0])
    assert size == -(-35 * bits // 8) + 3 * 4
    arrived, _ = sent(codec, layout, values)
    for where in (slice(0, 16), slice(16, 32), slice(32, 35)):
        block = values[where].double()
        if bits == 4:
            unit = block.abs().max() / 7
            expected = (block / unit).round() * unit
        else:
            border = block.square().mean().sqrt()
            outer = torch.where(block.abs() > border, 3.0, 1.0).double().copysign(block)
            expected = outer * ((block * outer).sum() / outer.square().sum())
        assert torch.allclose(arrived[where].double(), expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("codec", [BlockInt8(16), BlockInt4(16), BlockInt2(16)])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_values_of_any_size_are_sent_finite(codec: Codec, scale: float) -> None:
    layout = layout_of((5, 7))
    values = random(35) * scale
    arrived, left = sent(codec, layout, values)
    assert torch.isfinite(arrived).all()
    assert float(left.abs().max()) <= float(values.abs().max())


@pytest.mark.parametrize("name", FORMATS)
def test_several_are_added_with_their_factors(name: str) -> None:
    layout, codec = layout_of((40, 30), (30,)), FORMATS[name]
    chunk = layout.chunks[0]
    size = codec.size(layout, chunk)
    assert size is not None
    both = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
    for seed, out in enumerate(both):
        assert codec.pack(layout, chunk, random(chunk.nbytes // 4, seed), out, {})
    found = torch.ones(chunk.nbytes // 4)
    codec.add(layout, chunk, [(both[0], 0.5), (both[1], 3.0)], found)
    expected = 1.0 + 0.5 * unpacked(codec, layout, both[0]) + 3.0 * unpacked(codec, layout, both[1])
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("count", [1, 40, 900])
@pytest.mark.parametrize("length", [1000, 70_000, 200_000])
def test_the_largest_are_those_that_torch_finds(length: int, count: int) -> None:
    for values in (random(length), random(length).abs_().sort().values, torch.zeros(length)):
        found = largest(values, count)
        assert torch.equal(found, found.unique()), "ascending, each once"
        assert torch.equal(
            values[found].abs().sort().values, values.abs().topk(count).values.sort().values
        )


def test_a_sample_that_is_not_like_the_whole_misleads_nobody() -> None:
    values = torch.full((1 << 17,), 0.001)
    values[:: (1 << 17) // (1 << 14)] = random(1 << 14).abs() + 1  # just what the sample looks at
    assert torch.equal(
        values[largest(values, 9000)].sort().values, values.topk(9000).values.sort().values
    )
    assert len(largest(values, 1 << 14).unique()) == 1 << 14


def test_top_k_sends_the_largest_and_keeps_the_rest() -> None:
    layout = layout_of((200_000,))  # several buckets of places
    values = random(200_000)
    arrived, left = sent(Largest(0.01), layout, values)
    chosen = values.abs().topk(2000).indices
    assert torch.equal(arrived.nonzero().flatten(), chosen.sort().values)
    assert torch.allclose(arrived[chosen], values[chosen], rtol=1e-3)
    rest = torch.ones(200_000, dtype=torch.bool)
    rest[chosen] = False
    assert torch.equal(left[rest], values[rest])


def test_int8_is_off_by_half_a_level_at_most() -> None:
    layout = layout_of((1003,))
    values = random(1003) * torch.logspace(-12, 12, 1003)
    arrived, left = sent(BlockInt8(64), layout, values)
    for begin in range(0, 1003, 64):
        block = slice(begin, begin + 64)
        assert float(left[block].abs().max()) <= float(values[block].abs().max()) / 127 * 0.5001
    assert torch.isfinite(arrived).all()


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_at_all_arrives_as_nothing(name: str) -> None:
    layout = layout_of((40, 30), (30,))
    arrived, left = sent(FORMATS[name], layout, torch.zeros(1230))
    assert not arrived.any()
    assert not left.any()


@pytest.mark.parametrize("scale", [1.0, 1e-25])
@pytest.mark.parametrize("begins", ["nothing", "one direction"])
@pytest.mark.parametrize("name", FORMATS)
def test_all_of_a_gradient_arrives_in_time_whatever_the_first_one_was(
    name: str, begins: str, scale: float
) -> None:
    """What is left out stays bounded, also of a matrix whose first rows never have a gradient."""
    layout, codec, factors = layout_of((40, 30)), FORMATS[name], {}
    gradient = random(1200).view(40, 30) * scale
    gradient[:5] = 0.0
    first = torch.zeros(40, 30)
    if begins == "one direction":
        first[7, 3] = 2.0**-80
    size = codec.size(layout, layout.chunks[0])
    assert size is not None
    out, left, most = torch.empty(size, dtype=torch.uint8), first.flatten(), 0.0
    for _ in range(120):
        codec.pack(layout, layout.chunks[0], left, out, factors)
        left += gradient.flatten()
        most = max(most, float(left.abs().max()))
    assert most < 60 * gradient.abs().max()


def test_powersgd_finds_the_best_product_of_one_matrix_sooner_or_later() -> None:
    layout, codec, factors = layout_of((40, 30)), LowRank(3), {}
    u, s, v = torch.linalg.svd(random(1200).view(40, 30))
    matrix = u[:, :30] @ torch.diag(0.7 ** torch.arange(30.0)) @ v
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    best = u[:, :3] @ torch.diag(s[:3]) @ v[:3]
    out = torch.empty(3 * 70 * 4, dtype=torch.uint8)
    for _ in range(60):
        codec.pack(layout, layout.chunks[0], matrix.flatten().clone(), out, factors)
    assert torch.allclose(unpacked(codec, layout, out).view(40, 30), best, atol=1e-4)


def test_powersgd_sends_what_is_no_matrix_as_it_is() -> None:
    layout = layout_of((30,), (3, 2), (40, 5, 6))
    values = random(30 + 6 + 1200)
    arrived, left = sent(LowRank(2), layout, values)
    assert torch.equal(arrived[1200:], values[1200:]), "backward order: the last tensor first"
    assert not left[1200:].any()
    assert torch.linalg.matrix_rank(arrived[:1200].view(40, 30), atol=1e-4) == 2


@pytest.mark.parametrize(
    ("codec", "shapes", "size"),
    [
        (Largest(0.01), ((200_000,),), 4 + 4 * 4 + 4 * 2000),
        (Largest(1e-9), ((1000,),), 4 + 4 + 4),  # one at least
        (Largest(1.0), ((1000,),), None),
        (BlockInt8(256), ((1000,),), 1000 + 4 * 4),
        (BlockInt8(256), ((1,),), None),
        (LowRank(4), ((100, 50), (50,)), 4 * (4 * 150 + 50)),
        (LowRank(64), ((100, 50), (50,)), None),
        (LowRank(4), ((1000,),), None),
        (Half(torch.float16), ((1000,),), 2000),
    ],
)
def test_sizes_are_those_of_the_formulas(
    codec: Codec, shapes: tuple[tuple[int, ...], ...], size: int
) -> None:
    layout = layout_of(*shapes)
    assert codec.size(layout, layout.chunks[0]) == size


def test_other_dtypes_travel_as_they_are() -> None:
    layout = ParameterLayout.plan([("p", (40, 30), torch.float64, True)])
    assert all(codec.size(layout, layout.chunks[0]) is None for codec in FORMATS.values())


def test_what_is_no_gradient_is_refused() -> None:
    layout, codec = layout_of((1000,)), Largest(0.01)
    chunk = layout.chunks[0]
    out = torch.empty(4 + 4 + 4 * 10, dtype=torch.uint8)
    codec.pack(layout, chunk, random(1000), out, {})
    for place, wrong, words in (
        (slice(4, 8), torch.tensor([11], dtype=torch.int32), "10 elements should come"),
        (slice(8, 10), torch.tensor([300], dtype=torch.int16), "which has 1000"),
    ):
        damaged = out.clone()
        damaged[place] = wrong.view(torch.uint8)
        with pytest.raises(ProtocolError, match=words):
            codec.check(layout, chunk, damaged)


# -- error feedback -------------------------------------------------------------------------------


def compressor(codec: Codec, layout: ParameterLayout) -> GradientCompressor:
    return GradientCompressor(layout, codec, [True] * len(layout.chunks))


def step(
    sender: GradientCompressor,
    layout: ParameterLayout,
    gradient: torch.Tensor,
    codec: Codec,
    **about: Any,
) -> Any:
    about = {"unit": 1.0, "total": 1.0, "absent": ALL, **about}
    return unpacked(codec, layout, sender.pack(0, gradient.view(torch.uint8), **about))


def turns() -> Iterator[list[float]]:
    """What top-1 sends of the gradient (3, 2) again and again: whichever has more behind it, all of it."""
    a = b = 0.0
    while True:
        a, b = a + 3.0, b + 2.0
        if a >= b:
            yield [a, 0.0]
            a = 0.0
        else:
            yield [0.0, b]
            b = 0.0


def test_error_feedback_is_the_closed_form_for_the_largest_of_two() -> None:
    layout, codec = layout_of((64,)), Largest(1 / 64)
    gradient = torch.zeros(64)
    gradient[:2] = torch.tensor([3.0, 2.0])
    sender = compressor(codec, layout)
    for expected, _ in zip(turns(), range(40), strict=False):
        sender.begin()
        arrived = step(sender, layout, gradient, codec)
        sender.commit()
        assert arrived[:2].tolist() == expected
        assert not arrived[2:].any()


@pytest.mark.parametrize("name", FORMATS)
def test_what_was_applied_and_what_is_left_make_all_gradients(name: str) -> None:
    layout, codec = layout_of((40, 30), (30,)), FORMATS[name]
    sender, applied, given = compressor(codec, layout), torch.zeros(1230), torch.zeros(1230)
    for seed in range(30):
        gradient = random(1230, seed)
        sender.begin()
        applied += step(sender, layout, gradient, codec)
        sender.commit()
        given += gradient
    state = sender.state()
    left = torch.cat([state["left/p1"], state["left/p0"]])  # backward order
    assert torch.allclose(applied + left, given, atol=1e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_a_step_that_is_repeated_sends_the_same_bits(name: str) -> None:
    layout, codec = layout_of((40, 30), (30,)), FORMATS[name]
    sender, other = compressor(codec, layout), compressor(codec, layout)
    for seed in range(6):
        gradient = random(1230, seed)
        sender.begin()
        first = step(sender, layout, gradient, codec)
        if seed % 2:
            sender.begin()  # the first one was not committed
            assert torch.equal(step(sender, layout, gradient, codec), first)
        sender.commit()
        other.begin()
        assert torch.equal(step(other, layout, gradient, codec), first)
        other.commit()


def test_what_is_left_weighs_as_the_gradient_that_it_was_of() -> None:
    layout, codec = layout_of((64,)), Largest(1 / 64)
    gradient = torch.zeros(64)
    gradient[:2] = torch.tensor([3.0, 2.0])
    sender = compressor(codec, layout)
    step(
        sender, layout, gradient, codec, unit=2.0, total=4.0
    )  # the gradient of the mean loss is half of it
    sender.commit()
    assert sender.state()["left/p0"][1] == 1.0
    gradient[0] = 0.0
    arrived = step(sender, layout, gradient, codec, unit=1.0, total=8.0)
    assert arrived[1] == 2.0 + 1.0 * 8.0


def test_a_parameter_without_a_gradient_keeps_what_it_has() -> None:
    layout, codec = layout_of((32,), (32,)), Largest(1 / 64)
    sender = compressor(codec, layout)
    gradient = torch.zeros(64)
    gradient[0], gradient[40] = 3.0, 2.0
    step(sender, layout, gradient, codec)
    sender.commit()
    without = layout.entries[layout.index["p0"]]
    assert without.offset == 32 * 4
    sender.begin()
    arrived = step(sender, layout, torch.zeros(64), codec, absent=frozenset({layout.index["p0"]}))
    sender.commit()
    assert not arrived.any()
    assert sender.state()["left/p0"][8] == 2.0
    assert step(sender, layout, torch.zeros(64), codec)[40] == 2.0


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_travels_as_it_is_and_leaves_no_trace(wrong: float) -> None:
    layout, codec = layout_of((64,)), Largest(1 / 64)
    sender = compressor(codec, layout)
    gradient = torch.zeros(64)
    gradient[:2] = torch.tensor([3.0, 2.0])
    step(sender, layout, gradient, codec)
    sender.commit()
    before = sender.state()
    sender.begin()
    bad = torch.full((64,), wrong).view(torch.uint8)
    assert sender.pack(0, bad, 1.0, 1.0, ALL) is bad
    sender.commit()
    assert torch.equal(sender.state()["left/p0"], before["left/p0"])


@pytest.mark.parametrize("name", FORMATS)
def test_a_state_goes_on_to_the_bit_and_with_other_chunks(name: str) -> None:
    shapes = ((20, 30), (30,), (25, 20))
    layout, codec = layout_of(*shapes), FORMATS[name]
    sender, other = compressor(codec, layout), compressor(codec, layout)
    for seed in range(3):
        sender.begin()
        step(sender, layout, random(1130, seed), codec)
        sender.commit()
    state = sender.state()
    check_residuals(layout, [state])
    other.load_state(state)
    assert torch.equal(
        step(sender, layout, random(1130, 9), codec), step(other, layout, random(1130, 9), codec)
    )
    cut = layout_of(*shapes, chunk_bytes=1000)
    assert len(cut.chunks) > 1
    elsewhere = compressor(codec, cut)
    elsewhere.load_state(state)
    again = elsewhere.state()
    assert again  # of chunks that are packed there too
    assert all(torch.equal(value, state[key]) for key, value in again.items())
    elsewhere.load_state({})
    assert not elsewhere.state()


@pytest.mark.parametrize(
    ("key", "shape"),
    [("left/p0", (41, 30)), ("left/other", (5,)), ("factor/other", (5, 2)), ("else/p0", (1200,))],
)
def test_a_state_of_another_model_is_refused(key: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=key):
        check_residuals(layout_of((40, 30)), [{key: torch.zeros(shape)}])
