import assert from "node:assert/strict";
import { test } from "node:test";
import { spoken } from "../../../core/src/octavo/server/page/static/announce.js";
import { highlight } from "../../../core/src/octavo/server/page/static/highlight.js";
import { parseMarkdown } from "../../../core/src/octavo/server/page/static/markdown.js";
import { hitRate, rate, reading } from "../../../core/src/octavo/server/page/static/metrics.js";
import { doubt, percent, tokenText, visible } from "../../../core/src/octavo/server/page/static/tokens.js";

const TEXT = (tokens) => `# HELP octavo:num_requests_running x
# TYPE octavo:num_requests_running gauge
octavo:num_requests_running{engine="0",model_name="a b"} 2.0
octavo:num_requests_running{engine="1",model_name="a b"} 1.0
octavo:num_requests_waiting{engine="0"} 4.0
octavo:kv_cache_usage_perc{engine="0"} 0.5
octavo:kv_cache_usage_perc{engine="1"} 0.25
octavo:generation_tokens_total{engine="0"} ${tokens}
octavo:generation_tokens_created{engine="0"} 1.7e+09
octavo:prefix_cache_queries_total 100.0
octavo:prefix_cache_hits_total 30.0
`;

test("a reading sums engines, and takes the mean of their memory", () => {
  assert.deepEqual(reading(TEXT("1e3"), 7), { running: 3, waiting: 4, kv: 0.375, generated: 1000, looked: 100, found: 30, time: 7 });
});

test("the rate is tokens a second, and never negative after a restart", () => {
  assert.equal(rate(reading(TEXT(100), 0), reading(TEXT(150), 2000)), 25);
  assert.equal(rate(reading(TEXT(100), 0), reading(TEXT(0), 2000)), 0);
});

test("the hit rate is none where nothing was looked up", () => {
  assert.equal(hitRate({ looked: 100, found: 30 }, { looked: 200, found: 110 }), 0.8);
  assert.equal(hitRate({ looked: 100, found: 30 }, { looked: 100, found: 30 }), null);
});

test("probabilities are written with the digits that matter", () => {
  assert.deepEqual([0, -0.0001, Math.log(0.5), Math.log(0.004), -9999].map(percent), ["100 %", "100 %", "50.0 %", "0.40 %", "< 0.01 %"]);
  assert.deepEqual([0, Math.log(0.8), Math.log(0.5), Math.log(0.2), -20].map(doubt), [0, 1, 2, 3, 4]);
});

test("a token that is a part of a character shows its bytes", () => {
  assert.equal(tokenText("\ufffd", [0xe2, 0x82]), "⟨e2 82⟩");
  assert.equal(tokenText("é", [0xc3, 0xa9]), "é");
  assert.equal(tokenText("token_id:5", null), "token_id:5");
  assert.equal(visible(" a\n"), "␣a↵");
});

test("blocks are spoken in words", () => {
  const said = (text) => parseMarkdown(text).map(spoken);
  assert.deepEqual(said("# Hi *you*\n\n- a\n- b\n\n```py\nx\ny\n```\n\n---\n\n|a|b|\n|-|-|\n|1|2|"), [
    "Hi you", "a\nb", "Code in py, 2 lines.", "", "a, b. 1, 2",
  ]);
});

test("colouring loses no character", () => {
  for (const text of ["", "a", "def f(x): # c\n  return 'y\\'z' + 0x1f", "`${a}` /* b */ // c\n\"open", "\\"]) {
    for (const language of ["python", "js", "", "weird"]) {
      const pieces = highlight(text, language);
      assert.equal(pieces.map((piece) => piece.text).join(""), text);
    }
  }
  assert.deepEqual(highlight("if x: # y", "python").filter(({ kind }) => kind).map(({ kind }) => kind), ["keyword", "comment"]);
});
