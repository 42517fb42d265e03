// Requests: the latest ones, and for one of them where its time went, why its worker was chosen and why it missed the cache.

import { html, useState } from "../vendor/htm-preact.js";
import { clock, count, DASH, misses, money, ms, percent, reasonText, seconds } from "../format.js";
import { Bar, Empty, Failure, Panel, Selection, Table, usePolled } from "../parts.js";

const PARTS = ["queue", "gateway", "worker's wait", "prefill", "transfer"];
const TERMS = [
  ["queue_s", "queue"],
  ["compute_s", "compute"],
  ["prefill_s", "prefill leg"],
  ["fetch_s", "load KV"],
  ["decode_s", "decode"],
  ["kv_s", "KV space"],
  ["others_s", "delay of others"],
  ["later_s", "later turns"],
  ["recent_s", "recent load"],
  ["move_s", "move"],
  ["placement_s", "placement"],
];
const ERROR = 400;

export function Misses({ text }) {
  const parts = misses(text);
  if (!parts.length) return DASH;
  return html`<ul class="plain">${parts.map(
    (one) => html`<li><strong>${count(one.tokens)}</strong> tokens: ${reasonText(one.reason)}${one.place && html` <span class="place">(${one.place})</span>`}</li>`,
  )}</ul>`;
}

function Waterfall({ request }) {
  const total = request.e2e_ms || 1;
  let at = 0;
  const steps = request.parts_ms.map((length, i) => {
    const step = { name: PARTS[i], start: at, length, number: i + 1 };
    at += length;
    return step;
  });
  const first = request.ttft_ms === null ? 0 : request.ttft_ms;
  if (!steps.length) steps.push({ name: request.ttft_ms === null ? "no answer" : "answer, not streamed", start: 0, length: total, number: 3 });
  else steps.push({ name: "decode", start: first, length: Math.max(0, total - first), number: 6 });
  return html`<div class="waterfall" role="list" aria-label="Where the time went">
    ${steps
      .filter((one) => one.length > 0)
      .map(
        (one) => html`<div class="fall" role="listitem">
          <span class="fall-name">${one.name}</span>
          <span class="fall-track"><span class=${`fall-bar fall-${one.number}`} style=${{ left: `${(100 * one.start) / total}%`, width: `${Math.max(0.4, (100 * one.length) / total)}%` }}></span></span>
          <span class="fall-time">${ms(one.length)}</span>
        </div>`,
      )}
  </div>`;
}

function Candidates({ request }) {
  if (!request.candidates.length) return html`<${Empty}>No worker was considered.</${Empty}>`;
  const used = TERMS.filter(([key]) => request.candidates.some((one) => one[key]));
  const isChosen = (one) => one.worker === (one.part === "prefill" ? request.prefill_worker : request.worker);
  const columns = [
    { name: "Worker", cell: (one) => html`<span class="name">${one.worker}</span>${isChosen(one) && html` <span class="badge good">chosen</span>`}` },
    { name: "Part", cell: (one) => one.part },
    { name: "Cost", number: true, cell: (one) => seconds(one.cost_s || 0) },
    { name: "Cached tokens", number: true, cell: (one) => count(one.cached_tokens) },
    ...used.map(([key, name]) => ({ name, number: true, cell: (one) => (one[key] ? seconds(one[key]) : DASH) })),
  ];
  let number = 0;
  return html`<${Table} caption="Costs of the candidates" columns=${columns} rows=${request.candidates} rowKey=${(one) => `${one.worker}/${one.part}/${(number += 1)}`} />`;
}

export function Details({ id, currency }) {
  const [request, error] = usePolled(`/admin/requests?request=${encodeURIComponent(id)}`, 0);
  if (!request) return html`<${Failure} error=${error} />${!error && html`<${Empty}>Reading…</${Empty}>`}`;
  const facts = [
    ["Request", request.x_request_id],
    ["Model", request.model],
    ["Key, tenant", `${request.key_id}, ${request.tenant}`],
    ["Session", request.session || DASH],
    ["Worker", request.prefill_worker ? `${request.prefill_worker} → ${request.worker}` : request.worker || DASH],
    ["Retries, resumes", `${request.retries}, ${request.resumed}`],
    ["Prompt", `${count(request.prompt_tokens)} tokens, ${count(request.cached_tokens)} cached`],
    ["Cached in", `device ${count(request.tiers.device)}, host ${count(request.tiers.host)}, disk ${count(request.tiers.disk)}`],
    ["Answer", `${count(request.completion_tokens)} tokens`],
    ["Cost", `${money(request.cost, currency)}, the cache saved ${money(request.saved, currency)}`],
  ];
  if (request.error) facts.push(["Error", request.error]);
  return html`<${Panel} title="Where the time went"><${Waterfall} request=${request} /></${Panel}>
    <div class="two">
      <${Panel} title="Facts"><dl>${facts.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl></${Panel}>
      <${Panel} title="Why it was not all cached"><${Misses} text=${request.misses} /></${Panel}>
    </div>
    <${Panel} title="Why this worker" note="The candidate with the lowest cost is chosen. At most the eight cheapest are kept."><${Candidates} request=${request} /></${Panel}>`;
}

export function Requests({ now }) {
  const [found, error] = usePolled("/admin/requests?n=100", 2000);
  const [filter, setFilter] = useState("");
  const [selected, setSelected] = useState(null);
  if (!found) return html`<${Failure} error=${error} />${!error && html`<${Empty}>Reading the requests…</${Empty}>`}`;
  const wanted = filter.trim().toLowerCase();
  const text = (one) => [one.x_request_id, one.model, one.key_id, one.tenant, one.session, one.worker, one.status, one.error].join(" ").toLowerCase();
  const rows = found.requests.filter((one) => !wanted || text(one).includes(wanted));
  const columns = [
    { name: "Ended request", cell: (one) => html`<span class="name">${clock(one.time_s)} ${one.x_request_id}</span>` },
    { name: "Status", cell: (one) => html`<span class=${`badge ${one.status >= ERROR || one.error ? "bad" : "good"}`}>${one.status}${one.error ? ` ${one.error}` : ""}</span>` },
    { name: "Model", cell: (one) => one.model },
    { name: "Tenant", cell: (one) => one.tenant },
    { name: "Worker", cell: (one) => one.worker || DASH },
    { name: "First token", number: true, cell: (one) => ms(one.ttft_ms) },
    { name: "Total", number: true, cell: (one) => ms(one.e2e_ms) },
    { name: "Prompt", number: true, cell: (one) => count(one.prompt_tokens) },
    { name: "Cached", cell: (one) => (one.prompt_tokens ? html`<span class="with-bar"><${Bar} share=${one.cached_tokens / one.prompt_tokens} label=${percent(one.cached_tokens / one.prompt_tokens)} />${percent(one.cached_tokens / one.prompt_tokens)}</span>` : DASH) },
    { name: "Answer", number: true, cell: (one) => count(one.completion_tokens) },
  ];
  return html`<${Failure} error=${error} />
    ${selected &&
    html`<${Selection} title=${`Request ${selected}`} onClose=${() => setSelected(null)}>
      <${Details} key=${selected} id=${selected} currency=${now.currency} />
    </${Selection}>`}
    <${Panel} title="Latest requests" actions=${html`<input type="search" aria-label="Filter requests" placeholder="Filter" value=${filter} onInput=${(e) => setFilter(e.target.value)} />`}>
      ${rows.length
        ? html`<${Table} caption="Latest requests" columns=${columns} rows=${rows} rowKey=${(one) => one.request_id} selected=${selected} onSelect=${(key) => setSelected(key === selected ? null : key)} />`
        : html`<${Empty}>${found.requests.length ? "No request fits the filter." : "No request has ended since the gateway started."}</${Empty}>`}
    </${Panel}>`;
}
