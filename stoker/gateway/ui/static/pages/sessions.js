// Sessions: an agent and its sub-agents as a tree, where a prefix broke, and what it cost.

import { html, useState } from "../vendor/htm-preact.js";
import { clock, count, misses, money, ms, percent } from "../format.js";
import { Bar, Empty, Failure, Panel, Selection, Table, usePolled } from "../parts.js";
import { Misses } from "./requests.js";

const BREAKS = new Set(["changed", "answer_changed", "salted"]);

// Sorts sessions so that each follows its parent, with its depth. A parent that is not known, or a cycle, does not matter.
export function treeOf(sessions) {
  const byName = new Map(sessions.map((one) => [one.session, one]));
  const children = new Map();
  const roots = [];
  for (const one of sessions) {
    if (one.parent && one.parent !== one.session && byName.has(one.parent)) {
      children.set(one.parent, [...(children.get(one.parent) || []), one]);
    } else roots.push(one);
  }
  const rows = [];
  const seen = new Set();
  const visit = (one, depth) => {
    if (seen.has(one.session)) return;
    seen.add(one.session);
    rows.push({ ...one, depth: Math.min(depth, 8) });
    for (const child of children.get(one.session) || []) visit(child, depth + 1);
  };
  for (const one of roots) visit(one, 0);
  for (const one of sessions) visit(one, 0);
  return rows;
}

const breaksOf = (session) => session.turns.filter((turn) => misses(turn.misses).some((one) => BREAKS.has(one.reason)));

function Turns({ session, currency }) {
  const columns = [
    { name: "Turn", cell: (one) => clock(one.time_s) },
    { name: "Worker", cell: (one) => one.worker || "–" },
    { name: "Prompt", number: true, cell: (one) => count(one.prompt_tokens) },
    { name: "Cached", cell: (one) => html`<span class="with-bar"><${Bar} share=${one.cached_tokens / (one.prompt_tokens || 1)} label=${percent(one.cached_tokens / (one.prompt_tokens || 1))} />${percent(one.cached_tokens / (one.prompt_tokens || 1))}</span>` },
    { name: "First token", number: true, cell: (one) => ms(one.ttft_ms) },
    { name: "Answer", number: true, cell: (one) => count(one.completion_tokens) },
    { name: "Cost", number: true, cell: (one) => money(one.cost, currency) },
    { name: "Computed because", cell: (one) => html`<${Misses} text=${one.misses} />` },
  ];
  return html`<${Table} caption=${`Turns of ${session.session}`} columns=${columns} rows=${[...session.turns].reverse()} rowKey=${(one) => one.request_id} />`;
}

export function Sessions({ now }) {
  const [found, error] = usePolled("/admin/sessions?n=200", 3000);
  const [selected, setSelected] = useState(null);
  const currency = now.currency;
  if (!found) return html`<${Failure} error=${error} />${!error && html`<${Empty}>Reading the sessions…</${Empty}>`}`;
  const rows = treeOf(found.sessions);
  const open = rows.find((one) => one.session === selected);
  const columns = [
    { name: "Session", cell: (one) => html`<span class=${`name depth-${one.depth}`}>${one.depth ? "↳ " : ""}${one.session}</span>` },
    { name: "Model", cell: (one) => one.model },
    { name: "Requests", number: true, cell: (one) => count(one.requests) },
    { name: "Prompt tokens", number: true, cell: (one) => count(one.prompt_tokens) },
    { name: "Cached", cell: (one) => html`<span class="with-bar"><${Bar} share=${one.cached_tokens / (one.prompt_tokens || 1)} label=${percent(one.cached_tokens / (one.prompt_tokens || 1))} />${percent(one.cached_tokens / (one.prompt_tokens || 1))}</span>` },
    { name: "Answers, tokens", number: true, cell: (one) => count(one.completion_tokens) },
    { name: "Cost", number: true, cell: (one) => money(one.cost, currency) },
    { name: "Prefix", cell: (one) => { const broken = breaksOf(one).length; return broken ? html`<span class="badge warn">broke in ${broken} of ${one.turns.length} turns</span>` : html`<span class="badge good">kept</span>`; } },
  ];
  return html`<${Failure} error=${error} />
    ${open && html`<${Selection} title=${open.session} onClose=${() => setSelected(null)}><${Turns} session=${open} currency=${currency} /></${Selection}>`}
    <${Panel} title="Latest sessions" note="A session is recognised by a header or a body field. A sub-agent names its parent in x-parent-session-id.">
      ${rows.length
        ? html`<${Table} caption="Latest sessions" columns=${columns} rows=${rows} rowKey=${(one) => one.session} selected=${selected} onSelect=${(key) => setSelected(key === selected ? null : key)} />`
        : html`<${Empty}>No request had a session key, such as the header <code>x-session-id</code> or the body field <code>user</code>.</${Empty}>`}
    </${Panel}>`;
}
