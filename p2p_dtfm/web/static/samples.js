// What the model has made of one prompt over the steps, with a slider from the first to the newest.

import { byId, element } from "./dom.js";
import { some } from "./format.js";

let samples = null;
let watching = false;
let newest = true;

export function drawSamples(given) {
  samples = given;
  const slider = byId("samples-step");
  if (!watching) {
    watching = true;
    slider.addEventListener("input", () => {
      newest = Number(slider.value) === samples.written.length - 1;
      draw();
    });
  }
  slider.max = Math.max(0, samples.written.length - 1);
  if (newest) slider.value = slider.max;
  slider.hidden = samples.written.length < 2;
  draw();
}

function draw() {
  const slider = byId("samples-step");
  const chosen = samples.written[Math.min(Number(slider.value), samples.written.length - 1)];
  byId("samples-note").textContent = samples.note;
  if (!chosen) {
    byId("samples-when").textContent = "";
    byId("samples-text").replaceChildren(element("span", { className: "quiet" }, samples.note
      ? "Nothing so far." : "Nothing yet: after each held-out evaluation it goes on from the same few letters."));
    return;
  }
  const loss = chosen.held_out_loss === null ? "" : `, held-out loss ${chosen.held_out_loss.toFixed(3)}`;
  const when = `after ${some(chosen.step, "step")}${loss}`;
  byId("samples-when").textContent = when;
  slider.setAttribute("aria-valuetext", when);
  byId("samples-text").replaceChildren(element("b", {}, samples.prompt), chosen.text);
}
