"""What is read of a checkpoint is what was written, or a CheckpointError: whatever happened to the bytes."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from steepest.checkpoint.directory import CheckpointDirectory
from steepest.checkpoint.files import Checkpoint, write
from steepest.checkpoint.manifest import KINDS, decode_manifest, encode_manifest
from steepest.data.storage.safetensors_file import read_tensors
from steepest.errors import CheckpointError
from steepest.tables.files.saved_rows import MANIFEST, ROW_FILES
from tests.checkpoint_contents import about, content, edit
from tests.reference import same_bits
from tests.whole_checkpoints import all_of, newest_of

FILES = {
    kind: {"name": f"{kind}-3-0123abcd.safetensors", "sha256": "0" * 64, "dtypes": {}}
    for kind in KINDS
} | {ROW_FILES: [{"name": "tables-3-0123abcd-0.safetensors", "sha256": "0" * 64, "dtypes": {}}]}
ABOUT = {
    **about(),
    "epoch": 2,
    "left": [[0, 1, 2]],
    "begun": [[0, None], [1, 5], [2, [7, 9]]],
    "updates": 3,
    "ends": [1, 2],
    "result": {
        "step": 3,
        "epoch": None,
        "loss": math.inf,
        "metrics": {"a": math.inf, "b": True},
        "samples": 16,
        "staleness": [0],
        "gradient_norm": None,
    },
    "evaluations": [{"loss": 1.0, "metrics": {}, "samples": 1, "step": 3, "epoch": None}],
}
RAW = encode_manifest(FILES, ABOUT)


def sealed(text: str) -> bytes:
    """A manifest of any text that ends with }, with a checksum that is right."""
    body = text.rstrip().removesuffix("}").rstrip().encode()
    return body + f',\n "sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def test_a_manifest_is_read_as_it_was_written() -> None:
    assert decode_manifest(RAW) == (FILES, ABOUT)
    assert json.loads(RAW)["step"] == 3


def test_no_bit_of_a_manifest_may_change() -> None:
    for at in range(len(RAW)):
        for bit in range(8):
            raw = bytearray(RAW)
            raw[at] ^= 1 << bit
            with pytest.raises(CheckpointError):
                decode_manifest(bytes(raw))


def test_no_byte_of_a_manifest_may_be_missing_or_added() -> None:
    for at in range(len(RAW)):
        for raw in (
            RAW[:at],
            RAW[at + 1 :],
            RAW[:at] + RAW[at + 1 :],
            RAW[:at] + b" " + RAW[at:],
            RAW + RAW[:at],
        ):
            if raw != RAW:
                with pytest.raises(CheckpointError):
                    decode_manifest(raw)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"format": ' + "[" * 100_000 + "]" * 100_000 + "}", '{"a":' * 50_000]
)
def test_deep_json_is_damage(text: str) -> None:
    for raw in (text.encode(), sealed(text)):
        with pytest.raises(CheckpointError):
            decode_manifest(raw)


@pytest.mark.parametrize(
    "key",
    ['"step": 2', '"format": 2', '"files": {}', '"sha256": ""', '"left": []'],
    ids=lambda key: key,
)
def test_no_key_stands_there_twice(key: str) -> None:
    text = RAW.decode().replace("{", "{" + key + ",", 1)
    with pytest.raises(CheckpointError):
        decode_manifest(sealed(text[: text.rindex(',\n "sha256"')] + "}"))


@pytest.mark.parametrize("name", [
    "../weights-3-0123abcd.safetensors", "/weights-3-0123abcd.safetensors", "weights-\0.safetensors", "..", ".", "",
    "weights-3-0123abcd.safetensors\n", "weights-٣.safetensors", "weights-\ud800.safetensors",
    "optimizer-3.safetensors", "a/weights-3.safetensors", 7, None, ["weights-3.safetensors"],
])  # fmt: skip
def test_a_file_is_one_of_this_directory(name: Any) -> None:
    files = {**FILES, "weights": {**FILES["weights"], "name": name}}
    with pytest.raises(CheckpointError, match="weights"):
        decode_manifest(encode_manifest(files, ABOUT))


@pytest.mark.parametrize("wrong", [None, {}, [None], [FILES["weights"]]])
def test_files_of_rows_are_a_list_of_such_files(wrong: Any) -> None:
    with pytest.raises(CheckpointError, match="files of tables"):
        decode_manifest(encode_manifest({**FILES, ROW_FILES: wrong}, ABOUT))


@pytest.mark.parametrize("other", [1, 3, 2.0, True, "2", None, [2], 10**400])
def test_another_format_is_refused_and_the_one_that_is_read_named(
    tmp_path: Path, other: Any
) -> None:
    write(tmp_path, content())
    edit(tmp_path, lambda manifest: manifest.update(format=other))
    with pytest.raises(CheckpointError, match=r"format .*this one reads 2"):
        all_of(tmp_path)


WRONG = {
    "step": ["7", -1, 1.0, None, True, 1 << 40, 1 << 80], "epoch": [None, "0", 1 << 80],
    "offset": [[], 1 << 70], "samples": ["16", -1, 0.5], "seed": [-1],
    "optimizer": [None, 3], "flags": [3, {"0.a": 1}, {"a": True}, []], "plain": [3, [3]], "aliases": [{"a": "b"}, []],
    "left": [3, [[1, 2]], [[1, 2, "3"]]], "begun": [[[0]], [[0, "1"]], [["0", 1]], {}],
    "updates": ["3", 1 << 50], "ends": [3, [1 << 90]],
    "result": [3, {}, {"loss": "x"}], "tables": [[["a", 1, "float32"]], 3, [["a", "1", "float32", "SGD"]]],
    "schedule": ["x", []], "replicated": [5, [["t"]], [["t", -1, "float32", "SGD", "w"]]], "rates": [[-1], [math.inf]],
    "batch": [[4], [-1, 2], [1 << 70, 4]], "evaluations": [[{}], [{"loss": "x", "metrics": {}, "samples": 1}]],
    "ended_early": [[[1]], 3],
    "base": [{}, "000001-step-1", {"name": "../000001-step-1", "sha256": ""}, {"name": "000001-step-1"}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG.items() for value in values]
)
def test_what_it_says_is_of_the_right_kind(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key):
        decode_manifest(encode_manifest(FILES, {**ABOUT, key: value}))


@pytest.mark.parametrize(("key", "other"), [
    ("ends", {"ends": [2, 1]}), ("ends", {"ends": [1, 4]}),
    ("epoch", {"epoch": 1_000_000}), ("epoch", {"epoch": 5}), ("epoch", {"ends": [], "epoch": 3, "left": []}),
    ("offset", {"offset": 17}),
    ("left", {"left": [[3, 1, 2]]}), ("left", {"left": [[0, 1, 17]]}), ("left", {"left": [[0, 2, 2]]}),
    ("left", {"left": [[0, 1, 3], [0, 2, 4]]}), ("left", {"left": [[1, 1, 2], [0, 1, 2]]}),
    ("begun", {"begun": [[3, None]]}), ("begun", {"begun": [[0, [7, 8]]]}), ("begun", {"begun": [[0, [0, 16]]]}),
    ("batch", {"batch": [0, 0]}),
])  # fmt: skip
def test_what_it_says_fits_together(key: str, other: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"'{key}' is .*, which cannot be at step 3"):
        decode_manifest(encode_manifest(FILES, {**ABOUT, **other}))


def test_every_damage_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = CheckpointDirectory(tmp_path, 100)
    directory.put(content(1.0, 1))
    deep, name = b"[" * 100_000, {**FILES["weights"], "name": "a\0b"}
    manifests = [
        deep,
        sealed(deep.decode()),
        encode_manifest({**FILES, "weights": name}, ABOUT),
        RAW[:-9],
        b"\xff",
        RAW,
    ]
    for raw in manifests:
        (directory.put(content(2.0, 2))[0] / MANIFEST).write_bytes(raw)
    found = newest_of(CheckpointDirectory(tmp_path, 100))
    assert found is not None
    assert found[0].name == "000001-step-1"
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * len(manifests)


WRITTEN = Checkpoint(
    {"w": torch.arange(3.0), "z": torch.tensor([1j])}, {"w/m": torch.ones(3)}, {}, ABOUT
)


def is_written(found: Checkpoint) -> bool:
    kinds = [(getattr(found, kind), getattr(WRITTEN, kind)) for kind in KINDS]
    return found.about == WRITTEN.about and all(same_bits(mine, theirs) for mine, theirs in kinds)


@given(
    st.sampled_from([MANIFEST, *KINDS]),
    st.integers(0, 2000),
    st.integers(0, 9),
    st.binary(max_size=9),
)
@settings(
    max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_whatever_is_read_was_written(
    tmp_path: Path, kind: str, at: int, cut: int, put: bytes
) -> None:
    if not any(tmp_path.iterdir()):
        write(tmp_path, WRITTEN)
    (file,) = tmp_path.glob(f"{kind}*")
    raw = file.read_bytes()
    at %= len(raw)
    file.write_bytes(raw[:at] + put + raw[at + cut :])
    try:
        assert is_written(all_of(tmp_path))
    except CheckpointError:
        pass
    finally:
        file.write_bytes(raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.long
@given(st.sampled_from(["format", "files", "sha256", *ABOUT]), JSON)
@settings(max_examples=500)
def test_a_manifest_that_lies_is_refused_or_of_the_right_kind(key: str, value: Any) -> None:
    try:
        files, told = decode_manifest(encode_manifest(files=FILES, about={**ABOUT, key: value}))
    except CheckpointError:
        return
    assert all(files[kind]["name"].startswith(f"{kind}-") for kind in KINDS)
    assert isinstance(told["step"], int)


def headed(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


DTYPES = st.sampled_from(
    ["F64", "F32", "C64", "BOOL", "U8", "F4", "F6_E2M3", "F8_E8M0", "I64", "?", ""]
)
PARTS = st.fixed_dictionaries(
    {
        "dtype": DTYPES | JSON,
        "shape": st.lists(st.integers(-1, 3) | st.just(2**62), max_size=3) | JSON,
        "data_offsets": st.tuples(st.integers(0, 16), st.integers(0, 16)) | JSON,
    }
)
HEADERS = st.dictionaries(
    st.sampled_from(["w", "__metadata__", "", "\0"]), PARTS | JSON, max_size=3
)
HEADER = HEADERS.map(json.dumps).map(str.encode)


@pytest.mark.long
@given(
    HEADER.flatmap(lambda header: st.binary(max_size=24).map(lambda data: headed(header, data)))
    | st.binary(max_size=40),
    st.dictionaries(
        st.sampled_from(["w", "", "x"]),
        st.sampled_from(["complex128", "float32", "no", "bits8", "nn"]),
    ),
)
@example(headed(b"[" * 100_000, b""), {})
@example(headed(b'{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', b"1"), {})
@example((2**63).to_bytes(8, "little"), {})
@example(
    headed(b'{"w":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}}', b"1" * 16),
    {"w": "complex128"},
)
@settings(
    max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_a_tensor_file_that_lies_is_refused(
    tmp_path: Path, raw: bytes, dtypes: dict[str, str]
) -> None:
    """With a checksum that is right."""
    (tmp_path / "file").write_bytes(raw)
    try:
        found = read_tensors(
            tmp_path / "file", {"sha256": hashlib.sha256(raw).hexdigest(), "dtypes": dtypes}
        )
    except ValueError:
        return
    assert all(isinstance(value, torch.Tensor) for value in found.values())
