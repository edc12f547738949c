// From a conversation and the settings to the body of POST /v1/chat/completions. What the server can judge it judges:
// a number is sent as it was typed, and the server's own words say what is wrong with it.

import { Failure } from "./api.js";

export const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
];

/** Raises Failure naming the field where the text of a field is no JSON. */
export function requestBody(conversation, settings) {
  const body = {
    model: settings.model || undefined,
    messages: messages(conversation),
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of NUMBERS) {
    const value = number(settings[name]);
    if (value !== undefined) body[name] = value;
  }
  const stop = (settings.stop ?? "").split("\n").filter(Boolean).map(unescape);
  if (stop.length) body.stop = stop;
  if (settings.logprobs) {
    body.logprobs = true;
    body.top_logprobs = number(settings.top_logprobs) ?? 5;
  }
  if (settings.mode === "tools") {
    body.tools = tools(settings.tools);
    body.tool_choice = toolChoice(settings.tool_choice);
  }
  if (settings.mode === "json") body.response_format = responseFormat(settings.schema);
  return body;
}

/** The number that was typed; what is none is sent as text, for the server to refuse. undefined if nothing was. */
export function number(text) {
  const trimmed = (text ?? "").trim();
  if (!trimmed) return undefined;
  const value = Number(trimmed);
  return Number.isFinite(value) ? value : trimmed;
}

/** Messages as the API takes them. An answer that failed before its first word is no part of the conversation. */
export function messages({ system, messages: all }) {
  const out = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of all) {
    if (message.role === "user") out.push({ role: "user", content: message.content });
    else if (message.role === "tool")
      out.push({ role: "tool", tool_call_id: message.tool_call_id, content: message.content });
    else if (message.content || message.tool_calls.length) {
      const said = { role: "assistant", content: message.content || null };
      if (message.reasoning) said.reasoning_content = message.reasoning;
      if (message.tool_calls.length) said.tool_calls = message.tool_calls;
      out.push(said);
    }
  }
  return out;
}

/** Tools as the API takes them; bare functions ({name, parameters}) are wrapped. */
export function tools(text) {
  const list = parse(text, "tools", "Tool mode needs tools: paste their JSON under Tools in the settings.");
  if (!Array.isArray(list) || !list.length) throw new Failure("tools must be a list of tools, in JSON.", { field: "tools" });
  return list.map((tool) => (tool !== null && typeof tool === "object" && !tool.type && tool.name ? { type: "function", function: tool } : tool));
}

/** Names of the functions in a text of tools, as far as it can be read. */
export function toolNames(text) {
  try {
    return tools(text).map((tool) => tool?.function?.name).filter((name) => typeof name === "string" && name);
  } catch (error) {
    if (error instanceof Failure) return [];
    throw error;
  }
}

function toolChoice(choice) {
  return choice?.startsWith("function:") ? { type: "function", function: { name: choice.slice(9) } } : choice || "auto";
}

function responseFormat(text) {
  if (!(text ?? "").trim()) return { type: "json_object" };
  return { type: "json_schema", json_schema: { name: "answer", schema: parse(text, "schema", ""), strict: true } };
}

function parse(text, field, missing) {
  if (!(text ?? "").trim()) throw new Failure(missing, { field });
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Failure(`${field} is no valid JSON: ${error.message}`, { field });
  }
}

const ESCAPES = { n: "\n", t: "\t", "\\": "\\" };

function unescape(text) {
  return text.replace(/\\([nt\\])/g, (_, char) => ESCAPES[char]);
}
