"""Tier 2: every op kernel against its reference, computed in float32 on the CPU, over the catalogue's samples.

The samples hold what an op's contract allows: no token, one, many, strided rows. Strides are kept on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

from octavo.ops.bind import REFERENCE, KernelTable
from octavo.ops.catalogue import CATALOGUE, DEFAULT_TOLERANCE
from octavo.plugin import BatchKey, OpContext, Support
from octavo.testing.conformance.subject import Kernel, Subject


def test_an_op_kernel_agrees_with_the_reference(subject: Subject, op: Kernel, dtype: str) -> None:
    definition, device = CATALOGUE[op.what], subject.device
    allowed = subject.settings.error(op.what, dtype, definition.tolerance.get(dtype, DEFAULT_TOLERANCE[dtype]))
    fn = callable_of(op, subject, dtype)
    exact = KernelTable().bind(op.what, dtype="float32", device=device)
    with device.inference():
        for sample in supported(op, subject, dtype):
            expected_args = tree_map(widened, sample)
            expected = exact(*expected_args)
            args = on_device(sample, subject)
            close(fn(*args), expected, allowed, what=describe(sample))
            check_inputs(op, sample, args, touched=differing(tree_map(widened, sample), expected_args))


def test_an_op_kernel_is_good_for_something(subject: Subject, op: Kernel) -> None:
    for dtype in subject.caps.dtypes:
        with contextlib.suppress(pytest.skip.Exception):
            if supported(op, subject, dtype):
                return
    pytest.fail("refuses every sample in every claimed dtype, so nothing can be said of it")


def test_a_graph_safe_kernel_can_be_replayed(subject: Subject, op: Kernel) -> None:
    if subject.caps.graph == "none" or not op.graph_safe or op.provider == REFERENCE:
        pytest.skip("nothing claimed")
    device, dtype = subject.device, subject.caps.default_dtype
    fn = callable_of(op, subject, dtype)
    runner = subject.platform.make_graph_runner(subject.config, device)
    assert runner is not None
    with device.inference():
        # The largest: in a sample of one row, or of none, the rows cannot change places.
        sample = max(supported(op, subject, dtype), key=num_elements)
        args = on_device(sample, subject)
        handle = runner.prepare(BatchKey(num_tokens=1, num_seqs=1), lambda: fn(*args))
        # Other numbers in the same memory: a kernel that read them on the host would give the old results.
        others = tuple(map(turned, sample))
        fill(args, others)
        replayed = tree_map(copied, runner.run(handle))
        left = tree_map(copied, kept(op, args))
        device.synchronize()
        # Again, as a kernel may have worked in place.
        fill(args, others)
        close(replayed, fn(*args), 0.0, what=f"a replay with other inputs, of {describe(sample)}")
        close(left, kept(op, args), 0.0, what=f"a replay with other inputs, by what it leaves in {describe(sample)}")
    runner.close()


def kept(op: Kernel, args: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """The tensors among the arguments that the caller goes on using, by name."""
    definition = CATALOGUE[op.what]
    named = zip(definition.arguments, args, strict=False)  # a sample may leave out the last ones
    return {n: arg for n, arg in named if isinstance(arg, torch.Tensor) and n not in definition.given_up}


def turned(value: Any) -> Any:
    """A tensor of floats with its rows in reverse; anything else, as integers may be places, as it is."""
    return value.flip(0) if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() else value


def fill(args: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    """Put the values of tensors into those of `args`."""
    for arg, value in zip(args, values, strict=True):
        if isinstance(arg, torch.Tensor):
            arg.copy_(value)


def num_elements(sample: tuple[Any, ...]) -> int:
    return sum(value.numel() for value in sample if isinstance(value, torch.Tensor))


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def callable_of(op: Kernel, subject: Subject, dtype: str) -> Callable[..., Any]:
    """The kernel as a plain function of the op's arguments."""
    if op.provider == REFERENCE:
        # Made of reference parts, so that a wrong part is blamed once, under its own name.
        return KernelTable().bind(op.what, dtype=dtype, device=subject.device)
    fn: Callable[..., Any] = op.fn
    return fn


def supported(op: Kernel, subject: Subject, dtype: str) -> list[tuple[Any, ...]]:
    """The op's samples that the kernel takes. Skips the test if there is none; a refusal must give its reason."""
    definition = CATALOGUE[op.what]
    samples = list(definition.samples(dtype))
    if op.provider == REFERENCE:
        return samples
    entry = next(p for p in subject.kernels.providers(op.what) if p.fn is op.fn)
    taken, reason = [], ""
    for sample in samples:
        params = definition.params(sample)
        context = OpContext(op=op.what, dtype=dtype, device_type=subject.device.type, params=params)
        answer = entry.supports(context)
        assert isinstance(answer, Support), f"supports must return Support, not {answer!r}"
        if answer.ok:
            taken.append(sample)
        else:
            assert answer.reason, "a refusal must carry a reason"
            reason = answer.reason
    if not taken:
        pytest.skip(f"refuses {dtype}: {reason}")
    return taken


def widened(value: Any) -> Any:
    """A copy, floating-point tensors in float32."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.float().clone() if value.is_floating_point() else value.clone()


def on_device(sample: tuple[Any, ...], subject: Subject) -> tuple[Any, ...]:
    """Copies of a sample's tensors on the device, with the same strides."""
    target = subject.device.torch_device

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=target)
        return moved.copy_(value)

    return tuple(tree_map(move, sample))


def differing(before: Any, after: Any) -> set[int]:
    """Places of arguments that are no longer what they were."""
    return {
        i
        for i, (old, new) in enumerate(zip(before, after, strict=True))
        if isinstance(old, torch.Tensor) and not torch.equal(old.nan_to_num(), new.nan_to_num())
    }


def check_inputs(op: Kernel, sample: tuple[Any, ...], args: tuple[Any, ...], *, touched: set[int]) -> None:
    """A kernel may change only what the op's contract changes and, if it says `inplace`, what the caller gives up."""
    definition = CATALOGUE[op.what]
    changed = differing(sample, [a.cpu() if isinstance(a, torch.Tensor) else a for a in args]) - touched
    names = {definition.arguments[i] for i in changed}
    wrong = ", ".join(sorted(names - definition.given_up))
    assert not wrong, f"changes {wrong}, which the caller goes on using"
    assert op.inplace or not names, f"changes {', '.join(sorted(names))} but does not say inplace"


def close(got: Any, expected: Any, allowed: float, *, what: str) -> None:
    """Equal structure and values: floats within `allowed` (absolute and relative), everything else exactly."""
    ours, theirs = tree_flatten(got)[0], tree_flatten(expected)[0]
    assert len(ours) == len(theirs), f"{what}: {len(ours)} results instead of {len(theirs)}"
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.shape == right.shape, f"{what}: shape {tuple(mine.shape)} instead of {tuple(right.shape)}"
        mine, right = mine.cpu(), right.cpu()
        if right.is_floating_point():
            torch.testing.assert_close(
                mine.float(), right.float(), atol=allowed, rtol=allowed, equal_nan=True, msg=lambda m: f"{what}: {m}"
            )
        else:
            assert torch.equal(mine.to(right.dtype), right), f"{what}: integers differ"


def describe(sample: tuple[Any, ...]) -> str:
    return "(" + ", ".join(str(tuple(v.shape)) if isinstance(v, torch.Tensor) else str(v) for v in sample) + ")"
