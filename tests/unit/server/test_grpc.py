"""gRPC over a real channel: the same service, the same answers and the same refusals as over HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
import trustme
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo import __version__
from octavo.errors import ConfigError
from octavo.server.grpc import v1
from octavo.server.grpc.listener import GrpcListener
from octavo.server.grpc.requests import completion_body
from octavo.server.grpc.v1 import octavo_pb2 as pb
from octavo.server.grpc.v1.octavo_pb2_grpc import OctavoStub
from octavo.server.openai.protocol import CompletionBody
from octavo.server.options import ServerOptions

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
Code = grpc.StatusCode
Connect = Callable[..., Awaitable[grpc.aio.Channel]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """`await connect(server)`: a channel to a listener on the server's service."""
    open_: list[tuple[grpc.aio.Channel, GrpcListener]] = []

    async def make(server) -> grpc.aio.Channel:
        listener = GrpcListener(server.service.options)
        await listener.start(server.service)
        channel = grpc.aio.insecure_channel(listener.address)
        open_.append((channel, listener))
        return channel

    yield make
    for channel, listener in open_:
        await channel.close()
        await listener.stop(0)


def options(**more) -> ServerOptions:
    return ServerOptions(grpc_port=0, **more)


async def refused(call, code: Code, field: str | None = None) -> str:
    """The message of a call that ends with `code`, naming `field`."""
    first = call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await first
    assert caught.value.code() == code, caught.value.details()
    metadata = dict(caught.value.trailing_metadata() or ())
    assert metadata.get("octavo-field") == field
    message = caught.value.details()
    assert message
    return message


async def test_a_stream_joins_to_the_unary_answer_and_to_that_of_http(serve, connect):
    server = await serve("The sheets, 你好, were folded.", delay=0.01, options=options())
    stub = OctavoStub(await connect(server))
    request = pb.GenerateRequest(text="Once upon", sampling=pb.SamplingParams(max_tokens=40, temperature=0))
    responses = [response async for response in stub.Generate(request)]
    outputs = [output for response in responses for output in response.outputs]
    whole = await stub.GenerateUnary(request)
    answer = await server.ask(PATH, {"prompt": "Once upon", "max_tokens": 40, "temperature": 0})
    assert len(responses) > 1
    assert "".join(output.text for output in outputs) == whole.outputs[0].text == answer["choices"][0]["text"]
    assert [token for output in outputs for token in output.token_ids] == list(whole.outputs[0].token_ids)
    assert [output.finish_reason for output in outputs if output.finish_reason] == ["stop"]
    assert (responses[-1].usage.completion_tokens, whole.usage.prompt_tokens) == (
        answer["usage"]["completion_tokens"],
        answer["usage"]["prompt_tokens"],
    )
    assert list(responses[0].prompt_token_ids) == list(whole.prompt_token_ids)
    assert not any(response.prompt_token_ids for response in responses[1:])
    await server.settled()


async def test_token_ids_go_in_and_several_answers_come_out(serve, connect):
    server = await serve([40, 41, 42], options=options())
    stub = OctavoStub(await connect(server))
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[50, 51]),
        request_id="mine",
        sampling=pb.SamplingParams(n=3, max_tokens=2, logprobs=2, prompt_logprobs=1),
    )
    whole = await stub.GenerateUnary(request)
    assert whole.request_id == "mine"
    assert list(whole.prompt_token_ids) == [50, 51]
    assert [list(output.token_ids) for output in whole.outputs] == [[40, 41]] * 3
    assert [len(output.logprobs) for output in whole.outputs] == [2] * 3
    assert whole.outputs[0].logprobs[0].entries[0].token_id == 40
    assert whole.outputs[0].logprobs[0].entries[0].token
    assert [len(row.entries) > 0 for row in whole.prompt_logprobs] == [False, True]
    assert whole.usage.completion_tokens == 6


async def test_why_an_answer_stopped_is_told(serve, connect):
    server = await serve("one two three", options=options())
    stub = OctavoStub(await connect(server))
    stopped = await stub.GenerateUnary(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop=["two"])))
    assert (stopped.outputs[0].stop_string, stopped.outputs[0].finish_reason) == ("two", "stop")
    token = stopped.outputs[0].token_ids[0]
    stopped = await stub.GenerateUnary(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(stop_token_ids=[token])))
    assert stopped.outputs[0].stop_token_id == token


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (pb.GenerateRequest(), Code.INVALID_ARGUMENT, "prompt"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[999999])), Code.INVALID_ARGUMENT, "prompt"),
        (pb.GenerateRequest(text="x", model="gpt-9"), Code.NOT_FOUND, "model"),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(top_p=2)), Code.INVALID_ARGUMENT, "top_p"),
        (
            pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=float("nan"))),
            Code.INVALID_ARGUMENT,
            "temperature",
        ),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=0)), Code.INVALID_ARGUMENT, "max_tokens"),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=999)), Code.INVALID_ARGUMENT, "max_tokens"),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(n=-1)), Code.INVALID_ARGUMENT, "n"),
        (pb.GenerateRequest(text="x", sampling=pb.SamplingParams(logprobs=21)), Code.INVALID_ARGUMENT, "logprobs"),
        (
            pb.GenerateRequest(text="x", sampling=pb.SamplingParams(logit_bias={999999: 1.0})),
            Code.INVALID_ARGUMENT,
            "logit_bias",
        ),
        (
            pb.GenerateRequest(text="x", sampling=pb.SamplingParams(structured_outputs=pb.StructuredOutputs())),
            Code.INVALID_ARGUMENT,
            "structured_outputs",
        ),
        (pb.GenerateRequest(text="x", request_id="i" * 300), Code.INVALID_ARGUMENT, "request_id"),
    ],
)
async def test_a_wrong_request_names_its_field_streaming_or_not(serve, connect, request_, code, field):
    server = await serve(options=options())
    stub = OctavoStub(await connect(server))
    await refused(stub.Generate(request_), code, field)
    await refused(stub.GenerateUnary(request_), code, field)
    good = await stub.GenerateUnary(pb.GenerateRequest(text="next", sampling=pb.SamplingParams(max_tokens=1)))
    assert good.outputs[0].finish_reason == "length"


async def test_every_sampling_field_is_one_of_the_http_api():
    names = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert names <= set(CompletionBody.__struct_fields__)
    everything = pb.SamplingParams(
        n=2,
        seed=-5,
        top_k=-1,
        ignore_eos=False,
        stop=["a"],
        allowed_token_ids=[1, 2],
        logit_bias={7: -1.5},
        structured_outputs=pb.StructuredOutputs(choice=pb.StructuredOutputs.Choice(texts=["yes", "no"])),
    )
    body = completion_body(pb.GenerateRequest(text="x", sampling=everything))
    assert (body.n, body.seed, body.top_k, body.ignore_eos, body.stop) == (2, -5, -1, False, ["a"])
    assert (body.allowed_token_ids, body.logit_bias) == ([1, 2], {"7": -1.5})
    assert body.structured_outputs == {"choice": ["yes", "no"]}
    assert body.temperature is None


async def test_a_cancelled_call_aborts_its_generation(serve, connect):
    server = await serve([40] * 250, delay=0.005, options=options())
    stub = OctavoStub(await connect(server))
    request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=240))
    call = stub.Generate(request)
    await call.read()
    assert server.service.num_live == 1
    call.cancel()
    await server.settled()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GenerateUnary(request, timeout=0.1)
    assert caught.value.code() == Code.DEADLINE_EXCEEDED
    await server.settled()


async def test_a_key_guards_all_but_health(serve, connect):
    server = await serve(options=options(api_keys=("sesame",)))
    channel = await connect(server)
    stub = OctavoStub(channel)
    request = pb.GenerateRequest(text="x")
    for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "sesame"),)):
        await refused(stub.Generate(request, metadata=metadata), Code.UNAUTHENTICATED)
        await refused(stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata), Code.UNAUTHENTICATED)
    assert (await stub.GenerateUnary(request, metadata=(("authorization", "Bearer sesame"),))).outputs
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


async def test_the_limits_of_a_key_hold_and_free_their_places(serve, connect, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: alice, key: sesame, max_concurrent: 1, models: [tiny]}]")
    server = await serve([40] * 200, delay=0.005, options=options(api_keys_file=str(keys)))
    stub = OctavoStub(await connect(server))
    metadata = (("authorization", "Bearer sesame"),)
    request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=150))
    busy = stub.Generate(request, metadata=metadata)
    await busy.read()
    await refused(stub.Generate(request, metadata=metadata), Code.RESOURCE_EXHAUSTED)
    busy.cancel()
    await server.settled()
    short = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=1))
    assert (await stub.GenerateUnary(short, metadata=metadata)).outputs
    other = pb.GenerateRequest(text="x", model="tiny-alias")
    await refused(stub.GenerateUnary(other, metadata=metadata), Code.PERMISSION_DENIED, "model")


async def test_a_full_queue_and_a_shutdown_have_codes_of_their_own(serve, connect):
    server = await serve([40] * 200, delay=0.005, max_num_seqs=1, options=options(max_queue=0))
    stub = OctavoStub(await connect(server))
    busy = stub.Generate(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=150)))
    await busy.read()
    await refused(stub.GenerateUnary(pb.GenerateRequest(text="x")), Code.RESOURCE_EXHAUSTED)
    busy.cancel()
    await server.settled()
    server.service.draining = True
    await refused(stub.GenerateUnary(pb.GenerateRequest(text="x")), Code.UNAVAILABLE)
    server.service.draining = False


async def test_an_engine_that_fails_is_unavailable_and_not_serving(serve, connect):
    server = await serve([40] * 50, fail_at_step=3, options=options())
    channel = await connect(server)
    stub = OctavoStub(channel)
    await refused(stub.GenerateUnary(pb.GenerateRequest(text="x")), Code.UNAVAILABLE)
    health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_message_beyond_the_limit_is_refused_and_the_next_is_served(serve, connect):
    server = await serve(options=options(max_body_bytes=1000))
    stub = OctavoStub(await connect(server))
    await refused(stub.GenerateUnary(pb.GenerateRequest(text="x" * 2000)), Code.RESOURCE_EXHAUSTED)
    assert (await stub.GenerateUnary(pb.GenerateRequest(text="x"))).outputs


async def test_health_is_the_standard_one(serve, connect):
    server = await serve(options=options())
    stub = health_pb2_grpc.HealthStub(await connect(server))
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    for name in ("", "octavo.v1.Octavo"):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == serving
    await refused(stub.Check(health_pb2.HealthCheckRequest(service="nonesuch")), Code.NOT_FOUND)
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == serving
    server.service.draining = True
    assert (await watch.read()).status == not_serving
    assert await watch.read() == grpc.aio.EOF
    server.service.draining = False


async def test_server_info_and_embeddings_tell_what_there_is(serve, connect):
    server = await serve(options=options())
    stub = OctavoStub(await connect(server))
    info = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.version, list(info.models), info.max_model_len) == (__version__, ["tiny", "tiny-alias"], 256)
    assert "embeddings" in await refused(stub.Embed(pb.EmbedRequest(texts=["x"])), Code.UNIMPLEMENTED)


async def test_many_streams_at_once_get_only_their_own_tokens(serve, connect):
    server = await serve(lambda prompt: [prompt[0]] * 20 + [2], options=options())
    stub = OctavoStub(await connect(server))

    async def ask(own: int) -> list[int]:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[own]), sampling=pb.SamplingParams(max_tokens=30))
        return [t async for response in stub.Generate(request) for output in response.outputs for t in output.token_ids]

    answers = await asyncio.gather(*(ask(own) for own in range(40, 72)))
    assert answers == [[own] * 20 + [2] for own in range(40, 72)]


def write_certificate(authority: trustme.CA, folder: Path) -> tuple[Path, Path]:
    certificate = authority.issue_cert("127.0.0.1")
    pem, key = folder / "cert.pem", folder / "key.pem"
    certificate.private_key_pem.write_to_path(str(key))
    pem.write_bytes(b"".join(part.bytes() for part in certificate.cert_chain_pems))
    return pem, key


async def test_a_certificate_is_read_again_and_one_that_cannot_be_used_changes_nothing(serve, tmp_path):
    old, new = trustme.CA(), trustme.CA()
    pem, key = write_certificate(old, tmp_path)
    server = await serve(options=options(ssl_certfile=str(pem), ssl_keyfile=str(key)))
    listener = GrpcListener(server.service.options)
    await listener.start(server.service)

    async def is_trusted(authority: trustme.CA) -> bool:
        trusted = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        async with grpc.aio.secure_channel(listener.address, trusted) as channel:
            call = OctavoStub(channel).GenerateUnary(pb.GenerateRequest(text="x"))
            code = await call.code()
        assert code in (Code.OK, Code.UNAVAILABLE)
        return code is Code.OK

    assert (await is_trusted(old), await is_trusted(new)) == (True, False)
    write_certificate(new, tmp_path)
    assert await is_trusted(old), "not before it is told to"
    server.service.reload()
    assert (await is_trusted(old), await is_trusted(new)) == (False, True)
    pem.write_text("no certificate")
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        server.service.reload()
    assert await is_trusted(new)
    await listener.stop(0)


async def test_with_a_certificate_only_tls_is_served(serve, tmp_path):
    authority = trustme.CA()
    pem, key = write_certificate(authority, tmp_path)
    server = await serve(options=options(ssl_certfile=str(pem), ssl_keyfile=str(key)))
    listener = GrpcListener(server.service.options)
    await listener.start(server.service)
    trusted = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    async with grpc.aio.secure_channel(listener.address, trusted) as channel:
        assert (await OctavoStub(channel).GenerateUnary(pb.GenerateRequest(text="x"))).outputs
    async with grpc.aio.insecure_channel(listener.address) as channel:
        await refused(OctavoStub(channel).GenerateUnary(pb.GenerateRequest(text="x")), Code.UNAVAILABLE)
    await listener.stop(0)
    with pytest.raises(ConfigError, match="--ssl-keyfile-password"):
        GrpcListener(options(ssl_certfile=str(pem), ssl_keyfile=str(key), ssl_keyfile_password="x"))


async def test_a_port_in_use_is_an_error_that_names_the_flag():
    first = GrpcListener(options())
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match="--grpc-port"):
        GrpcListener(ServerOptions(grpc_port=port))
    await first.stop(0)


def drop_json_names(messages) -> None:
    """The compiler writes derived names into descriptor files, but not into Python code."""
    for message in messages:
        drop_json_names(message.nested_type)
        for field in message.field:
            field.ClearField("json_name")


def test_the_generated_code_is_what_the_proto_says(tmp_path):
    folder = Path(v1.__file__).parent
    source = folder.parents[3]
    name = (folder / "octavo.proto").relative_to(source)
    out = tmp_path / "descriptors"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{source}", f"--descriptor_set_out={out}", str(name)]
    subprocess.run(command, check=True, timeout=60)
    (fresh,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    drop_json_names(fresh.message_type)
    committed = descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    assert committed == fresh, "generate again, see octavo/server/grpc/__init__.py"
    methods = {method.name for service in fresh.service for method in service.method}
    assert methods == {name for name in vars(OctavoStub(grpc.insecure_channel("127.0.0.1:1"))) if name[0].isupper()}
