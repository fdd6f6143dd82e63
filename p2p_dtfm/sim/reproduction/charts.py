"""Small drawings as SVG: lines with bands, and bars. Legible alone and in the page."""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from p2p_dtfm.sim.reproduction.bars import ChartBar
from p2p_dtfm.sim.reproduction.html_bars import css_class

WIDTH, HEIGHT = 400, 280
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 30, 40
STATIONS = 120
"""Places across at which runs are compared."""
STYLE = """
svg.chart{--ink:#22303c;--quiet:#5f6f7b;--page:#fff;--rule:#dde4ea;--published:#8b98a3;
--simulated:#2d6cdf;--predicted:#8fb4f5;--measured:#1d8a5b;--c0:#8b98a3;--c1:#c26a1b;--c2:#b0307c;
--c3:#1d8a5b;--c4:#2d6cdf}
@media(prefers-color-scheme:dark){svg.chart{--ink:#e6edf3;--quiet:#9fb0bd;--page:#11181f;
--rule:#2a3743;--published:#7d8b97;--simulated:#5b93f5;--predicted:#39598f;--measured:#3fbf88;
--c0:#7d8b97;--c1:#e59345;--c2:#e070b4;--c3:#3fbf88;--c4:#5b93f5}}
svg.chart text{font:12px system-ui,sans-serif;fill:var(--ink)}
svg.chart .quiet{fill:var(--quiet);font-size:11px}svg.chart .title{font-weight:600}
svg.chart .page{fill:var(--page)}svg.chart .rule{stroke:var(--rule)}
svg.chart .published{fill:var(--published)}svg.chart .simulated{fill:var(--simulated)}
svg.chart .predicted{fill:var(--predicted)}svg.chart .measured-here{fill:var(--measured)}
"""


@dataclass(frozen=True, slots=True)
class ChartLine:
    """Points of several runs of one thing: the middle is drawn, and a band from least to most."""

    name: str
    runs: Sequence[Sequence[tuple[float, float]]]
    stepped: bool = True
    """Whether a value holds until the next point, as the best so far does. Otherwise points are
    joined, each run by itself."""


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis counts."""

    title: str
    told: Callable[[float], str]
    logarithmic: bool = True


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """A drawing with its own style, for a file or for the page."""
    return "\n".join(
        [
            f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'role="img"><title>{html.escape(title)}</title><style>{STYLE}</style>',
            f'<rect class="page" width="{width}" height="{height}"/>',
            *parts,
            "</svg>",
        ]
    )


def line_chart(title: str, lines: Sequence[ChartLine], across: Axis, up: Axis) -> str:
    """A chart in which each run ends where it ended. The middle of the runs is drawn, and the band
    between the least and the most."""
    points = [point for line in lines for run in line.runs for point in run]
    places, values = [p[0] for p in points], [p[1] for p in points]
    x = _scale(across, places, LEFT, WIDTH - RIGHT)
    y = _scale(up, values, HEIGHT - BOTTOM - 18, TOP)
    parts = [
        f'<text class="title" x="8" y="18">{html.escape(title)}</text>',
        *(
            f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" '
            f'y2="{y(value):.1f}"/><text class="quiet" x="{LEFT - 6}" y="{y(value) + 4:.1f}" '
            f'text-anchor="end">{up.told(value)}</text>'
            for value in _ticks(up, values)
        ),
        *(
            f'<text class="quiet" x="{x(value):.1f}" y="{HEIGHT - BOTTOM}" text-anchor="middle">'
            f"{across.told(value)}</text>"
            for value in _ticks(across, places)
        ),
        f'<text class="quiet" x="{WIDTH - RIGHT}" y="{TOP - 12}" text-anchor="end">'
        f"{html.escape(up.title)}; across: {html.escape(across.title)}</text>",
    ]
    least, most = min(places), max(places)
    stations = [least * (most / least) ** (at / STATIONS) for at in range(STATIONS + 1)]
    for number, line in enumerate(lines):
        parts += _drawn(line, stations, f"var(--c{number % 5})", x, y)
    return svg(WIDTH, HEIGHT, title, [*parts, *_legend([line.name for line in lines])])


def _drawn(
    line: ChartLine,
    stations: Sequence[float],
    colour: str,
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> list[str]:
    if not line.stepped:
        paths = [[(x(at), y(value)) for at, value in run] for run in line.runs]
        return [
            f'<path d="M{_path(path)}" fill="none" stroke="{colour}" stroke-width="2"/>'
            + "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in path)
            for path in paths
        ]
    band = []
    for at in stations:
        values = sorted(value for run in line.runs if (value := _at(run, at)) is not None)
        if len(values) == len(line.runs):  # a middle of fewer would rise where one ends
            band.append((at, values[0], values[len(values) // 2], values[-1]))
    edge = [(x(at), y(high)) for at, _, _, high in band]
    edge += [(x(at), y(low)) for at, low, _, _ in reversed(band)]
    middle = [(x(at), y(value)) for at, _, value, _ in band]
    if not band:
        return []
    return [
        f'<path d="M{_path(edge)}Z" fill="{colour}" opacity=".18"/>'
        f'<path d="M{_path(middle)}" fill="none" stroke="{colour}" stroke-width="2">'
        f"<title>{html.escape(line.name)}</title></path>"
    ]


def _legend(names: Sequence[str]) -> list[str]:
    parts: list[str] = []
    x, y = 8.0, HEIGHT - 20
    for number, name in enumerate(names):
        width = 26 + 6.3 * len(name)
        if x + width > WIDTH + 12:
            x, y = 8.0, y + 14
        parts.append(
            f'<rect x="{x:.0f}" y="{y - 8}" width="10" height="8" fill="var(--c{number % 5})"/>'
            f'<text class="quiet" x="{x + 14:.0f}" y="{y}">{html.escape(name)}</text>'
        )
        x += width
    return parts


def bar_chart(title: str, bars: Sequence[ChartBar], most_s: float) -> str:
    """Bars, one under the other. A bar longer than `most_s` is cut, and says so."""
    row, left = 22, 190
    height = 34 + row * len(bars) + 8
    parts = [f'<text class="title" x="8" y="20">{html.escape(title)}</text>']
    for number, bar in enumerate(bars):
        y = 34 + row * number
        width = max(1.0, (560 - left - 90) * min(1.0, bar.seconds / most_s))
        cut = " (cut)" if bar.seconds > most_s else ""
        parts.append(
            f"<g><title>{html.escape(f'{bar.system}: {bar.kind}. {bar.source}')}</title>"
            f'<text x="8" y="{y + 13}">{html.escape(bar.system)}</text>'
            f'<rect class="{css_class(bar.kind)}" x="{left}" y="{y + 2}" width="{width:.1f}" '
            f'height="14" rx="2"/><text class="quiet" x="{left + width + 6:.1f}" y="{y + 13}">'
            f"{bar.seconds:.1f} s{cut}, {bar.kind}</text></g>"
        )
    return svg(640, height, title, parts)


def _at(run: Sequence[tuple[float, float]], place: float) -> float | None:
    """The value of the last point that is not after the place; None once the run has ended."""
    if place > run[-1][0] * (1 + 1e-9):
        return None
    found = None
    for point, value in run:
        if point > place * (1 + 1e-9):
            break
        found = value
    return found


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _scale(
    axis: Axis, values: Sequence[float], start: float, end: float
) -> Callable[[float], float]:
    def seen(value: float) -> float:
        return math.log(max(value, 1e-9)) if axis.logarithmic else value

    low, high = seen(min(values)), seen(max(values))
    room = max(1e-9, high - low)
    return lambda value: start + (seen(value) - low) / room * (end - start)


def _ticks(axis: Axis, values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    if not axis.logarithmic:
        return [low + (high - low) * at / 4 for at in range(5)]
    powers = range(math.floor(math.log10(max(low, 1e-9))), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / max(low, 1e-9) < 200 else (1,)
    found = [
        s * 10.0**p for p in powers for s in steps if low * 0.999 <= s * 10.0**p <= high * 1.001
    ]
    return found if len(found) > 1 else [low, high]
