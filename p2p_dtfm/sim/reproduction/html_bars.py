"""Bars as rows of HTML, which a phone shows, too. Each says of what kind its figure is."""

import html
from collections.abc import Iterable, Sequence

from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.sim.reproduction.bars import ChartBar, FigureKind

STYLE = """
:root{--ink:#22303c;--quiet:#5f6f7b;--page:#fff;--card:#f5f7f9;--rule:#dde4ea;--published:#8b98a3;
--simulated:#2d6cdf;--predicted:#8fb4f5;--measured:#1d8a5b}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--quiet:#9fb0bd;--page:#11181f;--card:#18212a;
--rule:#2a3743;--published:#7d8b97;--simulated:#5b93f5;--predicted:#39598f;--measured:#3fbf88}}
*{box-sizing:border-box}
.grid{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(min(100%,400px),1fr))}
.card{background:var(--card);border-radius:8px;padding:12px;min-width:0}
.card h3{font-size:15px;margin:0 0 8px}.card h3 span{display:block;font-weight:400}
.bar{display:grid;grid-template-columns:minmax(0,12em) minmax(0,1fr) 7.4em;gap:6px;
align-items:center;font-size:12.5px;line-height:1.35;margin:2px 0}
.bar b{font-weight:400;overflow-wrap:anywhere}.bar.own b{font-weight:600}
.bar i{display:block;height:11px;border-radius:2px;min-width:2px}
.bar em{font-style:normal;text-align:right;color:var(--quiet);white-space:nowrap}
.published{background:var(--published)}.simulated{background:var(--simulated)}
.predicted{background:var(--predicted)}.measured-here{background:var(--measured)}
.bar i.cut{--cut:linear-gradient(90deg,#000 80%,#0000 80% 84%,#000 84% 90%,#0000 90% 94%,#000 94%);
-webkit-mask:var(--cut);mask:var(--cut)}
.key span{display:inline-block;margin:0 14px 4px 0}.key i{display:inline-block;
width:14px;height:11px;border-radius:2px;margin-right:5px}.quiet{color:var(--quiet);font-size:13px}
code{font-size:12.5px;overflow-wrap:anywhere}
"""
_TOLD = {
    FigureKind.PUBLISHED: "measured by the paper's authors",
    FigureKind.SIMULATED: "a step played in virtual time",
    FigureKind.PREDICTED: "the planner's own cost model",
    FigureKind.MEASURED_HERE: "by the clock of a machine that ran it",
}


def kinds_key(kinds: Iterable[FigureKind] = FigureKind) -> str:
    """The key to what the colours mean."""
    return "".join(
        f'<span><i class="{css_class(kind)}"></i>{kind}: {_TOLD[kind]}</span>' for kind in kinds
    )


def css_class(kind: FigureKind) -> str:
    return kind.value.replace(" ", "-")


def bar_row(bar: ChartBar, share: float, value: str, own: bool = False) -> str:
    """One bar that takes `share` of the room. A bar longer than all of it is cut."""
    speed = f", {bar.pflops:.2f} PFLOPS" if bar.pflops is not None else ""
    cached = "; cached" if bar.cached else ""
    price = ""
    if bar.price_per_hour is not None:
        price = f", {counted(bar.peers, 'peer')} with a stage at ${bar.price_per_hour:.2f} an hour"
    told = f"{bar.system}: {bar.seconds:.4g} s{speed}{price}; {bar.kind}{cached}. {bar.source}"
    cut = " cut" if share > 1.0001 else ""
    return (
        f'<div class="bar{" own" if own else ""}" data-kind="{bar.kind}" '
        f'title="{html.escape(told)}"><b>{html.escape(bar.system)}</b>'
        f'<i class="{css_class(bar.kind)}{cut}" style="width:{100 * min(1.0, share):.1f}%"></i>'
        f"<em>{html.escape(value)}</em></div>"
    )


def seconds_rows(bars: Sequence[ChartBar], own: str = "ours") -> str:
    """Bars in seconds on one scale. Those whose system begins with `own` stand out."""
    longest = max(bar.seconds for bar in bars)
    return "".join(
        bar_row(bar, bar.seconds / longest, seconds_told(bar.seconds), bar.system.startswith(own))
        for bar in bars
    )


def seconds_told(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def price_rows_html(bars: Sequence[ChartBar]) -> str:
    """Bars of tokens for a dollar."""
    most = max(bar.tokens_per_dollar or 0.0 for bar in bars)
    return "".join(
        bar_row(
            bar,
            (bar.tokens_per_dollar or 0.0) / most,
            f"{(bar.tokens_per_dollar or 0.0) / 1e6:.1f} M",
        )
        for bar in bars
    )
