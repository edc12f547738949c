import assert from "node:assert/strict";
import { test } from "node:test";
import { messages, number, requestBody, toolNames, tools } from "../../../core/src/octavo/server/page/static/request.js";

const conversation = (...all) => ({ system: "", messages: all });
const user = { role: "user", content: "hi" };
const answer = (rest) => ({ role: "assistant", content: "", reasoning: "", tool_calls: [], error: null, ...rest });

test("a field left empty is not sent, so that the model's defaults hold", () => {
  assert.deepEqual(requestBody(conversation(user), { mode: "text", model: "m", temperature: " ", stop: "" }), {
    model: "m",
    messages: [user],
    stream: true,
    stream_options: { include_usage: true },
  });
});

test("numbers are numbers, and what is none goes to the server as it is", () => {
  assert.equal(number("0.5"), 0.5);
  assert.equal(number(" 7 "), 7);
  assert.equal(number(""), undefined);
  assert.equal(number("warm"), "warm");
  assert.equal(number("1e999"), "1e999");
  const body = requestBody(conversation(user), { mode: "text", temperature: "0", seed: "-3", top_k: "x" });
  assert.deepEqual([body.temperature, body.seed, body.top_k], [0, -3, "x"]);
});

test("stop texts are lines with escapes", () => {
  assert.deepEqual(requestBody(conversation(user), { mode: "text", stop: "END\n\\n\\n\n\\\\n" }).stop, ["END", "\n\n", "\\n"]);
});

test("probabilities ask for five rivals unless told otherwise", () => {
  assert.equal(requestBody(conversation(user), { mode: "text", logprobs: true, top_logprobs: "" }).top_logprobs, 5);
  assert.equal(requestBody(conversation(user), { mode: "text", logprobs: true, top_logprobs: "0" }).top_logprobs, 0);
  assert.equal(requestBody(conversation(user), { mode: "text", logprobs: false, top_logprobs: "3" }).top_logprobs, undefined);
});

test("tools go out in tool mode only, and bare functions are wrapped", () => {
  const text = '[{"name": "f", "parameters": {}}, {"type": "function", "function": {"name": "g"}}]';
  const expected = [{ type: "function", function: { name: "f", parameters: {} } }, { type: "function", function: { name: "g" } }];
  assert.deepEqual(tools(text), expected);
  assert.deepEqual(toolNames(text), ["f", "g"]);
  assert.deepEqual(toolNames("[1, null, {"), []);
  assert.equal(requestBody(conversation(user), { mode: "text", tools: text }).tools, undefined);
  const body = requestBody(conversation(user), { mode: "tools", tools: text, tool_choice: "function:g" });
  assert.deepEqual(body.tool_choice, { type: "function", function: { name: "g" } });
});

test("JSON that is none is told by the name of its field", () => {
  for (const [settings, field] of [
    [{ mode: "tools", tools: "[" }, "tools"],
    [{ mode: "tools", tools: "" }, "tools"],
    [{ mode: "tools", tools: "{}" }, "tools"],
    [{ mode: "json", schema: "{" }, "schema"],
  ])
    assert.throws(() => requestBody(conversation(user), settings), (error) => error.field === field && error.message.length > 5);
});

test("a schema is sent strictly, and none means any JSON object", () => {
  assert.deepEqual(requestBody(conversation(user), { mode: "json", schema: "" }).response_format, { type: "json_object" });
  const { response_format } = requestBody(conversation(user), { mode: "json", schema: '{"type": "object"}' });
  assert.deepEqual(response_format, { type: "json_schema", json_schema: { name: "answer", schema: { type: "object" }, strict: true } });
});

test("messages are those of the API: what failed before its first word is left out", () => {
  const call = { id: "c", type: "function", function: { name: "f", arguments: "{}" } };
  const all = [
    user,
    answer({ error: { message: "no" } }),
    answer({ content: "half", error: { message: "cut" } }),
    answer({ reasoning: "hm", tool_calls: [call] }),
    { role: "tool", tool_call_id: "c", content: "4" },
  ];
  assert.deepEqual(messages({ system: "be brief", messages: all }), [
    { role: "system", content: "be brief" },
    user,
    { role: "assistant", content: "half" },
    { role: "assistant", content: null, reasoning_content: "hm", tool_calls: [call] },
    { role: "tool", tool_call_id: "c", content: "4" },
  ]);
});
