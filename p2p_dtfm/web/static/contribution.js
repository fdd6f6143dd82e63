// What this peer has given, and who has computed how much of the run.

import { byId, element, fill, say } from "./dom.js";
import { bytes, count, duration, percent, some } from "./format.js";

const ROWS_SHOWN = 10;

export function drawContribution({ contribution, live }) {
  if (!contribution) return;
  const { today, week, ever, board } = contribution;
  const rows = [
    ["tokens", (given) => count(given.tokens)],
    ["steps", (given) => count(given.steps)],
    ["time", (given) => duration(given.seconds)],
    ["sent", (given) => bytes(given.sent_bytes)],
    ["guarded", (given) => bytes(given.guarded_bytes)],
  ];
  const lines = [];
  if (live?.state === "done" && ever.steps) {
    lines.push(element("p", { className: "verdict" },
      `Thank you: ${some(ever.tokens, "token")} of this model went through your computer.`));
  }
  lines.push(ever.steps || ever.guarded_bytes
    ? element("table", { className: "given-table" },
      element("thead", {}, element("tr", {},
        ...["", "today", "7 days", "ever"].map((text) => element("th", {}, text)))),
      element("tbody", {}, ...rows.map(([name, figure]) => element("tr", {},
        element("th", { scope: "row" }, name),
        ...[today, week, ever].map((given) => element("td", {}, figure(given)))))))
    : element("p", { className: "quiet" }, "Nothing yet: it counts from the first step that is computed here."));
  if (Math.round(contribution.repeated_tokens ?? 0)) {
    lines.push(element("p", { className: "quiet" },
      `Of all tokens ${count(contribution.repeated_tokens)} were lost in a failure and done again; `
      + `${count(contribution.useful_tokens)} stayed.`));
  }
  fill(byId("given"), ...lines);
  drawBoard(contribution, board, live);
}

function drawBoard(contribution, board, live) {
  const all = contribution.board_tokens;
  say(byId("board-steps"), contribution.board_steps
    ? `tokens of ${some(contribution.board_steps, "step")} that this peer has seen or was shown` : "");
  const more = contribution.board_peers - Math.min(board.length, ROWS_SHOWN);
  fill(byId("board"), board.length
    ? element("ol", { className: "board-rows" }, ...board.slice(0, ROWS_SHOWN).map((row) => {
      const me = row.peer_id === live?.peer_id;
      const bar = element("span", { className: "board-bar" });
      bar.style.width = `${(100 * row.tokens) / board[0].tokens}%`;
      return element("li", { className: me ? "me" : "", title: row.peer_id },
        element("span", { className: "board-name" }, me ? `${row.name} (you)` : row.name),
        element("span", { className: "board-room" }, bar),
        element("span", { className: "board-figure" }, `${count(row.tokens)} · ${percent(row.tokens / all)}`));
    }))
    : element("p", { className: "quiet" }, "Nobody's work is known here yet."),
  more > 0 ? element("p", { className: "quiet" }, `and ${count(more)} more`) : null);
}
