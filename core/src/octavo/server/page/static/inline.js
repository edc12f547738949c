// Inline markdown to a tree: strings and {tag, href?, children}. Nothing in it comes from HTML: a tag written in the
// text stays text. Work is linear in the text (emphasis nests at most MAX_DEPTH deep), so hostile text cannot stall.

const MAX_DEPTH = 16;
const MAX_RUN = 8;
const MAX_URL = 2048;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const PLAIN = /[^\\`*_~[\]!<&\nhH]+/y;
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2048})>/y;
const BARE_URL = /https?:\/\/[^\s<>"`]{1,2048}/iy;
const ENTITY = /&(?:#(\d{1,7})|([a-z]{2,4}));/y;
const PUNCTUATION = /[\p{P}\p{S}]/u;

/** The address if a link may lead there (http, https, mailto), else null. Relative ones would lead into this server. */
export function safeUrl(address) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null; // not an absolute address: the caller shows it as text
  }
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

/** Nodes of one run of text (a paragraph, a cell, a heading). */
export function parseInline(text, { links = true } = {}) {
  const closing = links ? matchBrackets(text) : new Map();
  const out = new Emphasis();
  const unclosed = new Set();
  let at = 0;
  while (at < text.length) {
    const char = text[at];
    const found =
      (char === "\\" && escape(text, at)) ||
      (char === "`" && codeSpan(text, at, unclosed)) ||
      ("[!".includes(char) && links && link(text, at, closing)) ||
      (char === "<" && links && autolink(text, at)) ||
      ("hH".includes(char) && links && bareUrl(text, at)) ||
      (char === "&" && entity(text, at)) ||
      (char === "\n" && { node: { tag: "br", children: [] }, end: at + 1 });
    if (found) {
      out.add(found.node);
      at = found.end;
    } else if ("*_~".includes(char)) {
      at = delimiters(text, at, out);
    } else {
      PLAIN.lastIndex = at;
      const plain = PLAIN.exec(text)?.[0] ?? char;
      out.add(plain);
      at += plain.length;
    }
  }
  return out.finish();
}

/** The text of a tree, as a screen reader would say it. */
export function plainText(nodes) {
  return nodes.map((node) => (typeof node === "string" ? node : node.tag === "br" ? "\n" : plainText(node.children))).join("");
}

/** Nodes with open emphasis as a stack of frames. A frame that is never closed becomes its own stars again. */
class Emphasis {
  #frames = [{ nodes: [] }];

  add(node) {
    const { nodes } = this.#frames.at(-1);
    if (typeof node === "string" && typeof nodes.at(-1) === "string") nodes[nodes.length - 1] += node;
    else nodes.push(node);
  }

  open(char, count, both) {
    if (this.#frames.length > MAX_DEPTH) this.add(char.repeat(count));
    else this.#frames.push({ char, count, both, nodes: [] });
  }

  /** Close what `count` delimiters can close; the number of them that is left over. */
  close(char, count, both) {
    while (count) {
      const level = this.#frames.findLastIndex(
        (frame) => frame.char === char && !((both || frame.both) && (frame.count + count) % 3 === 0 && frame.count % 3),
      );
      if (level < 1) return count;
      this.#collapse(level);
      const frame = this.#frames[level];
      const used = char === "~" ? 2 : Math.min(2, count, frame.count);
      const node = { tag: char === "~" ? "del" : used === 2 ? "strong" : "em", children: frame.nodes };
      frame.count -= used;
      count -= used;
      if (frame.count) frame.nodes = [node];
      else {
        this.#frames.pop();
        this.add(node);
      }
    }
    return 0;
  }

  finish() {
    this.#collapse(0);
    return this.#frames[0].nodes;
  }

  #collapse(level) {
    for (const frame of this.#frames.splice(level + 1)) {
      this.add(frame.char.repeat(frame.count));
      frame.nodes.forEach((node) => this.add(node));
    }
  }
}

/** Where each `[` is closed. Escaped ones do not count. */
function matchBrackets(text) {
  const closing = new Map();
  const open = [];
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === "[") open.push(at);
    else if (text[at] === "]" && open.length) closing.set(open.pop(), at);
  }
  return closing;
}

function escape(text, at) {
  const next = text[at + 1];
  return next && next.charCodeAt(0) < 128 && PUNCTUATION.test(next) ? { node: next, end: at + 2 } : null;
}

/** unclosed: lengths of backtick runs that have no partner in the rest of the text. */
function codeSpan(text, at, unclosed) {
  const run = runLength(text, at);
  const start = at + run;
  if (!unclosed.has(run)) {
    for (let end = text.indexOf("`", start); end !== -1; ) {
      const length = runLength(text, end);
      if (length === run) {
        const code = text.slice(start, end).replaceAll("\n", " ");
        const padded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
        return { node: { tag: "code", children: [padded ? code.slice(1, -1) : code] }, end: end + run };
      }
      end = text.indexOf("`", end + length);
    }
    unclosed.add(run);
  }
  return { node: text.slice(at, start), end: start };
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

/** [text](address "title"), and ![text](address), which becomes a link too: an image would be fetched unasked. */
function link(text, at, closing) {
  const image = text[at] === "!";
  const open = image ? at + 1 : at;
  const close = closing.get(open);
  if (text[open] !== "[" || close === undefined || text[close + 1] !== "(") return null;
  const target = linkTarget(text, close + 2);
  const href = target && safeUrl(target.address);
  if (!href) return null;
  const label = text.slice(open + 1, close);
  const children = image ? [label || "image"] : parseInline(label, { links: false });
  return { node: { tag: "a", href, children: children.length ? children : [href] }, end: target.end };
}

function linkTarget(text, at) {
  const rest = text.slice(at, at + MAX_URL);
  const target = /^\s?(?:<([^<>\n]*)>|((?:[^\s()]|\([^\s()]{0,512}\))+))(?:\s(?:"[^"\n]{0,512}"|'[^'\n]{0,512}'))?\s?\)/.exec(rest);
  return target && { address: target[1] ?? target[2], end: at + target[0].length };
}

function autolink(text, at) {
  AUTOLINK.lastIndex = at;
  const found = AUTOLINK.exec(text);
  const href = found && safeUrl(found[1]);
  return href ? { node: { tag: "a", href, children: [found[1]] }, end: at + found[0].length } : null;
}

function bareUrl(text, at) {
  if (at && /[\p{L}\p{N}]/u.test(text[at - 1])) return null;
  BARE_URL.lastIndex = at;
  let shown = BARE_URL.exec(text)?.[0];
  if (!shown) return null;
  // What ends a sentence, and a bracket that was opened before the address, is no part of it.
  const count = (char) => shown.split(char).length - 1;
  while (".,:;!?'*_~".includes(shown.at(-1)) || (shown.endsWith(")") && count(")") > count("("))) shown = shown.slice(0, -1);
  const href = safeUrl(shown);
  return href ? { node: { tag: "a", href, children: [shown] }, end: at + shown.length } : null;
}

function entity(text, at) {
  ENTITY.lastIndex = at;
  const found = ENTITY.exec(text);
  if (!found) return null;
  const code = Number(found[1]);
  const valid = code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code <= 0xdfff);
  const node = found[2] ? ENTITIES[found[2]] : valid ? String.fromCodePoint(code) : null;
  return node ? { node, end: at + found[0].length } : null;
}

/** A run of `*`, `_` or `~`: closes, opens, or is text, by what stands on both sides (CommonMark's flanking rules). */
function delimiters(text, at, out) {
  const char = text[at];
  const count = runLength(text, at);
  const end = at + count;
  const before = side(text[at - 1]);
  const after = side(text[end]);
  const left = after !== "space" && (after === "word" || before !== "word");
  const right = before !== "space" && (before === "word" || after !== "word");
  const inWord = char === "_" && left && right;
  const canOpen = left && (!inWord || before === "mark");
  const canClose = right && (!inWord || after === "mark");
  const usable = char === "~" ? count === 2 : count <= MAX_RUN;
  let rest = count;
  if (usable && canClose) rest = out.close(char, count, canOpen);
  if (rest && usable && canOpen) out.open(char, rest, canClose);
  else if (rest) out.add(char.repeat(rest));
  return end;
}

function side(char) {
  if (char === undefined || /\s/.test(char)) return "space";
  return PUNCTUATION.test(char) ? "mark" : "word";
}
