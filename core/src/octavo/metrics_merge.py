"""One set of metrics out of several API processes' over one engine.

What the engine counts, every process is told: the newest word counts. What a process counts itself (requests, times,
responses) is added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from prometheus_client.core import Metric


class Point(msgspec.Struct, array_like=True, frozen=True):
    """One series' value."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, array_like=True, frozen=True):
    """A metric with all its series."""

    name: str
    text: str
    kind: str
    points: list[Point]


class Snapshot(msgspec.Struct, frozen=True):
    """A process' metrics. steps: of the engine, when it told `engine`. own: what the process counts itself."""

    steps: int
    num_live: int
    engine: list[Family]
    own: list[Family]


def freeze(families: Iterable[Metric]) -> list[Family]:
    """Families as they travel between processes."""
    return [
        Family(f.name, f.documentation, f.type, [Point(s.name, dict(s.labels), float(s.value)) for s in f.samples])
        for f in families
    ]


def merged(snapshots: Sequence[Snapshot]) -> list[Metric]:
    """The families of all processes together."""
    newest = max(snapshots, key=lambda snapshot: snapshot.steps)
    engine = [thaw(family) for family in newest.engine]
    by_name: dict[str, list[Family]] = {}
    for snapshot in snapshots:
        for family in snapshot.own:
            by_name.setdefault(family.name, []).append(family)
    return engine + [added(families) for families in by_name.values()]


def added(families: Sequence[Family]) -> Metric:
    """The sum of one metric over processes; when it began (`_created`) is the earliest."""
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in families:
        for point in family.points:
            key = (point.name, tuple(point.labels.items()))
            known = values.get(key)
            if known is None:
                values[key] = point.value
            else:
                values[key] = min(known, point.value) if point.name.endswith("_created") else known + point.value
    first = families[0]
    return thaw(Family(first.name, first.text, first.kind, [Point(n, dict(ls), v) for (n, ls), v in values.items()]))


def thaw(family: Family) -> Metric:
    """A family as `generate_latest` reads it."""
    metric = Metric(family.name, family.text, family.kind)
    for point in family.points:
        metric.add_sample(point.name, point.labels, point.value)
    return metric
