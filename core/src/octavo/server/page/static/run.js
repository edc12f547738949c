// One answer as it comes. An answer is a message of a conversation:
//   {role: "assistant", content, reasoning, tool_calls, tokens, mode, schema, model, finish, error, stats}
// tokens: [text, bytes, logprob, [[text, bytes, logprob], ...]] of each token, if probabilities were asked for.
// finish: the API's finish_reason, "stopped" (by the user), "failed", or null while it runs.

import { Failure, streamChat } from "./api.js";

export function newAnswer(settings) {
  return {
    role: "assistant",
    content: "",
    reasoning: "",
    tool_calls: [],
    tokens: [],
    mode: settings.mode,
    schema: settings.mode === "json" ? settings.schema : "",
    model: settings.model,
    finish: null,
    error: null,
    stats: {},
  };
}

/** Fill `answer` from the server's stream, calling `onChange` after each chunk and once at the end.
 *
 * Failures end up in `answer.error`. `answer.finish` is set last of all: nothing changes after it.
 */
export async function run(answer, body, { key, signal, onChange }) {
  const started = performance.now();
  let finish = null;
  try {
    for await (const chunk of streamChat(body, { key, signal })) {
      finish = addChunk(answer, chunk, (performance.now() - started) / 1000) ?? finish;
      onChange();
    }
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else if (error instanceof Failure) fail(answer, error);
    else {
      fail(answer, new Failure(`The page could not read the answer: ${error.message}`));
      console.error(error);
    }
  }
  answer.finish ??= finish ?? "stop";
  onChange();
}

export function fail(answer, { message, status, field, code }) {
  answer.finish = "failed";
  answer.error = { message, status, field, code };
}

/** Add what a chunk brings; the finish_reason, if it has one. at: seconds since the request was sent. */
export function addChunk(answer, chunk, at) {
  const { stats } = answer;
  if (chunk.model) answer.model = chunk.model;
  if (chunk.usage) {
    stats.prompt = chunk.usage.prompt_tokens;
    stats.generated = chunk.usage.completion_tokens;
    stats.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
  const choice = chunk.choices?.[0];
  if (!choice) return null;
  const { delta = {} } = choice;
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  if (reasoning || delta.content || delta.tool_calls?.length) {
    stats.first ??= at;
    stats.last = at;
    stats.pieces = (stats.pieces ?? 0) + 1;
  }
  if (reasoning) answer.reasoning += reasoning;
  if ((delta.content || delta.tool_calls?.length) && answer.reasoning) stats.thought ??= at - stats.first;
  answer.content += delta.content ?? "";
  for (const part of delta.tool_calls ?? []) addCall(answer.tool_calls, part);
  for (const token of choice.logprobs?.content ?? [])
    answer.tokens.push([...named(token), token.top_logprobs.map(named)]);
  return choice.finish_reason ?? null;
}

function named({ token, bytes, logprob }) {
  return [token, bytes, logprob];
}

function addCall(calls, { index = 0, id, function: part = {} }) {
  const call = (calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  if (id) call.id = id;
  if (part.name) call.function.name = part.name;
  call.function.arguments += part.arguments ?? "";
}

/** Tokens a second after the first; null where there is too little to tell. */
export function speed({ generated, first, last }) {
  return generated > 1 && last > first ? (generated - 1) / (last - first) : null;
}
