// Figures for people.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);

/** "1 step", "2 steps", "1,000 steps"; `many` where it is not made with an s. */
export const some = (value, one, many = `${one}s`) => {
  const text = count(value);
  return `${text} ${text === "1" ? one : many}`;
};

/** A number with about three digits. */
export function figure(value) {
  if (value === 0) return "0";
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
  return value.toLocaleString("en", {
    minimumFractionDigits: Math.min(digits, 3),
    maximumFractionDigits: Math.min(digits, 3),
  });
}

const scaled = (value, step, units) => {
  let at = 0;
  while (Math.round(Math.abs(value)) >= step && at < units.length - 1) {
    value /= step;
    at += 1;
  }
  const digits = at === 0 || Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  const text = value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return `${text} ${units[at]}`;
};

/** Amounts of bytes, in memory, on disk or on the way, are in binary units; links are in bits a second. */
export const bytes = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
export const linkRate = (bytesPerSecond) => scaled(8 * bytesPerSecond, 1000, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s"]);

/**
 * For which part of a step, as measured of late, a link transmits; never more than all of it. `use` knows
 * the rate of each way, and of what takes longer than the planned step nothing more; the flow's own rate is
 * that of the slower way, on which there may be nothing to send.
 */
export function busy(flow, live, view) {
  if (flow.use === null) return 0;
  if (!live?.step_ns || !flow.bytes_per_s) return Math.min(1, flow.use);
  const needed = flow.use < 1 ? flow.use * view.predicted_step_ns
    : (Math.max(flow.there_bytes, flow.here_bytes) / flow.bytes_per_s) * 1e9;
  return Math.min(1, needed / live.step_ns);
}

/** A short time, given in nanoseconds. */
export function shortTime(nanoseconds) {
  if (nanoseconds < 1e3) return `${whole.format(nanoseconds)} ns`;
  if (nanoseconds < 1e6) return `${figure(nanoseconds / 1e3)} µs`;
  if (nanoseconds < 1e9) return `${figure(nanoseconds / 1e6)} ms`;
  return nanoseconds < 120e9 ? `${figure(nanoseconds / 1e9)} s` : duration(nanoseconds / 1e9);
}

/** A long time, given in seconds. */
export function duration(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))} s`; // a clock may be set back
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${some(Math.floor(hours / 24), "day")} ${hours % 24} h`;
}

/** All is said of nothing less than all. */
export function percent(share) {
  if (share > 0 && share < 0.001) return "< 0.1%";
  if (share > 0 && share < 0.0995) return `${(share * 100).toFixed(1)}%`;
  return `${Math.round((share < 1 ? Math.min(share, 0.99) : share) * 100)}%`;
}

/** What a peer is called, in as much room as there is; its whole name and id are in tooltips. */
export const called = (peer, room = 32) =>
  peer.name.length > room ? `${peer.name.slice(0, room - 1)}…` : peer.name;

/** The same of one who may be no member of the view. */
export const calledIn = (view, peerId, room = 32) => {
  const found = view?.peers.find((peer) => peer.peer_id === peerId);
  return found ? called(found, room) : `…${peerId.slice(-6)}`;
};

const TIME = { hour: "2-digit", minute: "2-digit" };

/** When something was: the time of day, and the day unless it is today. */
export function clock(seconds) {
  const then = new Date(seconds * 1000);
  if (then.toDateString() === new Date().toDateString()) {
    return then.toLocaleTimeString("en-GB", { ...TIME, second: "2-digit" });
  }
  return `${dayOf(then)} ${then.toLocaleTimeString("en-GB", TIME)}`;
}

/** When something will be, if it is `seconds` from now. */
export function atClock(seconds) {
  const then = new Date(Date.now() + seconds * 1000);
  const time = then.toLocaleTimeString("en-GB", TIME);
  if (then.toDateString() === new Date().toDateString()) return `at ${time}`;
  return `on ${dayOf(then)} at ${time}`;
}

/** The day, with its year unless it is this one: a large model may take longer than one. */
const dayOf = (then) => then.toLocaleDateString("en-GB", { day: "numeric", month: "short",
  ...(then.getFullYear() === new Date().getFullYear() ? {} : { year: "numeric" }) });

export const layers = (peer) =>
  peer.end_layer - peer.first_layer === 1
    ? `layer ${peer.first_layer}`
    : `layers ${peer.first_layer}–${peer.end_layer - 1}`;

/** A hue for each pipeline: neighbours in number differ most (golden angle). */
export const hueOf = (pipeline) => Math.round((255 + pipeline * 137.508) % 360);
