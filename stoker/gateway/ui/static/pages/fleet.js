// Fleet: the pools and their workers, and the actions on them.

import { html, useState } from "../vendor/htm-preact.js";
import { post } from "../api.js";
import { count, percent, perSecond, seconds } from "../format.js";
import { Bar, Confirm, Empty, Failure, Panel, Table, Tile, usePolled } from "../parts.js";

const ROLES = [
  ["unified", "Unified workers", "run whole requests"],
  ["prefill", "Prefill workers", "compute prompts"],
  ["decode", "Decode workers", "generate after a prefill worker"],
];
const FULL = 0.95;
const SHOWN_LINES = 6;

export function stateOf(worker) {
  if (worker.draining) return ["draining", "warn"];
  if (!worker.usable) return [worker.breaker === "open" ? "failed requests" : "not ready", "bad"];
  if (worker.busy) return ["busy", "warn"];
  return ["ready", "good"];
}

// The actions on one worker: their names, when they make sense, what is asked before, and what is sent. `needs` is the path
// that the gateway must have; one that cannot change roles cannot move requests either.
const ACTIONS = [
  {
    name: "Drain",
    needs: "/admin/drain",
    applies: (worker) => !worker.draining,
    text: (worker) => `${worker.worker} gets no new requests. Its ${count(worker.reserved.requests)} running requests continue to their end.`,
    path: (worker) => `/admin/drain?${query({ worker })}`,
  },
  {
    name: "Move away",
    isMore: true,
    needs: "/admin/role",
    applies: (worker) => worker.dialect === "stoker",
    text: (worker) => `${worker.worker} gets no new requests. Its ${count(worker.reserved.requests)} running requests continue on other workers, with their KV.`,
    path: (worker) => `/admin/drain?${query({ worker, move: "1" })}`,
  },
  {
    name: "End drain",
    needs: "/admin/undrain",
    applies: (worker) => worker.draining,
    text: (worker) => `${worker.worker} gets new requests again.`,
    path: (worker) => `/admin/undrain?${query({ worker })}`,
  },
  ...["unified", "prefill", "decode"].map((role) => ({
    name: `Make ${role}`,
    isMore: true,
    needs: "/admin/role",
    applies: (worker) => worker.dialect === "stoker" && worker.role !== role,
    text: (worker) => `${worker.worker} changes its role from ${worker.role} to ${role}. Running requests continue.`,
    path: (worker) => `/admin/role?${query({ worker, role })}`,
  })),
];

const UPGRADE = "/admin/upgrade";
const STEPS = "It gets no new requests, its running requests continue on other workers, and it is restarted with the version that is installed now. Then it is watched.";

// Restarts one worker, or all of them one after the other. `stoker up` does it, so it is offered only where that follows the gateway.
const upgradeOf = (worker) => ({
  name: worker ? "Upgrade" : "Upgrade all workers",
  isMore: true,
  title: worker ? null : "Upgrade all workers?",
  applies: () => true,
  text: () => (worker ? STEPS : `One worker after the other: ${STEPS} The first trouble stops the upgrade.`),
  path: () => (worker ? `${UPGRADE}?${query({ worker })}` : UPGRADE),
});

const query = ({ worker, ...more }) => new URLSearchParams({ worker: worker.worker, ...more });

function Pool({ role, workers, actionsOf, ask }) {
  const [, title, what] = ROLES.find(([key]) => key === role) || [role, role, ""];
  const sum = (read) => workers.reduce((total, one) => total + (read(one) || 0), 0);
  const usable = workers.filter((one) => one.usable && !one.draining).length;
  const columns = [
    { name: "Worker", cell: (one) => html`<span class="name">${one.worker}</span>` },
    { name: "State", cell: (one) => { const [text, state] = stateOf(one); return html`<span class=${`badge ${state}`}>${text}</span>`; } },
    { name: "Models", cell: (one) => one.models.join(", ") },
    { name: "Requests", number: true, cell: (one) => count(one.reserved.requests) },
    { name: "Running", number: true, cell: (one) => (one.report ? count(one.report.running_sequences) : "–") },
    { name: "Waiting", number: true, cell: (one) => (one.report ? count(one.report.waiting_sequences) : "–") },
    { name: "Prefill backlog, tokens", number: true, cell: (one) => count(one.reserved.prefill_tokens) },
    { name: "In flight, tokens", number: true, cell: (one) => count(one.reserved.context_tokens) },
    { name: "KV in use", cell: (one) => html`<${Kv} worker=${one} />` },
    { name: "Prefill, tokens", number: true, cell: (one) => perSecond(one.prefill_tokens_per_s) },
    { name: "Decode step", number: true, cell: (one) => seconds(one.step_s) },
    { name: "Actions", cell: (one) => html`<${Actions} worker=${one} actions=${actionsOf(one)} ask=${ask} />` },
  ];
  return html`<${Panel} title=${`${title} (${usable} of ${workers.length} ready)`} note=${what}>
    <div class="tiles small">
      <${Tile} name="Requests" value=${count(sum((one) => one.reserved.requests))} more="sent and not finished" />
      <${Tile} name="Tokens in flight" value=${count(sum((one) => one.reserved.context_tokens))} more="of running requests" />
      <${Tile} name="Prefill backlog" value=${count(sum((one) => one.reserved.prefill_tokens))} more="tokens not computed" />
      <${Tile} name="Prefill speed" value=${perSecond(sum((one) => one.prefill_tokens_per_s))} more="tokens, all workers" />
    </div>
    <${Table} caption=${title} columns=${columns} rows=${workers} rowKey=${(one) => one.worker} />
  </${Panel}>`;
}

function Actions({ worker, actions, ask }) {
  const button = (action) =>
    html`<button type="button" onClick=${() => ask(action, worker)} aria-label=${`${action.name} ${worker.worker}`}>${action.name}</button>`;
  const some = actions.filter((action) => action.applies(worker));
  const more = some.filter((action) => action.isMore);
  return html`<span class="actions">
    ${some.filter((action) => !action.isMore).map(button)}
    ${more.length > 0 && html`<details><summary aria-label=${`More actions on ${worker.worker}`}>More</summary>${more.map(button)}</details>`}
  </span>`;
}

function Upgrade({ upgrade, ask }) {
  const { running, followed, outcome, lines } = upgrade;
  if (!running && !followed && !outcome) return null;
  const state = running ? ["running", "warn"] : outcome.startsWith("stopped") || outcome === "interrupted" ? ["stopped", "bad"] : ["done", "good"];
  const button = followed && !running && html`<button type="button" onClick=${() => ask(upgradeOf(null), null)}>Upgrade all workers</button>`;
  return html`<${Panel} title="Upgrade" note="Restarts the workers one after the other, while the fleet serves." actions=${button}>
    ${(running || outcome) && html`<p role="status"><span class=${`badge ${state[1]}`}>${state[0]}</span> ${outcome}</p>`}
    ${lines.length > 0 && html`<ul class="lines">${lines.slice(-SHOWN_LINES).map((line) => html`<li>${line}</li>`)}</ul>`}
  </${Panel}>`;
}

function Kv({ worker }) {
  if (!worker.report) return "–";
  const used = worker.report.kv_used;
  return html`<span class="with-bar"><${Bar} share=${used} label=${`${percent(used)} of the KV memory`} state=${used >= FULL ? "bad" : ""} />${percent(used)}</span>`;
}

export function Fleet({ status }) {
  const [fleet, error, readAgain] = usePolled("/admin/fleet", 2000);
  const canUpgrade = Boolean(status && status.changes.includes(UPGRADE));
  const [upgrade, , readUpgrade] = usePolled(canUpgrade ? `${UPGRADE}?process=0` : null, 2000);
  const [question, setQuestion] = useState(null);
  const ask = (action, worker) =>
    setQuestion({
      title: action.title || `${action.name}: ${worker.worker}?`,
      text: action.text(worker),
      confirm: action.name,
      run: async () => {
        await post(action.path(worker));
        readAgain();
        readUpgrade();
      },
    });
  if (!fleet) return html`<${Failure} error=${error} />${!error && html`<${Empty}>Reading the workers…</${Empty}>`}`;
  const actions = ACTIONS.filter((action) => status && status.changes.includes(action.needs));
  const some = (worker) => (upgrade && upgrade.followed && !upgrade.running ? [...actions, upgradeOf(worker)] : actions);
  const roles = [...new Set([...ROLES.map(([role]) => role), ...fleet.workers.map((one) => one.role)])];
  const pools = roles.map((role) => [role, fleet.workers.filter((one) => one.role === role)]).filter(([, some]) => some.length);
  return html`<${Failure} error=${error} />
    ${!pools.length && html`<${Empty}>No worker is connected. Start one with <code>stoker serve --gateway URL --secret-file FILE</code>, or give the gateway its address with <code>--worker</code>.</${Empty}>`}
    ${upgrade && html`<${Upgrade} upgrade=${upgrade} ask=${ask} />`}
    ${pools.map(([role, workers]) => html`<${Pool} key=${role} role=${role} workers=${workers} actionsOf=${some} ask=${ask} />`)}
    <${Confirm} question=${question} onClose=${() => setQuestion(null)} />`;
}
