"""Let a torch built for CUDA be imported without CUDA's libraries, where nothing of CUDA is used.

    python no_cuda.py        in the environment of that torch, installed with --no-deps

torch_xla stands on no other torch than the one built for CUDA, whose libraries are five gigabytes. They are searched
for when torch is imported, so one small library takes the names of all of them. Its functions answer 100, which is
CUDA's word for "no device". Wants a C compiler and nm.
"""

from __future__ import annotations

import subprocess
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

LIBRARIES = (
    "libcublas.so.12",
    "libcublasLt.so.12",
    "libcudart.so.12",
    "libcudnn.so.9",
    "libcufft.so.11",
    "libcufile.so.0",
    "libcupti.so.12",
    "libcurand.so.10",
    "libcusolver.so.11",
    "libcusparse.so.12",
    "libcusparseLt.so.0",
    "libnccl.so.2",
    "libnvrtc.so.12",
    "libnvshmem_host.so.3",
)
PREFIXES = ("cu", "__cuda", "nccl", "nvrtc", "nvshmem")
STAND_IN = "libnocuda.so"


def wanted(folder: Path) -> dict[str, set[str]]:
    """Version ("" for none) -> the functions of CUDA's libraries that those in `folder` call."""
    functions: dict[str, set[str]] = defaultdict(set)
    for library in sorted(folder.glob("lib*.so")):
        if library.name == STAND_IN or library.is_symlink():
            continue
        command = ["nm", "-D", "--undefined-only", str(library)]
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
            name, _, version = line.split()[-1].partition("@")
            version = version.strip("@")
            if version.startswith(("libcu", "libnv", "NVSHMEM")) or (not version and name.startswith(PREFIXES)):
                functions[version].add(name)
    return functions


def main() -> None:
    folder = Path(sysconfig.get_paths()["purelib"]) / "torch" / "lib"
    functions = wanted(folder)
    names = sorted(set().union(*functions.values()))
    versions = {version: members for version, members in functions.items() if version}
    with tempfile.TemporaryDirectory() as temporary:
        source, script = Path(temporary) / "nocuda.c", Path(temporary) / "nocuda.map"
        source.write_text("".join(f"long {name}(void) {{ return 100; }}\n" for name in names))
        script.write_text("".join(f"{v} {{ global: {'; '.join(sorted(m))}; }};\n" for v, m in versions.items()))
        command = ["cc", "-shared", "-fPIC", "-w", str(source), f"-Wl,--version-script={script}"]
        subprocess.run([*command, "-o", str(folder / STAND_IN)], check=True)
    for library in LIBRARIES:
        place = folder / library
        place.unlink(missing_ok=True)
        place.symlink_to(STAND_IN)


if __name__ == "__main__":
    main()
