"""The page and its drawings: one HTML file that needs nothing else, and the same as SVG files."""

import html
from collections.abc import Sequence
from typing import Any

from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.sim.paper.cost import paper_plan
from p2p_dtfm.sim.paper.published import PLANNED_SCENARIOS, TITLES
from p2p_dtfm.sim.reproduction.bars import Chart, ChartBar, Results, bars_of
from p2p_dtfm.sim.reproduction.bilevel import bilevel_svg
from p2p_dtfm.sim.reproduction.charts import Axis, ChartLine, bar_chart, line_chart
from p2p_dtfm.sim.reproduction.convergence import CASES, METHODS, OURS, case_problem
from p2p_dtfm.sim.reproduction.html_bars import (
    STYLE,
    bar_row,
    kinds_key,
    price_rows_html,
    seconds_rows,
)
from p2p_dtfm.sim.reproduction.simulated_rows import RUN
from p2p_dtfm.sim.reproduction.story import (
    Cell,
    cells,
    compared,
    curves_of,
    errors,
    own_compared,
    reached,
    the_claim,
)
from p2p_dtfm.sim.reproduction.tasks import PRICED
from p2p_dtfm.sim.scenario.files import read_scenario

TABLE_ORDER = (
    "ZeRO-3",
    "DeepSpeed pipeline",
    "Megatron random",
    "Megatron default",
    "Megatron pipeline",
    "Megatron best",
    "DT-FM random",
    "DT-FM random, simulated",
    "DT-FM scheduled",
    "DT-FM scheduled, simulated",
    "ours, predicted",
    "ours",
)
CUT = "ZeRO-3"
"""Often a hundred times as slow as the others. Its bars are cut where they would hide them."""
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);
background:var(--page);margin:0 auto;padding:16px;max-width:1400px}
h1{font-size:24px;line-height:1.25}h2{margin-top:40px;font-size:19px}p,li{max-width:76ch}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:13.5px}td,th{text-align:left;
padding:4px 12px 4px 0;border-bottom:1px solid var(--rule)}svg{display:block;width:100%;height:auto}
.wide svg{min-width:720px;max-width:1000px}
table{margin-top:14px}details>summary{cursor:pointer;font-weight:600;padding:6px 0}
"""


def drawings(results: Results) -> dict[str, str]:
    """SVG files by their names."""
    found = {}
    for (case, layers, batch), bars in cells(results).items():
        ordered = [bars[name] for name in TABLE_ORDER if name in bars]
        most = max(bar.seconds for bar in ordered if bar.system != CUT)
        title = f"Case {case}, {TITLES[case]}: {counted(layers, 'layer')}, {batch} sequences"
        found[f"case-{case}-L{layers}-B{batch}.svg"] = bar_chart(title, ordered, most)
    for case in CASES:
        for across in ("evaluations", "seconds"):
            found[f"convergence-{case}-{across}.svg"] = _convergence(results, case, across)
        found[f"bilevel-{case}.svg"] = _bilevel(results, case)
    found["scale-seconds.svg"], found["scale-quality.svg"] = _scale(results)
    return found


def page(results: Results, drawn: dict[str, str], made: str) -> str:
    """The whole page; `made` says when and how cached rows were computed."""
    rows = compared(results)
    all_rows = errors(rows)
    table = cells(results)
    shown = "".join(_cell_card(cell, table) for cell in (("5", 40, 4096), ("5", 24, 1024)))
    searches = "".join(
        _card(drawn[f"convergence-{case}-{across}.svg"])
        for case in CASES
        for across in ("evaluations", "seconds")
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>The paper, seen</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">
<style>{STYLE}{_STYLE}</style></head><body>
<h1>Decentralized training of foundation models: the paper's claims, computed again</h1>
<p>Yuan et al. (NeurIPS 2022) trained GPT-3 XL on 64 V100s over five networks. Here is what they
published, what a simulator makes of their runs, and what this program would do on the same
machines. Every bar says what it is; hover or look into <code>bars.json</code> for its source
and the command that gives it again.</p>
<p class="key">{kinds_key()}</p>
<h2>4.8 times faster than Megatron?</h2>
<p id="claim">{html.escape(the_claim(results))}</p>
<div class="grid">{shown}</div>
<h2>Does the simulator tell the truth?</h2>
<p>DT-FM's own runs, simulated, beside all {all_rows["rows"]:.0f} published rows: median error
{all_rows["median"]:.1%}, worst {all_rows["worst"]:.1%}. Four constants, shared by all cases, were
fitted to rows of cases 1, 3 and 5; one link rate of case 2 was chosen with its rows in sight.</p>
<div class="scroll">{_error_table(results)}</div>
{_own(results)}
<h2>With and without a scheduler</h2>
<p>Seconds a step under our execution, 24 layers and 1,024 sequences, 8 stages of 8 but for ours,
whose planner chooses its own shape.</p>
<div class="grid">{"".join(_scheduler_card(results, case) for case in CASES)}</div>
<h2>All five cases</h2>
{"".join(_case(results, case) for case in CASES)}
<h2>How fast searches find a placement</h2>
<p>The paper's own cost, lower is better; a line is the middle of five seeds, its band all of them.
The evolutionary algorithm is written from the paper's description. An evaluation costs a whole
partition with its shortest path; one of annealing and of ours is a move, which looks only at what
it touches and is compiled, so seconds compare them more fairly. Annealing starts anew with each
budget.</p>
<div class="grid">{searches}</div>
<div class="scroll">{_reached_table(results)}</div>
<h2>The two levels</h2>
<p>A partition into groups, and a path through the coarsened graph, as our solver leaves them.
<code>p2p-dtfm plan SCENARIO --cost paper --svg FILE</code> draws it for any scenario.</p>
{"".join(_bilevel_details(case, drawn) for case in CASES)}
<h2>From 8 to 1,024 peers</h2>
<p>Ten cities, speeds, memories and uplinks mixed; how long the planner takes, and how far its
plan is above a lower bound that no plan can beat, and that is loose where uplinks are weak.</p>
<div class="grid">{_card(drawn["scale-seconds.svg"])}{_card(drawn["scale-quality.svg"])}</div>
<h2>What a dollar buys</h2>
<p>Millions of tokens of {RUN} for a dollar, of plans as predicted: rented V100s on demand and on
the spot market, together and each alone (<code>{PRICED}</code>). What it costs when a rented
machine is taken away is not counted.</p>
<div class="grid"><div class="card">{price_rows_html(bars_of(results, Chart.PRICES))}</div></div>
<p class="quiet">{html.escape(made)}</p>
</body></html>
"""


def _bar(bar: ChartBar, most_s: float) -> str:
    value = f"{bar.seconds:.1f} s"
    if bar.pflops is not None:
        value += f" · {bar.pflops:.2f}"
    return bar_row(bar, bar.seconds / most_s, value, bar.system.startswith("ours"))


def _cell_card(cell: Cell, table: dict[Cell, dict[str, ChartBar]]) -> str:
    case, layers, batch = cell
    bars = [table[cell][name] for name in TABLE_ORDER if name in table[cell]]
    most = max(bar.seconds for bar in bars if bar.system != CUT)
    return (
        f'<div class="card"><h3>Case {case}, {counted(layers, "layer")}, {batch:,} sequences '
        '<span class="quiet">seconds · PFLOPS</span></h3>'
        + "".join(_bar(bar, most) for bar in bars)
        + "</div>"
    )


def _case(results: Results, case: str) -> str:
    table = cells(results)
    cards = "".join(_cell_card(cell, table) for cell in table if cell[0] == case)
    opened = " open" if case == "5" else ""
    return (
        f"<details{opened}><summary>Case {case}: {TITLES[case]}</summary>"
        f'<div class="grid">{cards}</div></details>'
    )


def _scheduler_card(results: Results, case: str) -> str:
    bars = [bar for bar in bars_of(results, Chart.SCHEDULER) if bar.case == case]
    most = max(bar.seconds for bar in bars)
    return (
        f'<div class="card"><h3>Case {case}: {TITLES[case]}</h3>'
        + "".join(_bar(bar, most) for bar in bars)
        + "</div>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return (
        "<table><tr>"
        + "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        + "</tr>"
        + "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in rows
        )
        + "</table>"
    )


def _error_table(results: Results) -> str:
    rows = compared(results)
    told = []
    for case in CASES:
        here = [row for row in rows if row.cell[0] == case]
        found = errors(here)
        worst = max(here, key=lambda row: abs(row.error))
        told.append(
            (
                f"{case}: {TITLES[case]}",
                f"{found['rows']:.0f}",
                f"{found['median']:.1%}",
                f"{worst.error:+.1%}",
                f"L{worst.cell[1]} B{worst.cell[2]} {worst.system}: {worst.published_s:.1f} s "
                f"published, {worst.simulated_s:.1f} s simulated",
            )
        )
    return _table(("case", "rows", "median error", "worst", "which"), told)


def _own(results: Results) -> str:
    """Rows that somebody else has measured; empty if there are none."""
    rows, bars = own_compared(results), bars_of(results, Chart.OWN)
    if not rows:
        return ""
    found = errors(rows)
    told = [
        (
            f"{row.cell[0]}, L{row.cell[1]} B{row.cell[2]}",
            row.system,
            f"{row.published_s:.2f} s",
            f"{row.simulated_s:.2f} s",
            f"{row.error:+.1%}",
        )
        for row in rows
    ]
    return (
        "<h2>Rows of your own</h2>"
        f"<p>{html.escape(bars[0].source)}: {found['rows']:.0f} rows, median error "
        f"{found['median']:.1%}, worst {found['worst']:.1%}; nothing was fitted to them.</p>"
        f'<div class="grid"><div class="card">{seconds_rows(bars)}</div></div>'
        '<div class="scroll">'
        + _table(("scenario", "system", "measured", "simulated", "error"), told)
        + "</div>"
    )


def _reached_table(results: Results) -> str:
    table: dict[str, dict[str, dict[str, Any]]] = reached(results)
    told = []
    for case in CASES:
        cells_ = []
        for method in METHODS:
            found = table[case][method]
            cells_.append(
                f"{found['reached']} of {found['seeds']}; "
                f"+{found['median_above']:.1%} (worst +{found['worst_above']:.1%})"
            )
        told.append((f"{case}: {TITLES[case]}", *cells_))
    return _table(("seeds that reach the best known; how far above it", *METHODS), told)


def _card(drawing: str) -> str:
    return f'<div class="card">{drawing}</div>'


def _bilevel_details(case: str, drawn: dict[str, str]) -> str:
    opened = " open" if case == "5" else ""
    return (
        f"<details{opened}><summary>Case {case}: {TITLES[case]}</summary>"
        f'<div class="scroll wide">{drawn[f"bilevel-{case}.svg"]}</div></details>'
    )


def _bilevel(results: Results, case: str) -> str:
    problem = case_problem(case)
    groups = tuple(map(tuple, results.levels[case]))
    scenario = read_scenario(PLANNED_SCENARIOS[case])
    return bilevel_svg(scenario, problem, paper_plan(problem, groups))


def _convergence(results: Results, case: str, across: str) -> str:
    lines = []
    for method in METHODS:
        runs = []
        for curve in curves_of(results, case, method):
            places = curve.seconds if across == "seconds" else curve.evaluations
            best = float("inf")
            run: list[tuple[float, float]] = []
            for place, total in zip(places, curve.total_s, strict=True):
                best = min(best, total)
                run.append((max(float(place), 1e-3 if across == "seconds" else 1.0), best))
            runs.append(sorted(run))
        lines.append(ChartLine(method if method != OURS else "ours", runs))
    across_axis = Axis("seconds of one core" if across == "seconds" else across, _short)
    return line_chart(f"Case {case}", lines, across_axis, Axis("the paper's cost, s", _short))


def _scale(results: Results) -> tuple[str, str]:
    bars = bars_of(results, Chart.SCALE)
    planned = [(float(bar.peers), max(1e-3, bar.seconds)) for bar in bars]
    seconds = ChartLine("planning", [planned], stepped=False)
    above = [(float(count), row["over_bound"]) for count, row in results.quality.items()]
    peers = Axis("peers", _short)
    return (
        line_chart("Seconds of planning (measured here)", [seconds], peers, Axis("s", _short)),
        line_chart(
            "Predicted step over a lower bound", [ChartLine("ours", [above], stepped=False)], peers,
            Axis("times", _short, logarithmic=False),
        ),
    )  # fmt: skip


def _short(value: float) -> str:
    if value >= 1_000_000:
        return f"{value / 1e6:g}M"
    if value >= 10_000:
        return f"{value / 1e3:g}k"
    return f"{value:g}" if value >= 1000 else f"{value:.3g}"
