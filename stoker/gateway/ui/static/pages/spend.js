// Spend: the ledger's usage and cost, by tenant, key, model or day.

import { html, useMemo, useState } from "../vendor/htm-preact.js";
import { count, money, percent } from "../format.js";
import { Bar, Empty, Failure, Panel, Segments, Table, Tile, usePolled } from "../parts.js";

const DAY_S = 86_400;
const PERIODS = [
  ["1", "24 hours"],
  ["7", "7 days"],
  ["30", "30 days"],
];
const GROUPS = [
  ["tenant", "Tenant"],
  ["key", "Key"],
  ["model", "Model"],
  ["day", "Day"],
];

export function Spend() {
  const [days, setDays] = useState("7");
  const [group, setGroup] = useState("tenant");
  // The period ends a minute from now, so that the path stays the same while the page is open.
  const start = useMemo(() => Math.floor(Date.now() / 1000) - Number(days) * DAY_S, [days]);
  const [usage, error] = usePolled(`/v1/usage?group_by=${group}&start=${start}&limit=1000`, 15_000);
  const controls = html`<div class="row">
    <${Segments} label="Period" options=${PERIODS} value=${days} onChange=${setDays} />
    <${Segments} label="Group" options=${GROUPS} value=${group} onChange=${setGroup} />
  </div>`;
  if (!usage) return html`${controls}<${Failure} error=${error} />${!error && html`<${Empty}>Reading the ledger…</${Empty}>`}`;
  const { total, currency } = usage;
  const rows = [...usage.data].sort((a, b) => (group === "day" ? String(b.day).localeCompare(String(a.day)) : Number(b.cost) - Number(a.cost) || b.prompt_tokens - a.prompt_tokens));
  const most = Math.max(...rows.map((one) => Number(one.cost)), 1e-12);
  const columns = [
    { name: GROUPS.find(([key]) => key === group)[1], cell: (one) => html`<span class="name">${String(one[group])}</span>` },
    { name: "Requests", number: true, cell: (one) => count(one.requests) },
    { name: "Prompt tokens", number: true, cell: (one) => count(one.prompt_tokens) },
    { name: "Cached", number: true, cell: (one) => percent(one.prompt_tokens ? one.cached_tokens / one.prompt_tokens : null) },
    { name: "Answers, tokens", number: true, cell: (one) => count(one.completion_tokens) },
    { name: "Cost", cell: (one) => html`<span class="with-bar"><${Bar} share=${Number(one.cost) / most} label=${money(one.cost, currency)} />${money(one.cost, currency)}</span>` },
  ];
  return html`${controls}<${Failure} error=${error} />
    <div class="tiles small">
      <${Tile} name="Cost" value=${money(total.cost, currency)} more=${`in ${PERIODS.find(([key]) => key === days)[1]}`} />
      <${Tile} name="Requests" value=${count(total.requests)} more="in the ledger" />
      <${Tile} name="Prompt tokens" value=${count(total.prompt_tokens)} more=${`${percent(total.prompt_tokens ? total.cached_tokens / total.prompt_tokens : null)} cached`} />
      <${Tile} name="Generated tokens" value=${count(total.completion_tokens)} more="in answers" />
    </div>
    <${Panel} title="By group" note="Costs come from the prices in the gateway's configuration. A model without a price is free.">
      ${rows.length ? html`<${Table} caption="Usage" columns=${columns} rows=${rows} rowKey=${(one) => String(one[group])} />` : html`<${Empty}>No request in this period.</${Empty}>`}
    </${Panel}>`;
}
