// The live view: reads /metrics every few seconds while it can be seen.

import { Failure, readMetrics } from "./api.js";
import { byId } from "./dom.js";
import { hitRate, rate, reading } from "./metrics.js";
import { apiKey } from "./settings.js";
import { isOpen } from "./shell.js";

const INTERVAL_MS = 2000;
const KEPT = 60;
const WIDTH = 240;
const HEIGHT = 40;

let readings = [];
let asking = false;

export function startLive() {
  poll();
  setInterval(poll, INTERVAL_MS);
  document.addEventListener("visibilitychange", poll);
}

async function poll() {
  if (asking || document.hidden || !isOpen("settings")) return;
  asking = true;
  const note = byId("live-note");
  try {
    const text = await readMetrics(apiKey(), AbortSignal.timeout(3 * INTERVAL_MS));
    readings = [...readings, reading(text, performance.now())].slice(-KEPT - 1);
    note.hidden = true;
    show();
  } catch (error) {
    if (!(error instanceof Failure) && error.name !== "TimeoutError") throw error;
    readings = [];
    note.textContent = error.status === 401 ? "The server shows its figures only to those with a key." : error.message;
    note.hidden = false;
    for (const id of ["speed", "running", "waiting", "kv", "hits"]) byId(`live-${id}`).textContent = "–";
    draw([]);
  } finally {
    asking = false;
  }
}

function show() {
  const now = readings.at(-1);
  const rates = readings.slice(1).map((at, index) => rate(readings[index], at));
  const hits = hitRate(readings[0], now) ?? hitRate({ looked: 0, found: 0 }, now);
  byId("live-speed").textContent = rates.length ? figure(rates.at(-1)) : "–";
  byId("live-running").textContent = now.running;
  byId("live-waiting").textContent = now.waiting;
  byId("live-kv").textContent = percent(now.kv);
  byId("live-hits").textContent = hits === null ? "–" : percent(hits);
  draw(rates);
}

function figure(value) {
  return value < 10 && value % 1 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

function percent(share) {
  return `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

/** The rates as a line over the last two minutes, the newest at the right; the same in words for those who cannot see it. */
function draw(rates) {
  const svg = byId("sparkline");
  if (!rates.length) {
    svg.replaceChildren();
    svg.setAttribute("aria-label", "Tokens a second: nothing measured yet");
    return;
  }
  const top = Math.max(...rates, 1);
  const step = WIDTH / (KEPT - 1);
  const points = rates.map((value, index) => [WIDTH - (rates.length - 1 - index) * step, HEIGHT - 2 - (value / top) * (HEIGHT - 6)]);
  const line = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
  const area = `${points[0][0].toFixed(1)},${HEIGHT} ${line} ${WIDTH},${HEIGHT}`;
  svg.replaceChildren(shape("polygon", "spark-area", area), shape("polyline", "spark-line", line));
  svg.setAttribute(
    "aria-label",
    `Tokens a second in the last two minutes: now ${figure(rates.at(-1))}, at most ${figure(Math.max(...rates))}, at least ${figure(Math.min(...rates))}`,
  );
}

function shape(tag, name, points) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  node.setAttribute("class", name);
  node.setAttribute("points", points);
  return node;
}
