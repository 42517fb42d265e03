// KV: what the tiers hold, what was evicted, where loading beats computing, and what more memory would have hit.

import { html } from "../vendor/htm-preact.js";
import { bytes, count, percent, perSecond, reasonText } from "../format.js";
import { Bar, Empty, Failure, Panel, Table, usePolled } from "../parts.js";
import { Plot } from "../charts.js";

const GIB = 2 ** 30;

// The hit ratio at a size, from the points of the curve; sizes are powers of two.
export function ratioAt(points, tokens) {
  if (!points.length) return null;
  for (let i = 1; i < points.length; i += 1) {
    const [size, ratio] = points[i];
    const [lower, below] = points[i - 1];
    if (tokens <= size) {
      const part = Math.log2(Math.max(tokens, lower) / lower) / Math.log2(size / lower);
      return below + (ratio - below) * part;
    }
  }
  return points[points.length - 1][1];
}

function advice(kv) {
  const { points, now } = kv.reuse;
  if (!points.length) return "No prompts were long enough yet. One block in 128 is followed, so the curve needs some traffic.";
  if (!kv.capacity_tokens || now === null) return "The size of the workers' memory is not known: only Stoker workers report it.";
  const twice = ratioAt(points, 2 * kv.capacity_tokens);
  const gain = 100 * (twice - now);
  const size = kv.bytes_per_token ? ` (${bytes(kv.capacity_tokens * kv.bytes_per_token)} more)` : "";
  return `Twice the memory${size} would have hit ${gain >= 0.05 ? `+${gain.toFixed(1)} points: ${percent(twice)} instead of ${percent(now)}.` : `nothing more than the ${percent(now)} of today.`}`;
}

function Curve({ kv, theme }) {
  const { points } = kv.reuse;
  const capacity = kv.capacity_tokens;
  const format = (tokens) => (kv.bytes_per_token ? bytes(tokens * kv.bytes_per_token) : count(tokens));
  // The axis ends a little above the memory of today, so that its mark is visible.
  let shown = points;
  while (shown.length && capacity && shown[shown.length - 1][0] < capacity) {
    const [size, ratio] = shown[shown.length - 1];
    shown = [...shown, [2 * size, ratio]];
  }
  return html`<${Panel} title="What more memory would have hit" note=${advice(kv)}>
    ${shown.length > 1
      ? html`<${Plot} title=${`Hit ratio by the size of the cache, in ${kv.bytes_per_token ? "bytes" : "tokens"}`} names=${["hit ratio"]} times=${shown.map(([size]) => Math.log2(size))} lines=${[shown.map(([, ratio]) => ratio)]} format=${percent} xFormat=${(power) => format(2 ** power)} yMax=${1} theme=${theme} mark=${capacity ? { x: Math.log2(capacity), text: `today: ${format(capacity)}` } : null} />`
      : html`<${Empty}>The curve appears after some requests.</${Empty}>`}
  </${Panel}>`;
}

function tiersOf(workers) {
  const tiers = new Map();
  for (const worker of workers) {
    for (const [name, tier] of Object.entries(worker.tiers)) {
      const sum = tiers.get(name) || { name, workers: 0, crossover: [] };
      sum.workers += 1;
      for (const key of ["blocks", "used_bytes", "capacity_bytes", "hits", "misses", "evicted", "declined", "corrupt", "errors"]) {
        sum[key] = (sum[key] || 0) + (tier[key] || 0);
      }
      sum.speed = Math.max(sum.speed || 0, tier.read_bytes_per_second || 0);
      if (tier.crossover_tokens !== undefined) sum.crossover.push(tier.crossover_tokens);
      tiers.set(name, sum);
    }
  }
  return [...tiers.values()];
}

const TIER_COLUMNS = [
  { name: "Tier", cell: (one) => one.name },
  { name: "Used", cell: (one) => html`<span class="with-bar"><${Bar} share=${one.used_bytes / (one.capacity_bytes || 1)} label=${`${bytes(one.used_bytes)} of ${bytes(one.capacity_bytes)}`} />${bytes(one.used_bytes)} of ${bytes(one.capacity_bytes)}</span>` },
  { name: "Blocks", number: true, cell: (one) => count(one.blocks) },
  { name: "Hits", number: true, cell: (one) => count(one.hits) },
  { name: "Misses", number: true, cell: (one) => count(one.misses) },
  { name: "Evicted", number: true, cell: (one) => count(one.evicted) },
  { name: "Not stored", number: true, cell: (one) => count(one.declined) },
  { name: "Corrupt", number: true, cell: (one) => count(one.corrupt) },
  { name: "Errors", number: true, cell: (one) => count(one.errors) },
  { name: "Read speed", number: true, cell: (one) => (one.speed ? `${(one.speed / GIB).toFixed(2)} GiB/s` : "–") },
  { name: "Loads from, tokens", number: true, cell: (one) => (one.crossover.length ? count(Math.min(...one.crossover)) : "–") },
];

const WORKER_COLUMNS = [
  { name: "Worker", cell: (one) => html`<span class="name">${one.worker}</span>` },
  { name: "Device KV in use", cell: (one) => (one.kv_used === null ? "–" : html`<span class="with-bar"><${Bar} share=${one.kv_used} label=${percent(one.kv_used)} />${percent(one.kv_used)}</span>`) },
  { name: "Blocks", number: true, cell: (one) => count(one.blocks) },
  { name: "Cached blocks", number: true, cell: (one) => count(one.cached_blocks) },
  { name: "Loaded from tiers, tokens", number: true, cell: (one) => count(one.loaded_tokens) },
  { name: "Pulled from peers, tokens", number: true, cell: (one) => count(one.pulled_tokens) },
  { name: "Failed loads", number: true, cell: (one) => count(one.failed_loads) },
  { name: "Preemptions", number: true, cell: (one) => count(one.preemptions) },
  { name: "Drafts accepted", number: true, cell: (one) => (one.draft_tokens ? percent(one.accepted_draft_tokens / one.draft_tokens) : "–") },
];

function Reasons({ misses }) {
  const sums = new Map();
  for (const key of misses.keys) {
    for (const { reason, tokens, requests } of key.reasons) {
      const sum = sums.get(reason) || { reason, tokens: 0, requests: 0 };
      sum.tokens += tokens;
      sum.requests += requests;
      sums.set(reason, sum);
    }
  }
  const rows = [...sums.values()].sort((a, b) => b.tokens - a.tokens);
  const all = rows.reduce((total, one) => total + one.tokens, 0);
  const columns = [
    { name: "Reason", cell: (one) => reasonText(one.reason) },
    { name: "Tokens", number: true, cell: (one) => count(one.tokens) },
    { name: "Share", cell: (one) => html`<span class="with-bar"><${Bar} share=${one.tokens / all} label=${percent(one.tokens / all)} />${percent(one.tokens / all)}</span>` },
    { name: "Requests", number: true, cell: (one) => count(one.requests) },
  ];
  return rows.length ? html`<${Table} caption="Why prompt tokens were computed" columns=${columns} rows=${rows} rowKey=${(one) => one.reason} />` : html`<${Empty}>No prompt was computed yet.</${Empty}>`;
}

export function Kv({ now, theme }) {
  const [kv, error] = usePolled("/admin/kv", 5000);
  const [misses] = usePolled("/admin/misses", 5000);
  if (!kv) return html`<${Failure} error=${error} />${!error && html`<${Empty}>Reading the workers' KV memory…</${Empty}>`}`;
  const tiers = tiersOf(kv.workers);
  const values = now.values;
  return html`<${Failure} error=${error} />
    <${Curve} kv=${kv} theme=${theme} />
    <${Panel} title="Tiers below the device" note=${`Last minute: ${perSecond(values.cached_host_tokens_per_s)} tokens from host memory, ${perSecond(values.cached_disk_tokens_per_s)} from disks and shared stores. A tier is read only for prompts of at least “loads from” tokens, because computing fewer is faster.`}>
      ${tiers.length ? html`<${Table} caption="Tiers" columns=${TIER_COLUMNS} rows=${tiers} rowKey=${(one) => one.name} />` : html`<${Empty}>No worker has a tier. <code>stoker serve --kv-host-gib</code> and <code>--kv-disk</code> add them.</${Empty}>`}
    </${Panel}>
    <${Panel} title="Why prompt tokens were computed" note="Since the gateway started.">
      ${misses ? html`<${Reasons} misses=${misses} />` : html`<${Empty}>Reading…</${Empty}>`}
    </${Panel}>
    <${Panel} title="Workers">
      ${kv.workers.length ? html`<${Table} caption="KV memory of the workers" columns=${WORKER_COLUMNS} rows=${kv.workers} rowKey=${(one) => one.worker} />` : html`<${Empty}>No worker is connected.</${Empty}>`}
    </${Panel}>`;
}
