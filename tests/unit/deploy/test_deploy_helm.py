"""The chart, rendered by Helm: manifests fit Kubernetes' schemas, and pods start a server that octavo accepts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from octavo.cli.options import config_from
from octavo.cli.serve import DEFAULTS, serve
from octavo.config import EngineConfig
from octavo.server.access import KeyRing, Rules
from octavo.server.options import ServerOptions

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "octavo"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())

Render = Callable[..., dict[str, Any]]

EVERYTHING: dict[str, Any] = {
    "platform": "cuda",
    "config": {
        "model": "/models/llama",
        "max-body-bytes": 33554432,
        "enable-prefix-caching": False,
        "dtype": "float16",
    },
    "models": {"existingClaim": "models"},
    "cache": {"create": True, "storageClass": "fast", "accessMode": "ReadWriteMany"},
    "hubToken": {"secretName": "hub"},
    "apiKeys": {
        "entries": [
            {"name": "alice", "key": "sesame", "tokens_per_minute": 1000000, "models": ["llama"], "max_priority": -1},
            {"name": "operator", "sha256": "0" * 64, "admin": True},
        ]
    },
    "gpu": {"count": 4},
    "grpc": {"enabled": True},
    "ingress": {"enabled": True, "tlsSecret": "certificate"},
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "keySecret": {"name": "scrape"}},
    "imagePullSecrets": [{"name": "pull"}],
    "service": {"annotations": {"a": "b"}},
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "a"},
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    ],
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "extraArgs": ["--log-level=debug"],
    "extraEnv": [{"name": "NCCL_DEBUG", "value": "WARN"}],
}


def container(manifests: dict[str, Any]) -> dict[str, Any]:
    (only,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    return only


def pod(manifests: dict[str, Any]) -> dict[str, Any]:
    return manifests["Deployment"]["spec"]["template"]["spec"]


def started(manifests: dict[str, Any], folder: Path) -> tuple[EngineConfig, ServerOptions]:
    """What the container's command makes of the files that are mounted for it."""
    files = {"config.yaml": manifests["ConfigMap"]["data"]["config.yaml"]}
    files |= manifests.get("Secret", {}).get("stringData", {})
    for name, text in files.items():
        (folder / name).write_text(text)
    mounts = {"/etc/octavo/": f"{folder}/", "/etc/octavo-keys/": f"{folder}/"}
    arguments = container(manifests)["args"]
    for path, here in mounts.items():
        arguments = [argument.replace(path, here) for argument in arguments]
    chosen = serve.make_context("serve", arguments).params
    options = ServerOptions(**{name: chosen.pop(name) for name in DEFAULTS})
    return config_from(chosen), options


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["default", "everything"])
@pytest.mark.parametrize("version", ["1.28", "1.34"])
def test_manifests_fit_the_schemas_of_kubernetes(render: Render, values: dict[str, Any], version: str) -> None:
    manifests = render(**values)
    checked = [one for kind, one in manifests.items() if kind not in ("notes", "ServiceMonitor")]  # the operator's own
    for manifest in checked:
        kubernetes_validate.validate(manifest, version, strict=True)
    assert len(checked) == (8 if values else 4)


def test_a_wrong_manifest_would_be_found(render: Render) -> None:
    manifest = render()["Deployment"]
    manifest["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["perod"] = 5
    with pytest.raises(kubernetes_validate.ValidationError, match="perod"):
        kubernetes_validate.validate(manifest, "1.28", strict=True)


def test_helm_lints_the_chart_without_a_warning() -> None:
    helm = pytest.importorskip("helm_python")
    found = helm.lint(str(CHART))
    assert found["errors"] == []
    assert [message for message in found["messages"] if "icon" not in message["error"]] == []


def test_the_pod_starts_a_server_with_the_default_values(render: Render, tmp_path: Path) -> None:
    config, options = started(render(), tmp_path)
    assert (config.model.model, config.platform.name) == ("Qwen/Qwen3-0.6B", "cpu")
    assert config.scheduler.max_queue == VALUES["config"]["max-queue"]
    assert (options.host, options.log_format, options.access_log) == ("0.0.0.0", "json", True)
    assert options.api_keys_file is None


def test_the_pod_starts_a_server_with_keys_gpus_and_flags_of_its_own(render: Render, tmp_path: Path) -> None:
    manifests = render(**EVERYTHING)
    config, options = started(manifests, tmp_path)
    assert (config.model.model, config.platform.name) == ("/models/llama", "cuda")
    assert config.parallel.tensor_parallel_size == container(manifests)["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert (options.max_body_bytes, options.log_level, options.grpc_port) == (33554432, "debug", 8001)
    assert not config.cache.enable_prefix_caching
    assert options.api_keys_file is not None
    ring = KeyRing(file=Path(options.api_keys_file))
    found = ring.find(b"sesame")
    assert found is not None
    assert found.rules.tokens_per_minute == 1000000


def test_the_ports_that_are_named_are_those_the_server_listens_on(render: Render, tmp_path: Path) -> None:
    manifests = render(**EVERYTHING)
    _, options = started(manifests, tmp_path)
    ports = {port["name"]: port["containerPort"] for port in container(manifests)["ports"]}
    assert ports == {"http": options.port, "grpc": options.grpc_port}
    assert {port["targetPort"] for port in manifests["Service"]["spec"]["ports"]} == ports.keys()
    (rule,) = manifests["Ingress"]["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert backend["name"] == manifests["Service"]["metadata"]["name"]
    assert backend["port"]["name"] in {port["name"] for port in manifests["Service"]["spec"]["ports"]}


@pytest.mark.parametrize("seconds", [0, 60, 1000000 // 12])
def test_a_pod_is_killed_later_than_its_server_has_drained(render: Render, tmp_path: Path, seconds: int) -> None:
    manifests = render(shutdownTimeout=seconds, preStopSeconds=7)
    _, options = started(manifests, tmp_path)
    assert options.shutdown_timeout == seconds
    assert pod(manifests)["terminationGracePeriodSeconds"] >= 7 + seconds + 15
    assert container(manifests)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]


def test_probes_ask_the_route_that_needs_no_key(render: Render) -> None:
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container(render())[name]["httpGet"] == {"path": "/health", "port": "http"}


def test_a_rollout_waits_as_long_as_a_model_may_load(render: Render) -> None:
    manifests = render(probes={"startup": {"periodSeconds": 10, "failureThreshold": 720}})
    assert manifests["Deployment"]["spec"]["progressDeadlineSeconds"] > 7200


def test_no_service_puts_variables_into_the_pod_that_octavo_would_read(render: Render) -> None:
    assert pod(render())["enableServiceLinks"] is False


def test_the_pod_is_no_root_and_writes_only_to_volumes(render: Render) -> None:
    manifests = render()
    assert pod(manifests)["securityContext"]["runAsNonRoot"] is True
    assert pod(manifests)["automountServiceAccountToken"] is False
    context = container(manifests)["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["mountPath"] for mount in container(manifests)["volumeMounts"] if not mount.get("readOnly")}
    assert mounts == {"/cache", "/tmp", "/dev/shm"}


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["default", "everything"])
def test_every_mount_has_its_volume(render: Render, values: dict[str, Any]) -> None:
    manifests = render(**values)
    volumes = {volume["name"]: volume for volume in pod(manifests)["volumes"]}
    assert [mount["name"] for mount in container(manifests)["volumeMounts"]] == list(volumes)
    assert volumes["config"]["configMap"]["name"] == manifests["ConfigMap"]["metadata"]["name"]
    if values:
        assert volumes["keys"]["secret"]["secretName"] == manifests["Secret"]["metadata"]["name"]
        claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
        assert claim == manifests["PersistentVolumeClaim"]["metadata"]["name"]


def test_everything_selects_the_pods_of_the_release(render: Render) -> None:
    manifests = render(**EVERYTHING)
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [manifests["Service"]["spec"]["selector"]] + [
        manifests[kind]["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")
    ]
    for selector in selectors:
        assert selector
        assert selector.items() <= labels.items()
    monitored = manifests["ServiceMonitor"]["spec"]
    assert monitored["selector"]["matchLabels"].items() <= manifests["Service"]["metadata"]["labels"].items()
    assert monitored["endpoints"][0]["port"] in {port["name"] for port in manifests["Service"]["spec"]["ports"]}


def test_the_autoscaler_alone_says_how_many_replicas_there_are(render: Render) -> None:
    manifests = render(**EVERYTHING)
    assert "replicas" not in manifests["Deployment"]["spec"]
    scaler = manifests["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == manifests["Deployment"]["metadata"]["name"]
    asked = {metric["pods"]["metric"]["name"] for metric in scaler["metrics"]}
    assert asked == set(VALUES["autoscaling"]["metrics"])


def test_a_strategy_without_a_pod_more_keeps_nothing_of_the_other(render: Render) -> None:
    assert render(strategy={"type": "Recreate"})["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
    assert render()["Deployment"]["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_a_secret_of_the_operators_own_is_mounted_and_none_is_made(render: Render) -> None:
    manifests = render(apiKeys={"existingSecret": "mine", "entries": EVERYTHING["apiKeys"]["entries"]})
    assert "Secret" not in manifests
    assert {"name": "keys", "secret": {"secretName": "mine"}} in pod(manifests)["volumes"]


def test_changed_flags_and_keys_make_new_pods(render: Render) -> None:
    def marks(**values: Any) -> dict[str, str]:
        return render(**values)["Deployment"]["spec"]["template"]["metadata"]["annotations"]

    keys = {"entries": [{"name": "a", "key": "b"}]}
    before, flags, entries = marks(), marks(config={"model": "other"}), marks(apiKeys=keys)
    assert before["checksum/config"] != flags["checksum/config"]
    assert before["checksum/keys"] != entries["checksum/keys"]


def test_keys_are_in_no_manifest_but_the_secret(render: Render) -> None:
    manifests = render(**EVERYTHING)
    secret = manifests.pop("Secret")
    assert "sesame" in json.dumps(secret)
    assert "sesame" not in json.dumps(manifests)


def test_the_notes_warn_of_a_server_without_keys(render: Render) -> None:
    assert "No keys are asked for" in render()["notes"]
    assert "No keys" not in render(**EVERYTHING)["notes"]


def test_the_ingress_lets_through_what_the_server_takes() -> None:
    annotations = {key.rsplit("/")[-1]: value for key, value in VALUES["ingress"]["annotations"].items()}
    assert annotations["proxy-buffering"] == "off"
    assert annotations["proxy-body-size"] == f"{ServerOptions().max_body_bytes // 2**20}m"
    assert float(annotations["proxy-read-timeout"]) > ServerOptions().sse_keep_alive_interval


def test_the_default_values_fit_the_schema_and_everything_does() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)
    jsonschema.validate(EVERYTHING, SCHEMA)


def test_every_value_of_the_schema_is_shown_in_the_values_file() -> None:
    assert SCHEMA["properties"].keys() - {"global"} == VALUES.keys()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replicas": 2}, "replicas"),
        ({"config": {"model": "m", "port": 9000}}, "port"),
        ({"config": {"model": "m", "api_key": "k"}}, "api_key"),
        ({"config": {"model": ""}}, "model"),
        ({"platform": "tpu"}, "platform"),
        ({"apiKeys": {"entries": [{"name": "a"}]}}, "apiKeys"),
        ({"apiKeys": {"entries": [{"name": "a", "key": "b", "requests": 1}]}}, "requests"),
        ({"gpu": {"count": "four"}}, "gpu"),
        ({"cache": {"size": "much"}}, "cache"),
    ],
)
def test_a_wrong_value_is_refused_by_name(render: Render, values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        render(**values)


def test_what_the_chart_keeps_to_itself_are_flags_of_octavo(flags: set[str]) -> None:
    kept = SCHEMA["properties"]["config"]["propertyNames"]["not"]["enum"]
    assert {f"--{name.replace('_', '-')}" for name in kept} <= flags
    assert {name.replace("-", "_") for name in kept} <= set(kept)


def test_entries_of_keys_have_the_fields_that_octavo_reads() -> None:
    fields = SCHEMA["properties"]["apiKeys"]["properties"]["entries"]["items"]["properties"]
    assert fields.keys() == set(Rules.__struct_fields__)
