import assert from "node:assert/strict";
import { test } from "node:test";
import { plainText, safeUrl } from "../../../core/src/octavo/server/page/static/inline.js";
import { parseMarkdown } from "../../../core/src/octavo/server/page/static/markdown.js";
import { hostileTexts } from "./hostile.mjs";

const TAGS = new Set(
  "p h3 h4 h5 h6 ul ol li blockquote hr br strong em del code codeblock a table thead tbody tr th td".split(" "),
);

/** The tree as text that looks like HTML, for comparing; text is not escaped. */
function show(node) {
  if (typeof node === "string") return node;
  const start = node.start > 1 ? ` start=${node.start}` : "";
  const align = node.align && node.align !== "left" ? ` ${node.align}` : "";
  const inner = (node.text ?? "") + node.children.map(show).join("");
  if (node.tag === "br" || node.tag === "hr") return `<${node.tag}>`;
  const language = node.language ? ` ${node.language}` : "";
  return `<${node.tag}${node.href ? ` ${node.href}` : ""}${start}${align}${language}>${inner}</${node.tag}>`;
}

const CASES = {
  "headings start below those of the page": ["# One\n### Three ##\n#no", "<h3>One</h3><h5>Three</h5><p>#no</p>"],
  "underlined headings": ["One\n===\nTwo\n---", "<h3>One</h3><h4>Two</h4>"],
  "a line break is kept": ["a\nb\n\nc", "<p>a<br>b</p><p>c</p>"],
  "emphasis nests": ["***a** b* __c__ ~~d~~", "<p><em><strong>a</strong> b</em> <strong>c</strong> <del>d</del></p>"],
  "stars in sums and underscores in names are text": ["2 * 3 * 4, snake_case_name, **", "<p>2 * 3 * 4, snake_case_name, **</p>"],
  "code spans keep what is in them": ["`a*b*` ``x`y`` `open", "<p><code>a*b*</code> <code>x`y</code> `open</p>"],
  "a fence that is still open is code already": ["```py\nx = 1\n*y*", "<codeblock py>x = 1\n*y*</codeblock>"],
  "a longer fence holds a shorter one": ["````\n```\n````\nz", "<codeblock>```</codeblock><p>z</p>"],
  "lists nest": ["- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"],
  "a numbered list holds dashes indented by two": ["1. a\n  - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"],
  "a list goes on at its number": ["3) a\n4) b", "<ol start=3><li>a</li><li>b</li></ol>"],
  "loose items are paragraphs": ["- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"],
  "code within an item": ["1. a\n   ```\n   x\n   ```\n2. b", "<ol><li>a<codeblock>x</codeblock></li><li>b</li></ol>"],
  "a year does not begin a list within a paragraph": ["born in\n1984. It", "<p>born in<br>1984. It</p>"],
  "quotes hold blocks": ["> a\n> - b\n\nc", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>"],
  "tables have alignment and escaped bars": [
    "|a|b|\n|:-:|-:|\n|`x\\|y`|1|\n|2",
    "<table><thead><tr><th center>a</th><th right>b</th></tr></thead><tbody><tr><td center><code>x|y</code></td><td right>1</td></tr><tr><td center>2</td><td right></td></tr></tbody></table>",
  ],
  "a table follows a paragraph": ["x\n\na|b\n-|-\n1|2", "<p>x</p><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>"],
  "rules": ["a\n\n***\n\n- - -", "<p>a</p><hr><hr>"],
  "links": ['[a *b*](https://x.y/z "t") <https://q.r>', "<p><a https://x.y/z>a <em>b</em></a> <a https://q.r/>https://q.r</a></p>"],
  "bare addresses end before the full stop": ["(see https://x.y/a_(b)). Or http://z.", "<p>(see <a https://x.y/a_(b)>https://x.y/a_(b)</a>). Or <a http://z/>http://z</a>.</p>"],
  "images become links": ["![cat](https://x.y/c.png?q=secret)", "<p><a https://x.y/c.png?q=secret>cat</a></p>"],
  "links that lead nowhere good are text": ["[a](javascript:alert(1)) [b](/v1/models)", "<p>[a](javascript:alert(1)) [b](/v1/models)</p>"],
  "HTML is text": ["<b onclick=x>hi</b> &lt;i&gt; &#60;", "<p><b onclick=x>hi</b> <i> <</p>"],
  "escapes": ["\\*a\\* \\[b\\](c) \\q", "<p>*a* [b](c) \\q</p>"],
};

for (const [name, [text, expected]] of Object.entries(CASES))
  test(name, () => assert.equal(parseMarkdown(text).map(show).join(""), expected));

test("equal sources mean equal blocks, so that drawing only what changed is right", () => {
  const whole = "# a\n\ntext *b*\n\n```js\nx\n```\n\n- 1\n- 2\n\n|a|\n|-|\n|1|";
  const final = parseMarkdown(whole);
  for (let end = 0; end <= whole.length; end += 1)
    for (const [index, block] of parseMarkdown(whole.slice(0, end)).entries())
      if (block.source === final[index].source && block.tag === final[index].tag) assert.deepEqual(block, final[index]);
});

test("only http, https and mailto addresses are links", () => {
  for (const good of ["https://a.b/c", "HTTP://a.b", "mailto:a@b.c"]) assert.ok(safeUrl(good), good);
  for (const bad of ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "java\nscript:alert(1)", " javascript:x", "\u0001javascript:x", "data:text/html,x", "vbscript:x", "file:///etc", "blob:https://a/b", "//evil.example", "/x", "x", "", "http://"])
    assert.equal(safeUrl(bad), null, JSON.stringify(bad));
});

test("whatever a model writes, the tree holds known tags and safe addresses only", () => {
  for (const text of hostileTexts(3000)) for (const block of parseMarkdown(text)) check(block, text, 0);
});

function check(node, text, depth) {
  if (typeof node === "string") return;
  assert.ok(TAGS.has(node.tag), `${node.tag} from ${JSON.stringify(text)}`);
  assert.ok(depth < 300, `nested ${depth} deep by ${JSON.stringify(text)}`);
  for (const key of Object.keys(node))
    assert.ok(["tag", "children", "href", "text", "language", "source", "start", "align"].includes(key), key);
  if (node.tag === "a") assert.match(node.href, /^(https?:|mailto:)/, JSON.stringify(text));
  else assert.equal(node.href, undefined);
  if (node.start !== undefined) assert.ok(Number.isInteger(node.start));
  if (node.align !== undefined) assert.ok(["left", "right", "center"].includes(node.align));
  node.children.forEach((child) => check(child, text, depth + 1));
}

test("no text is lost: the letters of a text are the letters of its tree", () => {
  const letters = (text) => text.replace(/[^a-z]/g, "");
  for (const text of ["a *b **c** d* [e](https://f.g) `h`\n- i\n  1. j\n> k\n\n|l|m|\n|-|-|\n|n|o|", "**a _b **c_ d** [e [f](g) h"]) {
    const shown = parseMarkdown(text).map((block) => plainText([block])).join("");
    assert.equal(letters(shown), letters(text.replace("(https://f.g)", "")));
  }
});

// The runner's timeout is the assertion: each of these takes minutes where matching is not linear.
const PATHOLOGICAL = {
  "unclosed emphasis": "*a ".repeat(40_000),
  "mixed emphasis": "a**b_c~~".repeat(15_000),
  "long runs": `${"*".repeat(50_000)}a${"*".repeat(50_000)}`,
  brackets: "[".repeat(80_000),
  "half links": "[](".repeat(25_000),
  "backticks of many lengths": Array.from({ length: 400 }, (_, n) => "`".repeat(n + 1)).join(" "),
  "a fence of blanks": `\`\`\`${" ".repeat(80_000)}\``,
  "a delimiter row of blanks": `a|b\n-${" ".repeat(80_000)}x`,
  "deep quotes": "> ".repeat(40_000),
  "deep lists": "- ".repeat(40_000),
  "many nested lines": "> - > - > - a\n".repeat(3000),
  "an address of brackets": `http://${"(".repeat(80_000)}`,
  "bars and dashes": `${"|".repeat(40_000)}\n${"|-".repeat(40_000)}`,
  backslashes: "\\".repeat(80_001),
};
for (const [name, text] of Object.entries(PATHOLOGICAL))
  test(`hostile size: ${name}`, { timeout: 20_000 }, () => void parseMarkdown(text));
