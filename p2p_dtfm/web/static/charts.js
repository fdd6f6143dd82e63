// Loss and speed over the steps, drawn by uPlot; vertical lines where a view took over.

import uPlot from "./vendor/uplot/uPlot.esm.js";
import { smoothed } from "./columns.js";
import { byId, element, legend, onWidth } from "./dom.js";
import { count, figure } from "./format.js";

const HEIGHT = 220;
const SMOOTH_FROM = 60;
const dark = matchMedia("(prefers-color-scheme: dark)");

const charts = {
  loss: { room: "loss-chart", plot: null, width: 0 },
  rate: { room: "rate-chart", plot: null, width: 0 },
};
let history = null;
let watching = false;

export function drawCharts(newest) {
  history = newest;
  if (!watching) {
    watching = true;
    dark.addEventListener("change", rebuild);
    for (const chart of Object.values(charts)) {
      onWidth(byId(chart.room), (width) => {
        chart.width = width;
        if (chart.plot) chart.plot.setSize({ width, height: HEIGHT });
        else draw();
      });
    }
  }
  draw();
}

function rebuild() {
  for (const chart of Object.values(charts)) {
    chart.plot?.destroy();
    chart.plot = null;
  }
  draw();
}

function draw() {
  const enough = history.step.length > 1;
  const [loss, rate] = [lossData(), [history.step, history.tokens_per_s]];
  show(charts.loss, loss, enough, lossSeries);
  show(charts.rate, rate, enough, rateSeries);
  const views = history.view_step.length > 1 ? [["line-view", "a new view took over"]] : [];
  const items = [["line-smooth", history.step.length > SMOOTH_FROM ? "smoothed" : "each step"]];
  if (history.step.length > SMOOTH_FROM) items.push(["line-raw", "each step"]);
  if (history.held_out_step.length) items.push(["point-held-out", "held out"]);
  legend(byId("loss-legend"), enough ? [...items, ...views] : []);
  legend(byId("rate-legend"), enough ? views : []);
}

/** Steps, raw losses, smoothed losses, held-out losses, on one common axis. */
function lossData() {
  const span = history.step.length > SMOOTH_FROM ? Math.max(8, history.step.length / 40) : 1;
  const steps = [...new Set([...history.step, ...history.held_out_step])].sort((a, b) => a - b);
  const at = (columnSteps, values) => {
    const found = new Map(columnSteps.map((step, row) => [step, values[row]]));
    return steps.map((step) => found.get(step) ?? null);
  };
  const raw = span > 1 ? at(history.step, history.loss) : steps.map(() => null);
  return [steps, raw, at(history.step, smoothed(history.loss, span)), at(history.held_out_step, history.held_out_loss)];
}

function show(chart, data, enough, makeSeries) {
  const room = byId(chart.room);
  if (!enough) {
    chart.plot?.destroy();
    chart.plot = null;
    room.removeAttribute("role");
    room.removeAttribute("aria-label");
    room.replaceChildren(element("p", { className: "quiet" }, "Nothing to draw before this peer has seen two steps."));
    return;
  }
  room.setAttribute("role", "img");
  room.setAttribute("aria-label", inWords(chart));
  if (chart.plot) {
    chart.plot.setData(data);
  } else if (chart.width) {
    room.replaceChildren();
    chart.plot = new uPlot(options(chart.width, makeSeries()), data, room);
  }
}

/** What somebody who does not see the curve is told of it. */
function inWords(chart) {
  const [what, values] = chart === charts.loss ? ["loss", history.loss] : ["tokens per second", history.tokens_per_s];
  const known = values.filter((value) => value !== null);
  const told = known.length ? `: ${figure(known[0])} at first, ${figure(known.at(-1))} now` : "";
  return `${what} from step ${count(history.step[0])} to ${count(history.step.at(-1))}${told}`;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function lossSeries() {
  return [
    { label: "each step", stroke: colour("--faint-line"), width: 1, points: { show: false } },
    { label: "loss", stroke: colour("--accent"), width: 2, points: { show: false }, spanGaps: true },
    { label: "held out", stroke: colour("--orange"), width: 0, paths: () => null, points: { show: true, size: 7, fill: colour("--orange") } },
  ];
}

function rateSeries() {
  return [{ label: "tokens/s", stroke: colour("--green"), width: 2, points: { show: false }, spanGaps: true,
    fill: colour("--green-wash") }];
}

function options(width, series) {
  const axis = {
    stroke: colour("--quiet"), font: "12px system-ui, sans-serif", labelSize: 0, size: 46,
    grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false },
  };
  const text = (value) => (Math.abs(value) >= 1000 ? count(value) : value === 0 ? "0" : figure(value));
  const isRate = series.length === 1;
  return {
    width, height: HEIGHT, legend: { show: true, live: true }, cursor: { y: false, points: { size: 6 } },
    scales: { x: { time: false }, y: isRate ? { range: (_, low, high) => [0, (high || 1) * 1.12] } : {} },
    axes: [
      { ...axis, size: 30, space: 70, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6],
        values: (_, ticks) => ticks.map(count) },
      { ...axis, size: isRate ? 62 : 46, space: 40, values: (_, ticks) => ticks.map((tick) => isRate ? count(tick) : String(Number(tick.toPrecision(4)))) },
    ],
    series: [{ label: "step", value: (_, value) => (value === null ? "" : count(value)) },
      ...series.map((item) => ({ ...item, value: (_, value) => (value === null || value === undefined ? "" : isRate ? count(value) : text(value)) }))],
    hooks: { drawAxes: [drawViews] },
  };
}

/** A dashed line at each step from which a new view holds, the first left out. */
function drawViews(plot) {
  const context = plot.ctx;
  context.save();
  context.strokeStyle = colour("--view-line");
  context.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
  context.lineWidth = devicePixelRatio;
  for (const step of history.view_step.slice(1)) {
    const x = Math.round(plot.valToPos(step, "x", true)) + 0.5;
    if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) continue;
    context.beginPath();
    context.moveTo(x, plot.bbox.top);
    context.lineTo(x, plot.bbox.top + plot.bbox.height);
    context.stroke();
  }
  context.restore();
}
