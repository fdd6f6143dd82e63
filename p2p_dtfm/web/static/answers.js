// What a person wants to know first: is this computer of use, does the model learn, how long yet.

import { byId, drawing, element, fill } from "./dom.js";
import { smoothed } from "./columns.js";
import { atClock, count, duration, percent, some } from "./format.js";

const NOTICED = 0.03;
const LEAST_WINDOW = 10;
const SPARK_WIDTH = 120, SPARK_HEIGHT = 30;

export function drawAnswers({ live, run, view, history, contribution }) {
  if (!live) return;
  fill(byId("answers"),
    answer("Am I helping?", ...helping(live, view, contribution)),
    answer("Is it learning?", ...learning(live, history), spark(history)),
    answer("How long yet?", ...howLong(live, run)),
  );
}

function answer(question, value, note, picture) {
  return element("div", {}, element("dt", {}, question),
    element("dd", {}, element("span", {}, value), picture),
    element("dd", { className: "note" }, note));
}

function helping(live, view, contribution) {
  const ever = contribution?.ever;
  const given = ever?.tokens ? `${some(ever.tokens, "token")} from here` : "";
  const me = view && view.me !== null ? view.peers[view.me] : null;
  if (live.state === "done") return ["Thank you", given || "the run is complete"];
  if (live.state === "paused") return ["Paused", given || "nothing is computed here"];
  if (live.state === "leaving") return ["It leaves", given || "others get what they need of it"];
  if (!me && (given || live.committed_here)) return ["Not now", live.work || "it is in no view of the others"];
  if (!me) return ["Not yet", live.work || "it takes no part in a view yet"];
  if (view.no_plan) return [given || live.committed_here ? "Not now" : "Not yet", "there is no plan, so nobody computes"];
  if (me.pipeline === null) return ["As a spare", given || (view.part?.guards.length ? "it guards layers of others" : "it stands in when another goes")];
  const share = `${percent(view.part?.share ?? 0)} of each step`;
  if (live.state !== "training") return ["Not just now", `${share} once it goes on`];
  const worth = worthAnswer(live.worth);
  return worth ? [worth, `${share}${given ? `; ${given}` : ""}`] : [share, given || "here from the beginning"];
}

/** By what was measured before this peer came and since; empty for a founder, who has nothing to compare with. */
export function worthAnswer(worth) {
  if (!worth) return "";
  if (worth.now_tokens_per_s === null) return "Not known yet";
  const more = worth.now_tokens_per_s / worth.before_tokens_per_s - 1;
  return more >= NOTICED ? "Yes" : more <= -NOTICED ? "No" : "Hardly";
}

function learning(live, history) {
  const loss = live.loss === null ? "" : `loss ${live.loss.toFixed(3)}`;
  const held = live.held_out_loss === null ? "" : `held out ${live.held_out_loss.toFixed(3)}`;
  const note = [loss, held].filter(Boolean).join(", ");
  const now = ["training", "spare"].includes(live.state);
  const yes = now ? "Yes" : live.state === "done" ? "It did" : "So far, yes";
  return [{ down: yes, up: "No: it rises", flat: "Hardly of late", unknown: "Too early to say" }[trend(history.loss)], note || (live.step ? "no loss is known here yet" : "no step is committed yet")];
}

/**
 * Where the training loss goes: the mean of the newest third of all steps (ten at least) against that
 * of as many before; no further apart than twice the standard error of the difference is flat.
 */
export function trend(losses) {
  const window = Math.max(LEAST_WINDOW, Math.floor(losses.length / 3));
  if (losses.length < 2 * window) return "unknown";
  const [before, now] = [losses.slice(-2 * window, -window), losses.slice(-window)].map(moments);
  const fall = before.mean - now.mean;
  const error = Math.sqrt((before.variance + now.variance) / window);
  return fall > 2 * error ? "down" : fall < -2 * error ? "up" : "flat";
}

function moments(values) {
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return { mean, variance: squares / (values.length - 1) };
}

/** The loss so far as a line of a finger's width. */
function spark(history) {
  if (history.loss.length < 2) return null;
  const every = Math.max(1, Math.floor(history.loss.length / SPARK_WIDTH));
  const values = smoothed(history.loss, Math.max(1, history.loss.length / 40)).filter((_, at) => at % every === 0);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const points = values.map((value, at) => {
    const x = 1 + (at / (values.length - 1)) * (SPARK_WIDTH - 2);
    return `${x.toFixed(1)},${(2 + ((high - value) / (high - low || 1)) * (SPARK_HEIGHT - 4)).toFixed(1)}`;
  });
  const image = drawing("svg", { class: "spark", viewBox: `0 0 ${SPARK_WIDTH} ${SPARK_HEIGHT}`, role: "img", "aria-label": "the loss so far" });
  image.append(drawing("polyline", { points: points.join(" ") }));
  return image;
}

function howLong(live, run) {
  const part = run ? `step ${count(live.step)} of ${count(run.total_steps)}, ${percent(live.step / run.total_steps)}` : "";
  if (live.state === "done") return ["Done", part];
  if (live.eta_s === null) return ["Not known", part];
  return [duration(live.eta_s), `done ${atClock(live.eta_s)}; ${part}`];
}
