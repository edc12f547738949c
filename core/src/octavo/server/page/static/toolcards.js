// Calls of tools as cards. Each has a box for the result; once all are filled the conversation goes on.

import { codeBlock, element } from "./dom.js";

export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still being written, or cut short: shown as it is
  }
}

/** Cards of all calls of one answer.
 *
 * results: id of a call -> the result that was given. onResults: called with {id: text} once; null: nothing to fill in.
 */
export function toolCards(calls, { results, onResults, number }) {
  const boxes = new Map();
  const cards = calls.map((call, index) => {
    const id = `result-${number}-${index}`;
    const { name, arguments: args } = call.function;
    const body = [codeBlock(pretty(args || "{}"), "json")];
    const key = call.id || id;
    if (results.has(call.id)) {
      body.push(element("p", { class: "label" }, "Result"), element("pre", { class: "result", tabindex: "0", role: "region", "aria-label": `Result of ${name}` }, results.get(call.id)));
    } else if (onResults) {
      const box = element("textarea", { id, rows: "2", class: "mono", spellcheck: "false", placeholder: "what the tool gives back" });
      boxes.set(key, box);
      body.push(element("label", { for: id }, `Result of ${name}`), box);
    }
    return element("section", { class: "card", "aria-label": `Call of ${name}` }, element("h3", { class: "card-title" }, name), ...body);
  });
  if (!boxes.size) return element("div", { class: "cards" }, ...cards);
  const button = element("button", { type: "submit", class: "primary" }, boxes.size === 1 ? "Send the result" : "Send the results");
  const form = element("form", { class: "cards" }, ...cards, button);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    onResults(Object.fromEntries([...boxes].map(([key, box]) => [key, box.value])));
  });
  return form;
}
