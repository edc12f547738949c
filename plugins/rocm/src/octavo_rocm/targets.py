"""The GPU targets that the kernels are written for, and what differs between them.

Numbers of a target are AMD's, from the instruction-set guides: CDNA (Instinct) has waves of 64 and MFMA matrix units,
RDNA (Radeon) waves of 32 and WMMA. fp8 comes in two kinds: CDNA3's "fnuz" (bias 8, no minus zero, NaN in its place) and
OCP's, of all later chips.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NO_FP8: frozenset[str] = frozenset()
FNUZ = frozenset({"e4m3fnuz", "e5m2fnuz"})
OCP = frozenset({"e4m3fn", "e5m2"})


@dataclass(frozen=True, kw_only=True)
class Target:
    """One compiler target. wave: threads of a wavefront. shared_memory: bytes of LDS of a workgroup.

    fp8: what its matrix units multiply. launch: options that Triton's AMD compiler takes for kernels with products.
    barrier_waits: whether Triton's barrier also waits until memory has the stores of each wave.
    """

    name: str
    wave: int
    shared_memory: int
    fp8: frozenset[str] = NO_FP8
    launch: Mapping[str, int] = field(default_factory=dict)
    barrier_waits: bool = True

    @property
    def fp8_dtype(self) -> str | None:
        """Torch's name of the e4m3 that the matrix units multiply."""
        return next((f"float8_{kind}" for kind in sorted(self.fp8) if kind.startswith("e4m3")), None)


KIB = 1024
# Products of few rows fill the 16x16 shape; the 32x32 one would be half empty. kpack: how many packs of K a lane reads
# from LDS at once; CDNA4 reads wide by itself and takes 1 only.
MFMA = {"matrix_instr_nonkdim": 16}

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target(name="gfx90a", wave=64, shared_memory=64 * KIB, launch=MFMA | {"kpack": 2}, barrier_waits=False),
        Target(
            name="gfx942",
            wave=64,
            shared_memory=64 * KIB,
            fp8=FNUZ,
            launch=MFMA | {"kpack": 2},
            barrier_waits=False,
        ),
        Target(name="gfx950", wave=64, shared_memory=160 * KIB, fp8=OCP, launch=MFMA, barrier_waits=False),
        Target(name="gfx1100", wave=32, shared_memory=64 * KIB),
        Target(name="gfx1201", wave=32, shared_memory=64 * KIB, fp8=OCP),
    )
}

SAME_AS: Mapping[str, str] = {"gfx1101": "gfx1100", "gfx1102": "gfx1100", "gfx1200": "gfx1201"}
"""Smaller chips of a generation: other numbers of units, the same instructions."""


def target_of(arch: str) -> Target | None:
    """The target of an architecture as HIP names it ("gfx942:sramecc+:xnack-"); None for one that is not served."""
    name = arch.partition(":")[0]
    return TARGETS.get(SAME_AS.get(name, name))


def arch_of(version: int) -> str:
    """The architecture's name of the kernel driver's number: 90402 is gfx942, 90010 gfx90a, 120001 gfx1201."""
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{stepping:x}"
