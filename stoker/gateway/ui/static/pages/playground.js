// Playground: a chat, with what it cost in time and tokens and where it ran.

import { html, useRef, useState } from "../vendor/htm-preact.js";
import { eventsOf, getApiKey, openChat, setApiKey } from "../api.js";
import { count, DASH, ms, percent } from "../format.js";
import { Empty, Failure, Panel, Tile, usePolled } from "../parts.js";
import { Details } from "./requests.js";

const UNAUTHORIZED = 401;

function Numbers({ stats }) {
  const gaps = stats.pieces > 1 ? (stats.lastMs - stats.firstMs) / (stats.pieces - 1) : null;
  const usage = stats.usage;
  const cached = usage && usage.prompt_tokens_details ? usage.prompt_tokens_details.cached_tokens : null;
  const details = (usage && usage.completion_tokens_details) || {};
  const accepted = details.accepted_prediction_tokens || 0;
  const rejected = details.rejected_prediction_tokens || 0;
  return html`<div class="tiles small">
    <${Tile} name="Time to the first token" value=${ms(stats.firstMs)} more="in this browser" />
    <${Tile} name="Time between tokens" value=${ms(gaps)} more="mean" />
    <${Tile} name="Prompt" value=${usage ? count(usage.prompt_tokens) : DASH} more=${cached === null ? "tokens" : `tokens, ${percent(usage.prompt_tokens ? cached / usage.prompt_tokens : 0)} cached`} />
    <${Tile} name="Answer" value=${usage ? count(usage.completion_tokens) : count(stats.pieces)} more=${usage ? "tokens" : "pieces"} />
    <${Tile} name="Speculation" value=${accepted + rejected ? percent(accepted / (accepted + rejected)) : DASH} more=${accepted + rejected ? `${count(accepted)} of ${count(accepted + rejected)} drafted tokens accepted` : "no drafts reported"} />
  </div>`;
}

export function Playground({ now }) {
  const [fleet] = usePolled("/admin/fleet", 10_000);
  const [model, setModel] = useState("");
  const [messages, setMessages] = useState([]);
  const [text, setText] = useState("");
  const [maxTokens, setMaxTokens] = useState("256");
  const [key, setKey] = useState(getApiKey());
  const [needsKey, setNeedsKey] = useState(Boolean(getApiKey()));
  const [stats, setStats] = useState(null);
  const [error, setError] = useState(null);
  const [stopper, setStopper] = useState(null);
  const box = useRef(null);
  const models = fleet ? [...new Set(fleet.workers.flatMap((one) => one.models))].sort() : [];
  const chosen = model || models[0] || "";

  const run = async (event) => {
    event.preventDefault();
    const question = text.trim();
    if (!question || stopper) return;
    const conversation = [...messages, { role: "user", content: question }];
    const abort = new AbortController();
    setStopper(abort);
    setMessages([...conversation, { role: "assistant", content: "" }]);
    setText("");
    setError(null);
    setApiKey(key);
    const began = performance.now();
    const seen = { firstMs: null, lastMs: null, pieces: 0, usage: null, id: null };
    let answer = "";
    try {
      const body = { model: chosen, messages: conversation, stream: true, stream_options: { include_usage: true }, max_tokens: Number(maxTokens) || 256 };
      const response = await openChat(body, abort.signal);
      seen.id = response.headers.get("x-request-id");
      for await (const { data } of eventsOf(response.body)) {
        if (!data || data === "[DONE]") continue;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(String(chunk.error.message || "The answer broke off."));
        if (chunk.usage) seen.usage = chunk.usage;
        const delta = (chunk.choices && chunk.choices[0] && chunk.choices[0].delta) || {};
        const piece = delta.content || delta.reasoning_content || "";
        if (!piece) continue;
        seen.lastMs = performance.now() - began;
        if (seen.firstMs === null) seen.firstMs = seen.lastMs;
        seen.pieces += 1;
        answer += piece;
        setMessages([...conversation, { role: "assistant", content: answer }]);
        setStats({ ...seen, isDone: false });
      }
    } catch (failed) {
      if (!abort.signal.aborted) setError(failed);
      if (failed.status === UNAUTHORIZED) setNeedsKey(true);
      if (!answer) {
        setMessages(messages);
        setText(question);
      }
    }
    setStats(seen.id ? { ...seen, isDone: true } : null);
    setStopper(null);
    if (box.current) box.current.focus();
  };
  const clear = () => {
    setMessages([]);
    setStats(null);
    setError(null);
  };

  return html`<div class="two chat">
    <${Panel} title="Chat" actions=${messages.length > 0 && html`<button type="button" onClick=${clear}>New chat</button>`}>
      <div class="messages" role="log" aria-label="Conversation" tabindex="0">
        ${!messages.length && html`<${Empty}>Ask the model something. The numbers appear beside the answer.</${Empty}>`}
        ${messages.map((one) => html`<div class=${`message ${one.role}`}><span class="who">${one.role === "user" ? "You" : "Model"}</span><p>${one.content || "…"}</p></div>`)}
      </div>
      <${Failure} error=${error} />
      <form onSubmit=${run}>
        <label for="question">Message</label>
        <textarea id="question" ref=${box} rows="3" value=${text} onInput=${(e) => setText(e.target.value)} onKeyDown=${(e) => { if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) run(e); }}></textarea>
        <div class="row">
          <label>Model <select value=${chosen} onChange=${(e) => setModel(e.target.value)}>${models.map((one) => html`<option value=${one}>${one}</option>`)}</select></label>
          <label>Longest answer, tokens <input type="number" min="1" max="100000" value=${maxTokens} onInput=${(e) => setMaxTokens(e.target.value)} /></label>
          ${needsKey && html`<label>API key <input type="password" autocomplete="off" value=${key} onInput=${(e) => setKey(e.target.value)} /></label>`}
          ${stopper ? html`<button type="button" onClick=${() => stopper.abort()}>Stop</button>` : html`<button class="primary" disabled=${!chosen}>Send</button>`}
        </div>
        <p class="note">Ctrl+Enter sends.${!needsKey && html` <button type="button" class="link" onClick=${() => setNeedsKey(true)}>Use an API key</button>`}</p>
      </form>
    </${Panel}>
    <div>
      <${Panel} title="This answer">
        ${stats ? html`<${Numbers} stats=${stats} />` : html`<${Empty}>No answer yet.</${Empty}>`}
      </${Panel}>
      ${stats && stats.isDone && stats.id && html`<${Details} key=${stats.id} id=${stats.id} currency=${now.currency} />`}
    </div>
  </div>`;
}
