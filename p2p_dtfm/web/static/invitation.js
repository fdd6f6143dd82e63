// What a newcomer types, as a line to copy and as a code to hold a phone's camera to.

import { byId, drawing } from "./dom.js";

let shown = null;

export function drawInvitation({ view, live, run }) {
  const over = run && live && live.step >= run.total_steps; // nothing is left to take part in
  const line = over ? "" : view?.join_line ?? "";
  byId("invite").hidden = !line;
  if (line === shown) return;
  shown = line;
  byId("invite-line").textContent = line;
  byId("invite-copy").textContent = "Copy";
  byId("invite-copy").onclick = () => copy(line);
  byId("invite-code").replaceChildren();
  byId("invite-why").textContent = "";
  if (line) drawCode(line);
}

async function copy(line) {
  try {
    await navigator.clipboard.writeText(line);
    byId("invite-copy").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(byId("invite-line"));
    byId("invite-copy").textContent = "Selected: copy it";
  }
}

async function drawCode(line) {
  let picture;
  try {
    picture = await (await fetch("/api/invitation")).json();
  } catch {
    shown = null;  // the daemon is away: the next view asks again
    return;
  }
  if (picture.line !== line || shown !== line) return;
  byId("invite-why").textContent = picture.why;
  if (!picture.path) return;
  const { size } = picture;
  byId("invite-code").replaceChildren(
    drawing("svg", { viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": "the same line as a QR code", "shape-rendering": "crispEdges" },
      drawing("rect", { width: size, height: size, class: "light" }),
      drawing("path", { d: picture.path, class: "dark" })));
}
