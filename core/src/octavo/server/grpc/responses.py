"""Deltas of the engine as gRPC responses."""

from __future__ import annotations

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.server.grpc.v1 import octavo_pb2 as pb
from octavo.server.openai.answers import Usage
from octavo.server.openai.logprobs import Row, TokenNames, finite


class ResponseWriter:
    """Writes the deltas of one request. names: where the bytes of tokens come from."""

    def __init__(self, request_id: str, names: TokenNames) -> None:
        self._request_id = request_id
        self._names = names
        self._started = False

    def write(self, delta: RequestOutput, usage: Usage) -> pb.GenerateResponse:
        """A response with what is new; the first one also has what belongs to the prompt."""
        response = pb.GenerateResponse(
            request_id=self._request_id,
            outputs=[self._output(new) for new in delta.outputs],
            usage=pb.Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.prompt_tokens_details.cached_tokens,
            ),
        )
        if not self._started:
            self._started = True
            response.prompt_token_ids.extend(delta.prompt_token_ids)
            response.prompt_logprobs.extend(self._logprobs(row) for row in delta.prompt_logprobs or ())
        return response

    def _output(self, new: CompletionOutput) -> pb.Output:
        output = pb.Output(
            index=new.index,
            text=new.text,
            token_ids=new.token_ids,
            logprobs=[self._logprobs(row) for row in new.logprobs or ()],
            finish_reason=new.finish_reason or "",
        )
        if isinstance(new.stop_reason, str):
            output.stop_string = new.stop_reason
        elif new.stop_reason is not None:
            output.stop_token_id = new.stop_reason
        return output

    def _logprobs(self, row: Row | None) -> pb.TokenLogprobs:
        return pb.TokenLogprobs(
            entries=[
                pb.Logprob(
                    token_id=token,
                    logprob=finite(entry.logprob),
                    rank=entry.rank or 0,
                    token=bytes(self._names.bytes(token) or ()),
                )
                for token, entry in (row or {}).items()
            ]
        )
