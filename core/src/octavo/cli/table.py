"""Plain aligned columns: readable in a terminal, and still whole when piped or pasted."""

from __future__ import annotations

from collections.abc import Sequence


def columns(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The rows under their header, each column as wide as its widest cell; the last one runs free."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header) - 1)]
    lines = [[cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)] for row in cells]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def size(num_bytes: int) -> str:
    """Bytes for people: 1.5 GiB."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
