"""torch_tpu's backend of torch.compile, with the KV cache donated: a step's program is given its buffers to overwrite.

    torch_tpu's own   the program gives new caches back, which are copied over the old ones: two exist, all is copied
    this one          the program writes into the buffers of the caches, which then take what comes back: nothing moves

torch_tpu 0.2 can donate what a program takes, but decides by itself never to, so private names of it are used here and
nowhere else: the compiler's argument `donated_inputs`, and the method of its backend that calls the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch_tpu._internal.compile._backend import TpuBackend
from torch_tpu._internal.compile.torch_tpu_compiled_executable import CompiledArtifact


class DonatingBackend(TpuBackend):  # type: ignore[misc]
    """What torch.compile calls to make a program of a graph. Programs are kept over restarts as torch_tpu's own are."""

    def _compile_graph_module(
        self,
        compiler_instance: Any,
        is_fwd: bool,
        custom_module_name: str | None,
        debug: Any,
        compiled_artifacts: list[Any],
        graph_module: fx.GraphModule,
        example_inputs: Sequence[Tensor],
    ) -> DonatingProgram:
        traced = TracingContext.get().fw_metadata
        assert traced is not None
        # The graph's outputs begin with the new values of what it changes.
        changed = list(traced.mutated_inp_runtime_indices)
        donated = [i for i in changed if has_memory_for_itself(example_inputs[i], example_inputs)]

        def compile_donating(*args: Any, **kwargs: Any) -> Any:
            return compiler_instance.base_compiler(*args, donated_inputs=donated, **kwargs)

        program = super()._compile_graph_module(
            compile_donating, is_fwd, custom_module_name, debug, compiled_artifacts, graph_module, example_inputs
        )
        return DonatingProgram(program, [(changed.index(i), i) for i in donated])


class DonatingProgram(CompiledArtifact):  # type: ignore[misc]
    """A compiled program, and what it was given to overwrite: (index of the output, index of the input) pairs.

    Pickled with the program, when that is kept for another start.
    """

    def __init__(self, program: Any, donated: list[tuple[int, int]]) -> None:
        super().__init__()
        self._program, self._donated = program, donated

    def __call__(self, *args: Any) -> list[Any]:
        inputs = list(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple)) else list(args)
        outputs = list(self._program(*inputs))
        for output, index in self._donated:
            if num_tensors_on(inputs[index]) == 1:
                inputs[index].set_(outputs[output])
                # torch.compile copies each new value over its input, and sees here that it is there already. Where
                # other tensors look at the same memory, as at the request table, that copy is what they follow.
                outputs[output] = inputs[index]
        return outputs

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return DonatingProgram, (self._program, self._donated)

    def prepare_for_serialization(self) -> None:
        self._program.prepare_for_serialization()

    def post_compile(self, *args: Any, **kwargs: Any) -> None:
        self._program.post_compile(*args, **kwargs)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        self._program.set_triton_bundle(triton_bundle)

    def updates_default_generator_state(self) -> bool:
        return bool(self._program.updates_default_generator_state())

    def fingerprint(self) -> str:
        return str(self._program.fingerprint())


def has_memory_for_itself(t: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Whether a tensor is all of its storage, and no other of these has a part in that."""
    storage = t.untyped_storage()
    sharing = sum(isinstance(other, Tensor) and other.untyped_storage()._cdata == storage._cdata for other in inputs)
    return sharing == 1 and storage.nbytes() == t.numel() * t.itemsize


def num_tensors_on(t: Tensor) -> int:
    """How many tensors, `t` among them, have the storage of `t`."""
    storage = t.untyped_storage()
    # The handle just made counts too.
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1
