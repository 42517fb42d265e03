// Requests to the gateway. The admin token stays in this tab's session storage, and travels only in a header.

const TOKEN = "stoker-admin-token";
const API_KEY = "stoker-api-key";
const RETRY_MS = 2000;

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const getToken = () => sessionStorage.getItem(TOKEN) || "";
export const setToken = (token) => (token ? sessionStorage.setItem(TOKEN, token) : sessionStorage.removeItem(TOKEN));
export const getApiKey = () => sessionStorage.getItem(API_KEY) || "";
export const setApiKey = (key) => (key ? sessionStorage.setItem(API_KEY, key) : sessionStorage.removeItem(API_KEY));

const bearer = (token) => (token ? { authorization: `Bearer ${token}` } : {});

async function errorOf(response) {
  let message = `HTTP ${response.status}`;
  try {
    const body = await response.json();
    if (body.error && body.error.message) message = String(body.error.message);
  } catch {
    // not JSON: the status must do
  }
  return new ApiError(response.status, message);
}

async function send(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options, headers: { ...bearer(getToken()), ...options.headers } });
  } catch {
    throw new ApiError(0, "The gateway does not answer.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

export const getJson = async (path) => (await send(path)).json();
export const post = async (path) => (await send(path, { method: "POST" })).json();

// Calls `onEvent` for each state of /admin/stream, and opens the stream again when it ends. Returns a function that stops it.
export function follow(onEvent, onError) {
  const stopper = new AbortController();
  const pause = () => new Promise((done) => setTimeout(done, RETRY_MS));
  (async () => {
    while (!stopper.signal.aborted) {
      try {
        const response = await send("/admin/stream", { signal: stopper.signal });
        for await (const event of eventsOf(response.body)) {
          if (event.data) onEvent(JSON.parse(event.data));
        }
      } catch (error) {
        if (stopper.signal.aborted) return;
        onError(error);
      }
      await pause();
    }
  })();
  return () => stopper.abort();
}

// Yields the server-sent events of a response body as {data, comment}.
export async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split(/\r?\n\r?\n/);
      rest = events.pop();
      for (const text of events) {
        const event = { data: "", comment: "" };
        for (const line of text.split(/\r?\n/)) {
          if (line.startsWith("data:")) event.data += line.slice(5).trimStart();
          else if (line.startsWith(":")) event.comment += line.slice(1).trim();
        }
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Sends a chat with the API key of the playground, or with none where the gateway needs none.
export async function openChat(body, signal) {
  const key = getApiKey();
  const headers = { "content-type": "application/json", "x-stoker-debug": "cache", ...bearer(key) };
  let response;
  try {
    response = await fetch("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), headers, signal });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new ApiError(0, "The gateway does not answer.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}
