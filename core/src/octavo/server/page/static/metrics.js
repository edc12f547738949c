// Prometheus text to the few numbers that the live view shows.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)/;

/** Values of all metrics whose names are asked for: name -> list, one per label set. */
export function parseMetrics(text, names) {
  const values = new Map(names.map((name) => [name, []]));
  for (const line of text.split("\n")) {
    const found = SAMPLE.exec(line);
    if (found) values.get(found[1])?.push(Number(found[2]));
  }
  return values;
}

const NAMES = {
  running: "octavo:num_requests_running",
  waiting: "octavo:num_requests_waiting",
  kv: "octavo:kv_cache_usage_perc",
  generated: "octavo:generation_tokens_total",
  looked: "octavo:prefix_cache_queries_total",
  found: "octavo:prefix_cache_hits_total",
};

/** One reading: sums over engines, except `kv`, a share from 0 to 1, which is their mean. `time` is in milliseconds. */
export function reading(text, time) {
  const values = parseMetrics(text, Object.values(NAMES));
  const sum = (name) => values.get(NAMES[name]).reduce((total, value) => total + value, 0);
  const engines = Math.max(1, values.get(NAMES.kv).length);
  const totals = Object.fromEntries(Object.keys(NAMES).map((name) => [name, sum(name)]));
  return { ...totals, kv: totals.kv / engines, time };
}

/** Tokens a second between two readings; 0 if the counter began anew between them. */
export function rate(before, now) {
  const seconds = (now.time - before.time) / 1000;
  return seconds > 0 ? Math.max(0, (now.generated - before.generated) / seconds) : 0;
}

/** Share of prompt tokens found in the prefix cache between two readings; null if none was looked up. */
export function hitRate(before, now) {
  const looked = now.looked - before.looked;
  return looked > 0 ? Math.max(0, now.found - before.found) / looked : null;
}
