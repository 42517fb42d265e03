// Now: latency, goodput, hit ratio, money, and one sentence about the bottleneck.

import { html, useEffect, useMemo, useState } from "../vendor/htm-preact.js";
import { getJson } from "../api.js";
import { count, ms, money, perSecond, percent, seconds } from "../format.js";
import { Failure, Segments, Tile } from "../parts.js";
import { Plot } from "../charts.js";

const RANGES = [
  ["1", "10 minutes"],
  ["10", "3 hours"],
  ["300", "3 days"],
];
const POINTS = { 1: 600, 10: 1080, 300: 864 };
const PLOTS = [
  ["Time to the first token", ["p50", "p95"], ["ttft_p50_ms", "ttft_p95_ms"], ms],
  ["Time between tokens", ["p50", "p95"], ["itl_p50_ms", "itl_p95_ms"], ms],
  ["Requests per second", ["ended", "within the goals", "refused"], ["requests_per_s", "goodput_per_s", "refused_per_s"], count],
  [
    "Mean parts of the time to the first token",
    ["queue", "gateway", "worker's wait", "prefill", "transfer"],
    ["ttft_queue_ms", "ttft_gateway_ms", "ttft_worker_wait_ms", "ttft_prefill_ms", "ttft_transfer_ms"],
    ms,
    true,
  ],
  ["Tokens per second", ["prompt", "generated"], ["prompt_tokens_per_s", "completion_tokens_per_s"], count],
  [
    "Cached prompt tokens per second, by tier",
    ["device", "host", "disk"],
    ["cached_device_tokens_per_s", "cached_host_tokens_per_s", "cached_disk_tokens_per_s"],
    count,
    true,
  ],
  ["Requests", ["running", "waiting"], ["running_requests", "waiting_requests"], count],
  ["KV memory in use", ["mean", "fullest worker"], ["kv_used", "kv_used_max"], percent],
];

// The series of one resolution. A point of a second comes from the stream; coarser ones are read again.
function useSeries(step, now) {
  const [series, setSeries] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    let isCurrent = true;
    const read = () =>
      getJson(`/admin/series?step=${step}&n=${POINTS[step]}`).then(
        (found) => isCurrent && (setSeries(found), setError(null)),
        (failed) => isCurrent && setError(failed),
      );
    setSeries(null);
    read();
    const timer = step === "1" ? 0 : setInterval(read, Math.min(60, Number(step)) * 1000);
    return () => {
      isCurrent = false;
      clearInterval(timer);
    };
  }, [step]);
  useEffect(() => {
    if (!series || step !== "1") return;
    const time = Math.floor(now.time_s);
    if (time <= series.times_s[series.times_s.length - 1]) return;
    const columns = {};
    for (const name of Object.keys(series.columns)) {
      columns[name] = [...series.columns[name].slice(1), now.point[name] ?? null];
    }
    setSeries({ ...series, times_s: [...series.times_s.slice(1), time], columns });
  }, [now]);
  return [series, error];
}

// The points from the first known one on, but at least a tenth of them, so that a young gateway's plots are not empty.
function withoutEmptyStart({ times_s: times, columns }) {
  const known = columns.workers.findIndex((value) => value !== null);
  const start = known < 0 ? 0 : Math.min(known, Math.floor(0.9 * times.length));
  const cut = Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values.slice(start)]));
  return { times: times.slice(start), columns: cut };
}

function Plots({ series, step, theme }) {
  const { times, columns } = useMemo(() => withoutEmptyStart(series), [series]);
  return html`<div class="plots">
    ${PLOTS.map(
      ([title, names, shown, format, isStacked]) =>
        html`<${Plot} key=${title + step} title=${title} names=${names} lines=${shown.map((one) => columns[one])} times=${times} format=${format} isStacked=${isStacked} theme=${theme} />`,
    )}
  </div>`;
}

function Tiles({ now }) {
  const v = now.values;
  const good = v.requests_per_s ? v.goodput_per_s / v.requests_per_s : null;
  const over = (value, goal) => (value !== null && value > goal ? "bad" : "");
  const saved = now.has_prices
    ? ["Money saved", money(60 * v.saved, `${now.currency}/h`), `spent ${money(60 * v.cost, `${now.currency}/h`)}`]
    : ["Prefill saved", seconds(v.saved_prefill_s), "in the last minute; set prices to see money"];
  return html`<div class="tiles">
    <${Tile} name="Time to the first token" value=${ms(v.ttft_p50_ms)} more=${`p95 ${ms(v.ttft_p95_ms)}, goal ${ms(now.ttft_goal_ms)}`} state=${over(v.ttft_p95_ms, now.ttft_goal_ms)} />
    <${Tile} name="Time between tokens" value=${ms(v.itl_p50_ms)} more=${`p95 ${ms(v.itl_p95_ms)}, goal ${ms(now.itl_goal_ms)}`} state=${over(v.itl_p95_ms, now.itl_goal_ms)} />
    <${Tile} name="Goodput" value=${perSecond(v.goodput_per_s)} more=${good === null ? "no requests" : `${percent(good)} of the requests within the goals`} />
    <${Tile} name="Cache hits" value=${percent(v.hit_ratio)} more=${`of ${perSecond(v.prompt_tokens_per_s)} prompt tokens`} />
    <${Tile} name=${saved[0]} value=${saved[1]} more=${saved[2]} />
    <${Tile} name="Requests" value=${count(now.point.running_requests)} more=${`running, ${count(now.point.waiting_requests)} waiting`} />
    <${Tile} name="Workers" value=${`${count(now.point.usable_workers)}/${count(now.point.workers)}`} more="can take requests" state=${now.point.usable_workers < now.point.workers ? "bad" : ""} />
    <${Tile} name="Generated" value=${perSecond(v.completion_tokens_per_s)} more="tokens" />
  </div>`;
}

export function Now({ now, theme }) {
  const [step, setStep] = useState("1");
  const [series, error] = useSeries(step, now);
  return html`<p class="bottleneck" role="status">${now.bottleneck}</p>
    <${Tiles} now=${now} />
    <p class="note">The numbers above are those of the last minute.</p>
    <div class="row"><${Segments} label="Time range" options=${RANGES} value=${step} onChange=${setStep} /></div>
    <${Failure} error=${error} />
    ${series && html`<${Plots} series=${series} step=${step} theme=${theme} />`}`;
}
