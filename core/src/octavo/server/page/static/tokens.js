// An answer token by token, tinted where the model was unsure. Hover a token, or walk with the arrow keys, to see what
// else it might have said. One stop of the tab key for all tokens.

import { byId, element } from "./dom.js";

const STEPS = [0.9, 0.7, 0.4, 0.15];
const decoder = new TextDecoder("utf-8", { fatal: true });

/** How a token is shown: its text, or its bytes where they are a part of a character only. */
export function tokenText(text, bytes) {
  if (!bytes) return text;
  try {
    return decoder.decode(new Uint8Array(bytes)) || text;
  } catch {
    return `⟨${bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ")}⟩`;
  }
}

/** The same where it stands alone: blanks can be seen. */
export function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ | $/g, "␣") || "(empty)";
}

export function percent(logprob) {
  const share = Math.exp(logprob) * 100;
  if (share >= 99.95) return "100 %";
  if (share < 0.01) return "< 0.01 %";
  return `${share.toFixed(share < 1 ? 2 : 1)} %`;
}

/** 0 (sure) to 4 (a guess). */
export function doubt(logprob) {
  const share = Math.exp(logprob);
  const step = STEPS.findIndex((limit) => share >= limit);
  return step === -1 ? STEPS.length : step;
}

/** How many equally likely tokens the model chose among, on average. */
export function perplexity(tokens) {
  return Math.exp(-tokens.reduce((sum, [, , logprob]) => sum + logprob, 0) / tokens.length);
}

/** A list of tokens that grows: `update(tokens)`. */
export class TokenList {
  #shown = 0;
  #tokens = [];
  #current = null;

  constructor() {
    this.element = element("div", {
      class: "tokens",
      role: "listbox",
      "aria-orientation": "horizontal",
      "aria-label": "Tokens of the answer with their probabilities; arrow keys walk",
      onkeydown: (event) => this.#walk(event),
      onfocusin: (event) => this.#show(event.target),
      onfocusout: hideTip,
      onpointerover: (event) => this.#show(event.target),
      onpointerleave: hideTip,
      onclick: (event) => event.target.closest("[role=option]")?.focus(),
    });
  }

  update(tokens) {
    this.#tokens = tokens;
    for (; this.#shown < tokens.length; this.#shown += 1) {
      const [text, bytes, logprob] = tokens[this.#shown];
      const shown = tokenText(text, bytes);
      const option = element(
        "span",
        {
          role: "option",
          class: `token doubt-${doubt(logprob)}`,
          tabindex: this.#shown ? "-1" : "0",
          "aria-selected": "false",
          "aria-label": `${visible(shown)} ${percent(logprob)}`,
        },
        shown.includes("\n") ? shown.replaceAll("\n", "↵\n") : shown || "·",
      );
      option.dataset.index = this.#shown;
      this.#current ??= option;
      this.element.append(option);
    }
  }

  #walk(event) {
    const options = this.element.children;
    const at = Number(this.#current?.dataset.index ?? 0);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: options.length - 1 }[event.key];
    if (event.key === "Escape") hideTip();
    if (to === undefined) return;
    event.preventDefault();
    options[Math.max(0, Math.min(options.length - 1, to))].focus();
  }

  #show(target) {
    const option = target.closest?.("[role=option]");
    if (!option) return;
    if (option === document.activeElement && option !== this.#current) {
      this.#current.tabIndex = -1;
      this.#current = option;
      option.tabIndex = 0;
    }
    for (const other of this.element.querySelectorAll("[aria-selected=true]")) other.setAttribute("aria-selected", "false");
    option.setAttribute("aria-selected", "true");
    showTip(option, this.#tokens[option.dataset.index]);
  }
}

function showTip(option, [text, bytes, logprob, top]) {
  const chosen = tokenText(text, bytes);
  const among = top.some(([other, otherBytes]) => tokenText(other, otherBytes) === chosen);
  const rows = among ? top : [[text, bytes, logprob], ...top];
  const tip = byId("tip");
  tip.replaceChildren(
    ...rows.map(([other, otherBytes, otherLogprob]) => {
      const shown = tokenText(other, otherBytes);
      const bar = element("span", { class: "bar-fill", "aria-hidden": "true" });
      bar.style.setProperty("--share", Math.exp(otherLogprob));
      return element(
        "span",
        { class: shown === chosen ? "tip-row chosen" : "tip-row" },
        element("span", { class: "tip-token" }, visible(shown)),
        element("span", { class: "bar-track", "aria-hidden": "true" }, bar),
        element("span", { class: "tip-share" }, ` ${percent(otherLogprob)}`),
      );
    }),
  );
  tip.hidden = false;
  for (const other of document.querySelectorAll("[aria-describedby=tip]")) other.removeAttribute("aria-describedby");
  option.setAttribute("aria-describedby", "tip");
  const place = option.getClientRects()[0] ?? option.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const above = place.top - height - 6;
  tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - width - 8))}px`;
  tip.style.top = `${above > 8 ? above : place.bottom + 6}px`;
}

export function hideTip() {
  byId("tip").hidden = true;
}
