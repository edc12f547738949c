"""What the files of deploy/ are held against: the flags, variables and metrics that octavo has; the rendered chart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.core import Metric

from octavo.cli.serve import serve
from octavo.engine.info import ModelInfo
from octavo.metrics import EngineMetrics
from octavo.server.options import ServerOptions
from octavo.server.service import Service

DEPLOY = Path(__file__).parents[3] / "deploy"
CHART = DEPLOY / "helm" / "octavo"

Render = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def flags() -> set[str]:
    """Every flag of `octavo serve`, with its dashes."""
    return {name for param in serve.params for name in (*param.opts, *param.secondary_opts) if name.startswith("--")}


@pytest.fixture(scope="session")
def variables() -> set[str]:
    """Every variable that `octavo serve` reads."""
    return {str(param.envvar) for param in serve.params if param.envvar}


@pytest.fixture(scope="session")
def series() -> dict[str, set[str]]:
    """Every series of /metrics: its labels, and those that Prometheus adds."""
    info = ModelInfo(model="m", served_names=("m",), max_model_len=64, vocab_size=100)
    service = Service(SimpleNamespace(info=info), ServerOptions())  # type: ignore[arg-type]
    service.http_requests.labels("GET", "200").inc()
    service.rejections.labels("queue_full").inc()
    added = {"instance", "job"}
    found = {"up": added}
    for family in (*EngineMetrics(info).registry.collect(), *service.registry.collect()):
        for sample in samples_of(family):
            found.setdefault(sample.name, set(added)).update(sample.labels)
    return found


def samples_of(family: Metric) -> Iterator[Any]:
    """The series that are stored: without the times at which counters were made."""
    return (sample for sample in family.samples if not sample.name.endswith("_created"))


@pytest.fixture
def render() -> Render:
    """The chart's manifests by kind, rendered by Helm with some values; and the text of its notes."""
    helm = pytest.importorskip("helm_python")

    def rendered(**values: Any) -> dict[str, Any]:
        with helm.Chart.load(str(CHART)) as chart:
            texts = chart.render(values, name="demo", namespace="models")
        manifests: dict[str, Any] = {"notes": texts.pop("octavo/templates/NOTES.txt")}
        for name, text in texts.items():
            for manifest in filter(None, yaml.safe_load_all(text)):
                assert manifest["kind"] not in manifests, f"{name}: a second {manifest['kind']}"
                manifests[manifest["kind"]] = manifest
        return manifests

    return rendered
