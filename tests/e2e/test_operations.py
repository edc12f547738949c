"""Operating a server: sleep, reload, TLS, structured logs. Real processes; the tiny model where memory matters."""

from __future__ import annotations

import json
import os
import signal
import ssl
import time
from pathlib import Path

import httpx
import pytest

BODY = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
SCRIPTED = {"prompt": [40], "max_tokens": 3}


def wait_until(condition, timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def steered(tiny_model, octavo_serve, tmp_path_factory):
    """`octavo serve` of the tiny model, from a configuration file, with everything an operator may want."""
    folder = tmp_path_factory.mktemp("steered")
    config = {
        "model": str(tiny_model),
        "port": 0,
        "served-model-name": "tiny",
        "platform": "cpu",
        "dtype": "float32",
        "max-num-seqs": 8,
        "kv-cache-memory-bytes": "1G",
        "threads": 1,
        "enable-admin": True,
        "access-log": True,
        "log-format": "json",
        "metrics-alias": "vllm",
    }
    (folder / "octavo.json").write_text(json.dumps(config))
    return octavo_serve("--config", str(folder / "octavo.json"))


def answer(server, **extra) -> dict:
    response = httpx.post(f"{server.url}/v1/completions", json=BODY | extra, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_refuses_requests_and_a_woken_one_says_the_same(steered, level):
    before = answer(steered)
    slept = httpx.post(f"{steered.url}/sleep", params={"level": level}, timeout=60)
    assert slept.json() == {"status": "sleeping", "level": level}
    assert httpx.get(f"{steered.url}/is_sleeping").json() == {"is_sleeping": True}
    resumed = httpx.post(f"{steered.url}/resume")
    assert (resumed.status_code, resumed.json()["error"]["code"]) == (503, "asleep")
    refused = httpx.post(f"{steered.url}/v1/completions", json=BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "asleep")
    assert httpx.get(f"{steered.url}/health").status_code == 200
    metrics = httpx.get(f"{steered.url}/metrics").text
    state = ("awake", "weights_offloaded", "discard_all")[level]
    assert f'vllm:engine_sleep_state{{engine="0",model_name="tiny",sleep_state="{state}"}} 1.0' in metrics
    woken = httpx.post(f"{steered.url}/wake_up", params={"tags": ["weights", "kv_cache"]}, timeout=120)
    assert woken.json()["status"] == "awake"
    after = answer(steered)
    assert after["choices"][0]["text"] == before["choices"][0]["text"]
    assert after["usage"].get("prompt_tokens_details") in (None, {"cached_tokens": 0})


def test_the_log_holds_a_json_line_per_request_and_no_prompt(steered):
    answer(steered, prompt="a very secret plan")
    text = steered.log.read_text()
    entries = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    last = [entry for entry in entries if entry.get("path") == "/v1/completions"][-1]
    assert (last["status"], last["generated_tokens"], last["model"]) == (200, 8, "tiny")
    assert last["ttft_s"] <= last["duration_s"]
    assert "secret" not in text


def test_the_configuration_is_shown(steered):
    info = httpx.get(f"{steered.url}/server_info").json()
    assert info["config"]["cache.memory_bytes"] == 2**30
    assert info["server"]["metrics_alias"] == "vllm"


def write_certificate(authority, folder: Path) -> dict[str, str]:
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    (folder / "cert.pem").write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    return {"ssl_certfile": str(folder / "cert.pem"), "ssl_keyfile": str(folder / "key.pem")}


def test_https_is_served_and_a_new_certificate_is_taken_on_sighup(scripted_server, tmp_path):
    import trustme

    old, new = trustme.CA(), trustme.CA()
    files = write_certificate(old, tmp_path)
    server = scripted_server(**files)
    assert server.url.startswith("https://127.0.0.1:")

    def trusts(authority) -> bool:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        try:
            return httpx.get(f"{server.url}/health", verify=context).status_code == 200
        except httpx.ConnectError:
            return False

    assert trusts(old)
    assert not trusts(new)
    (tmp_path / "cert.pem").write_text("nonsense")
    os.kill(server.pid, signal.SIGHUP)
    wait_until(lambda: "could be read again" in server.log.read_text())
    assert trusts(old)
    write_certificate(new, tmp_path)
    os.kill(server.pid, signal.SIGHUP)
    wait_until(lambda: trusts(new))
    assert not trusts(old)


def test_clients_must_show_a_certificate_where_the_operator_wants_one(scripted_server, tmp_path):
    import trustme

    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    server = scripted_server(
        **write_certificate(authority, tmp_path), ssl_ca_certs=str(tmp_path / "ca.pem"), ssl_cert_reqs="required"
    )
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with pytest.raises((httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError)):
        httpx.get(f"{server.url}/health", verify=context)
    authority.issue_cert("client@example.org").configure_cert(context)
    assert httpx.get(f"{server.url}/health", verify=context).status_code == 200


def test_sighup_reads_keys_again_and_streams_go_on(scripted_server, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: a, key: old}")
    server = scripted_server(delay=0.01, api_keys_file=str(file))

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{server.url}/v1/completions", json=SCRIPTED, headers=headers).status_code

    assert (status("old"), status("new")) == (200, 401)
    with httpx.Client(headers={"authorization": "Bearer old"}) as client:
        body = SCRIPTED | {"max_tokens": 300, "stream": True}
        with client.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
            lines = (line for line in response.iter_lines() if line)
            assert next(lines).startswith("data: {")
            file.write_text("- {name: a, key: new}")
            os.kill(server.pid, signal.SIGHUP)
            wait_until(lambda: status("new") == 200)
            assert status("old") == 401
            assert list(lines)[-1] == "data: [DONE]"
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait(15) == 0
