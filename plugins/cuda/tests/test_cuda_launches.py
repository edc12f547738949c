"""What a recorded step launches around its layers: each launch is a node of the graph, and costs a microsecond."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("interpreting Triton would hide the card from the other tests", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")

from triton.runtime import interpreter

from octavo import LLM
from octavo.plugin import BatchKey
from octavo.testing.tiny import make_model

sys.path.insert(0, str(Path(__file__).parent))
from test_cuda_interpreted import Again, Interpreted

NO_KERNEL = {"empty", "empty_strided", "empty_like", "new_empty", "detach", "alias", "resize_"}


class Launches(TorchDispatchMode):
    """Notes every operator that computes something, as a device would launch it."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        if not func.is_view and name not in NO_KERNEL:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The launches of what runs inside: Triton's by the kernel's name, with nothing of how it is interpreted."""
    names: list[str] = []
    launch = interpreter.GridExecutor.__call__
    mode = Launches(names)

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        names.append(self.fn.__name__)
        with torch._C._DisableTorchDispatch():
            launch(self, *args, **kwargs)

    with monkeypatch.context() as patch, mode:
        patch.setattr(interpreter.GridExecutor, "__call__", call)
        yield names


OF_THE_MODEL = {"mul", "deal_kernel"}
"""Gemma scales its embeddings; attention may share out a step's work once for each kind of layer."""
ROWS = "embedding"
"""The rows that are sampled are taken by the op that looks up a vocabulary."""
CHOICE = ["_scan_kernel", "_choose_kernel", "_commit_tokens_kernel"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "behind"),
    [
        (BatchKey(num_tokens=2, num_seqs=2, max_q_len=1), ["linear", *CHOICE]),
        (BatchKey(num_tokens=16, num_seqs=3), [ROWS, "linear", *CHOICE]),
    ],
    ids=["decode", "mixed"],
)
def test_little_is_launched_around_the_layers_of_a_step(
    key: BatchKey, behind: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("interpreted")
    module.platform = Interpreted()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "interpreted", module)
    monkeypatch.setenv("OCTAVO_EXTRA_PLATFORMS", "interpreted=interpreted:platform")
    steps: dict[BatchKey, Callable[[], Any]] = {}

    def prepare(self: Again, key: BatchKey, fn: Callable[[], Any]) -> Callable[[], Any]:
        return steps.setdefault(key, fn)

    monkeypatch.setattr(Again, "prepare", prepare)
    # A vocabulary of several parts; sliding layers, so that there are two KV groups.
    model = make_model(tmp_path, "gemma3_text", tokenizer=False, vocab_size=5000)
    options = {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 32, "num_kv_blocks": 40}
    with (
        LLM(str(model), platform="interpreted", dtype="float32", skip_tokenizer_init=True, **options),
        torch.inference_mode(),
        noted(monkeypatch) as names,
    ):
        steps[key]()
    norms = [i for i, name in enumerate(names) if "rms_norm" in name]
    assert [name for name in names[: norms[0]] if name not in OF_THE_MODEL] == ["_begin_step_kernel", "embedding"]
    assert names[norms[-1] + 1 :] == behind
