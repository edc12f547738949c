// The server's routes. Addresses are relative to the page, so that it works behind any prefix of a proxy.

import { EventParser } from "./sse.js";

/** What went wrong, in the server's own words where it had any. `field` names the part of the request that is wrong. */
export class Failure extends Error {
  constructor(message, { status = null, field = null, code = null } = {}) {
    super(message);
    this.status = status;
    this.field = field;
    this.code = code;
  }
}

const here = (path) => new URL(path, document.baseURI);

async function call(path, { key, ...how } = {}) {
  const headers = { ...how.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(here(path), { ...how, headers, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(`The server cannot be reached (${error.message}).`);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const text = await response.text();
  let error;
  try {
    ({ error } = JSON.parse(text));
  } catch {
    error = null; // not from this server: a proxy's page, say
  }
  const message = typeof error?.message === "string" ? error.message : text.slice(0, 300) || response.statusText;
  return new Failure(message, { status: response.status, field: error?.param, code: error?.code });
}

/** Models that are served: {id, max_model_len, ...}. */
export async function listModels(key) {
  return (await (await call("v1/models", { key })).json()).data;
}

/** Prometheus text. */
export async function readMetrics(key, signal) {
  return (await call("metrics", { key, signal })).text();
}

/** Chunks of a streamed chat. Raises Failure, also for an error that comes in the midst; AbortError once stopped. */
export async function* streamChat(body, { key, signal }) {
  const response = await call("v1/chat/completions", {
    key,
    signal,
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      const { value, done } = await read(reader);
      if (done) throw new Failure("The connection ended before the answer did.");
      for (const data of parser.feed(value)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) {
          const { message, param, code } = chunk.error;
          throw new Failure(message, { field: param, code });
        }
        yield chunk;
      }
    }
  } finally {
    // A reader that is left early tells the server that nobody listens any more; one that broke has nothing to cancel.
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(`The connection broke (${error.message}).`);
  }
}
