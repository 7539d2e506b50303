"""Arrays as chunks: what is gathered, sent and scattered is what was given; what does not fit is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steepest.core.tensors.memory import Bytes
from steepest.errors import ConfigurationError
from steepest.parameter_server.arrays import Arrays, WantedPart
from steepest.parameter_server.hosting import read_optimizer
from tests.random_examples import examples
from tests.unusual_optimizers import Clipped

many = examples(150)
DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
}  # fmt: skip
MANNERS = ("plain", "transposed", "strided", "backwards", "frozen")


def plan(initial: Any, chunk_bytes: int | None = None, optimizer: Any = None) -> Arrays:
    return Arrays.plan(
        initial, None if optimizer is None else read_optimizer(optimizer, initial), chunk_bytes
    )


def bits(array: Any) -> bytes:
    """What an array holds, in the order of its elements."""
    if isinstance(array, torch.Tensor):
        array = (
            array.detach().view(torch.int16) if array.dtype == torch.bfloat16 else array.detach()
        ).numpy()
    return array.tobytes()


def same(a: Any, b: Any) -> bool:
    """Whether two arrays are of one kind, shape and dtype, and hold the same bits."""
    kind = torch.Tensor if isinstance(a, torch.Tensor) else np.ndarray
    return (
        isinstance(b, kind)
        and tuple(a.shape) == tuple(b.shape)
        and a.dtype == b.dtype
        and bits(a) == bits(b)
    )


def make(name: str, shape: Sequence[int], manner: str, numpy: bool, seed: int = 0) -> Any:
    """An array of random bits, which lies in memory in some manner."""
    size = int(np.prod(shape)) * DTYPES[name].itemsize
    data = torch.tensor(list(np.random.default_rng(seed).bytes(size)), dtype=torch.uint8)
    tensor = data.view(DTYPES[name]).view(tuple(shape))
    if manner == "transposed":
        tensor = tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor
    elif manner == "strided" and tensor.dim():
        tensor = torch.stack([tensor, tensor], dim=-1)[..., 0]
    if not numpy:
        return tensor
    array = tensor.numpy()
    if manner == "backwards" and array.ndim:
        array = np.ascontiguousarray(array[::-1])[::-1]
    elif manner == "frozen":
        array.flags.writeable = False
    return array


def stored(arrays: Arrays, update: Mapping[str, Bytes]) -> list[Bytes]:
    """What servers get: every chunk's bytes, copied; zeros where nothing is given."""
    chunks = []
    for chunk in arrays.layout.chunks:
        payload, absent = arrays.payload(chunk, update)
        names = {arrays.layout.entries[piece.entry].name for piece in chunk.slices}
        assert {arrays.layout.entries[entry].name for entry in absent} == names - update.keys()
        assert (payload is None) == (not names & update.keys())
        assert payload is None or payload.size == chunk.nbytes
        chunks.append(np.zeros(chunk.nbytes, np.uint8) if payload is None else payload.copy())
    return chunks


def receive(arrays: Arrays, chunks: Sequence[Bytes], wanted: Mapping[str, WantedPart]) -> set[int]:
    """Takes the chunks that are needed, as a user does; returns which ones arrived where they belong at once."""
    direct = set()
    for index in arrays.chunks_for(wanted):
        chunk = arrays.layout.chunks[index]
        target = arrays.target(chunk, wanted)
        if target is None:
            arrays.scatter(chunk, chunks[index], wanted)
        else:
            direct.add(index)
            target[:] = chunks[index]
    return direct


def named(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"": value}


shapes = st.lists(st.integers(0, 5), max_size=3)
members = st.tuples(
    st.sampled_from(sorted(DTYPES)), shapes, st.sampled_from(MANNERS), st.booleans()
)


@st.composite
def trees(draw: Any) -> Any:
    """One array, or a dict of some; at least one element."""
    drawn = draw(st.lists(members, min_size=1, max_size=5))
    made = [
        make(dtype, shape, manner, numpy and dtype != "bfloat16", seed)
        for seed, (dtype, shape, manner, numpy) in enumerate(drawn)
    ]
    if not any(int(np.prod(array.shape)) for array in made):
        made[0] = make("int16", (3,), "plain", True)
    if len(made) == 1 and draw(st.booleans()):
        return made[0]
    return {f"array {index}": array for index, array in enumerate(made)}


sizes = st.one_of(st.none(), st.integers(1, 9), st.integers(10, 300))


# -- there and back ----------------------------------------------------------------------------------


@many
@given(trees(), sizes)
def test_arrays_sent_by_chunks_come_back_as_they_were(tree: Any, chunk_bytes: int | None) -> None:
    arrays = plan(tree, chunk_bytes)
    wanted, pulled = arrays.request(None, None, None)
    receive(arrays, stored(arrays, arrays.bytes_of(tree, "it")), wanted)
    assert isinstance(pulled, dict) == isinstance(tree, dict)
    assert named(pulled).keys() == named(tree).keys()
    for name, array in named(tree).items():
        assert same(array, named(pulled)[name])


@many
@given(trees(), sizes)
def test_chunks_are_as_small_as_asked_and_hold_every_element_once(
    tree: Any, chunk_bytes: int | None
) -> None:
    arrays = plan(tree, chunk_bytes)
    held = dict.fromkeys(named(tree), 0)
    for chunk in arrays.layout.chunks:
        assert chunk.nbytes <= max(chunk_bytes or chunk.nbytes, chunk.dtype.itemsize)
        for piece in chunk.slices:
            held[arrays.layout.entries[piece.entry].name] += piece.stop - piece.start
    assert held == {name: int(np.prod(array.shape)) for name, array in named(tree).items()}


@many
@given(trees(), sizes, st.data())
def test_a_range_is_just_those_elements_and_needs_only_their_chunks(
    tree: Any, size: int | None, data: Any
) -> None:
    arrays = plan(tree, size)
    filled = {name: array for name, array in named(tree).items() if int(np.prod(array.shape))}
    name = data.draw(st.sampled_from(sorted(filled)))
    count = int(np.prod(filled[name].shape))
    begin = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(begin + 1, count))
    wanted, pulled = arrays.request([name], (begin, end), None)
    needed = arrays.chunks_for(wanted)
    for chunk in arrays.layout.chunks:
        parts = [p for p in chunk.slices if arrays.layout.entries[p.entry].name == name]
        assert (chunk.index in needed) == any(
            part.start < end and begin < part.stop for part in parts
        )
    chunks = stored(arrays, arrays.bytes_of(tree, "it"))
    receive(
        arrays,
        [chunk if i in needed else np.full_like(chunk, 7) for i, chunk in enumerate(chunks)],
        wanted,
    )
    assert same(filled[name].reshape(-1)[begin:end], pulled)


@many
@given(trees(), sizes, st.data())
def test_some_arrays_are_sent_and_received_alone_and_the_others_are_named_absent(
    tree: Any, size: Any, data: Any
) -> None:
    tree = tree if isinstance(tree, dict) else {"only": tree}
    arrays = plan(tree, size)
    names = [entry.name for entry in arrays.layout.entries]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True))
    given_ = {name: array for name, array in tree.items() if name in chosen}
    chunks = stored(arrays, arrays.bytes_of(given_, "it"))  # checks what is absent
    wanted, pulled = arrays.request(chosen, None, None)
    assert pulled.keys() == set(chosen)
    receive(arrays, chunks, wanted)
    for name, array in given_.items():
        assert same(array, pulled[name])


@many
@given(trees(), sizes)
def test_what_is_pulled_into_given_arrays_lies_in_them(tree: Any, chunk_bytes: int | None) -> None:
    arrays = plan(tree, chunk_bytes)

    def fresh(array: Any) -> Any:
        shape = tuple(array.shape)
        like = torch.zeros if isinstance(array, torch.Tensor) else np.zeros
        return like(shape, dtype=array.dtype)

    out = (
        {name: fresh(array) for name, array in tree.items()}
        if isinstance(tree, dict)
        else fresh(tree)
    )
    wanted, pulled = arrays.request(None, None, out)
    assert pulled is out
    receive(arrays, stored(arrays, arrays.bytes_of(tree, "it")), wanted)
    for name, array in named(tree).items():
        assert same(array, named(out)[name])


def test_a_chunk_within_one_array_is_sent_from_its_memory_and_received_in_it() -> None:
    given_ = {"a": np.arange(40.0), "b": torch.arange(24.0).view(4, 6)}
    arrays = plan(given_, 64)
    assert len(arrays.layout.chunks) > 4
    memory = arrays.bytes_of(given_, "it")
    addresses = {"a": given_["a"].ctypes.data, "b": given_["b"].data_ptr()}
    for chunk in arrays.layout.chunks:
        payload, _ = arrays.payload(chunk, memory)
        name = arrays.layout.entries[chunk.slices[0].entry].name
        assert payload is not None
        assert payload.ctypes.data == addresses[name] + chunk.slices[0].start * chunk.dtype.itemsize
    wanted, _ = arrays.request(None, None, None)
    assert receive(arrays, stored(arrays, memory), wanted) == {
        chunk.index for chunk in arrays.layout.chunks
    }


def test_a_chunk_of_several_arrays_or_of_part_of_what_is_wanted_is_received_elsewhere() -> None:
    arrays = plan({"a": np.arange(3.0), "b": np.arange(5.0)})
    (chunk,) = arrays.layout.chunks
    assert arrays.target(chunk, arrays.request(None, None, None)[0]) is None
    arrays = plan(np.arange(20.0), 80)
    wanted, pulled = arrays.request(None, (5, 20), None)
    assert receive(arrays, stored(arrays, arrays.bytes_of(np.arange(20.0), "it")), wanted) == {1}
    assert pulled.tolist() == list(range(5, 20))


@pytest.mark.parametrize("numpy", [True, False])
def test_a_scalar_is_an_array_of_one_element(numpy: bool) -> None:
    scalar = np.array(3.5) if numpy else torch.tensor(3.5)
    arrays = plan(scalar)
    wanted, pulled = arrays.request(None, None, None)
    receive(arrays, stored(arrays, arrays.bytes_of(scalar, "it")), wanted)
    assert pulled.shape == ()
    assert float(pulled) == 3.5
    wanted, pulled = arrays.request(None, (0, 1), None)
    receive(arrays, stored(arrays, arrays.bytes_of(scalar, "it")), wanted)
    assert pulled.tolist() == [3.5]


def test_what_came_from_ray_read_only_is_sent_without_a_copy_and_kept_alive() -> None:
    array = np.arange(1000.0)
    array.flags.writeable = False
    address = array.ctypes.data
    memory = plan(array).bytes_of(array, "it")[""]
    assert memory.ctypes.data == address
    del array
    again = [np.full(1000, -1.0) for _ in range(50)]  # would take the place of what was let go
    assert memory.view(np.float64).tolist() == list(range(1000))
    assert len(again) == 50


def test_a_parameter_that_needs_a_gradient_is_sent_and_received_like_any_tensor() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    arrays = plan({"w": weight})
    out = torch.nn.Parameter(torch.zeros(2, 3))
    wanted, _ = arrays.request(None, None, {"w": out})
    receive(arrays, stored(arrays, arrays.bytes_of({"w": weight}, "it")), wanted)
    assert torch.equal(out, weight)


def test_numpy_arrays_come_back_as_numpy_and_tensors_as_tensors_whatever_is_pushed() -> None:
    arrays = plan({"n": np.zeros(3), "t": torch.zeros(3)})
    chunks = stored(
        arrays,
        arrays.bytes_of({"n": torch.ones(3, dtype=torch.float64), "t": np.ones(3, "f4")}, "it"),
    )
    wanted, pulled = arrays.request(None, None, None)
    receive(arrays, chunks, wanted)
    assert same(pulled["n"], np.ones(3))
    assert same(pulled["t"], torch.ones(3))


# -- refused -----------------------------------------------------------------------------------------

KNOWN = {
    "a": np.zeros((2, 3)),
    "b": torch.zeros(4),
    "c": np.zeros(2, dtype=np.int32),
    "none": np.zeros((0, 2)),
}
ARRAYS = plan(KNOWN)
ONE = plan(np.zeros((2, 3)))


def numpy_of(dtype: Any) -> Callable[[], Any]:
    return lambda: np.zeros(3, dtype=dtype)


@pytest.mark.parametrize(
    ("make_initial", "says"),
    [
        (lambda: [1.0, 2.0], "initial is a list: give NumPy arrays or torch tensors"),
        (lambda: 3.0, "initial is a float"),
        (lambda: None, "initial is a NoneType"),
        (lambda: np.float64(3.0), "initial is a float64"),
        (lambda: {"w": [1.0]}, "initial['w'] is a list"),
        (lambda: {"w": {"deep": np.zeros(3)}}, "initial['w'] is a dict"),
        (lambda: {3: np.zeros(3)}, "initial has a key 3: give names as text"),
        (lambda: {"": np.zeros(3)}, "initial has a key '': give names as text"),
        (dict, "initial holds no elements"),
        (lambda: np.zeros(0), "initial holds no elements"),
        (lambda: {"a": np.zeros((3, 0)), "b": torch.zeros(0)}, "initial holds no elements"),
        (numpy_of(">f8"), "the array has dtype >f8: give a floating-point or integer type"),
        (numpy_of(">i4"), "of this machine's byte order"),
        (numpy_of(bool), "the array has dtype bool"),
        (numpy_of("c16"), "the array has dtype complex128"),
        (numpy_of(object), "the array has dtype object"),
        (numpy_of("U3"), "the array has dtype <U3"),
        (numpy_of("M8[s]"), "the array has dtype datetime64[s]"),
        (numpy_of("u4"), "the array has dtype uint32"),
        (numpy_of([("x", "f8")]), "has dtype [('x', '<f8')]"),
        (lambda: {"w": torch.zeros(3, dtype=torch.bool)}, "'w' has dtype torch.bool"),
        (lambda: torch.zeros(3, dtype=torch.complex64), "has dtype torch.complex64"),
        (lambda: {"w": torch.zeros(3, device="meta")}, "'w' lies on meta: give CPU tensors"),
        (lambda: {"w": torch.zeros(3, 3).to_sparse()}, "'w' is torch.sparse_coo"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused_and_named(
    make_initial: Callable[[], Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        plan(make_initial())


@pytest.mark.parametrize(
    ("arrays", "update", "says"),
    [
        (
            ARRAYS,
            {"a": np.zeros((2, 3)), "z": np.zeros(3)},
            "it has 'z', which this server does not: it has 'b',",
        ),
        (ARRAYS, {"a": np.zeros((3, 2))}, "it: 'a' has shape (3, 2), not (2, 3)"),
        (ARRAYS, {"a": np.zeros(6)}, "it: 'a' has shape (6,), not (2, 3)"),
        (ARRAYS, {"none": np.zeros((2, 0))}, "'none' has shape (2, 0), not (0, 2)"),
        (ARRAYS, {"a": np.zeros((2, 3), "f4")}, "it: 'a' is float32, not float64: convert it"),
        (ARRAYS, {"c": np.zeros(2)}, "it: 'c' is float64, not int32"),
        (ARRAYS, {"a": np.zeros((2, 3), ">f8")}, "'a' has dtype >f8"),
        (ARRAYS, {"b": torch.zeros(4, device="meta")}, "'b' lies on meta"),
        (ARRAYS, {"b": torch.zeros(4).to_sparse()}, "'b' is torch.sparse_coo"),
        (ARRAYS, {"a": [[0.0] * 3] * 2}, "it['a'] is a list"),
        (ARRAYS, {7: np.zeros((2, 3))}, "it has a key 7"),
        (
            ARRAYS,
            np.zeros((2, 3)),
            "it is one array, initial was a dict: give a dict with some or all of its names",
        ),
        (ONE, {"a": np.zeros((2, 3))}, "it is a dict, initial was one array"),
        (ONE, np.zeros((1, 2, 3)), "it: the array has shape (1, 2, 3), not (2, 3)"),
        (ONE, [0.0], "it is a list"),
    ],
)
def test_an_update_that_does_not_fit_is_refused(arrays: Arrays, update: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        arrays.bytes_of(update, "it")


@pytest.mark.parametrize(
    ("arrays", "names", "span", "says"),
    [
        (ARRAYS, ["a", "z"], None, "there is no array named 'z' on this server"),
        (ARRAYS, None, (0, 2), "a range needs the name of one array"),
        (ARRAYS, ["a", "b"], (0, 2), "a range needs the name of one array"),
        (ARRAYS, ["a"], (-1, 2), "range (-1, 2): 'a' has elements 0 to 6"),
        (ARRAYS, ["a"], (0, 7), "range (0, 7): 'a' has elements 0 to 6"),
        (ARRAYS, ["a"], (3, 3), "range (3, 3)"),
        (ARRAYS, ["a"], (4, 3), "range (4, 3)"),
        (ARRAYS, ["none"], (0, 1), "range (0, 1): 'none' has elements 0 to 0"),
        (ARRAYS, ["a"], (0.5, 3), "range (0.5, 3): give (begin, end)"),
        (ARRAYS, ["a"], (0, 1, 2), "range (0, 1, 2): give (begin, end)"),
        (ARRAYS, ["a"], 3, "range 3: give (begin, end)"),
        (ONE, None, (0, 99), "range (0, 99): the array has elements 0 to 6"),
    ],
)
def test_a_request_for_what_is_not_there_is_refused(
    arrays: Arrays, names: Any, span: Any, says: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        arrays.request(names, span, None)


def test_a_range_may_be_of_numpy_integers() -> None:
    assert ARRAYS.request(["a"], (np.int64(1), np.int64(4)), None)[1].shape == (3,)


def frozen(array: Any) -> Any:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("arrays", "names", "out", "says"),
    [
        (ARRAYS, ["a"], {"a": np.zeros((3, 2)).T}, "out: 'a' must be contiguous and writable"),
        (
            ARRAYS,
            ["a"],
            {"a": frozen(np.zeros((2, 3)))},
            "out: 'a' must be contiguous and writable",
        ),
        (ARRAYS, ["b"], {"b": torch.zeros(8)[::2]}, "out: 'b' must be contiguous and writable"),
        (
            ARRAYS,
            ["b"],
            {"b": torch.zeros(1).expand(4)},
            "out: 'b' must be contiguous and writable",
        ),
        (ARRAYS, ["a"], {"b": torch.zeros(4)}, "out= must hold just the arrays that are pulled"),
        (
            ARRAYS,
            ["a"],
            {"a": np.zeros((2, 3)), "b": torch.zeros(4)},
            "out= must hold just the arrays",
        ),
        (ARRAYS, None, {"a": np.zeros((2, 3))}, "out= must hold just the arrays that are pulled"),
        (ARRAYS, ["a"], {"a": np.zeros((2, 3), "f4")}, "out: 'a' is float32, not float64"),
        (ARRAYS, ["a"], {"z": np.zeros(3)}, "out has 'z'"),
        (ARRAYS, ["a"], np.zeros((2, 3)), "out is one array"),
        (ONE, None, np.zeros(6), "out: the array has shape (6,), not (2, 3)"),
        (ONE, None, np.zeros((3, 2)).T, "out: the array must be contiguous and writable"),
        (ONE, None, frozen(np.zeros((2, 3))), "out: the array must be contiguous and writable"),
    ],
)
def test_memory_that_cannot_be_received_into_is_refused(
    arrays: Arrays, names: Any, out: Any, says: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        arrays.request(names, None, out)


def test_a_range_takes_no_out() -> None:
    with pytest.raises(ConfigurationError, match="no out="):
        ONE.request(None, (0, 2), np.zeros(2))


# -- optimizers --------------------------------------------------------------------------------------


def stepped(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that has taken a step."""
    (parameter,) = parameters
    parameter.grad = torch.ones_like(parameter)
    adam = torch.optim.Adam(parameters)
    adam.step()
    return adam


@pytest.mark.parametrize(
    ("initial", "optimizer", "says"),
    [
        (
            {"w": np.zeros(3), "n": np.zeros(3, dtype=np.int64)},
            lambda p: torch.optim.SGD(p),
            "'n' is int64",
        ),
        (np.zeros(3), lambda p: None, "returned NoneType"),
        (np.zeros(3), lambda p: torch.optim.LBFGS(p), "LBFGS"),
        ({"v": np.zeros(3), "w": np.zeros(3)}, lambda p: torch.optim.SGD(p[:1]), "leaves out 'w'"),
        (np.zeros(3), stepped, "Adam arrives with state"),
        (
            np.zeros(3),
            lambda p: torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))]),
            "is not a parameter",
        ),
        (np.zeros(3), torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))]), "optimizer= is a SGD"),
        (np.zeros(3), "sgd", "optimizer= is a str: give a function"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused(initial: Any, optimizer: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        plan(initial, None, optimizer)


def test_an_optimizer_sees_the_parameters_in_the_order_of_their_names_in_the_dict() -> None:
    seen: list[Any] = []

    def make_optimizer(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        seen.extend(tuple(parameter.shape) for parameter in parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    spec = read_optimizer(
        make_optimizer, {"z": np.zeros(3), "a": np.zeros((2, 2)), "m": torch.zeros(())}
    )
    assert seen == [(3,), (2, 2), ()]
    assert spec.groups[0][0] == ("z", "a", "m")


def test_arrays_are_not_split_under_an_optimizer_that_needs_them_whole() -> None:
    initial = {"a": torch.zeros(8, 8), "b": torch.zeros(8, 8)}
    whole = plan(initial, 64, lambda p: torch.optim.Adafactor(p))
    assert [len(chunks) for chunks in whole.layout.chunks_of] == [1, 1]
    split = plan(initial, 64, lambda p: torch.optim.Adam(p))
    assert [len(chunks) for chunks in split.layout.chunks_of] == [4, 4]


def test_an_optimizer_that_couples_arrays_has_them_in_one_chunk() -> None:
    initial = {"v": np.zeros(300), "w": np.zeros((20, 30))}
    split = Arrays.plan(initial, read_optimizer(torch.optim.SGD, initial), 64)
    together = Arrays.plan(initial, read_optimizer(Clipped, initial), 64)
    assert (len(split.layout.chunks) > 20, len(together.layout.chunks)) == (True, 1)
