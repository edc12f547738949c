"""The dashboard, the alerts and the autoscaler query series that octavo has, by labels that these have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

DEPLOY = Path(__file__).parents[3] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD = json.loads((DEPLOY / "grafana" / "octavo.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
RULES = [rule for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"] for rule in group["rules"]]

QUERIES = {
    **{f"panel {p['id']} {t['refId']}": t["expr"] for p in PANELS for t in p.get("targets", ())},
    **{rule["alert"]: rule["expr"] for rule in RULES},
}
WATCHED = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "http_requests_total",
    "admission_rejections_total",
)


def parse(query: str) -> Any:
    return promql_parser.parse(query.replace("$__rate_interval", "5m"))


def below(expr: Any) -> Iterator[Any]:
    """An expression and everything in it."""
    yield expr
    parts = [getattr(expr, name, None) for name in ("lhs", "rhs", "expr", "param", "vector_selector")]
    for part in (*parts, *getattr(expr, "args", ())):
        if part is not None:
            yield from below(part)


@pytest.mark.parametrize("name", QUERIES)
def test_query_reads_series_that_exist_by_labels_that_they_have(name: str, series: dict[str, set[str]]) -> None:
    parts = list(below(parse(QUERIES[name])))
    selectors = [part for part in parts if isinstance(part, promql_parser.VectorSelector)]
    read = {selector.name for selector in selectors}
    assert read
    assert read <= series.keys()
    for selector in selectors:
        assert {matcher.name for matcher in selector.matchers.matchers} <= series[selector.name]
    labels = set.intersection(*(series[name] for name in read))
    for part in parts:
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            assert set(part.modifier.labels) <= labels


def test_the_dashboard_shows_what_matters() -> None:
    text = " ".join(QUERIES[name] for name in QUERIES if name.startswith("panel"))
    assert [name for name in WATCHED if f"octavo:{name}" not in text] == []


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for one, other in combinations([panel["gridPos"] for panel in PANELS], 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in PANELS)


def test_panels_use_the_variables_of_the_dashboard_and_say_what_they_show() -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    for panel in PANELS:
        if panel["type"] == "row":
            continue
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert set(re.findall(r"\$(?!__)(\w+)", target["expr"])) <= variables
    for variable in DASHBOARD["templating"]["list"]:
        assert set(re.findall(r"\$(\w+)", variable.get("definition", ""))) <= variables


def test_the_variables_of_the_dashboard_are_labels_that_exist(series: dict[str, set[str]]) -> None:
    definitions = [v["definition"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    for definition in definitions:
        name, label = re.findall(r"^label_values\(([\w:]+)(?:\{.*\})?, (\w+)\)$", definition)[0]
        assert label in series[name]
    assert len(definitions) == 2


def test_reasons_that_alerts_ask_for_are_given_by_the_server() -> None:
    asked = {reason for rule in RULES for reason in re.findall(r'reason="(\w+)"', rule["expr"])}
    service = (DEPLOY.parent / "core" / "src" / "octavo" / "server" / "service.py").read_text()
    assert asked
    assert asked <= set(re.findall(r'rejections\.labels\("(\w+)"\)', service))


def test_the_autoscalers_metrics_are_what_the_adapter_makes_of_octavos(series: dict[str, set[str]]) -> None:
    (rule,) = yaml.safe_load((PROMETHEUS / "adapter.yaml").read_text())["rules"]["custom"]
    (pattern,) = re.findall(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    renamed = re.sub(r"\$\{(\d)\}", r"\\\1", rule["name"]["as"])
    offered = {re.sub(rule["name"]["matches"], renamed, name) for name in series if re.fullmatch(pattern, name)}
    values = yaml.safe_load((DEPLOY / "helm" / "octavo" / "values.yaml").read_text())
    assert set(values["autoscaling"]["metrics"]) == offered == {
        "octavo_num_requests_waiting",
        "octavo_num_requests_running",
    }  # fmt: skip


def test_every_alert_says_what_it_means_and_is_tried_by_the_rules_tests() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    fired = [re.findall(r'"(\w+)"', s["labels"])[0] for s in tests[0]["promql_expr_test"][0]["exp_samples"]]
    assert fired == names


def test_prometheus_scrapes_the_route_of_metrics_and_reads_the_rules() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    assert [job["metrics_path"] for job in config["scrape_configs"]] == ["/metrics"]
    assert re.search(r'job=~"\.\*octavo\.\*"', RULES[0]["expr"])
    assert "octavo" in config["scrape_configs"][0]["job_name"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian's prometheus)")
@pytest.mark.parametrize("command", ["check config prometheus.yml", "test rules alerts_test.yml"])
def test_promtool_agrees(command: str) -> None:
    done = subprocess.run(["promtool", *command.split()], cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
