// What a screen reader is told: whole blocks of an answer as they are done, never single tokens.

import { byId, element } from "./dom.js";
import { plainText } from "./inline.js";

const KEPT = 30;

export function announce(text) {
  const region = byId("announcer");
  region.append(element("p", {}, text));
  while (region.childElementCount > KEPT) region.firstElementChild.remove();
}

/** A block of markdown as it is said. */
export function spoken(block) {
  if (block.tag === "codeblock") {
    const lines = block.text.split("\n").length;
    return `Code${block.language ? ` in ${block.language}` : ""}, ${lines} ${lines === 1 ? "line" : "lines"}.`;
  }
  if (block.tag === "table") return block.children.flatMap((part) => part.children).map(row).join(". ");
  if (block.tag === "hr") return "";
  return plainText([withGaps(block)]).trim();
}

function row(tr) {
  return tr.children.map((cell) => plainText([cell])).join(", ");
}

/** Items of a list do not run into one another. */
function withGaps(node) {
  if (typeof node === "string") return node;
  const children = node.children.map(withGaps);
  return { ...node, children: ["li", "p", "blockquote"].includes(node.tag) ? [...children, "\n"] : children };
}
