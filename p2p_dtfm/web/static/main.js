// The page: takes the daemon's events, keeps the newest state, and says how old it is.

import { drawAnswers } from "./answers.js";
import { byId, element, say } from "./dom.js";
import { drawCharts } from "./charts.js";
import { appendHistory, emptyHistory } from "./columns.js";
import { duration } from "./format.js";
import { drawInvitation } from "./invitation.js";
import { drawMap, markHeard, moveTraffic } from "./map.js";
import { drawPipelines } from "./pipelines.js";
import { drawEvents, drawNext, drawNow, drawPart, drawProblems } from "./panels.js";
import { drawContribution } from "./contribution.js";
import { drawSamples } from "./samples.js";
import { drawTimeline } from "./timeline.js";

const STALE_S = 5;
const RETRY_MS = 2000;
const TOKEN_HEADER = "X-P2P-DTFM-Token";

const state = { live: null, run: null, view: null, timeline: null, history: emptyHistory() };
let heardMs = null;
let lookedMs = 0;
let source = null;
let lost = false;
let retry = null;
let offered = [];
let version = null;

/**
 * Listens while somebody looks. A browser keeps six connections to a daemon: of tabs that are left open
 * in the background six would keep a seventh, and its buttons, from ever being answered; and as long as a
 * page listens its daemon asks others what they do.
 */
function connect() {
  clearTimeout(retry);
  source?.close();
  if (document.visibilityState === "hidden") return;
  lookedMs = performance.now();
  source = new EventSource("/api/events");
  const on = (name, take) =>
    source.addEventListener(name, (event) => {
      heardMs = performance.now();
      lost = false;
      take(JSON.parse(event.data));
    });
  on("hello", (hello) => {
    // a daemon of another version has come: what it says is for its own page
    if (version !== null && hello.version !== version) location.reload();
    version = hello.version;
  });
  on("actions", offerActions);
  on("run", (run) => {
    state.run = run;
    byId("run").textContent = run ? run.name : "";
    byId("run").title = run ? `run ${run.digest}` : "";
    document.title = run ? `${run.name} · p2p-dtfm` : "p2p-dtfm";
  });
  on("view", (view) => {
    state.view = view;
    drawMap(state);
    drawPipelines(state);
    drawInvitation(state);
    drawPart(state);
  });
  on("timeline", (timeline) => {
    state.timeline = timeline;
    drawTimeline(state);
  });
  on("history", (grown) => {
    state.history = appendHistory(state.history, grown);
    drawCharts(state.history);
    drawAnswers(state);
  });
  on("samples", drawSamples);
  on("contribution", (contribution) => {
    state.contribution = contribution;
    drawContribution(state);
    drawAnswers(state);
  });
  on("events", (events) => {
    state.events = events;
    drawEvents(events);
  });
  on("live", (live) => {
    const changed = state.live?.state !== live.state || state.live?.this_machine.length !== live.this_machine.length;
    state.live = live;
    redate();
    if (changed && state.view) drawMap(state);
    if (changed && state.view) drawPipelines(state);
    if (changed && state.timeline) drawTimeline(state);
    if (changed) drawContribution(state);
    document.body.classList.toggle("computing", live.state === "training");
    drawNow(state);
    drawAnswers(state);
    drawProblems(state);
    drawNext(state);
    drawPart(state);
    drawInvitation(state);
    markHeard(state);
    moveTraffic(live);
    showAge();
  });
  source.onerror = () => {
    lost = true;
    if (source.readyState === EventSource.CLOSED) retry = setTimeout(connect, RETRY_MS);
    showAge();
  };
}

/** What was today is of a day with a date from midnight on. */
function redate() {
  const today = new Date().toDateString();
  if (state.today !== today && state.events) drawEvents(state.events);
  state.today = today;
}

/** How old the data are; a banner and a grey page once they are stale. What is lost is said aloud once. */
function showAge() {
  if (document.visibilityState === "hidden") return;
  const connected = source.readyState === EventSource.OPEN;
  const now = performance.now();
  const seconds = heardMs === null ? null : (now - heardMs) / 1000;
  const stale = seconds !== null && now - Math.max(heardMs, lookedMs) >= STALE_S * 1000;
  document.body.classList.toggle("stale", stale);
  const age = byId("age");
  age.classList.toggle("live", !lost && !stale && seconds !== null);
  if (seconds === null) say(age, connected ? "connected" : "connecting");
  else say(age, stale || lost ? `${duration(seconds)} old` : "live");
  const banner = byId("banner");
  banner.hidden = !(stale || (lost && seconds !== null));
  const what = connected ? "The daemon says nothing. It may be paused or very busy."
    : "Connection to the daemon lost. Trying again. Is it still running?";
  say(byId("banner-what"), banner.hidden ? "" : what);
  say(byId("banner-age"), banner.hidden ? "" : `What you see is ${duration(seconds)} old.`);
}

// actions ------------------------------------------------------------------------------------

const TITLES = { leave: "Leave", pause: "Pause", resume: "Resume" };
const QUESTIONS = {
  leave: "Leave the swarm? This daemon finishes its step, hands its layers over, and ends.",
  pause: "Pause? This daemon finishes its step, hands its layers over and frees the memory; Resume brings it back.",
};

const HINTS = {
  leave: "Hands the layers to the others and ends the daemon.",
  pause: "Hands the layers to the others and frees the memory, until you resume.",
  resume: "Joins the others again.",
};

/** Where there is nothing to pause, as in a pause or when the run is complete, nothing is handed over either. */
const handsOver = (name) => name !== "leave" || offered.includes("pause");
const hint = (name) => (handsOver(name) ? HINTS[name] ?? "" : "Ends the daemon.");
const question = (name) => (handsOver(name) ? QUESTIONS[name] : "Leave? This daemon ends.");

/** The token comes with the address once, and is kept for this tab alone. */
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem("token");
}

function offerActions(actions) {
  const token = takeToken();
  offered = actions;
  byId("actions").replaceChildren(
    ...actions.map((name) =>
      element("button", {
        type: "button",
        textContent: TITLES[name] ?? name,
        disabled: !token,
        title: token ? hint(name) : "Open the address that p2p-dtfm dashboard prints: it has the token.",
        onclick: () => act(name, token),
      }),
    ),
  );
}

/** Why it was not done, and what can be; empty if it was. */
const refusal = (told) => (told?.error ? [told.error, ...(told.fixes ?? [])].join("\n\n") : "");

async function act(name, token) {
  if (question(name) && !confirm(question(name))) return;
  let answer = "";
  try {
    const reply = await fetch(`/api/actions/${name}`, {
      method: "POST",
      headers: { [TOKEN_HEADER]: token },
    });
    answer = reply.ok ? refusal(await reply.json()) : await reply.text();
  } catch (error) {
    answer = String(error);
  }
  if (answer) alert(answer);
}

takeToken();
connect();
document.addEventListener("visibilitychange", connect);
// whoever writes the token behind the address of an open page loads nothing anew
addEventListener("hashchange", () => offerActions(offered));
setInterval(showAge, 1000);
