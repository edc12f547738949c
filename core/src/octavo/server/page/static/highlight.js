// A little colour for code, the same rules for every language: comments, strings, numbers and common keywords.

const HASH_COMMENTS = /^(py|python|sh|bash|shell|zsh|ruby|rb|yaml|yml|toml|r|perl|pl|make|makefile|dockerfile|console|nix|elixir|jl|julia)$/i;
const PLAIN = /^(|text|txt|plain|plaintext|markdown|md|output|log|csv|diff)$/i;
const MAX_LENGTH = 50_000;
const STRING = /"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\[^]){0,2000}`/;
const NUMBER = /\b\d[\w.]*/;
const WORD = /[A-Za-z_$][\w$]*/;
const KEYWORDS = new Set(
  (
    "abstract and as assert async await begin bool break case catch char class const continue def default defer del do " +
    "double elif else end enum except export extends extern false False final finally float fn for foreach from func " +
    "function global go goto if impl implements import in include int interface is lambda let long loop match mod module " +
    "mut namespace new nil None nonlocal not null nullptr or package pass private protected pub public raise return self " +
    "short signed sizeof static struct super switch template this throw throws trait true True try type typedef typeof " +
    "undefined union unsigned use using var virtual void volatile where while with yield select insert update delete " +
    "create join group order by limit echo then fi done esac local SELECT FROM WHERE INSERT UPDATE DELETE CREATE TABLE " +
    "JOIN ON GROUP ORDER BY LIMIT AND OR NOT NULL AS INTO VALUES"
  ).split(" "),
);

function rules(language) {
  const comment = HASH_COMMENTS.test(language) ? /#[^\n]*/ : /\/\/[^\n]*|\/\*[^]*?\*\/|--[ ][^\n]*/;
  const sources = [comment, STRING, NUMBER, WORD].map((rule) => `(${rule.source})`);
  return new RegExp(sources.join("|"), "g");
}

/** The text in pieces {kind, text}; kind is null, "comment", "string", "number" or "keyword". */
export function highlight(text, language) {
  if (PLAIN.test(language) || text.length > MAX_LENGTH) return [{ kind: null, text }];
  const pieces = [];
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) pieces.push({ kind: null, text: plain });
    plain = "";
  };
  for (const found of text.matchAll(rules(language))) {
    const [whole, comment, string, number] = found;
    plain += text.slice(at, found.index);
    at = found.index + whole.length;
    const kind = comment ? "comment" : string ? "string" : number ? "number" : KEYWORDS.has(whole) ? "keyword" : null;
    if (kind) {
      flush();
      pieces.push({ kind, text: whole });
    } else plain += whole;
  }
  plain += text.slice(at);
  flush();
  return pieces;
}
