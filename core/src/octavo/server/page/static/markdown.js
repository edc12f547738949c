// Markdown as models write it, to a tree of {tag, ...} that `dom.js` builds with createElement: no HTML is ever parsed.
// Headings, paragraphs, lists, quotes, fenced code, tables and rules; a single line break is kept. Not markdown here:
// HTML, images (they become links) and code by indentation (models fence it, and indent prose).

import { parseInline } from "./inline.js";

const MAX_DEPTH = 10;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:([ \t]+)|$)/;
const UNDERLINE = /^ {0,3}(=+|-+)[ \t]*$/;

/** Blocks of a text. Each has `source`, its lines: blocks of equal source are equal, so only the others need drawing. */
export function parseMarkdown(text) {
  return blocks(text.replaceAll("\0", "\ufffd").replace(/\r\n?/g, "\n").split("\n"), 0);
}

function blocks(lines, depth) {
  const out = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const { end, ...block } =
      fence(lines, at) ??
      heading(lines, at) ??
      rule(lines, at) ??
      (depth < MAX_DEPTH ? (quote(lines, at, depth) ?? list(lines, at, depth)) : null) ??
      table(lines, at) ??
      paragraph(lines, at);
    out.push({ ...block, source: lines.slice(at, end).join("\n") });
    at = end;
  }
  return out;
}

/** Whether a line begins a block that may cut a paragraph short. */
function interrupts(line) {
  const item = ITEM.exec(line);
  return (
    FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) ||
    (item !== null && item[3] !== undefined && (!/^\d/.test(item[2]) || /^1[.)]$/.test(item[2])))
  );
}

function fence(lines, at) {
  const found = FENCE.exec(lines[at]);
  if (!found) return null;
  const [, mark, info] = found;
  const indent = lines[at].length - lines[at].trimStart().length;
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], mark)) end += 1;
  const code = lines.slice(at + 1, end).map((line) => dedent(line, indent));
  const language = info.trim().split(/\s/)[0].slice(0, 40);
  return { tag: "codeblock", language, text: code.join("\n"), children: [], end: Math.min(end + 1, lines.length) };
}

function closes(line, mark) {
  const text = line.trim();
  return text.length >= mark.length && text === mark[0].repeat(text.length);
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  let text = lines[at].slice(found[0].length).trim();
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  if (end === 0 || /\s/.test(text[end - 1])) text = text.slice(0, end).trim();
  return { tag: headingTag(found[1].length), children: parseInline(text), end: at + 1 };
}

/** The page has h1 and h2 itself. */
function headingTag(level) {
  return `h${Math.min(level + 2, 6)}`;
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? { tag: "hr", children: [], end: at + 1 } : null;
}

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at])) return null;
  const inner = [];
  let end = at;
  for (; end < lines.length && lines[end].trim(); end += 1) {
    const quoted = QUOTE.test(lines[end]);
    if (!quoted && interrupts(lines[end])) break;
    inner.push(quoted ? lines[end].replace(QUOTE, "") : lines[end]);
  }
  return { tag: "blockquote", children: blocks(inner, depth + 1), end };
}

function list(lines, at, depth) {
  const first = marker(lines[at]);
  if (!first) return null;
  const items = [];
  let end = at;
  let loose = false;
  while (end < lines.length) {
    const next = marker(lines[end]);
    if (!next || next.kind !== first.kind || next.indent > first.indent + 1 || RULE.test(lines[end])) break;
    const item = itemLines(lines, end, next);
    const trailing = trailingBlanks(item.lines);
    const children = blocks(item.lines, depth + 1);
    items.push(children);
    end = item.end;
    const parted = item.lines.slice(0, item.lines.length - trailing).some((line) => !line.trim());
    const followed = end < lines.length && marker(lines[end])?.kind === first.kind;
    loose ||= (parted && !onlyNested(children)) || (trailing > 0 && followed);
  }
  const children = items.map((item) => ({ tag: "li", children: loose ? item : item.flatMap(tight) }));
  return { tag: first.ordered ? "ol" : "ul", start: first.start, children, end };
}

/** What a list item marker is: its kind, where its text begins; null if the line has none. */
function marker(line) {
  const found = ITEM.exec(line);
  if (!found) return null;
  const [, spaces, mark, gap = " "] = found;
  const ordered = /\d/.test(mark);
  const width = spaces.length + mark.length + (gap.length > 4 ? 1 : gap.length);
  return { indent: spaces.length, width, ordered, kind: ordered ? mark.at(-1) : mark, start: ordered ? parseInt(mark, 10) : 1 };
}

/** The lines of one item, without its marker and indentation, and where it ends. */
function itemLines(lines, at, { indent, width, kind }) {
  const own = [lines[at].slice(width)];
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const depth = line.length - line.trimStart().length;
    if (!line.trim()) {
      own.push("");
      continue;
    }
    // Models indent what is nested by two or more, whatever the marker's width.
    const other = marker(line);
    const nested = depth >= width || (depth >= indent + 2 && other !== null && (depth > indent + 2 || other.kind !== kind));
    const lazy = own.at(-1) !== "" && !interrupts(line) && other === null;
    if (!nested && !lazy) break;
    own.push(dedent(line, width));
  }
  return { lines: own, end };
}

function trailingBlanks(lines) {
  let count = 0;
  while (count < lines.length && !lines[lines.length - 1 - count].trim()) count += 1;
  return count;
}

function onlyNested(children) {
  return children.slice(1).every((child) => child.tag === "ul" || child.tag === "ol");
}

/** A paragraph of a tight list shows as bare text. */
function tight(block) {
  return block.tag === "p" ? block.children : [block];
}

function dedent(line, width) {
  let cut = 0;
  while (cut < width && line[cut] === " ") cut += 1;
  return line.slice(cut);
}

function table(lines, at) {
  if (!lines[at].includes("|") || !/^[-:| \t]+$/.test(lines[at + 1] ?? "")) return null;
  const head = cells(lines[at]);
  const marks = cells(lines[at + 1]);
  if (head.length !== marks.length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  const aligns = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left"));
  const row = (texts, tag) => ({
    tag: "tr",
    children: aligns.map((align, column) => ({ tag, align, children: parseInline(texts[column] ?? "") })),
  });
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && !interrupts(lines[end])) end += 1;
  const body = lines.slice(at + 2, end).map((line) => row(cells(line), "td"));
  const children = [{ tag: "thead", children: [row(head, "th")] }];
  if (body.length) children.push({ tag: "tbody", children: body });
  return { tag: "table", children, end };
}

/** The texts between the bars of a row; an escaped bar, or one in a code span, is none. */
function cells(line) {
  const out = [""];
  let code = false;
  const text = line.trim().replace(/^\|/, "");
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      out[out.length - 1] += "|";
      at += 1;
    } else if (text[at] === "|" && !code) out.push("");
    else {
      if (text[at] === "`") code = !code && text.indexOf("`", at + 1) !== -1;
      out[out.length - 1] += text[at];
    }
  }
  if (out.length > 1 && !out.at(-1).trim()) out.pop();
  return out.map((cell) => cell.trim());
}

function paragraph(lines, at) {
  let end = at + 1;
  let tag = "p";
  const own = [lines[at]];
  for (; end < lines.length && lines[end].trim(); end += 1) {
    const under = UNDERLINE.exec(lines[end]);
    if (under) {
      tag = headingTag(under[1][0] === "=" ? 1 : 2);
      end += 1;
      break;
    }
    if (interrupts(lines[end]) || table(lines, end)) break;
    own.push(lines[end]);
  }
  return { tag, children: parseInline(own.map((line) => line.trim()).join("\n")), end };
}
