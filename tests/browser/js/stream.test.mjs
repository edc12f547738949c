import assert from "node:assert/strict";
import { test } from "node:test";
import { addChunk, newAnswer, speed } from "../../../core/src/octavo/server/page/static/run.js";
import { EventParser } from "../../../core/src/octavo/server/page/static/sse.js";

const STREAM = 'data: {"a":1}\n\n: a comment\ndata: two\r\ndata:lines\r\n\r\nevent: x\nid: 7\ndata\n\ndata:  kept blank\r\rdata: [DONE]\n\n';
const EVENTS = ['{"a":1}', "two\nlines", "", " kept blank", "[DONE]"];

test("events come out whole however the stream is cut", () => {
  for (let first = 0; first <= STREAM.length; first += 1)
    for (let second = first; second <= STREAM.length; second += 3) {
      const parser = new EventParser();
      const parts = [STREAM.slice(0, first), STREAM.slice(first, second), STREAM.slice(second)];
      assert.deepEqual(parts.flatMap((part) => parser.feed(part)), EVENTS, `cut at ${first} and ${second}`);
    }
});

test("character by character too", () => {
  const parser = new EventParser();
  assert.deepEqual([...STREAM].flatMap((char) => parser.feed(char)), EVENTS);
});

test("an event is not given before its blank line", () => {
  const parser = new EventParser();
  assert.deepEqual(parser.feed("data: x\n"), []);
  assert.deepEqual(parser.feed("\n"), ["x"]);
});

const settings = { mode: "tools", model: "m", schema: "" };
const chunk = (delta, more = {}) => ({ choices: [{ index: 0, delta, ...more }] });

test("an answer is put together from its deltas", () => {
  const answer = newAnswer(settings);
  const reasons = [
    chunk({ role: "assistant", content: "" }),
    chunk({ reasoning_content: "hm" }),
    chunk({ reasoning: "m" }),
    chunk({ content: "a" }),
    chunk({ content: "b" }, { finish_reason: "stop" }),
    { choices: [], usage: { prompt_tokens: 5, completion_tokens: 9, prompt_tokens_details: { cached_tokens: 3 } } },
  ].map((part, index) => addChunk(answer, part, index));
  assert.equal(answer.content, "ab");
  assert.equal(answer.reasoning, "hmm");
  assert.deepEqual(reasons, [null, null, null, null, "stop", null]);
  assert.deepEqual(answer.stats, { first: 1, last: 4, pieces: 4, thought: 2, prompt: 5, generated: 9, cached: 3 });
  assert.equal(speed(answer.stats), 8 / 3);
});

test("calls of tools are put together by their index", () => {
  const answer = newAnswer(settings);
  const call = (index, rest) => addChunk(answer, chunk({ tool_calls: [{ index, ...rest }] }), 0);
  call(0, { id: "c0", type: "function", function: { name: "f", arguments: "" } });
  call(0, { function: { arguments: '{"x"' } });
  call(1, { id: "c1", function: { name: "g", arguments: "{}" } });
  call(0, { function: { arguments: ":1}" } });
  assert.deepEqual(answer.tool_calls, [
    { id: "c0", type: "function", function: { name: "f", arguments: '{"x":1}' } },
    { id: "c1", type: "function", function: { name: "g", arguments: "{}" } },
  ]);
});

test("probabilities keep the token, its bytes and its rivals", () => {
  const answer = newAnswer(settings);
  const top = [{ token: "a", bytes: [97], logprob: -0.5 }];
  addChunk(answer, chunk({ content: "a" }, { logprobs: { content: [{ token: "a", bytes: [97], logprob: -0.5, top_logprobs: top }] } }), 0);
  assert.deepEqual(answer.tokens, [["a", [97], -0.5, [["a", [97], -0.5]]]]);
});
