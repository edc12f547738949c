"""The loader compares checkpoint and model before it reads, and then fills every slot once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import CheckpointError
from octavo.testing.tiny import make_model
from octavo.weights import loader
from octavo.weights.loader import load
from octavo.weights.slots import CheckpointTensor, Slot, WeightTable
from octavo.weights.source import ModelSource, open_model

Checkpoint = Callable[..., ModelSource]
"""Writes the given tensors (`__` in a name is a dot) and opens them."""


@dataclass
class Model:
    """A table whose slots keep a copy of what they are given."""

    table: WeightTable = field(default_factory=WeightTable)
    loaded: dict[str, torch.Tensor] = field(default_factory=dict)

    def want(self, name: str, *shape: int, **settings: Any) -> None:
        def keep(tensor: CheckpointTensor) -> None:
            assert name not in self.loaded, f"{name} is loaded twice"
            self.loaded[name] = tensor.read().clone()

        self.table.add(name, Slot(shape=shape, load=keep, **settings))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    make_model(tmp_path, tokenizer=False)

    def open_with(**tensors: torch.Tensor) -> ModelSource:
        save_file({name.replace("__", "."): t for name, t in tensors.items()}, tmp_path / "model.safetensors")
        return open_model(tmp_path)

    return open_with


@pytest.fixture
def model() -> Model:
    return Model()


def test_slots_get_the_tensor_of_their_name(checkpoint: Checkpoint, model: Model) -> None:
    model.want("a.weight", 2, 3)
    model.want("b.weight", 4)
    load(model.table, checkpoint(b__weight=torch.arange(4.0), a__weight=torch.ones(2, 3)))
    assert model.loaded["a.weight"].tolist() == [[1.0] * 3] * 2
    assert model.loaded["b.weight"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_one_error_lists_all_that_is_wrong_and_nothing_is_read(checkpoint: Checkpoint, model: Model) -> None:
    model.want("there.weight", 2)
    model.want("missing.weight", 2)
    model.want("shape.weight", 2, 3)
    source = checkpoint(there__weight=torch.ones(2), shape__weight=torch.ones(3, 2), surplus__weight=torch.ones(1))
    with pytest.raises(CheckpointError) as caught:
        load(model.table, source)
    message = str(caught.value)
    assert "1 tensors missing: missing.weight" in message
    assert "1 tensors of the wrong shape: shape.weight is [3, 2], the config says [2, 3]" in message
    assert "1 tensors not known to the model: surplus.weight" in message
    assert caught.value.path == str(source.path)
    assert model.loaded == {}


def test_a_long_list_of_faults_is_cut_after_ten(checkpoint: Checkpoint, model: Model) -> None:
    for i in range(25):
        model.want(f"layer{i:02}", 1)
    with pytest.raises(CheckpointError, match=r"25 tensors missing: layer00.*layer09 and 15 more") as caught:
        load(model.table, checkpoint())
    assert "layer10" not in str(caught.value)


def test_surplus_that_the_model_ignores_or_that_says_nothing_is_allowed(checkpoint: Checkpoint, model: Model) -> None:
    model.table.ignored.append(r"vision\..*")
    surplus = {
        "vision__patch__weight": torch.ones(2),
        "model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(2),
        "h__0__attn__bias": torch.ones(1, 1, 2, 2),
        "padding__weight": torch.zeros(0, 4),
    }
    load(model.table, checkpoint(**surplus))


def test_an_ignored_name_must_match_wholly(checkpoint: Checkpoint, model: Model) -> None:
    model.table.ignored.append(r"vision")
    with pytest.raises(CheckpointError, match=r"not known to the model: vision\.weight"):
        load(model.table, checkpoint(vision__weight=torch.ones(2)))


def test_an_optional_slot_may_stay_empty(checkpoint: Checkpoint, model: Model) -> None:
    model.want("bias", 2, optional=True)
    load(model.table, checkpoint())
    assert model.loaded == {}


def test_progress_counts_up_and_finishers_run_last_in_order(checkpoint: Checkpoint, model: Model) -> None:
    events: list[object] = []
    model.want("a", 1)
    model.want("b", 1)
    model.table.when_loaded(lambda: events.append("first"))
    model.table.when_loaded(lambda: events.append("second"))
    load(model.table, checkpoint(a=torch.ones(1), b=torch.ones(1)), progress=lambda *at: events.append(at))
    assert events == [(1, 2), (2, 2), "first", "second"]


def test_nothing_stays_mapped_after_loading(checkpoint: Checkpoint, model: Model) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    model.want("a", 4096)
    source = checkpoint(a=torch.ones(4096))
    held = source.tensors()
    assert "model.safetensors" in maps.read_text()
    del held
    load(model.table, source)
    gc.collect()
    assert "model.safetensors" not in maps.read_text()


def dummy(tmp_path: Path, model: Model) -> dict[str, torch.Tensor]:
    make_model(tmp_path, tokenizer=False, dtype=torch.bfloat16)
    (tmp_path / "model.safetensors").unlink()
    load(model.table, open_model(tmp_path, load_format="dummy"))
    return model.loaded


def mapped_kib(name: str) -> int:
    """How much of the files of that name is in this process's memory."""
    sizes, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            ours = line.endswith(name)
        elif ours and line.startswith("Rss:"):
            sizes += int(line.split()[1])
    return sizes


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_what_was_read_of_the_file_does_not_stay_in_memory(
    checkpoint: Checkpoint, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "HELD_BYTES", 1 << 20)
    weights = {f"w{i:02}": torch.full((256, 256), float(i)) for i in range(64)}  # 16 MiB
    source = checkpoint(**weights)
    for name in weights:
        model.want(name, 256, 256)
    views = {}
    model.table.slots["w00"] = Slot(shape=(256, 256), load=lambda tensor: views.update(w00=tensor.read()))
    most = 0

    def watch(done: int, of: int) -> None:
        nonlocal most
        most = max(most, mapped_kib("model.safetensors"))

    loader.load(model.table, source, progress=watch)
    assert 256 <= most <= 4096
    assert all(torch.equal(model.loaded[name], weights[name]) for name in list(weights)[1:])
    assert torch.equal(views["w00"], weights["w00"])


def test_dummy_weights_fill_every_slot_alike_in_every_run(tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        model = Model()
        model.want("layer.weight", 64, 32)
        model.want("other.weight", 64, 32)
        model.want("norm.weight", 64)
        model.want("layer.bias", 64)
        runs.append(dummy(tmp_path, model))
    for name, tensor in runs[0].items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, runs[1][name])
    assert len(runs[0]) == 4
    assert not torch.equal(runs[0]["other.weight"], runs[0]["layer.weight"])
    assert 0.01 < runs[0]["layer.weight"].float().std() < 0.03
    assert 0.9 < runs[0]["norm.weight"].float().mean() < 1.1
    assert abs(runs[0]["layer.bias"].float().mean()) < 0.1


def test_slices_of_dummy_weights_agree_with_the_whole(tmp_path: Path) -> None:
    model, parts = Model(), []
    model.table.add("w", Slot(shape=(8, 6), load=lambda t: parts.extend([t.read(), t.read(dim=1, start=2, length=3)])))
    dummy(tmp_path, model)
    assert torch.equal(parts[0][:, 2:5], parts[1])
