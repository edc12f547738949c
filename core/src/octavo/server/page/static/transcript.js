// The conversation on show: questions, which can be edited, and answers.

import { AnswerView } from "./answer.js";
import { byId, element, icon } from "./dom.js";

const REDRAW_MS = 50;

/** Draw all of a conversation. actions: {edit(index, text), retry(index), results(index, given), showField, isRunning()}.
 *
 * Returns `update(answer)`: draw a running answer again, at most every REDRAW_MS.
 */
export function showTranscript(conversation, actions) {
  const { messages } = conversation;
  const results = new Map(messages.filter(({ role }) => role === "tool").map((message) => [message.tool_call_id, message.content]));
  const views = new Map();
  let number = 0;
  const nodes = messages.map((message, index) => {
    if (message.role === "user") return question(message, index, actions);
    if (message.role === "tool") return null; // shown in the card of its call
    number += 1;
    const view = new AnswerView(message, {
      number,
      results,
      live: message.finish === null,
      actions: {
        retry: () => actions.retry(index),
        results: index === messages.length - 1 ? (given) => actions.results(given) : null,
        showField: actions.showField,
      },
    });
    views.set(message, view);
    return view.element;
  });
  byId("transcript").replaceChildren(...nodes.filter(Boolean));
  return throttled(views);
}

function question(message, index, actions) {
  const text = element("div", { class: "question-text" }, message.content);
  const edit = element("button", { type: "button", class: "quiet", "aria-label": "Edit this question" }, icon("edit"), element("span", {}, "Edit"));
  const article = element("article", { class: "question", "aria-label": "Question" }, text, element("div", { class: "question-foot" }, edit));
  edit.addEventListener("click", () => {
    if (!actions.isRunning()) article.replaceChildren(editor(message, index, actions, article));
  });
  return article;
}

function editor(message, index, actions) {
  const box = element("textarea", { rows: "3", "aria-label": "Question" });
  box.value = message.content;
  const cancel = element("button", { type: "button", class: "quiet" }, "Cancel");
  const form = element("form", { class: "editor" }, box, element("div", { class: "editor-row" }, cancel, element("button", { type: "submit", class: "primary" }, "Ask again")));
  const leave = () => {
    const again = question(message, index, actions);
    form.closest("article").replaceWith(again);
    again.querySelector("button").focus();
  };
  cancel.addEventListener("click", leave);
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (box.value.trim()) actions.edit(index, box.value);
  });
  queueMicrotask(() => box.focus());
  return form;
}

/** Long answers take longer to draw than a token takes to come, so drawing waits a little, and longer if it is slow. */
function throttled(views) {
  let timer = null;
  let pause = REDRAW_MS;
  const draw = (answer) => {
    clearTimeout(timer);
    timer = null;
    const reading = byId("reading");
    const atEnd = reading.scrollHeight - reading.scrollTop - reading.clientHeight < 80;
    const started = performance.now();
    views.get(answer)?.update();
    pause = Math.max(REDRAW_MS, 4 * (performance.now() - started));
    if (atEnd) reading.scrollTop = reading.scrollHeight;
  };
  return (answer) => {
    if (answer.finish !== null) draw(answer);
    else timer ??= setTimeout(draw, pause, answer);
  };
}
