// One step as bars: what each peer of the pipeline did, and when, by one common clock.

import { byId, drawing, element, fitted, legend, onWidth } from "./dom.js";
import { calledIn, percent, shortTime } from "./format.js";

const ROW = 26;
const BAR = 16;
const AXIS = 24;
const NARROW = 520;
const TITLES = {
  forward: "forward", backward: "backward", evaluate: "held out", wait: "waits for a tensor",
  reduce: "reduces gradients", guard: "waits for guardians", audit: "computes another's work again", commit: "waits for all to be ready", apply: "optimizer", save: "checkpoint",
};
const WORK = ["forward", "backward", "evaluate", "apply"];

let state = null;
let width = 0;
let watching = false;

export function drawTimeline(newest) {
  state = newest;
  if (!watching) {
    watching = true;
    onWidth(byId("timeline"), (now) => {
      width = now;
      draw();
    });
  }
  draw();
}

function draw() {
  const timeline = state?.timeline;
  if (!width || !timeline) return;
  const room = byId("timeline");
  if (timeline.step === null || !timeline.lanes.length) {
    const paused = state.live?.state === "paused";
    room.replaceChildren(element("p", { className: "quiet" },
      paused ? "None: a paused peer takes part in no step." : "Not recorded yet: it is asked for while this page is open."));
    byId("timeline-legend").replaceChildren();
    return;
  }
  const error = Math.max(...timeline.lanes.map((lane) => lane.clock_error_ns));
  const notes = [`Step ${timeline.step}, ${shortTime(timeline.duration_ns)}.`];
  if (error) notes.push(`Clocks agree to ${shortTime(error)}.`);
  if (timeline.missing.length) notes.push(`No word from ${timeline.missing.map((peerId) => calledIn(state.view, peerId)).join(", ")}.`);
  room.replaceChildren(element("p", { className: "quiet" }, notes.join(" ")), picture(timeline));
  const kinds = Object.keys(TITLES).filter((kind) => timeline.lanes.some((lane) => lane.spans.some((span) => span[0] === kind)));
  legend(byId("timeline-legend"), kinds.map((kind) => [`span-${kind}`, TITLES[kind]]));
}

function picture(timeline) {
  const left = width < NARROW ? 76 : 124;
  const right = 46;
  const room = width - left - right;
  const height = timeline.lanes.length * ROW + AXIS;
  const x = (ns) => left + (room * ns) / Math.max(1, timeline.duration_ns);
  const shares = timeline.lanes.map((lane) =>
    `${calledIn(state.view, lane.peer_id)} ${percent(busyShare(lane, timeline.duration_ns))}`).join(", ");
  const image = drawing("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": `bars of step ${timeline.step}, computing: ${shares}` });
  image.append(axis(timeline, x, height, room));
  timeline.lanes.forEach((lane, row) => {
    const y = row * ROW + (ROW - BAR) / 2;
    const me = lane.peer_id === state.live?.peer_id;
    const name = drawing("text", { class: `lane-name${me ? " me" : ""}`, x: left - 10, y: y + BAR - 4,
      title: `${calledIn(state.view, lane.peer_id)} (${lane.peer_id})` });
    const text = me ? (width < NARROW ? "this" : "this peer") : fitted(calledIn(state.view, lane.peer_id), left - 12, "13px");
    name.append(text);
    image.append(name);
    image.append(drawing("rect", { class: "lane", x: left, y, width: room, height: BAR, rx: 2 }));
    image.append(bars(lane, x, y));
    const busy = drawing("text", { class: "lane-busy", x: width, y: y + BAR - 4, title: "share of the step spent computing" });
    busy.append(percent(busyShare(lane, timeline.duration_ns)));
    image.append(busy);
  });
  return image;
}

function bars(lane, x, y) {
  const group = drawing("g", {});
  // waiting goes below: work may begin while something else is still awaited
  const order = [...lane.spans].sort((a, b) => WORK.includes(a[0]) - WORK.includes(b[0]));
  for (const [kind, number, start, end] of order) {
    const from = x(start);
    const wide = x(end) - from;
    if (wide < 0.25) continue;
    group.append(drawing("rect", { class: `span span-${kind}`, x: from.toFixed(2), y,
      width: Math.max(0.6, wide - (wide > 4 ? 0.8 : 0)).toFixed(2), height: BAR, rx: wide > 6 ? 2 : 0,
      title: `${TITLES[kind] ?? kind} ${label(kind, number)}: ${shortTime(end - start)}` }));
  }
  return group;
}

function label(kind, number) {
  if (kind === "reduce") return `from layer ${number} on`;
  return ["forward", "backward", "evaluate"].includes(kind) ? `of microbatch ${number}` : "";
}

function busyShare(lane, duration) {
  const busy = lane.spans.filter(([kind]) => WORK.includes(kind)).reduce((sum, [, , start, end]) => sum + end - start, 0);
  return Math.min(1, busy / Math.max(1, duration));
}

function axis(timeline, x, height, room) {
  const group = drawing("g", { class: "axis" });
  const steps = Math.max(2, Math.min(8, Math.floor(room / 90)));
  const raw = timeline.duration_ns / steps;
  const magnitude = 10 ** Math.floor(Math.log10(raw));
  const tick = [1, 2, 5, 10].map((factor) => factor * magnitude).find((value) => value >= raw);
  if (!(tick > 0)) return group; // of no time at all: the loop would never end
  for (let at = 0; at <= timeline.duration_ns; at += tick) {
    group.append(drawing("line", { x1: x(at), x2: x(at), y1: 0, y2: height - AXIS }));
    const text = drawing("text", { x: x(at), y: height - 7 });
    text.textContent = at === 0 ? "0" : shortTime(at);
    group.append(text);
  }
  return group;
}
