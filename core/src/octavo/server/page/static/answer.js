// The view of one answer: reasoning, text or tokens or JSON, calls of tools, what went wrong, and figures.

import { announce, spoken } from "./announce.js";
import { build, codeBlock, copyButton, element, icon } from "./dom.js";
import { parseMarkdown } from "./markdown.js";
import { speed } from "./run.js";
import { validate } from "./schema.js";
import { TokenList, perplexity } from "./tokens.js";
import { pretty, toolCards } from "./toolcards.js";

const FINISH = {
  length: "Cut off: the limit of tokens was reached.",
  abort: "The server stopped this answer.",
  stopped: "You stopped this answer.",
};

export class AnswerView {
  #blocks = [];
  #spoken = 0;
  #tokens = null;
  #asTokens;
  #reasoning = null;

  /** actions: {retry, results, showField}; live: the answer is coming now, so a screen reader is told of it. */
  constructor(answer, { number, results, actions, live }) {
    this.answer = answer;
    this.actions = actions;
    this.live = live;
    this.results = results;
    this.number = number;
    // What came before this view was drawn has been told already.
    if (live) this.#spoken = Math.max(0, parseMarkdown(answer.content).length - 1);
    this.#asTokens = answer.tokens.length > 0 || live;
    this.body = element("div", { class: "answer-body" });
    this.head = element("div", { class: "answer-head" }, element("h3", { class: "who" }, answer.model || "Answer"));
    this.after = element("div", { class: "answer-after" });
    this.foot = element("div", { class: "answer-foot" });
    this.element = element("article", { class: "answer", "aria-label": `Answer ${number}` }, this.head, this.body, this.after, this.foot);
    this.update();
  }

  get done() {
    return this.answer.finish !== null;
  }

  /** Bring the view up to date with its answer. */
  update() {
    const { answer } = this;
    this.element.setAttribute("aria-busy", String(!this.done));
    this.head.firstElementChild.textContent = answer.model || "Answer";
    this.#updateReasoning();
    this.#drawText();
    if (this.done) this.#drawEnd();
    if (this.live) this.#speak();
  }

  #updateReasoning() {
    const { reasoning, stats, content } = this.answer;
    if (!reasoning) return;
    if (!this.#reasoning) {
      const text = element("div", { class: "reasoning-text" });
      const summary = element("summary", {});
      this.#reasoning = { summary, text };
      this.head.after(element("details", { class: "reasoning" }, summary, text));
      if (this.live) announce("The model is thinking.");
    }
    const thinking = !this.done && !content;
    const seconds = stats.thought ?? (this.done ? stats.last - stats.first : null);
    this.#reasoning.summary.textContent = thinking ? "Thinking…" : seconds >= 0.1 ? `Thought for ${seconds.toFixed(1)} s` : "Reasoning";
    this.#reasoning.text.textContent = reasoning;
  }

  #drawText() {
    const { answer } = this;
    if (answer.tokens.length && this.#asTokens) {
      if (!this.#tokens) {
        this.#tokens = new TokenList();
        this.body.replaceChildren(this.#tokens.element);
        this.#blocks = [];
      }
      this.#tokens.update(answer.tokens);
      return;
    }
    if (this.#tokens) {
      this.#tokens = null;
      this.body.replaceChildren();
      this.#blocks = [];
    }
    if (answer.mode === "json" && answer.content) this.#drawJson();
    else this.#drawMarkdown();
    if (!this.done && !answer.content && !answer.reasoning && !answer.tool_calls.length) this.body.append(waiting());
  }

  /** Only blocks that changed are drawn: a selection, or the focus on a button of an earlier one, stays. */
  #drawMarkdown() {
    const blocks = parseMarkdown(this.answer.content);
    let same = 0;
    while (same < blocks.length && blocks[same].source === this.#blocks[same]?.source && blocks[same].tag === this.#blocks[same]?.tag) same += 1;
    while (this.body.childNodes.length > same) this.body.lastChild.remove();
    this.body.append(...blocks.slice(same).map(build));
    this.#blocks = blocks;
  }

  #drawJson() {
    const { content } = this.answer;
    this.#blocks = [];
    this.body.replaceChildren(codeBlock(this.done ? pretty(content) : content, "json"));
  }

  #drawEnd() {
    const { answer, results, number } = this;
    const parts = [];
    if (answer.mode === "json" && answer.content) parts.push(verdict(answer.content, answer.schema));
    if (answer.tool_calls.length) parts.push(toolCards(answer.tool_calls, { results, onResults: this.actions.results, number }));
    if (answer.error) parts.push(this.#failure(answer.error));
    else if (FINISH[answer.finish]) parts.push(element("p", { class: "muted ending" }, FINISH[answer.finish]));
    this.after.replaceChildren(...parts);
    this.#drawFoot();
  }

  #failure({ message, status, field, code }) {
    const facts = [status, code].filter(Boolean).join(" · ");
    return element(
      "div",
      { class: "failure", role: this.live ? "alert" : null },
      element("p", {}, message),
      facts || field ? element("p", { class: "failure-facts" }, facts, facts && field ? " · " : "", field ? element("code", {}, field) : null) : null,
      this.actions.showField?.(field),
    );
  }

  #drawFoot() {
    const { answer } = this;
    const buttons = [];
    if (answer.content) buttons.push(copyButton(() => answer.content));
    if (answer.tokens.length) buttons.push(this.#tokenSwitch());
    if (this.actions.retry)
      buttons.push(element("button", { type: "button", class: "quiet", onclick: this.actions.retry }, icon("retry"), element("span", {}, "Retry")));
    this.foot.replaceChildren(
      ...buttons,
      element("span", { class: "muted stats" }, figures(answer)),
      this.#asTokens && answer.tokens.length ? legend(answer.tokens) : "",
    );
  }

  #tokenSwitch() {
    const button = element("button", { type: "button", class: "quiet", "aria-pressed": String(this.#asTokens) }, icon("chance"), element("span", {}, "Probabilities"));
    button.addEventListener("click", () => {
      this.#asTokens = !this.#asTokens;
      this.#drawText();
      this.#drawFoot();
      this.foot.querySelector("[aria-pressed]").focus();
    });
    return button;
  }

  #speak() {
    const { answer } = this;
    const blocks = answer.mode === "json" ? [] : parseMarkdown(answer.content);
    const ready = this.done ? blocks.length : blocks.length - 1;
    for (; this.#spoken < ready; this.#spoken += 1) {
      const text = spoken(blocks[this.#spoken]);
      if (text) announce(text);
    }
    if (!this.done) return;
    this.live = false;
    for (const call of answer.tool_calls) announce(`The model calls ${call.function.name}.`);
    if (answer.mode === "json" && answer.content) announce(`The answer is JSON. ${this.after.querySelector(".verdict")?.textContent ?? ""}`);
    if (!answer.error) announce(FINISH[answer.finish] ?? "The answer is complete.");
  }
}

function waiting() {
  return element("p", { class: "waiting" }, element("span", { "aria-hidden": "true" }), element("span", { class: "visually-hidden" }, "Waiting for the answer"));
}

function figures({ stats, model }) {
  const rate = speed(stats);
  return [
    stats.generated !== undefined && `${stats.generated} ${stats.generated === 1 ? "token" : "tokens"}`,
    rate !== null && `${rate.toFixed(rate < 10 ? 1 : 0)} tok/s`,
    stats.first !== undefined && `first after ${stats.first.toFixed(2)} s`,
    stats.cached > 0 && `${stats.cached} of ${stats.prompt} prompt tokens cached`,
  ]
    .filter(Boolean)
    .join(" · ");
}

function legend(tokens) {
  const shades = [0, 1, 2, 3, 4].map((step) => element("span", { class: `token doubt-${step}` }, "\u2003"));
  return element("span", { class: "muted legend" }, "sure ", element("span", { "aria-hidden": "true" }, ...shades), " a guess", ` · perplexity ${perplexity(tokens).toFixed(2)}`);
}

/** Whether the answer is JSON, and fits its schema. */
function verdict(content, schema) {
  let value;
  try {
    value = JSON.parse(content);
  } catch (error) {
    return element("p", { class: "verdict bad" }, `Not valid JSON: ${error.message}`);
  }
  if (!schema.trim()) return element("p", { class: "verdict good" }, "Valid JSON.");
  let result;
  try {
    result = validate(value, JSON.parse(schema));
  } catch (error) {
    return element("p", { class: "verdict bad" }, `The schema cannot be checked: ${error.message}`);
  }
  const { errors, unchecked } = result;
  if (errors.length) return element("div", { class: "verdict bad" }, "Does not fit the schema:", element("ul", {}, ...errors.map((text) => element("li", {}, text))));
  return element("p", { class: "verdict good" }, `Fits the schema.${unchecked.length ? ` Not checked: ${unchecked.join(", ")}.` : ""}`);
}
