// The form of settings: kept in the browser (the API key only for this tab), and able to show where a request was wrong.

import { listModels } from "./api.js";
import { byId, element } from "./dom.js";
import { NUMBERS, toolNames } from "./request.js";
import { setOpen, setTheme } from "./shell.js";
import { loadKey, loadSettings, saveKey, saveSettings } from "./store.js";

const CONTROLS = { ...Object.fromEntries(NUMBERS.map((name) => [name, name])), stop: "stop_texts", top_logprobs: "top_logprobs", tools: "tools", tool_choice: "tool_choice", schema: "schema", theme: "theme", model: "model" };
/** Name of a setting -> id of its control. */
const FIELDS = { ...CONTROLS, response_format: "schema", structured_outputs: "schema", max_completion_tokens: "max_tokens", api_key: "api_key" };
/** Field of a request -> id of the control that it comes from. */

const TOOLS_EXAMPLE = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city now",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const SCHEMA_EXAMPLE = {
  type: "object",
  properties: { title: { type: "string" }, year: { type: "integer" }, tags: { type: "array", items: { type: "string" } } },
  required: ["title", "year"],
  additionalProperties: false,
};

let models = [];

/** Fill the form from what was kept. onKey: called when another API key was given. */
export function setUpSettings({ onKey }) {
  const kept = loadSettings();
  for (const [name, id] of Object.entries(CONTROLS)) if (kept[name] !== undefined && name !== "model") byId(id).value = kept[name];
  byId("api_key").value = loadKey();
  byId("logprobs").checked = Boolean(kept.logprobs);
  const mode = document.querySelector(`[name=mode][value="${CSS.escape(kept.mode ?? "text")}"]`);
  if (mode) mode.checked = true;
  setTheme(kept.theme);
  offerFunctions(kept.tool_choice);

  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("controls").addEventListener("input", ({ target }) => clearProblem(target));
  for (const part of [byId("controls"), byId("composer"), byId("model")]) part.addEventListener("change", keep);
  byId("tools").addEventListener("change", () => offerFunctions(byId("tool_choice").value));
  byId("theme").addEventListener("change", () => setTheme(byId("theme").value));
  byId("api_key").addEventListener("change", () => {
    saveKey(byId("api_key").value.trim());
    onKey();
  });
  for (const radio of document.querySelectorAll("[name=mode]")) radio.addEventListener("change", () => openSection(radio.value));
  example("tools", TOOLS_EXAMPLE);
  example("schema", SCHEMA_EXAMPLE);
  byId("model").addEventListener("change", showContext);
}

/** What is set now. */
export function settings() {
  const values = Object.fromEntries(Object.entries(CONTROLS).map(([name, id]) => [name, byId(id).value]));
  return { ...values, logprobs: byId("logprobs").checked, mode: document.querySelector("[name=mode]:checked").value };
}

export const apiKey = () => byId("api_key").value.trim();

/** Ask the server for its models and offer them. Raises Failure. */
export async function refreshModels() {
  models = await listModels(apiKey());
  const select = byId("model");
  const wanted = select.value || loadSettings().model;
  select.replaceChildren(...models.map(({ id }) => element("option", { value: id }, id)));
  if (models.some(({ id }) => id === wanted)) select.value = wanted;
  select.disabled = models.length === 0;
  showContext();
}

function showContext() {
  const length = models.find(({ id }) => id === byId("model").value)?.max_model_len;
  byId("context").textContent = length ? `${length.toLocaleString("en")} tokens of context` : "";
}

function keep() {
  saveSettings(settings());
}

/** The mode of tools or JSON without its definition is of no use: show where that goes. */
function openSection(mode) {
  const [section, field] = { tools: ["tools-section", "tools"], json: ["schema-section", "schema"] }[mode] ?? [];
  if (section && !byId(field).value.trim()) byId(section).open = true;
}

function example(field, value) {
  byId(`${field}-example`).addEventListener("click", () => {
    byId(field).value = JSON.stringify(value, null, 2);
    byId(field).dispatchEvent(new Event("change", { bubbles: true }));
    clearProblem(byId(field));
    byId(field).focus();
    byId(field).setSelectionRange(0, 0);
    byId(field).scrollTop = 0;
  });
}

function offerFunctions(chosen) {
  const options = ["auto", "required", "none"].map((name) => element("option", { value: name }, name));
  const named = toolNames(byId("tools").value).map((name) => element("option", { value: `function:${name}` }, name));
  byId("tool_choice").replaceChildren(...options, ...named);
  byId("tool_choice").value = chosen;
  if (!byId("tool_choice").value) byId("tool_choice").value = "auto";
}

/** The control that a field of a request comes from (`tools[0].function` is of `tools`), or null. */
export function controlOf(field) {
  const id = FIELDS[(field ?? "").split(/[.[]/)[0]];
  return id ? byId(id) : null;
}

/** Mark a control as wrong and say why beside it. */
export function showProblem(control, message) {
  clearProblem(control);
  const id = `${control.id}-problem`;
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-describedby", id);
  // Hidden from the field's name, which its label makes; told as its description.
  const place = control.closest("label") ?? control.parentElement;
  place.append(element("span", { id, class: "problem", "aria-hidden": "true" }, message));
}

function clearProblem(control) {
  control.removeAttribute("aria-invalid");
  if (control.getAttribute("aria-describedby") === `${control.id}-problem`) control.removeAttribute("aria-describedby");
  byId(`${control.id}-problem`)?.remove();
}

export function clearProblems() {
  for (const control of document.querySelectorAll("[aria-invalid]")) clearProblem(control);
}

/** Bring a control into view and give it the focus. */
export function reveal(control) {
  if (control.closest("#settings")) setOpen("settings", true, { focus: false });
  const section = control.closest("details");
  if (section) section.open = true;
  control.focus();
  control.scrollIntoView({ block: "center" });
}
