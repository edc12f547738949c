// Texts that want to become script: known tricks, and fragments of them thrown together. The same each time.

export const TRICKS = [
  "<script>window.pwned = 1</script>",
  "<img src=x onerror=\"window.pwned = 1\">",
  "<svg/onload=window.pwned=1>",
  "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
  "<a href=\"javascript:window.pwned=1\">click</a>",
  "[click](javascript:window.pwned=1)",
  "[click](JaVaScRiPt:window.pwned=1)",
  "[click](java\tscript:window.pwned=1)",
  "[click](<javascript:window.pwned=1>)",
  "[click](&#106;avascript:window.pwned=1)",
  "[click](\u0001javascript:window.pwned=1)",
  "[click](data:text/html;base64,PHNjcmlwdD53aW5kb3cucHduZWQ9MTwvc2NyaXB0Pg==)",
  "[click](vbscript:pwned)",
  "[a](https://x.example/\" onmouseover=\"window.pwned=1)",
  "[a](https://x.example \"t\" onmouseover=window.pwned=1)",
  "![x](https://x.example/\" onerror=\"window.pwned=1)",
  "![x](javascript:window.pwned=1)",
  "<javascript:window.pwned=1>",
  "```js\" onclick=\"window.pwned=1\nx\n```",
  "```\"><img src=x onerror=window.pwned=1>\nx\n```",
  "`<img src=x onerror=window.pwned=1>`",
  "# <img src=x onerror=window.pwned=1>",
  "|<img src=x onerror=window.pwned=1>|\n|-|\n|<script>window.pwned=1</script>|",
  "- <details open ontoggle=window.pwned=1>",
  "> <base href=https://x.example/>",
  "<style>@import url(https://x.example/?leak)</style>",
  "<meta http-equiv=refresh content='0;url=https://x.example'>",
  "<form action=https://x.example><button>go</button></form>",
  "<math><mtext></form><form><mglyph><style></math><img src onerror=window.pwned=1>",
  "&lt;script&gt;window.pwned=1&lt;/script&gt;",
  "&#60;script&#62;window.pwned=1&#60;/script&#62;",
  "https://x.example/<script>window.pwned=1</script>",
  "https://x.example/\"onmouseover=\"window.pwned=1",
  "[![a](https://x.example)](javascript:window.pwned=1)",
  "${window.pwned=1} {{constructor.constructor('window.pwned=1')()}}",
  "\u0000<scr\u0000ipt>window.pwned=1</script>",
];

const FRAGMENTS = [
  ...TRICKS, "[", "](", ")", "(", "<", ">", "\"", "'", "`", "```", "*", "**", "_", "~~", "\\", "|", "\n", "\n\n", "    ", "- ",
  "1. ", "> ", "# ", "&", "&#", ";", "javascript:", "data:", "https://", "mailto:", "!", "onerror=", "__proto__", "constructor", "\r", "\t",
  "\u2028", "\ud800", "é", "漢", "a", "|-|", "===", "---",
];

export function* hostileTexts(count) {
  yield* TRICKS;
  let state = 20240917;
  const random = (below) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
  for (let number = 0; number < count; number += 1)
    yield Array.from({ length: 1 + random(14) }, () => FRAGMENTS[random(FRAGMENTS.length)]).join("");
}
