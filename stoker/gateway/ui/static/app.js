// The shell of the dashboard: the token, the pages, the theme and the stream.

import { html, render, useEffect, useState } from "./vendor/htm-preact.js";
import { follow, getJson, getToken, setToken } from "./api.js";
import { Empty, Failure } from "./parts.js";
import { Now } from "./pages/now.js";
import { Fleet } from "./pages/fleet.js";
import { Kv } from "./pages/kv.js";
import { Requests } from "./pages/requests.js";
import { Sessions } from "./pages/sessions.js";
import { Spend } from "./pages/spend.js";
import { Playground } from "./pages/playground.js";

const PAGES = [
  ["now", "Now", Now],
  ["fleet", "Fleet", Fleet],
  ["kv", "KV", Kv],
  ["requests", "Requests", Requests],
  ["sessions", "Sessions", Sessions],
  ["spend", "Spend", Spend],
  ["playground", "Playground", Playground],
];
const THEME = "stoker-theme";
const UNAUTHORIZED = 401;

const pageOf = () => location.hash.replace(/^#\/?/, "").split("/")[0] || "now";

// A gateway may have several processes. The numbers are without those that do not answer.
const silence = (numbers, count) => `without process ${numbers.join(", ")} of ${count}, which ${numbers.length > 1 ? "do" : "does"} not answer`;

function useTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const [chosen, setChosen] = useState(localStorage.getItem(THEME));
  const [isDark, setDark] = useState(dark.matches);
  useEffect(() => {
    const change = (event) => setDark(event.matches);
    dark.addEventListener("change", change);
    return () => dark.removeEventListener("change", change);
  }, []);
  const theme = chosen || (isDark ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  const toggle = () => {
    const other = theme === "dark" ? "light" : "dark";
    localStorage.setItem(THEME, other);
    setChosen(other);
  };
  return [theme, toggle];
}

function SignIn({ onToken, error }) {
  const [text, setText] = useState("");
  const submit = (event) => {
    event.preventDefault();
    onToken(text.trim());
  };
  return html`<main class="sign-in" id="main">
    <h1>Stoker</h1>
    <form onSubmit=${submit}>
      <label for="token">Admin token</label>
      <input id="token" type="password" autocomplete="off" required value=${text} onInput=${(e) => setText(e.target.value)} />
      <button class="primary">Open the dashboard</button>
    </form>
    <${Failure} error=${error} />
    <p class="note">The token is in the file that the gateway was given with --admin-token-file. It is kept in this tab until you close it.</p>
  </main>`;
}

function App() {
  const [token, setCurrent] = useState(getToken());
  const [isValid, setValid] = useState(false);
  const [error, setError] = useState(null);
  const [page, setPage] = useState(pageOf());
  const [now, setNow] = useState(null);
  const [status, setStatus] = useState(null);
  const [stale, setStale] = useState(null); // why there is no stream
  const [theme, toggleTheme] = useTheme();

  const leave = (failed) => {
    setToken("");
    setCurrent("");
    setValid(false);
    setNow(null);
    setError(failed);
  };
  const enter = (text) => {
    setToken(text);
    setError(null);
    setCurrent(text);
  };
  useEffect(() => {
    const change = () => setPage(pageOf());
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  useEffect(() => {
    if (!token) return undefined;
    let isCurrent = true;
    getJson("/admin/status").then(
      (found) => isCurrent && (setStatus(found), setValid(true)),
      (failed) => isCurrent && (failed.status ? leave(failed) : setError(failed)),
    );
    return () => {
      isCurrent = false;
    };
  }, [token]);
  useEffect(() => {
    if (!isValid) return undefined;
    return follow(
      (state) => {
        setNow(state);
        setStale(null);
      },
      (failed) => (failed.status === UNAUTHORIZED ? leave(failed) : setStale(failed)),
    );
  }, [isValid]);
  useEffect(() => {
    const found = PAGES.find(([key]) => key === page);
    document.title = found ? `${found[1]} · Stoker` : "Stoker";
  }, [page]);

  if (!token || !isValid) return html`<${SignIn} onToken=${enter} error=${error} />`;
  const [, name, Page] = PAGES.find(([key]) => key === page) || PAGES[0];
  return html`<a class="skip" href="#main" onClick=${(e) => (e.preventDefault(), document.getElementById("main").focus())}>Skip to the content</a>
    <header>
      <span class="brand">Stoker</span>
      <nav aria-label="Pages">
        ${PAGES.map(([key, text]) => html`<a href=${`#/${key}`} aria-current=${key === page ? "page" : null}>${text}</a>`)}
      </nav>
      <span class="tools">
        ${stale && html`<span class="badge bad" role="status">no connection</span>`}
        ${now && now.silent.length > 0 && html`<span class="badge bad" role="status">${silence(now.silent, status.processes)}</span>`}
        <button type="button" onClick=${toggleTheme} aria-label=${`Use the ${theme === "dark" ? "light" : "dark"} theme`}>${theme === "dark" ? "☀" : "☾"}</button>
        <button type="button" onClick=${() => leave(null)}>Sign out</button>
      </span>
    </header>
    <main id="main" tabindex="-1">
      <h1 class="hidden">${name}</h1>
      ${now
        ? html`<${Page} now=${now} theme=${theme} status=${status} />`
        : html`<${Failure} error=${stale} />${!stale && html`<${Empty}>Reading the state of the gateway…</${Empty}>`}`}
    </main>`;
}

render(html`<${App} />`, document.getElementById("app"));
