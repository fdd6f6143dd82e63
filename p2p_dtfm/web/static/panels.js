// What is said in words and figures: state, usefulness, problems, next, history.

import { worthAnswer } from "./answers.js";
import { byId, element, fill, say } from "./dom.js";
import { busy, bytes, called, clock, count, duration, hueOf, layers, linkRate, percent, shortTime, some } from "./format.js";

const unknown = "–";
const ORDER = ["pipeline", "reduction", "guard"];

export function drawNow({ live, run, view }) {
  say(byId("state"), live.state);
  say(byId("who"), live.name ? `this peer: ${live.name}${besides(live, view)}` : "");
  byId("who").title = live.peer_id;
  byId("state").dataset.state = live.state;
  say(byId("reason"), live.reason);
  byId("report").hidden = !run || live.step < run.total_steps;
  const working = live.work_share !== null;
  const done = working ? live.work_share : run ? live.step / run.total_steps : 0;
  byId("progress").classList.toggle("work", working);
  byId("progress").setAttribute("aria-label", working ? live.work : "steps committed");
  const left = live.work_left_s === null ? "" : `, ${duration(live.work_left_s)} left`;
  say(byId("work"), working && !live.reason.startsWith(live.work) ? `${live.work}: ${percent(live.work_share)}${left}` : "");
  byId("progress").setAttribute("aria-valuenow", Math.floor(done * 100));
  byId("progress-done").style.width = `${done * 100}%`;
  const tiles = [
    ["tokens/s", live.tokens_per_s === null ? unknown : count(live.tokens_per_s), ""],
    ["a step takes", live.step_ns === null ? unknown : shortTime(live.step_ns),
      view?.predicted_step_ns ? `planned ${shortTime(view.predicted_step_ns).replace(" ", "\u00a0")}` : ""],
    ["peers", view?.peers.length && live.state !== "paused" ? count(view.peers.length) : unknown, spares(view)],
  ];
  fill(byId("tiles"), ...tiles.map(tile));
  byId("marks").hidden = live.marks.length === 0;
  say(byId("marks"), live.marks.join(" · "));
  say(byId("footer"),
    `p2p-dtfm ${live.version} · ${live.name || "peer"} ${live.peer_id}` + (run ? ` · run ${run.digest}` : ""));
}

/** This machine's other devices are peers of their own. */
function besides(live, view) {
  const others = (view?.peers ?? []).filter((peer) => peer.peer_id !== live.peer_id && live.this_machine.includes(peer.peer_id));
  if (!others.length) return "";
  return `, beside ${others.length > 2 ? some(others.length, "other device") : others.map((peer) => called(peer)).join(" and ")} of this machine`;
}

function spares(view) {
  if (!view?.pipelines.length) return "";
  const idle = view.peers.filter((peer) => peer.pipeline === null).length;
  const text = some(view.pipelines.length, "pipeline");
  return idle ? `${text}, ${idle} spare` : text;
}

function tile([name, value, note]) {
  return element("div", {}, element("dt", {}, name), element("dd", {}, value),
    element("dd", { className: "note" }, note));
}

// is this peer useful, and with whom -----------------------------------------------------------

export function drawPart({ live, view }) {
  const room = byId("part");
  const me = view && view.me !== null ? view.peers[view.me] : null;
  if (!me) {
    const paused = live?.state === "paused" ? "Paused: it computes nothing, and the memory is yours." : "";
    fill(room, element("p", { className: "quiet" }, paused || "It is in no view."));
    return;
  }
  const over = live?.state === "done";
  const lines = [element("p", { className: "verdict" }, verdict(view, me, live?.worth, over))];
  const guards = guarded(view.part, over);
  if (guards) lines.push(element("p", {}, guards));
  for (const text of [over ? "" : placeOf(view, me), worthOf(live?.worth, over)]) {
    if (text) lines.push(element("p", {}, text));
  }
  if (live) lines.push(element("p", { className: "quiet" }, `${some(live.committed_here, "step")} committed while it was here.`));
  lines.push(neighbours(view, live, me));
  fill(room, ...lines);
}

/** `over`: the run is complete, so nothing of it is of now. */
function verdict(view, me, worth, over) {
  if (view.no_plan) return over ? "Nothing is left to compute." : "It computes nothing now: there is no plan.";
  if (me.pipeline === null) return over ? "At the end it was a spare." : "As a spare: it computes nothing now.";
  const pipeline = view.pipelines[me.pipeline];
  const found = over ? "" : worthAnswer(worth);
  return `${found && `${found}: `}${percent(view.part?.share ?? 0)} of each step ${over ? "was" : "is"} computed here, ` +
    `${layers(me)} for ${some(pipeline.microbatch_count, "microbatch", "microbatches")} ` +
    `(pipeline ${me.pipeline + 1}, stage ${me.position + 1} of ${pipeline.peers.length}).`;
}

const NOTICED = 0.03;

/** Which layers would be lost with their holder, were it not for this peer. */
function guarded(part, over) {
  if (!part?.guards.length) return "";
  const [first, last] = [part.guards[0], part.guards.at(-1)];
  const whole = part.guards.length === last - first + 1;
  const which = first === last ? `layer ${first}` : whole ? `layers ${first}–${last}` : `${part.guards.length} layers`;
  return over ? `It kept the only copy of ${which} beside the holder's.`
    : `It keeps the only copy of ${which} beside the holder's, so that no crash loses them.`;
}

/** What a spare is kept for, as the plan predicts it. */
function placeOf(view, me) {
  const part = view.part;
  if (!part || me.pipeline !== null) return "";
  if (part.why_spare || part.other_step_ns === null) return part.why_spare;
  const more = part.other_step_ns / part.step_ns - 1;
  return more > 0
    ? `By the plan, its best place would make a step ${percent(more)} slower. It takes over when another peer goes.`
    : "By the plan, no place makes a step faster. It takes over when another peer goes.";
}

/** What the swarm did before this peer came and does now, both as measured. */
function worthOf(worth, over) {
  if (!worth) return "";
  const who = (members) => some(members, "peer");
  const before = `Before it came, ${who(worth.before_members)} did ${count(worth.before_tokens_per_s)} tokens a second, as measured`;
  if (worth.now_tokens_per_s === null) return over ? `${before}.` : `${before}; what it adds is not known yet.`;
  const times = worth.now_tokens_per_s / worth.before_tokens_per_s;
  const change = times >= 1 + NOTICED ? `${percent(times - 1)} more`
    : times <= 1 - NOTICED ? `${percent(1 - times)} less` : "about the same";
  const [then, did] = over ? ["at the end", "did"] : ["now", "do"];
  return `${before}; ${then} ${who(worth.now_members)} ${did} ${count(worth.now_tokens_per_s)}: ${change}.`;
}

/** What this peer sends of a flow in a step; of a layer that it guards, what comes. */
function sends(flow, view) {
  const out = flow.here === view.me ? flow.there_bytes : flow.here_bytes;
  const note = out ? "a step" : "come";
  return [bytes(out || most(flow)), element("small", {}, note)];
}

const most = (flow) => Math.max(flow.there_bytes, flow.here_bytes);

function purpose(flow, view, me, peer) {
  if (flow.kind === "pipeline") return peer.position < me.position ? "its input" : "its output";
  if (flow.kind === "reduction") return "gradients";
  return flow.here === view.me ? "its guardian" : "guarded";
}

function neighbours(view, live, me) {
  const table = element("table", { className: "neighbours" },
    element("thead", {}, element("tr", {},
      ...["with", "sends", "link", "busy", "heard"].map((text) => element("th", {}, text)))));
  const mine = view.flows.filter((flow) => flow.here === view.me || flow.there === view.me)
    .sort((a, b) => ORDER.indexOf(a.kind) - ORDER.indexOf(b.kind) || most(b) - most(a));
  if (!mine.length) return element("p", { className: "quiet" }, "It exchanges tensors with nobody.");
  const body = element("tbody");
  const shown = mine.slice(0, 8);
  for (const flow of shown) {
    const other = flow.here === view.me ? flow.there : flow.here;
    const heard = live?.heard_s_ago[other];
    const peer = view.peers[other];
    body.append(element("tr", {},
      element("td", {}, element("span", { className: "dot", hue: hueOf(peer.pipeline ?? 0) }), element("span", { title: peer.peer_id }, called(peer, 14)),
        element("small", {}, purpose(flow, view, me, peer))),
      element("td", {}, ...sends(flow, view)),
      flow.bytes_per_s === null
        ? element("td", { className: "quiet" }, "not measured")
        : element("td", {}, linkRate(flow.bytes_per_s), element("small", {}, shortTime(flow.round_trip_ns))),
      element("td", {}, flow.use === null ? unknown : percent(busy(flow, live, view))),
      heard === null || heard === undefined ? element("td", {}, unknown) : element("td", {}, duration(heard), element("small", {}, "ago"))));
  }
  table.append(body);
  const more = mine.length - shown.length;
  return element("div", { className: "scroll" }, table,
    more ? element("p", { className: "quiet" }, `and ${more} more`) : null);
}

// problems, next, history ----------------------------------------------------------------------

export function drawProblems({ live }) {
  const list = byId("problems");
  list.closest("section").classList.toggle("bad", live.problems.length > 0);
  if (!live.problems.length) {
    fill(list, element("li", { className: "good" }, "Nothing that this peer knows of."));
    return;
  }
  fill(list, ...live.problems.map((problem) =>
    element("li", {}, element("span", {}, problem.what),
      element("span", { className: "fix" }, problem.fix))));
}

export function drawNext({ live }) {
  const over = live.state === "done";
  say(byId("next-title"), over ? "What to do with it" : "What comes next");
  const line = (text) => element("li", {}, over ? element("code", {}, text) : text);
  fill(byId("next"), ...(live.next.length
    ? live.next.map(line)
    : [element("li", { className: "quiet" }, over ? "The run is complete." : "Nothing is planned.")]));
}

export function drawEvents(events) {
  byId("history").replaceChildren(...(events.length
    ? events.map((event) => element("li", { className: event.kind },
        element("time", {}, clock(event.time_s)),
        element("span", { className: "kind" }, event.kind),
        element("span", {}, event.text)))
    : [element("li", { className: "quiet" }, "Nothing has happened yet.")]));
}
