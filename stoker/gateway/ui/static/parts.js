// Components that several pages use.

import { html, useCallback, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { getJson } from "./api.js";

export function Tile({ name, value, more, state }) {
  return html`<div class=${`tile ${state || ""}`}>
    <div class="tile-name">${name}</div>
    <div class="tile-value">${value}</div>
    <div class="tile-more">${more}</div>
  </div>`;
}

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

export function Failure({ error }) {
  return error ? html`<p class="failure" role="alert">${error.message}</p>` : null;
}

export function Panel({ title, note, children, actions }) {
  return html`<section class="panel">
    <div class="panel-head"><h2>${title}</h2>${actions}</div>
    ${note && html`<p class="note">${note}</p>`}
    ${children}
  </section>`;
}

// `columns` are {name, key?, cell(row), number?}. On a phone each row becomes a card, with the names in front of the values.
export function Table({ caption, columns, rows, rowKey, onSelect, selected }) {
  return html`<div class="table-wrap" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <caption class="hidden">${caption}</caption>
      <thead>
        <tr>${columns.map((one) => html`<th scope="col" class=${one.number ? "number" : ""}>${one.name}</th>`)}</tr>
      </thead>
      <tbody>
        ${rows.map((row) => {
          const key = rowKey(row);
          return html`<tr key=${key} class=${selected === key ? "selected" : ""}>
            ${columns.map(
              (one, index) => html`<td class=${one.number ? "number" : ""} data-name=${one.name}>
                ${index === 0 && onSelect
                  ? html`<button class="link" aria-expanded=${selected === key ? "true" : "false"} onClick=${() => onSelect(key)}>${one.cell(row)}</button>`
                  : one.cell(row)}
              </td>`,
            )}
          </tr>`;
        })}
      </tbody>
    </table>
  </div>`;
}

export function Bar({ share, label, state }) {
  const whole = Math.max(0, Math.min(1, share || 0));
  return html`<span class="bar" role="img" aria-label=${label}>
    <span class=${`bar-fill ${state || ""}`} style=${{ width: `${100 * whole}%` }}></span>
  </span>`;
}

export function Segments({ label, options, value, onChange }) {
  return html`<div class="segments" role="group" aria-label=${label}>
    ${options.map(
      ([key, text]) =>
        html`<button type="button" aria-pressed=${value === key ? "true" : "false"} onClick=${() => onChange(key)}>${text}</button>`,
    )}
  </div>`;
}

// Asks before an action. `question` is {title, text, confirm, run} or null.
export function Confirm({ question, onClose }) {
  const dialog = useRef(null);
  const [error, setError] = useState(null);
  const [isRunning, setRunning] = useState(false);
  useEffect(() => {
    if (question && dialog.current && !dialog.current.open) {
      setError(null);
      dialog.current.showModal();
    }
  }, [question]);
  if (!question) return null;
  const close = () => {
    dialog.current.close();
    onClose();
  };
  const run = async () => {
    setRunning(true);
    try {
      await question.run();
      close();
    } catch (failed) {
      setError(failed);
    } finally {
      setRunning(false);
    }
  };
  return html`<dialog ref=${dialog} aria-labelledby="confirm-title" onCancel=${onClose}>
    <h2 id="confirm-title">${question.title}</h2>
    <p>${question.text}</p>
    <${Failure} error=${error} />
    <div class="dialog-actions">
      <button type="button" onClick=${close}>Cancel</button>
      <button type="button" class="primary" disabled=${isRunning} onClick=${run}>${question.confirm}</button>
    </div>
  </dialog>`;
}

// A framed part of the page about the selected row. It is brought into view, and gets the focus.
export function Selection({ title, onClose, children }) {
  const box = useRef(null);
  useEffect(() => {
    box.current.focus({ preventScroll: true });
    box.current.scrollIntoView({ block: "start" });
  }, [title]);
  return html`<section class="details" ref=${box} tabindex="-1" aria-label=${title}>
    <div class="row"><h2>${title}</h2><button type="button" onClick=${onClose}>Close</button></div>
    ${children}
  </section>`;
}

// Reads a path now and then every `everyMs`, while the page is visible. Without a path, it reads nothing. Returns [data, error, readAgain].
export function usePolled(path, everyMs) {
  const [data, setData] = useState(null);
  const [error, setError] = useState(null);
  const [round, setRound] = useState(0);
  useEffect(() => {
    if (!path) return undefined;
    let isCurrent = true;
    let timer = 0;
    const read = async () => {
      try {
        if (!document.hidden) {
          const found = await getJson(path);
          if (isCurrent) {
            setData(found);
            setError(null);
          }
        }
      } catch (failed) {
        if (isCurrent) setError(failed);
      }
      if (isCurrent && everyMs) timer = setTimeout(read, everyMs);
    };
    read();
    return () => {
      isCurrent = false;
      clearTimeout(timer);
    };
  }, [path, everyMs, round]);
  const readAgain = useCallback(() => setRound((n) => n + 1), []);
  return [data, error, readAgain];
}
