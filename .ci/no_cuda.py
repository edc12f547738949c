"""Let a torch built for CUDA be imported without CUDA's libraries, where nothing of CUDA is used.

    python no_cuda.py        in the environment of that torch, installed with --no-deps

For some versions PyPI has no torch but the one built for CUDA, whose libraries are five gigabytes. They are searched
for when torch is imported, so one small library takes the names of all of them. Its functions answer 100, which is
CUDA's word for "no device". Wants a C compiler, nm and objdump.
"""

from __future__ import annotations

import subprocess
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

LIBRARIES = ("libcu", "libnccl", "libnv")
DRIVER = "libcuda.so.1"
"""Of the cards' driver: torch opens what wants it when it finds a card."""
PREFIXES = ("cu", "__cuda", "nccl", "nvrtc", "nvshmem")
STAND_IN = "libnocuda.so"


def printed(*command: object) -> list[list[str]]:
    """The words of each line that a command prints."""
    text = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout
    return [line.split() for line in text.splitlines()]


def wanted(folder: Path) -> tuple[set[str], dict[str, set[str]]]:
    """CUDA's libraries that those in `folder` ask for; version ("" for none) -> the functions of CUDA they call."""
    names: set[str] = set()
    functions: dict[str, set[str]] = defaultdict(set)
    for library in sorted(folder.glob("lib*.so")):
        if library.name == STAND_IN or library.is_symlink():
            continue
        needed = {words[1] for words in printed("objdump", "-p", library) if words[:1] == ["NEEDED"]}
        names |= {name for name in needed - {DRIVER} if name.startswith(LIBRARIES)}
        for words in printed("nm", "-D", "--undefined-only", library):
            name, _, version = words[-1].partition("@")
            version = version.strip("@")
            if version.startswith(("libcu", "libnv", "NVSHMEM")) or (not version and name.startswith(PREFIXES)):
                functions[version].add(name)
    return names, functions


def main() -> None:
    folder = Path(sysconfig.get_paths()["purelib"]) / "torch" / "lib"
    libraries, functions = wanted(folder)
    if not libraries:
        return
    names = sorted(set().union(*functions.values()))
    versions = {version: members for version, members in functions.items() if version}
    with tempfile.TemporaryDirectory() as temporary:
        source, script = Path(temporary) / "nocuda.c", Path(temporary) / "nocuda.map"
        source.write_text("".join(f"long {name}(void) {{ return 100; }}\n" for name in names))
        script.write_text("".join(f"{v} {{ global: {'; '.join(sorted(m))}; }};\n" for v, m in versions.items()))
        command = ["cc", "-shared", "-fPIC", "-w", str(source), f"-Wl,--version-script={script}"]
        subprocess.run([*command, "-o", str(folder / STAND_IN)], check=True)
    for library in libraries:
        place = folder / library
        place.unlink(missing_ok=True)
        place.symlink_to(STAND_IN)


if __name__ == "__main__":
    main()
