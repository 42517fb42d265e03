// Numbers with their units. A value that is not known is a dash.

export const DASH = "–";
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function count(value) {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)} G`;
  if (size >= 1e6) return `${trim(value / 1e6)} M`;
  if (size >= 1e4) return `${trim(value / 1e3)} k`;
  return size >= 100 || Number.isInteger(value) ? value.toFixed(0) : trim(value);
}

const trim = (value) => String(Number(value.toPrecision(3)));

export function ms(value) {
  if (!known(value)) return DASH;
  if (value >= 60_000) return `${(value / 60_000).toFixed(1)} min`;
  if (value >= 1000) return `${Number((value / 1000).toFixed(value >= 10_000 ? 0 : 2))} s`;
  return `${value >= 100 ? value.toFixed(0) : Number(value.toFixed(1))} ms`;
}

export const seconds = (value) => (known(value) ? ms(value * 1000) : DASH);
export const percent = (value) => (known(value) ? `${Number((100 * value).toFixed(value >= 0.0995 ? 0 : 1))}%` : DASH);
export const perSecond = (value) => (known(value) ? `${count(value)}/s` : DASH);

export function bytes(value) {
  if (!known(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 ? value.toFixed(0) : Number(value.toFixed(1))} ${units[unit]}`;
}

export function money(value, currency) {
  const amount = Number(value);
  if (value === null || value === undefined || !Number.isFinite(amount)) return DASH;
  if (Math.abs(amount) >= 1000) return `${count(amount)} ${currency}`;
  const digits = amount === 0 || Math.abs(amount) >= 1 ? 2 : Math.abs(amount) >= 0.01 ? 4 : 6;
  return `${amount.toFixed(digits)} ${currency}`;
}

// The times of a plot's axis: the day where it begins, else the time of day.
export function axisTime(unixSeconds) {
  const date = new Date(unixSeconds * 1000);
  const isMidnight = date.getHours() === 0 && date.getMinutes() === 0 && date.getSeconds() === 0;
  if (isMidnight) return date.toLocaleDateString([], { month: "short", day: "numeric" });
  const seconds = date.getSeconds() ? { second: "2-digit" } : {};
  return date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false, ...seconds });
}

export const clock = (unixSeconds) => new Date(unixSeconds * 1000).toLocaleTimeString([], { hour12: false });
export const moment = (unixSeconds) => new Date(unixSeconds * 1000).toLocaleString([], { hour12: false });

const REASONS = {
  first_turn: "first turn of the conversation",
  new: "new since the previous turn",
  changed: "the prompt changed",
  answer_changed: "the previous answer came back changed",
  salted: "sent under another cache salt",
  evicted: "evicted from the cache",
  restarted: "the worker restarted",
  not_stored: "was never stored",
  pending: "another request was still computing it",
  not_loaded: "was in a slower tier and not loaded",
  routed_for_load: "another worker had it, but was busier",
  held_elsewhere: "only an unusable worker had it",
  partial_block: "did not fill a block",
  unknown: "unknown",
};

export const reasonText = (reason) => REASONS[reason] || reason;

// Reads `changed[message 3]=2048;new=512` into [{reason, place, tokens}].
export function misses(text) {
  return [...(text || "").matchAll(/([a-z_]+)(?:\[([^\]]*)\])?=(\d+)/g)].map(([, reason, place, tokens]) => ({
    reason,
    place: place || "",
    tokens: Number(tokens),
  }));
}
