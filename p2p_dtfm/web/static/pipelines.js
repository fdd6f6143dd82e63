// Pipelines as rows, stages as blocks as wide as their layers are many.

import { byId, element, oneStop } from "./dom.js";
import { called, count, hueOf, layers } from "./format.js";
import { choosePeer } from "./map.js";

const MANY = 10;

export function drawPipelines({ view, live }) {
  const room = byId("pipelines");
  if (!view.pipelines.length) {
    const why = live?.state === "done" ? "None is left: the run is complete." : view.no_plan;
    room.replaceChildren(element("p", { className: "quiet" }, why || (live?.state === "paused" ? "None: a paused peer is in no plan." : "None: this peer is in no view.")));
    return;
  }
  const layerCount = Math.max(...view.peers.map((peer) => peer.end_layer));
  const rows = view.pipelines.map((pipeline, number) => row(view, pipeline, number, layerCount));
  const list = element("ol", { className: `pipeline-rows${rows.length > MANY ? " many" : ""}` }, ...rows);
  const idle = view.peers.filter((peer) => peer.pipeline === null);
  room.replaceChildren(
    element("p", { className: "quiet" },
      `Layers 0 to ${layerCount - 1} from left to right; each row computes the microbatches that stand behind it.`),
    list,
    idle.length ? spares(view, idle) : element("span"),
  );
  const blocks = [...list.querySelectorAll(".stage")];
  oneStop(list, blocks, Math.max(0, blocks.findIndex((block) => block.classList.contains("me"))));
  const mine = list.querySelector(".mine");
  if (mine) list.scrollTop = mine.offsetTop - list.offsetTop - list.clientHeight / 2;
}

function row(view, pipeline, number, layerCount) {
  const stages = pipeline.peers.map((at) => {
    const peer = view.peers[at];
    const me = at === view.me;
    const block = element("button", {
      type: "button", className: `stage${me ? " me" : ""}`, hue: hueOf(number),
      title: `${peer.name}${me ? ", this peer" : ""} (${peer.peer_id}): ${layers(peer)}, at most ${peer.in_flight} in flight`,
      onclick: () => choosePeer(peer.peer_id),
    },
    element("span", { className: "who" }, me ? "this peer" : called(peer)),
    element("span", { className: "what" }, layers(peer)));
    block.style.flexGrow = (peer.end_layer - peer.first_layer) / layerCount;
    return block;
  });
  return element("li", { className: pipeline.peers.includes(view.me) ? "mine" : "" },
    element("span", { className: "number" }, String(number + 1)),
    element("div", { className: "stages" }, ...stages),
    element("span", { className: "load", title: "microbatches of a step" },
      count(pipeline.microbatch_count),
      element("span", {}, pipeline.microbatch_count === 1 ? " microbatch" : " microbatches")));
}

function spares(view, idle) {
  const names = idle.map((peer) => {
    const me = view.peers[view.me] === peer;
    return element("button", { type: "button", className: `spare-peer${me ? " me" : ""}`, title: peer.peer_id, onclick: () => choosePeer(peer.peer_id) },
      me ? "this peer" : called(peer));
  });
  return element("p", { className: "spares" }, element("span", { className: "quiet" }, "Without a stage: "), ...names);
}
