"""The methods of octavo.v1.Octavo and grpc.health.v1.Health over one `Service`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, aclosing

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo import __version__
from octavo.outputs import OutputMerger
from octavo.server.errors import as_api_error
from octavo.server.exchange import Exchange
from octavo.server.grpc.calls import open_exchange
from octavo.server.grpc.requests import completion_body
from octavo.server.grpc.responses import ResponseWriter
from octavo.server.grpc.status import abort
from octavo.server.grpc.v1 import octavo_pb2 as pb
from octavo.server.grpc.v1 import octavo_pb2_grpc
from octavo.server.openai.answers import UsageCount
from octavo.server.openai.completions import DEFAULT_MAX_TOKENS, read_params, read_prompts
from octavo.server.openai.logprobs import TokenNames
from octavo.server.service import Outputs, Service

SERVICE = pb.DESCRIPTOR.services_by_name["Octavo"].full_name
WATCH_S = 0.2


class OctavoServicer(octavo_pb2_grpc.OctavoServicer):
    """Generation and facts about the server. A cancelled call cancels its coroutine, which aborts the generation."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        with self._exchange(request, context, "Generate") as exchange:
            try:
                outputs, writer = self._start(request, exchange.request_id)
                count = UsageCount()
                async with aclosing(outputs):
                    async for _, delta in outputs:
                        count.add(0, delta)
                        yield writer.write(delta, count.usage())
            except Exception as error:
                told = as_api_error(error)
                exchange.status = told.status
                await abort(context, told)

    async def GenerateUnary(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> pb.GenerateResponse:
        with self._exchange(request, context, "GenerateUnary") as exchange:
            try:
                outputs, writer = self._start(request, exchange.request_id)
                count, merger = UsageCount(), OutputMerger()
                async with aclosing(outputs):
                    async for _, delta in outputs:
                        count.add(0, delta)
                        merger.add(delta)
                whole = merger.result()
                assert whole is not None, "a request ends with a delta"
                return writer.write(whole, count.usage())
            except Exception as error:
                told = as_api_error(error)
                exchange.status = told.status
                await abort(context, told)

    async def Embed(self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext) -> pb.EmbedResponse:
        model = self.service.info.served_names[0]
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{model} generates text; this version serves no embeddings")
        raise AssertionError("abort does not return")

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        info = self.service.info
        return pb.GetServerInfoResponse(
            version=__version__,
            models=info.served_names,
            root=info.model,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            platform=info.platform,
            dtype=info.dtype,
            max_num_seqs=info.max_num_seqs,
        )

    def _exchange(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext, method: str
    ) -> AbstractContextManager[Exchange]:
        request_id = request.request_id or uuid.uuid4().hex
        return open_exchange(self.service, context, method=f"/{SERVICE}/{method}", request_id=request_id)

    def _start(self, request: pb.GenerateRequest, request_id: str) -> tuple[Outputs, ResponseWriter]:
        """The deltas of a checked request, and what writes them. Raises as the HTTP route does."""
        body = completion_body(request)
        self.service.model_name(body.model)
        params = read_params(body, self.service)
        outputs = self.service.generate(
            read_prompts(body.prompt),
            params,
            request_id=request_id,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            add_special_tokens=body.add_special_tokens is not False,
            default_max_tokens=DEFAULT_MAX_TOKENS,
        )
        return outputs, ResponseWriter(request_id, TokenNames(self.service.client.tokenizer, as_ids=False))


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The standard health service: SERVING while requests are served, for the server ("") and for octavo.v1.Octavo."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def state(self, name: str) -> int:
        """The serving status of a service."""
        if name not in ("", SERVICE):
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        ready = self.service.is_ready
        return int(health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        state = self.state(request.service)
        if state == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=state)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now and whenever it changes; ends when the server shuts down."""
        told = None
        while True:
            ending = self.service.draining
            state = self.state(request.service)
            if state != told:
                told = state
                yield health_pb2.HealthCheckResponse(status=state)
            if ending:
                return
            await asyncio.sleep(WATCH_S)
