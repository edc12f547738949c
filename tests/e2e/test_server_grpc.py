"""gRPC in a server process: beside HTTP, through a shutdown, with a port that is taken."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.server.grpc.v1 import octavo_pb2 as pb
from octavo.server.grpc.v1.octavo_pb2_grpc import OctavoStub

OCTAVO = str(Path(sys.executable).with_name("octavo"))
SAMPLING = pb.SamplingParams(max_tokens=100, ignore_eos=True)


def request(token: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[token]), sampling=SAMPLING)


def test_both_doors_lead_to_one_engine_and_a_shutdown_lets_both_finish(scripted_server):
    server = scripted_server(delay=0.01, grpc_port=0, shutdown_timeout=30)
    with grpc.insecure_channel(server.grpc_address) as channel, httpx.Client() as http:
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest())
        next(watch)
        responses = OctavoStub(channel).Generate(request(40))
        got = [token for output in next(responses).outputs for token in output.token_ids]
        body = {"prompt": [41], "max_tokens": 100, "stream": True}
        with http.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            os.kill(server.pid, signal.SIGTERM)
            events = [line for line in stream.iter_lines() if line]
        got += [token for response in responses for output in response.outputs for token in output.token_ids]
        assert got == [40] * 100
        assert events[-1] == "data: [DONE]"
        assert [response.status for response in watch] == [health_pb2.HealthCheckResponse.NOT_SERVING]
    assert server.wait(20) == 0


def test_a_dead_engine_ends_grpc_calls_with_unavailable(scripted_server):
    server = scripted_server(delay=0.02, grpc_port=0)
    with grpc.insecure_channel(server.grpc_address) as channel:
        responses = OctavoStub(channel).Generate(request(40))
        next(responses)
        os.kill(server.engine_pid, signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as caught:
            list(responses)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert dict(caught.value.trailing_metadata())["octavo-code"] == "engine_dead"
    assert server.wait(20) == 1


def test_a_taken_grpc_port_ends_the_start_with_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = ["--port", "0", "--grpc-port", str(taken.getsockname()[1]), "--log-level", "error"]
        result = subprocess.run([OCTAVO, "serve", *flags], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "--grpc-port" in result.stderr
    assert "Traceback" not in result.stderr
