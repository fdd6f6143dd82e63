"""The charts of any scenario's own page, below the map of its plan."""

import html
from collections.abc import Sequence

from p2p_dtfm.sim.reproduction.bars import Chart, ChartBar
from p2p_dtfm.sim.reproduction.html_bars import STYLE as BARS_STYLE
from p2p_dtfm.sim.reproduction.html_bars import (
    bar_row,
    kinds_key,
    price_rows_html,
    seconds_rows,
    seconds_told,
)
from p2p_dtfm.sim.reproduction.swarm.swarm_bars import SwarmBars
from p2p_dtfm.sim.step_time.stage_shares import Parts

PART_NAMES = {
    "computing": "computing",
    "others": "waiting for others that compute",
    "transfer": "waiting for what is on its way",
    "reduction": "reducing gradients",
    "guarding": "until guardians have them",
    "commit": "committing",
}
STYLE = (
    BARS_STYLE
    + """
:root{--computing:#1d8a5b;--others:#b9c3cb;--transfer:#d9822b;--reduction:#8e4ec6;
--guarding:#c2366b;--commit:#5f6f7b}
@media(prefers-color-scheme:dark){:root{--computing:#3fbf88;--others:#55636f;--transfer:#e59345;
--reduction:#b184e0;--guarding:#e070b4;--commit:#9fb0bd}}
.charts .card{margin-bottom:14px;max-width:760px}.parts{display:grid;gap:6px;align-items:center;
grid-template-columns:minmax(0,12em) minmax(0,1fr) 7.4em;font-size:12.5px;line-height:1.35;
margin:2px 0}.parts b{font-weight:400;overflow-wrap:anywhere}.parts.all b{font-weight:600}
.parts em{font-style:normal;text-align:right;color:var(--quiet)}
.parts div{display:flex;height:11px;border-radius:2px;overflow:hidden;background:var(--rule)}
@media(max-width:600px){
.charts .bar,.parts{grid-template-columns:minmax(0,9em) minmax(0,1fr) 7.2em}}
"""
    + "".join(f".part-{name}{{background:var(--{name})}}" for name in PART_NAMES)
)


def charts_html(found: SwarmBars) -> str:
    """Sections with bars, each marked with its kind."""
    kinds = dict.fromkeys(bar.kind for bar in found.bars)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in found.notes)
    return "\n".join(
        [
            f'<div class="charts"><p class="key">{kinds_key(kinds)}</p>',
            "<h2>How long a step is</h2>",
            f'<div class="card">{seconds_rows(_of(found, Chart.STEP))}</div>',
            "<h2>Where it goes</h2>",
            "<p>Simulated; each bar is the whole step at one peer, the figure how much of it is "
            "computing.</p>",
            f'<p class="key">{_parts_key()}</p>',
            f'<div class="card">{"".join(_parts(row, found) for row in found.where)}</div>',
            "<h2>What would change it</h2>",
            "<p>Each alone. A plan is searched for, so that what should help may come out a "
            "little longer. What compression costs in loss is another question: "
            "<code>p2p-dtfm plan SCENARIO --run FILE --advise</code>.</p>",
            f'<div class="card">{_change_rows(_of(found, Chart.CHANGES))}</div>',
            _prices_html(_of(found, Chart.PRICES)),
            f'<ul class="quiet">{notes}</ul>' if notes else "",
            "</div>",
        ]
    )


def _of(found: SwarmBars, chart: Chart) -> list[ChartBar]:
    return [bar for bar in found.bars if bar.chart is chart]


def _parts_key() -> str:
    return "".join(
        f'<span><i class="part-{name}"></i>{words}</span>' for name, words in PART_NAMES.items()
    )


def _parts(row: str, found: SwarmBars) -> str:
    """One peer's step, from left to right."""
    parts: Parts = found.where[row]
    shares = {name: value / parts.total_ns for name, value in parts.values().items()}
    told = "; ".join(
        f"{PART_NAMES[name]} {seconds_told(value / 1e9)} ({shares[name]:.0%})"
        for name, value in parts.values().items()
    )
    pieces = "".join(
        f'<i class="part-{name}" style="width:{100 * share:.2f}%"></i>'
        for name, share in shares.items()
        if share > 0
    )
    (bar, *_) = (b for b in _of(found, Chart.PARTS) if b.system.startswith(f"{row}: "))
    first = " all" if row == next(iter(found.where)) else ""
    return (
        f'<div class="parts{first}" data-kind="{bar.kind}" title="{html.escape(told)}">'
        f"<b>{html.escape(row)}</b><div>{pieces}</div>"
        f"<em>{shares['computing']:.0%}</em></div>"
    )


def _change_rows(bars: Sequence[ChartBar]) -> str:
    """Seconds, and what part of the first bar they are."""
    before, longest = bars[0].seconds, max(bar.seconds for bar in bars)
    rows = []
    for number, bar in enumerate(bars):
        percent = 100 * (bar.seconds / before - 1)
        told = seconds_told(bar.seconds)
        if number and abs(percent) >= 0.05:
            told += f" {percent:+.1f}%"
        rows.append(bar_row(bar, bar.seconds / longest, told, own=number == 0))
    return "".join(rows)


def _prices_html(bars: Sequence[ChartBar]) -> str:
    """Bars of prices; empty where a scenario has none."""
    if not bars:
        return ""
    return (
        "<h2>What a dollar buys</h2><p>Millions of tokens for a dollar, of plans as predicted; "
        "what it costs when a rented machine is taken away is not counted.</p>"
        f'<div class="card">{price_rows_html(bars)}</div>'
    )
