// Numbers and names as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const hundredth = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

/** 0, 0.42, 4.2, 42.0, 1,234: as many digits as a glance takes. */
export function number(value) {
  if (value === 0 || Math.abs(value) >= 100) return whole.format(value);
  return Math.abs(value) < 1 ? hundredth.format(value) : tenth.format(value);
}

export const count = (value, one, many = `${one}s`) => `${whole.format(value)} ${value === 1 ? one : many}`;

export const milliseconds = (value) => `${number(value)} ms`;

export const layerRange = ([start, end]) => `${start}–${end}`;

/** The end of a peer id: all of them begin alike. */
export const shortPeer = (peer) => (peer.length > 8 ? `…${peer.slice(-6)}` : peer);

export function megabytes(value) {
  return value >= 1024 ? `${tenth.format(value / 1024)} GiB` : `${whole.format(value)} MiB`;
}

export function duration(seconds) {
  if (seconds < 10) return `${tenth.format(seconds)} s`;
  if (seconds < 60) return `${whole.format(seconds)} s`;
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s` : `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

export const clockTime = (unixMs) => new Date(unixMs).toLocaleTimeString("en-GB");

/** Joins as a sentence does. */
export function listed(words) {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

/** What a stage's status means; the marks of the map have the same classes. */
const STATUSES = {
  Healthy: { mark: "healthy", word: "healthy" },
  Saturated: { mark: "saturated", word: "full" },
  Draining: { mark: "draining", word: "draining" },
  PendingLoad: { mark: "draining", word: "loading" },
  Stale: { mark: "stale", word: "silent" },
  Offline: { mark: "offline", word: "offline" },
};

export const statusOf = (status) => STATUSES[status] ?? { mark: "stale", word: String(status) };
