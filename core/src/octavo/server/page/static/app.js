// The page: which conversation is on show, what runs, and what the buttons do.

import { announce } from "./announce.js";
import { Failure } from "./api.js";
import { byId, element, icon } from "./dom.js";
import { startLive } from "./live.js";
import { messages as apiMessages, requestBody } from "./request.js";
import { fail, newAnswer, run } from "./run.js";
import { apiKey, clearProblems, controlOf, refreshModels, reveal, setUpSettings, settings, showProblem } from "./settings.js";
import { closeOverlays, setUpShell } from "./shell.js";
import { loadConversations, newConversation, onChangeElsewhere, removeConversation, saveConversation } from "./store.js";
import { hideTip } from "./tokens.js";
import { showTranscript } from "./transcript.js";

const IDEAS = [
  "How does one sheet of paper become sixteen pages?",
  "Write a Python function that merges two sorted lists.",
  "Compare tea, coffee and cocoa in a table.",
];
const question = byId("question");
const runs = new Map(); // id of a conversation -> what stops its answer

let current = newConversation();
let redraw = () => {};

function isRunning() {
  return runs.has(current.id);
}

// ---- what is on show

function show(conversation) {
  current = conversation;
  byId("system").value = current.system;
  draw();
  byId("reading").scrollTop = byId("reading").scrollHeight;
}

function draw() {
  hideTip();
  byId("title").textContent = current.title || "New conversation";
  byId("welcome").hidden = current.messages.length > 0;
  redraw = showTranscript(current, { edit, retry, results: giveResults, showField, isRunning });
  drawButtons();
  drawList();
}

function drawButtons() {
  byId("send").hidden = isRunning();
  byId("stop").hidden = !isRunning();
  byId("export").disabled = current.messages.length === 0;
}

function drawList() {
  const saved = loadConversations();
  byId("conversations").replaceChildren(
    ...saved.map((conversation) =>
      element(
        "li",
        {},
        element(
          "button",
          {
            type: "button",
            class: "conversation",
            "aria-current": conversation.id === current.id ? "true" : null,
            onclick: () => choose(conversation.id),
          },
          conversation.title || "Untitled",
        ),
        element(
          "button",
          { type: "button", class: "round remove", "aria-label": `Delete “${conversation.title || "Untitled"}”`, onclick: () => remove(conversation.id) },
          icon("trash"),
        ),
      ),
    ),
  );
}

function choose(id) {
  const running = runs.get(id)?.conversation;
  const found = running ?? loadConversations().find((conversation) => conversation.id === id);
  if (!found) return drawList(); // deleted in another tab
  if (!running) settle(found);
  show(found);
  closeOverlays();
  question.focus();
}

/** An answer that was running when its tab was closed will not go on. */
function settle(conversation) {
  for (const message of conversation.messages) if (message.role === "assistant") message.finish ??= "stopped";
}

function remove(id) {
  runs.get(id)?.abort();
  removeConversation(id);
  if (id === current.id) show(newConversation());
  else drawList();
  byId("new").focus();
  announce("Deleted.");
}

function save(conversation) {
  if (!saveConversation(conversation)) notify("The browser's storage is full: this conversation will be gone when you leave the page. Delete older ones to make room.");
}

function notify(text, button = null) {
  const notice = byId("notice");
  notice.replaceChildren(element("p", {}, text), button ?? "");
  notice.hidden = !text;
  if (text) announce(text);
}

// ---- asking

async function ask() {
  const chosen = settings();
  const conversation = current;
  const answer = newAnswer(chosen);
  clearProblems();
  let body = null;
  let problem = null;
  try {
    body = requestBody(conversation, chosen);
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    problem = error;
  }
  conversation.updated = Date.now();
  conversation.messages.push(answer);
  const stopper = new AbortController();
  if (!problem) runs.set(conversation.id, { conversation, abort: () => stopper.abort() });
  save(conversation);
  draw();
  byId("reading").scrollTop = byId("reading").scrollHeight;
  const onChange = () => {
    if (answer.finish !== null) runs.delete(conversation.id);
    if (current === conversation) redraw(answer);
  };
  if (problem) {
    fail(answer, problem);
    onChange();
  } else await run(answer, body, { key: apiKey(), signal: stopper.signal, onChange });
  if (loadConversations().some(({ id }) => id === conversation.id)) save(conversation);
  if (current === conversation) drawButtons();
  drawList();
  const control = answer.error && controlOf(answer.error.status === 401 ? "api_key" : answer.error.field);
  if (control) showProblem(control, answer.error.message);
}

function send() {
  const text = question.value;
  if (!text.trim() || isRunning()) return;
  question.value = "";
  fit();
  current.messages.push({ role: "user", content: text });
  ask();
}

/** Ask a changed question again: what came after the old one goes. */
function edit(index, text) {
  if (isRunning()) return;
  current.messages.splice(index, Infinity, { role: "user", content: text });
  ask();
  question.focus();
}

function retry(index) {
  if (isRunning()) return;
  current.messages.splice(index);
  ask();
  question.focus();
}

/** given: id of a call -> what its tool gave back. */
function giveResults(given) {
  if (isRunning()) return;
  for (const [id, content] of Object.entries(given)) current.messages.push({ role: "tool", tool_call_id: id, content });
  ask();
  question.focus();
}

/** A button that leads to the control that a field of the request comes from; null if there is none. */
function showField(field) {
  const control = controlOf(field);
  return control && element("button", { type: "button", class: "quiet", onclick: () => reveal(control) }, "Show the setting");
}

function fit() {
  question.style.height = "auto";
  question.style.height = `${Math.min(question.scrollHeight, 240)}px`;
}

function exportConversation() {
  const { model, ...rest } = settings();
  const { title, created, updated } = current;
  const whole = { octavo: 1, title, created: new Date(created), updated: new Date(updated), model, settings: rest, messages: apiMessages(current), transcript: current.messages };
  const url = URL.createObjectURL(new Blob([JSON.stringify(whole, null, 2)], { type: "application/json" }));
  const name = (title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").toLowerCase();
  element("a", { href: url, download: `${name || "conversation"}.json` }).click();
  URL.revokeObjectURL(url);
}

async function loadModels() {
  try {
    await refreshModels();
    notify("");
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    const toKey = element("button", { type: "button", class: "quiet", onclick: () => reveal(byId("api_key")) }, "Enter a key");
    const again = element("button", { type: "button", class: "quiet", onclick: loadModels }, "Try again");
    notify(error.message, error.status === 401 ? toKey : again);
  }
}

// ---- beginning

setUpShell();
setUpSettings({ onKey: loadModels });
byId("ideas").append(
  ...IDEAS.map((text) =>
    element("li", {}, element("button", { type: "button", onclick: () => { question.value = text; send(); question.focus(); } }, text)),
  ),
);
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
question.addEventListener("input", fit);
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", () => {
  runs.get(current.id)?.abort();
  question.focus();
});
byId("new").addEventListener("click", () => {
  show(newConversation());
  closeOverlays();
  question.focus();
});
byId("export").addEventListener("click", exportConversation);
byId("system").addEventListener("change", () => {
  current.system = byId("system").value;
  if (current.messages.length) save(current);
});
byId("forget").addEventListener("click", () => {
  if (!confirm("Forget all conversations of this browser?")) return;
  for (const { id } of loadConversations()) {
    runs.get(id)?.abort();
    removeConversation(id);
  }
  show(newConversation());
});
onChangeElsewhere(drawList);
show(current);
loadModels();
startLive();
