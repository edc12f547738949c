// Elements made one by one. Text goes in as text nodes, never as HTML, so nothing that a model writes can run.

import { safeUrl } from "./inline.js";
import { highlight } from "./highlight.js";

/** element("a", {class: "x", href, onclick: fn}, child, ...): properties that start with "on" are listeners. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** An icon of the page's own sheet. It says nothing: its button has a name. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** A button that copies a text and says so. */
export function copyButton(text, label = "Copy") {
  const words = element("span", {}, label);
  const button = element("button", { type: "button", class: "quiet" }, icon("copy"), words);
  button.addEventListener("click", async () => {
    words.textContent = (await copy(text())) ? "Copied" : "Not allowed";
    setTimeout(() => (words.textContent = label), 2000);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers keep the clipboard from pages that came over plain http; the old way still works there.
    const box = element("textarea", { class: "visually-hidden", "aria-hidden": "true", tabindex: "-1" });
    box.value = text;
    const focused = document.activeElement;
    document.body.append(box);
    box.select();
    const done = document.execCommand("copy");
    box.remove();
    focused?.focus();
    return done;
  }
}

const TAGS = new Set([
  "p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "br", "strong", "em", "del", "code",
  "thead", "tbody", "tr",
]);

/** A node of `markdown.js` as DOM. A tag it does not know is a bug. */
export function build(node) {
  if (typeof node === "string") return document.createTextNode(node);
  if (node.tag === "codeblock") return codeBlock(node.text, node.language);
  const children = node.children.map(build);
  if (node.tag === "a") return anchor(node.href, children);
  if (node.tag === "table") {
    const table = element("table", {}, ...children);
    return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, table);
  }
  if (node.tag === "th") return element("th", { scope: "col", class: `align-${node.align}` }, ...children);
  if (node.tag === "td") return element("td", { class: `align-${node.align}` }, ...children);
  if (!TAGS.has(node.tag)) throw new Error(`markdown has no ${node.tag}`);
  return element(node.tag, { start: node.start > 1 ? node.start : null }, ...children);
}

function anchor(href, children) {
  const safe = safeUrl(href);
  if (!safe) return element("span", {}, ...children);
  return element("a", { href: safe, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

/** Code in a frame, with its language and a button that copies it. */
export function codeBlock(text, language = "", ...extra) {
  const label = language ? `Code, ${language}` : "Code";
  const code = element("code", {}, ...highlight(text, language).map(colored));
  return element(
    "figure",
    { class: "code" },
    element("figcaption", {}, element("span", {}, language || "text"), copyButton(() => text), ...extra),
    element("pre", { tabindex: "0", role: "region", "aria-label": label }, code),
  );
}

function colored({ kind, text }) {
  return kind ? element("span", { class: `code-${kind}` }, text) : text;
}
