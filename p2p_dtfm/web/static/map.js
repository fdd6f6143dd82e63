// Peers where their round trips put them, and what flows between them.

import { byId, drawing, element, fill, legend, onSize, oneStop, textWidth } from "./dom.js";
import { busy, bytes, called, duration, hueOf, layers, linkRate, percent, shortTime, some } from "./format.js";

const FEW_PEERS = 3;
const MANY_PEERS = 16;
const LABELLED_LINKS = 6;
const LABEL_ROOM = 150;
const LABEL_LETTERS = 16;
const GAP = 7;
const DOTS = 20.1;
/** Pixels from dot to dot of what moves, as in the style sheet. */

let state = null;
let size = { width: 0, height: 0 };
let chosen = null;
let watching = false;
let moved = 0;
let anySilent = false;

export function drawMap(newest) {
  state = newest;
  if (!watching) {
    watching = true;
    onSize(byId("map"), (width, height) => {
      size = { width, height };
      draw();
    });
  }
  draw();
}

/** Marks peers that have been silent for a while. */
export function markHeard({ live, view }) {
  if (!view) return;
  const nodes = [...byId("map").querySelectorAll(".peer")];
  for (const node of nodes) {
    const number = Number(node.dataset.peer);
    const heard = live.heard_s_ago[number];
    const silent = heard !== null && heard !== undefined && heard > live.silent_after_s;
    node.classList.toggle("silent", silent);
    node.setAttribute("aria-label", `peer ${view.peers[number].name}${silent ? ", silent" : ""}`);
  }
  const isAny = nodes.some((node) => node.classList.contains("silent"));
  if (nodes.length && isAny !== anySilent) {
    anySilent = isAny;
    legend(byId("map-legend"), legendItems(view));
  }
  drawFacts();
}

function draw() {
  const view = state?.view;
  const { width, height } = size;
  if (!width || !view) return;
  if (!view.peers.some((peer) => peer.peer_id === chosen)) chosen = null;
  const room = byId("map");
  room.classList.toggle("empty", view.peers.length < 2);
  room.classList.toggle("small", view.peers.length <= FEW_PEERS);
  if (!view.peers.length) {
    room.replaceChildren(element("p", { className: "quiet" }, state.live?.state === "paused" ? "Nobody: a paused peer is in no view." : "This peer is in no view: nobody to show."));
    byId("map-legend").replaceChildren();
    drawFacts();
    return;
  }
  if (view.peers.length === 1) {
    room.replaceChildren(element("p", { className: "quiet" }, `Nobody but ${view.me === 0 ? "this peer" : called(view.peers[0])} yet: a map begins with two.`));
    byId("map-legend").replaceChildren();
    drawFacts();
    return;
  }
  const nodes = placed(view, width, height);
  const image = drawing("svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, role: "group",
    "aria-label": `map of ${some(view.peers.length, "peer")}: arrow keys go from one to the next`,
  });
  const drawn = peers(view, nodes);
  image.classList.toggle("many", nodes.length > MANY_PEERS);
  image.append(flows(view, nodes), traffic(view, nodes), ...linkFacts(view, nodes), ...drawn);
  const focused = byId("map").contains(document.activeElement);
  oneStop(image, drawn, drawn.length - 1);
  image.addEventListener("click", (event) => choose(event.target.closest?.(".peer")));
  room.replaceChildren(image);
  if (focused) drawn.at(-1).focus();
  legend(byId("map-legend"), legendItems(view));
  emphasise();
  drawFacts();
  if (state.live) markHeard(state);
}

// where things are -----------------------------------------------------------------------------

/** Points in pixels: the unit square stretched over the room, circles pushed apart. */
function placed(view, w, h) {
  const layerCount = Math.max(1, ...view.peers.map((peer) => peer.end_layer));
  const scale = view.peers.length > MANY_PEERS ? 0.75 : 1;
  const nodes = view.peers.map((peer, number) => ({
    peer, number, x: 0, y: 0,
    radius: scale * (6 + 7 * Math.sqrt((peer.end_layer - peer.first_layer) / layerCount)),
  }));
  const margin = 34;
  stretch(nodes, "x", margin, w - margin);
  stretch(nodes, "y", margin, h - margin - 8);
  for (let turn = 0; turn < 120; turn += 1) {
    if (!pushApart(nodes, margin - 14, w, h)) break;
  }
  return nodes;
}

function stretch(nodes, axis, low, high) {
  const values = nodes.map((node) => node.peer[axis]);
  const least = Math.min(...values);
  const extent = Math.max(...values) - least;
  for (const node of nodes) {
    const at = extent < 0.02 ? 0.5 : (node.peer[axis] - least) / extent;
    node[axis] = low + at * (high - low);
  }
}

function pushApart(nodes, edge, w, h) {
  let moved = false;
  for (let a = 0; a < nodes.length; a += 1) {
    for (let b = 0; b < a; b += 1) {
      const [one, other] = [nodes[a], nodes[b]];
      const dx = one.x - other.x || 0.1 * (a - b);
      const dy = one.y - other.y || 0.1;
      const apart = Math.hypot(dx, dy);
      const lack = one.radius + other.radius + GAP - apart;
      if (lack <= 0.1) continue;
      moved = true;
      const [mx, my] = [(dx / apart) * (lack / 2), (dy / apart) * (lack / 2)];
      one.x += mx; one.y += my;
      other.x -= mx; other.y -= my;
    }
  }
  for (const node of nodes) {
    node.x = Math.min(Math.max(node.x, edge), w - edge);
    node.y = Math.min(Math.max(node.y, edge), h - edge - 10);
  }
  return moved;
}

// drawing --------------------------------------------------------------------------------------

function flows(view, nodes) {
  const group = drawing("g", { class: "flows" });
  for (const flow of view.flows) if (flow.kind !== "pipeline") group.append(line(view, flow, nodes));
  for (const flow of view.flows) if (flow.kind === "pipeline") group.append(line(view, flow, nodes));
  return group;
}

/**
 * What this peer sends and gets: dots that move with every second in which it computes, the further,
 * the busier the link. Only its own, and no animation: that took a tenth of a processor core and more.
 */
function traffic(view, nodes) {
  const group = drawing("g", { class: "traffic" });
  for (const flow of view.flows) {
    if (flow.here !== view.me && flow.there !== view.me) continue;
    const moving = line(view, flow, nodes);
    moving.setAttribute("class", `moving ${flow.kind}`);
    moving.removeAttribute("stroke-width");
    moving.dataset.stride = (3 + (DOTS / 2 - 4) * Math.min(1, busy(flow, state.live, view))).toFixed(1);
    moving.style.strokeDashoffset = -moved * moving.dataset.stride;
    group.append(moving);
  }
  return group;
}

/** One second further. */
export function moveTraffic(live) {
  if (live.state !== "training") return;
  moved += 1;
  for (const path of byId("map").querySelectorAll(".moving")) {
    path.style.strokeDashoffset = (-moved * path.dataset.stride) % DOTS;
  }
}

function line(view, flow, nodes) {
  const [a, b] = [nodes[flow.here], nodes[flow.there]];
  const pipeline = flow.kind === "pipeline" ? a.peer.pipeline : null;
  const bend = pipeline === null ? 0 : 0.1 + 0.02 * (pipeline % 4);
  const cx = (a.x + b.x) / 2 - bend * (b.y - a.y);
  const cy = (a.y + b.y) / 2 + bend * (b.x - a.x);
  const use = busy(flow, state.live, view);
  const speed = flow.bytes_per_s === null
    ? "link not measured"
    : `${linkRate(flow.bytes_per_s)}, round trip ${shortTime(flow.round_trip_ns)}, busy ${percent(use)} of a step`;
  const made = drawing("path", {
    class: `flow ${flow.kind}${flow.here === view.me || flow.there === view.me ? " mine" : ""}`,
    d: `M${a.x.toFixed(1)} ${a.y.toFixed(1)}Q${cx.toFixed(1)} ${cy.toFixed(1)} ${b.x.toFixed(1)} ${b.y.toFixed(1)}`,
    "stroke-width": (1.2 + 6 * Math.min(1, use)).toFixed(1),
    hue: hueOf(pipeline ?? 0),
    title: `${a.peer.name} and ${b.peer.name}: ${bytesOf(flow)}; ${speed}`,
  });
  made.dataset.pipeline = pipeline ?? "";
  made.dataset.ends = `${flow.here} ${flow.there}`;
  return made;
}

/** How far a label reaches to either side of its middle, the line around its letters included. */
const reachOf = (text, weight = 400) => textWidth(text, `${weight} 12px`) / 2 + 2;

/** The nearest place to `x` at which what reaches so far to either side is not cut off. */
const onMap = (x, reach) => Math.min(Math.max(x, reach), size.width - reach);

/** Where there are few links and room: what each of them can carry, written beside it. */
function linkFacts(view, nodes) {
  const pairs = new Map();
  for (const flow of view.flows) {
    const key = [flow.here, flow.there].sort((a, b) => a - b).join(" ");
    if (flow.bytes_per_s !== null && !pairs.has(key)) pairs.set(key, flow);
  }
  if (pairs.size > LABELLED_LINKS) return [];
  return [...pairs.values()].flatMap((flow) => {
    const [a, b] = [nodes[flow.here], nodes[flow.there]];
    if (Math.hypot(a.x - b.x, a.y - b.y) < LABEL_ROOM) return [];
    const facts = `${linkRate(flow.bytes_per_s)}, ${shortTime(flow.round_trip_ns)}`;
    const text = drawing("text", {
      class: "link-facts", x: onMap((a.x + b.x) / 2, reachOf(facts)), y: (a.y + b.y) / 2 - 8,
    });
    text.textContent = facts;
    return [text];
  });
}

function bytesOf(flow) {
  const there = bytes(flow.there_bytes);
  if (flow.kind === "guard") return `${there} a step to the guardian`;
  return flow.there_bytes === flow.here_bytes
    ? `${there} a step each way`
    : `${there} a step one way, ${bytes(flow.here_bytes)} the other`;
}

function peers(view, nodes) {
  const named = names(view, nodes);
  const meLast = [...nodes].sort((a, b) => (a.number === view.me) - (b.number === view.me));
  return meLast.map((node) => {
    const { peer, number } = node;
    const me = number === view.me;
    const ours = me || state.live?.this_machine.includes(peer.peer_id);
    const group = drawing("g", {
      class: `peer${peer.pipeline === null ? " spare" : ""}${me ? " me" : ""}`,
      hue: hueOf(peer.pipeline ?? 0), role: "button",
      "aria-label": `peer ${peer.name}`,
      title: `${peer.name}${me ? ", this peer" : ours ? ", of this machine" : ""} (${peer.peer_id}): ${place(peer)}`,
    });
    group.dataset.peer = number;
    if (ours) group.append(drawing("circle", { class: "ring", cx: node.x, cy: node.y, r: node.radius + 4 }));
    group.append(drawing("circle", { class: "body", cx: node.x, cy: node.y, r: node.radius }));
    const text = named.get(number);
    if (text) group.append(text);
    group.addEventListener("pointerenter", () => emphasise(number));
    group.addEventListener("pointerleave", () => emphasise());
    group.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();  // the space bar would scroll
      choose(group);
    });
    return group;
  });
}

/** Labels by the peer's number. Of many peers those that this one exchanges with, where there is room. */
function names(view, nodes) {
  const few = nodes.length <= MANY_PEERS;
  const mine = view.flows.filter((flow) => flow.here === view.me || flow.there === view.me)
    .map((flow) => (flow.here === view.me ? flow.there : flow.here));
  const wanted = view.me === null ? nodes.map((node) => node.number) : [view.me, ...(few ? nodes.map((node) => node.number) : mine)];
  const [found, taken] = [new Map(), []];
  for (const number of new Set(wanted)) {
    const { peer, x, y, radius } = nodes[number];
    const me = number === view.me;
    const name = me ? "this peer" : called(peer, LABEL_LETTERS);
    const reach = reachOf(name, me ? 600 : 400);
    const covers = (one, other) => one.left < other.right && one.right > other.left && one.top < other.bottom && one.bottom > other.top;
    const onPeer = (box) => nodes.some((it) => it.number !== number &&
      covers(box, { left: it.x - it.radius, right: it.x + it.radius, top: it.y - it.radius, bottom: it.y + it.radius }));
    const places = [y + radius + (me ? 17 : 14), y - radius - (me ? 9 : 6)].flatMap((base) =>
      [x, x + reach, x - reach].map((at) => ({ middle: onMap(at, reach), base })));
    const boxed = places.map((it) => ({ ...it, left: it.middle - reach, right: it.middle + reach, top: it.base - 11, bottom: it.base + 3 }));
    const free = boxed.find((box) => box.top > 0 && box.bottom < size.height && !onPeer(box) && !taken.some((it) => covers(box, it)));
    if (!few && !me && !free) continue;
    const box = free ?? boxed[0];
    taken.push(box);
    const text = drawing("text", { x: box.middle, y: box.base });
    text.textContent = name;
    found.set(number, text);
  }
  return found;
}

function place(peer) {
  if (peer.pipeline === null && state.view.no_plan) return "no stage: there is no plan";
  if (peer.pipeline === null) return peer.intent === "train" ? "spare" : peer.intent;
  return `pipeline ${peer.pipeline + 1}, stage ${peer.position + 1}, ${layers(peer)}`;
}

function legendItems(view) {
  const items = [];
  if (view.pipelines.length) items.push(["line-pipeline", "a pipeline; thicker: busier link"]);
  const others = view.flows.filter((flow) => flow.kind !== "pipeline");
  const ofMe = view.are_flows_left_out ? " of this peer" : "";
  if (others.some((flow) => flow.kind === "reduction")) items.push(["line-reduction", `gradients${ofMe}`]);
  if (others.some((flow) => flow.kind === "guard")) items.push(["line-guard", `to guardians${ofMe}`]);
  if (view.pipelines.length) items.push(["circle", "larger: more layers"]);
  if (view.peers.some((peer) => peer.pipeline === null)) items.push(["circle-spare", "no stage"]);
  if (anySilent) items.push(["circle-silent", "silent"]);
  if (view.flows.some((flow) => flow.here === view.me || flow.there === view.me)) items.push(["line-moving", "moves: what this peer sends and gets"]);
  items.push(["near", "near in round trip, near on the map"]);
  return items;
}

// singling out -----------------------------------------------------------------------------------

/** Dims all but one peer's pipeline and flows; without an argument, those of the chosen one. */
function emphasise(number) {
  const view = state.view;
  const at = number ?? view.peers.findIndex((peer) => peer.peer_id === chosen);
  const peer = at < 0 ? null : view.peers[at];
  for (const path of byId("map").querySelectorAll(".flow, .moving")) {
    const mine = peer && (path.dataset.ends.split(" ").includes(String(at)) ||
      (peer.pipeline !== null && path.dataset.pipeline === String(peer.pipeline)));
    path.classList.toggle("dim", peer !== null && !mine);
  }
  for (const node of byId("map").querySelectorAll(".peer")) {
    const other = view.peers[Number(node.dataset.peer)];
    const near = peer && (other === peer || (peer.pipeline !== null && other.pipeline === peer.pipeline));
    node.classList.toggle("dim", peer !== null && !near);
    node.classList.toggle("chosen", other.peer_id === chosen);
  }
}

/** Shows one peer's facts below the map, until it is chosen again or another is. */
function choose(node) {
  const peerId = node ? state.view.peers[Number(node.dataset.peer)].peer_id : null;
  choosePeer(peerId === chosen ? null : peerId);
}

export function choosePeer(peerId) {
  chosen = peerId;
  emphasise();
  drawFacts();
}

function drawFacts() {
  const view = state.view;
  const at = view ? view.peers.findIndex((peer) => peer.peer_id === chosen) : -1;
  const room = byId("peer-facts");
  if (at < 0) {
    fill(room, ...(view?.peers.length > 1 ? [element("p", { className: "quiet" }, "Choose a peer to see its facts.")] : []));
    return;
  }
  const peer = view.peers[at];
  const heard = state.live?.heard_s_ago[at];
  const link = view.flows.find((flow) => [flow.here, flow.there].includes(at) && [flow.here, flow.there].includes(view.me));
  const line = [["up", peer.uplink_bytes_per_s], ["down", peer.downlink_bytes_per_s]]
    .filter(([, rate]) => rate).map(([way, rate]) => `${linkRate(rate)} ${way}`).join(", ");
  const facts = [
    ["peer", peer.name], ["id", peer.peer_id], ["place", place(peer)], ["device", peer.device],
    ["memory to use", bytes(peer.memory_bytes)], ["a block takes", `${shortTime(peer.block_ns)} forward and backward`],
    ["its line", line], ["reachable", peer.reachability === "unknown" ? "" : peer.reachability],
    ["link to this peer", link && link.bytes_per_s !== null ? `${linkRate(link.bytes_per_s)}, ${shortTime(link.round_trip_ns)}` : ""],
    ["last heard", at === view.me ? "this peer" : heard === null || heard === undefined ? "" : `${duration(heard)} ago`],
  ].filter(([, value]) => value);
  fill(room, element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])));
}
