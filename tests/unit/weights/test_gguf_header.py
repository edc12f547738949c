"""A damaged GGUF file is refused by name, whatever byte is wrong; a sound one is read in one pass."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from octavo.errors import CheckpointError
from octavo.testing.gguf_files import write_gguf
from octavo.testing.tiny import tiny_config
from octavo.weights.gguf_header import read_header


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def handmade(*, pairs: list[bytes] | None = None, entries: list[bytes] | None = None, data: bytes = b"") -> bytes:
    """A GGUF file out of raw key-value pairs and tensor entries."""
    pairs, entries = pairs or [], entries or []
    header = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(pairs)) + b"".join(pairs) + b"".join(entries)
    return header + bytes(-len(header) % 32) + data


def entry(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    config = tiny_config("llama")
    tensors = {"model.embed_tokens.weight": torch.zeros(384, 64), "model.norm.weight": torch.ones(64)}
    words = {"tokenizer.ggml.tokens": ["a", "é", "\u2581the"], "tokenizer.ggml.scores": [0.5, -1.0, 2.0]}
    return write_gguf(tmp_path / "sound.gguf", config, tensors, qtype="Q4_0", metadata=words)


def test_metadata_and_places_of_tensors_are_read(sound: Path) -> None:
    header = read_header(sound)
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["llama.embedding_length"] == 64
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "é", "\u2581the"]
    assert header.metadata["tokenizer.ggml.scores"] == [0.5, -1.0, 2.0]
    embedding, norm = header.tensors
    assert (embedding.name, embedding.shape, embedding.qtype) == ("token_embd.weight", (384, 64), "Q4_0")
    assert embedding.size == 384 * 2 * 18
    assert np.fromfile(sound, np.float32, 64, offset=norm.start).tolist() == [1.0] * 64


def test_every_kind_of_number_is_read(tmp_path: Path) -> None:
    file = tmp_path / "numbers.gguf"
    writer = GGUFWriter(file, "llama")
    wanted = {
        "u8": 200,
        "i8": -3,
        "u16": 60000,
        "i16": -300,
        "u32": 4 * 10**9,
        "i32": -5,
        "u64": 2**63,
        "i64": -(2**40),
    }
    adders = {"u8": "uint8", "i8": "int8", "u16": "uint16", "i16": "int16", "u32": "uint32", "i32": "int32"}
    for key, value in wanted.items():
        getattr(writer, f"add_{adders.get(key, key.replace('u64', 'uint64').replace('i64', 'int64'))}")(key, value)
    writer.add_float64("f64", 1e300)
    writer.add_bool("yes", True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_header(file).metadata
    assert {key: metadata[key] for key in wanted} == wanted
    assert metadata["f64"] == 1e300
    assert metadata["yes"] is True


@pytest.mark.parametrize("size", [0, 3, 4, 10, 24, 100, 500])
def test_a_file_cut_short_anywhere_is_refused_by_name(size: int, sound: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(sound.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"cut\.gguf") as caught:
        read_header(cut)
    assert caught.value.path == str(cut)


def test_a_file_whose_last_tensor_is_cut_names_the_tensor(sound: Path) -> None:
    last = read_header(sound).tensors[-1]
    sound.write_bytes(sound.read_bytes()[: last.start + last.size - 1])
    with pytest.raises(CheckpointError, match=r"cut short: tensor output_norm\.weight ends at byte"):
        read_header(sound)


def test_random_damage_to_the_header_never_escapes_as_another_error(sound: Path) -> None:
    rng = random.Random(5)
    data = sound.read_bytes()
    end = read_header(sound).tensors[0].start
    refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            damaged[rng.randrange(end)] = rng.randrange(256)
        sound.write_bytes(damaged)
        try:
            read_header(sound)
        except CheckpointError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + bytes(60), "is not a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big-endian"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "GGUF version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "cut short or corrupt"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "cut short or corrupt"),
        (handmade(pairs=[text(b"k") + struct.pack("<I", 99)]), "99 is no value type"),
        (handmade(pairs=[text(b"k") + struct.pack("<IIQ", 9, 9, 1)]), "array of type 9"),
        (handmade(pairs=[text(b"k") + struct.pack("<IIQ", 9, 4, 2**61)]), "goes past the end"),
        (handmade(pairs=[text(b"k") + struct.pack("<IQ", 8, 2**62)]), "goes past the end"),
        (handmade(pairs=[text(b"k\xff") + struct.pack("<II", 4, 1)]), "utf-8"),
        (handmade(pairs=[text(b"k") + struct.pack("<II", 4, 1)] * 2), "'k' occurs twice"),
        (handmade(pairs=[text(b"general.alignment") + struct.pack("<II", 4, 0)]), "alignment is 0"),
        (handmade(entries=[entry(b"t", (1,) * 5, 0, 0)]), "'t' has 5 dimensions"),
        (handmade(entries=[entry(b"t", (4,), 200, 0)]), "tensor t is of unknown type 200"),
        (handmade(entries=[entry(b"t", (48, 2), 2, 0)], data=bytes(99)), "not whole Q4_0 blocks of 32"),
        (handmade(entries=[entry(b"t", (2**40,), 0, 0)]), "cut short: tensor t ends"),
        (handmade(entries=[entry(b"t", (8,), 0, 2**63)]), "cut short: tensor t ends"),
        (handmade(entries=[entry(b"t", (8,), 0, 0)] * 2, data=bytes(64)), "t occurs twice|overlap"),
        (
            handmade(entries=[entry(b"t", (8,), 0, 0), entry(b"u", (8,), 0, 16)], data=bytes(64)),
            "tensors t and u overlap",
        ),
    ],
)
def test_each_fault_is_named(data: bytes, message: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(bad)
    assert caught.value.path == str(bad)


def test_a_tensor_of_no_elements_is_fine(tmp_path: Path) -> None:
    file = tmp_path / "empty-tensor.gguf"
    file.write_bytes(handmade(entries=[entry(b"t", (0, 4), 0, 0)]))
    (tensor,) = read_header(file).tensors
    assert (tensor.shape, tensor.size) == ((4, 0), 0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.gguf: cannot be read"):
        read_header(tmp_path / "absent.gguf")


def split_in_two(folder: Path) -> list[Path]:
    parts = [folder / f"model-0000{i}-of-00002.gguf" for i in (1, 2)]
    for part, name in zip(parts, ("model.norm.weight", "model.embed_tokens.weight"), strict=True):
        write_gguf(part, tiny_config("llama"), {name: torch.zeros(384, 64)})
    return parts


def test_the_parts_of_a_split_file_are_read_together(tmp_path: Path) -> None:
    parts = split_in_two(tmp_path)
    header = read_header(parts[0])
    assert [(t.name, t.path) for t in header.tensors] == [
        ("output_norm.weight", parts[0]),
        ("token_embd.weight", parts[1]),
    ]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    parts = split_in_two(tmp_path)
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"one of 2 parts, these are missing: model-00002-of-00002\.gguf"):
        read_header(parts[0])


def test_a_tensor_in_two_parts_is_an_error(tmp_path: Path) -> None:
    parts = split_in_two(tmp_path)
    shutil.copy(parts[0], parts[1])
    with pytest.raises(CheckpointError, match=r"output_norm\.weight occurs twice"):
        read_header(parts[0])
