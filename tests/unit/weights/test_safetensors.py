"""Safetensors: sound files of every shape are read, damaged ones refused by name before any memory is taken."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import CheckpointError
from octavo.weights.safetensors import DTYPES, INDEX, open_tensors, read_file


def write(file: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return file


def entry(dtype: Any = "F32", shape: Any = (2,), start: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(6, 4, generator=generator),
        "half": torch.randn(3, 2, generator=generator).bfloat16(),
        "byte": torch.arange(5, dtype=torch.uint8),
        "fp8": torch.randn(4, 4, generator=generator).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 7),
        "flags": torch.tensor([True, False]),
    }


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and one.tolist() == two.tolist()


def test_tensors_of_every_kind_come_back(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = {tensor.name: tensor for tensor in open_tensors(tmp_path)}
    assert found.keys() == tensors.keys()
    for name, tensor in found.items():
        assert tensor.shape == tuple(tensors[name].shape)
        assert tensor.dtype == tensors[name].dtype
        assert same(tensor.read(), tensors[name])


def test_slices_agree_with_the_whole(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    (matrix,) = (tensor for tensor in open_tensors(tmp_path) if tensor.name == "matrix")
    assert same(matrix.read(start=2, length=3), tensors["matrix"][2:5])
    assert same(matrix.read(dim=1, start=1), tensors["matrix"][:, 1:])


def test_tensors_that_are_not_aligned_in_the_file_are_read_too(tmp_path: Path) -> None:
    header = {"b": entry("U8", [1], 0, 1), "f": entry("F32", [2], 1, 9), "h": entry("F16", [1], 9, 11)}
    data = b"\x07" + struct.pack("<2f", 1.5, -2.0) + struct.pack("<e", 0.25)
    found = {t.name: t.read().tolist() for t in read_file(write(tmp_path / "odd.safetensors", header, data))}
    assert found == {"b": [7], "f": [1.5, -2.0], "h": [0.25]}


def test_every_known_dtype_has_the_size_that_the_format_says(tmp_path: Path) -> None:
    bits = {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "BOOL": 8}
    for name, dtype in DTYPES.items():
        plain = bits.get(name, 8 if name.startswith("F8") or name.endswith("8") else 16)
        assert dtype.itemsize * 8 == plain, name


GOOD = {"t": entry()}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"\x10\x00", "cut short: 2 bytes"),
        (struct.pack("<Q", 0) + bytes(92), "header claims 0 bytes"),
        (struct.pack("<Q", 2**60) + bytes(92), f"header claims {2**60} bytes"),
        (struct.pack("<Q", 200) + bytes(92), "header claims 200 bytes, the file has 100"),
        (struct.pack("<Q", 4) + b"{no}", "not valid JSON"),
        (struct.pack("<Q", 4) + b"\xff\xfe\x00\x00", "not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 20) + b'{"a": {}, "a" : {} }', "a name occurs twice"),
    ],
)
def test_a_damaged_beginning_is_refused_by_name(data: bytes, message: str, tmp_path: Path) -> None:
    bad = tmp_path / "model.safetensors"
    bad.write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_tensors(tmp_path)
    assert caught.value.path == str(bad)


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"t": 3}, 8, "entry of t is malformed"),
        ({"t": {"dtype": "F32", "shape": [2]}}, 8, "entry of t is malformed"),
        ({"t": entry("F31")}, 8, "t has dtype 'F31'"),
        ({"t": entry(["F32"])}, 8, "t has dtype"),
        ({"t": entry(shape=[-2])}, 8, r"shape \(-2,\)"),
        ({"t": entry(shape=[True, 2])}, 8, r"shape \(True, 2\)"),
        ({"t": entry(start=-8, end=0)}, 8, "offsets -8"),
        ({"t": entry(end=8.0)}, 8, "offsets 0, 8.0"),
        ({"t": entry(start=8, end=0)}, 8, "bytes 8 to 0"),
        ({"t": entry(end=16, shape=[4])}, 8, "bytes 0 to 16 of 8"),
        ({"t": entry(shape=[3])}, 8, "cannot take 8 bytes"),
        ({"t": entry("F16")}, 8, "cannot take 8 bytes"),
        ({"t": entry(), "u": entry()}, 8, "overlaps the tensor before it"),
        ({"t": entry(), "u": entry(start=4, end=12)}, 12, "overlaps the tensor before it"),
        ({"t": entry(start=4, end=12)}, 12, "leaves a gap"),
        (GOOD, 9, "the tensors end at byte"),
    ],
)
def test_a_damaged_entry_is_refused_by_file_and_tensor(
    header: dict[str, Any], size: int, message: str, tmp_path: Path
) -> None:
    bad = write(tmp_path / "model.safetensors", header, bytes(size))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_tensors(tmp_path)
    assert caught.value.path == str(bad)


def test_random_damage_to_the_header_never_escapes_as_another_error(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    rng = random.Random(7)
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(end)] = rng.choice((rng.randrange(256), *b'0123456789{}[],"-'))
        file.write_bytes(damaged)
        try:
            read_file(file)
        except CheckpointError:
            refused += 1
    assert refused > 200


def test_a_file_cut_after_its_header_is_refused(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="cut short"):
        open_tensors(tmp_path)


def shards(folder: Path, *, count: int = 2, index: bool = True) -> dict[str, str]:
    weight_map = {}
    for i in range(1, count + 1):
        name = f"model-{i:05}-of-{count:05}.safetensors"
        save_file({f"t{i}": torch.full((2,), float(i))}, folder / name)
        weight_map[f"t{i}"] = name
    if index:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_read_in_order_with_or_without_an_index(index: bool, tmp_path: Path) -> None:
    shards(tmp_path, count=3, index=index)
    assert [(t.name, t.read()[0].item()) for t in open_tensors(tmp_path)] == [("t1", 1.0), ("t2", 2.0), ("t3", 3.0)]


def test_an_index_that_names_absent_shards_is_an_error_that_counts_both_sides(tmp_path: Path) -> None:
    weight_map = shards(tmp_path)
    stale = weight_map | {f"x{i}": f"model-{i:05}-of-00030.safetensors" for i in range(1, 31)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": stale}))
    with pytest.raises(
        CheckpointError, match=r"lists 32 files, 30 of them are missing.*has 2 safetensors files"
    ) as caught:
        open_tensors(tmp_path)
    assert caught.value.path == str(tmp_path / INDEX)


def test_an_index_that_puts_a_tensor_into_another_shard_is_an_error(tmp_path: Path) -> None:
    weight_map = shards(tmp_path)
    weight_map["t1"], weight_map["t2"] = weight_map["t2"], weight_map["t1"]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="disagrees with the files: 2 tensors it lists are not there"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(text: str, tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: is no index"):
        open_tensors(tmp_path)


def test_an_index_cannot_reach_outside_of_its_folder(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"t1": "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside of its folder"):
        open_tensors(tmp_path)


def test_a_missing_shard_is_noticed_without_an_index(tmp_path: Path) -> None:
    shards(tmp_path, count=3, index=False)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="one of 3 shards, only 2 are there"):
        open_tensors(tmp_path)


def test_a_tensor_in_two_files_is_an_error(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"t": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"b\.safetensors: t is also in .*a\.safetensors"):
        open_tensors(tmp_path)


def test_adapters_and_second_copies_are_not_the_model(tmp_path: Path) -> None:
    for name in ("model", "consolidated", "adapter_model"):
        save_file({name: torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    assert [tensor.name for tensor in open_tensors(tmp_path)] == ["model"]


def test_pickled_weights_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(CheckpointError, match=r"only pickled weights.*convert them to safetensors"):
        open_tensors(tmp_path)


def test_a_folder_without_weights_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        open_tensors(tmp_path)
