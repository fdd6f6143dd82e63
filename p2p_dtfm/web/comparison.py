"""Two runs' losses beside one another, by tokens and by time, from their histories at two peers.

A loss of step `s` is of the model before that step, which has had `s` steps' tokens then. Time runs
from the first step that the history has, pauses included.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from html import escape

import msgspec

from p2p_dtfm.core.protocol.facts.in_words import counted, duration
from p2p_dtfm.web.report import STYLE

POINTS_DRAWN = 600
SMOOTHED_PART = 40
"""A training loss is shown as the mean around it, over one part in so many of its history."""
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 380, 250, 40, 34, 12, 12
COLOURS = ("var(--first)", "var(--second)")
MORE_STYLE = """
:root { --first: #2563c4; --second: #b4540a }
@media (prefers-color-scheme: dark) { :root { --first: #6ba3f2; --second: #f0954a } }
body { max-width: 1040px } h1 { overflow-wrap: anywhere }
.charts { display: grid; gap: 10px 24px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)) }
figure { margin: 0 } figcaption { font-weight: 600; margin-top: 10px } figure svg { width: 100% }
.name { font-weight: 600 } .first { color: var(--first) } .second { color: var(--second) }
"""

Point = tuple[float, float]


class HistoryLine(msgspec.Struct):
    """The part of a history's line that is needed here."""

    time_s: float
    event: str
    step: int | None = None
    loss: float | None = None
    held_out_loss: float | None = None


class ComparedStep(msgspec.Struct, frozen=True, array_like=True):
    """A committed step; `seconds` since the first one."""

    step: int
    seconds: float
    loss: float | None
    held_out_loss: float | None


class RunCurves(msgspec.Struct, frozen=True):
    """What one peer saw of a run."""

    name: str
    digest: str
    tokens_per_step: int
    rows: tuple[ComparedStep, ...]
    unreadable_lines: int = 0

    def training(self, by_time: bool) -> list[Point]:
        """Smoothed training losses: (tokens or seconds, nats per token)."""
        rows = [(row, row.loss) for row in self.rows if row.loss is not None]
        losses = _smoothed([loss for _, loss in rows], max(1, len(rows) // SMOOTHED_PART))
        return [(self._x(row, by_time), loss) for (row, _), loss in zip(rows, losses, strict=True)]

    def held_out(self, by_time: bool) -> list[Point]:
        return [
            (self._x(row, by_time), row.held_out_loss)
            for row in self.rows
            if row.held_out_loss is not None
        ]

    def _x(self, row: ComparedStep, by_time: bool) -> float:
        return row.seconds if by_time else row.step * self.tokens_per_step


def read_rows(lines: Iterable[bytes]) -> tuple[tuple[ComparedStep, ...], int]:
    """The steps of a history, and how many of its lines cannot be read. Of a repeated
    step the last time counts. What came after its first time is no part of the run."""
    decoder, unreadable = msgspec.json.Decoder(HistoryLine), 0
    found: list[ComparedStep] = []
    for text in lines:
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, ValueError, RecursionError):
            unreadable += 1
            continue
        if line.event != "step" or line.step is None:
            continue
        while found and found[-1].step >= line.step:
            found.pop()
        found.append(ComparedStep(line.step, line.time_s, line.loss, line.held_out_loss))
    began_s = found[0].seconds if found else 0.0
    rows = (msgspec.structs.replace(row, seconds=row.seconds - began_s) for row in found)
    return tuple(rows), unreadable


def _smoothed(values: Sequence[float], span: int) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    found = []
    for at in range(len(values)):
        near = min(span // 2, at, len(values) - 1 - at)
        found.append((sums[at + near + 1] - sums[at - near]) / (2 * near + 1))
    return found


# what the figures say -----------------------------------------------------------------------------


class Common(msgspec.Struct, frozen=True):
    """Both runs' losses at the last point that both came to, on the lines from loss to loss."""

    kind: str
    axis: str
    at: float
    """Tokens or seconds, by the axis."""
    losses: tuple[float, float]


class Reached(msgspec.Struct, frozen=True):
    """How far each run was when its line first came down to the lowest loss that both have had."""

    kind: str
    loss: float
    tokens: tuple[float, float]
    seconds: tuple[float, float]


class Compared(msgspec.Struct, frozen=True):
    """The comparison, without what one of the runs has no losses for."""

    common: tuple[Common, ...]
    reached: Reached | None


KINDS = ("held-out", "training")


def compare(first: RunCurves, second: RunCurves) -> Compared:
    """Compare two runs that both have rows."""
    common = (_common(first, second, kind, by_time) for by_time in (False, True) for kind in KINDS)
    reached = (_reached(first, second, kind) for kind in KINDS)
    return Compared(
        tuple(each for each in common if each), next((each for each in reached if each), None)
    )


def _points(curves: RunCurves, kind: str, by_time: bool) -> list[Point]:
    return curves.training(by_time) if kind == "training" else curves.held_out(by_time)


def _common(first: RunCurves, second: RunCurves, kind: str, by_time: bool) -> Common | None:
    curves = [_points(each, kind, by_time) for each in (first, second)]
    if not all(curves):
        return None
    x = min(points[-1][0] for points in curves)
    if x < max(points[0][0] for points in curves):
        return None
    losses = _between(curves[0], x), _between(curves[1], x)
    return Common(kind, "seconds" if by_time else "tokens", x, losses)


def _between(points: list[Point], x: float) -> float:
    """The value at `x` on the line from point to point."""
    at = bisect_left(points, x, key=lambda point: point[0])
    if at == 0 or points[at][0] == x:
        return points[at][1]
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _reached(first: RunCurves, second: RunCurves, kind: str) -> Reached | None:
    both = (first, second)
    curves = [_points(each, kind, False) for each in both]
    if not all(curves):
        return None
    loss = max(min(y for _, y in points) for points in curves)
    tokens, seconds = (
        [_first_at(_points(each, kind, by_time), loss) for each in both]
        for by_time in (False, True)
    )
    return Reached(kind, loss, (tokens[0], tokens[1]), (seconds[0], seconds[1]))


def _first_at(points: list[Point], loss: float) -> float:
    """Where the line first comes down to this loss, which some point has or undercuts."""
    at = next(at for at, (_, y) in enumerate(points) if y <= loss)
    if at == 0:
        return points[0][0]
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return x0 + (x1 - x0) * (y0 - loss) / (y0 - y1)


def comparison_rows(first: RunCurves, second: RunCurves) -> list[tuple[str, str, str]]:
    """Rows of the comparison: its name, and the value for either run."""
    found, both = compare(first, second), (first, second)
    last = [each.rows[-1] for each in both]
    rows: list[tuple[str, ...]] = [
        ("steps", *(f"{row.step + (row.loss is not None):,}" for row in last)),
        ("tokens a step", *(f"{each.tokens_per_step:,}" for each in both)),
        ("time", *(_duration(row.seconds) for row in last)),
    ]
    for each in found.common:
        by_time = each.axis == "seconds"
        where = f"after {_duration(each.at)}" if by_time else f"at {counted(each.at, 'token')}"
        rows.append((f"{each.kind} loss {where}", *(f"{loss:.4f}" for loss in each.losses)))
    if found.reached is not None:
        reached, what = found.reached, f"{found.reached.kind} loss {found.reached.loss:.4f} after"
        rows.append((what, *(counted(tokens, "token") for tokens in reached.tokens)))
        rows.append((what, *(_duration(seconds) for seconds in reached.seconds)))
    return [(what, one, other) for what, one, other in rows]


def _duration(seconds: float) -> str:
    """A duration in words. A short one is told to a tenth: two runs may differ by less than a
    second."""
    return duration(seconds) if seconds >= 60 else f"{seconds:.1f} s"


# the page -----------------------------------------------------------------------------------------


def comparison_html(first: RunCurves, second: RunCurves) -> str:
    """One HTML file that runs and loads nothing. Names are text of strangers."""
    rows = "".join(
        f"<tr><th scope='row'>{escape(what)}</th><td>{escape(a)}</td><td>{escape(b)}</td></tr>"
        for what, a, b in comparison_rows(first, second)
    )
    names = [
        f'<span class="name {place}">{escape(each.name)}</span> '
        f'<span class="quiet">{escape(each.digest[:16])}</span>'
        for place, each in (("first", first), ("second", second))
    ]
    charts = "".join(
        _figure(first, second, kind, by_time) for kind in KINDS for by_time in (False, True)
    )
    title = f"{escape(first.name)} and {escape(second.name)}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{MORE_STYLE}</style><body><h1>{title}</h1>"
        f"<p>{names[0]} is the whole line, {names[1]} the dashed one. Losses are in nats per "
        "token; training losses are smoothed. Time runs from the first step that each history has, "
        f'pauses included.</p><div class="charts">{charts}</div><h2>In figures</h2>'
        f"<table><tr><th></th><th>{names[0]}</th><th>{names[1]}</th></tr>{rows}</table>"
        "</body></html>\n"
    )


def _figure(first: RunCurves, second: RunCurves, kind: str, by_time: bool) -> str:
    caption = f"{kind.capitalize()} loss by {'time' if by_time else 'tokens'}"
    curves = [_thinned(_points(each, kind, by_time)) for each in (first, second)]
    if not any(curves):
        return f"<figure><figcaption>{caption}</figcaption><p class='quiet'>None yet.</p></figure>"
    return f"<figure><figcaption>{caption}</figcaption>{_chart(curves, caption, by_time)}</figure>"


def _thinned(points: list[Point]) -> list[Point]:
    every = -(-len(points) // POINTS_DRAWN) or 1
    return [*points[:-1:every], *points[-1:]]


def _chart(curves: Sequence[list[Point]], label: str, by_time: bool) -> str:
    xs = [x for points in curves for x, _ in points]
    ys = [y for points in curves for _, y in points]
    end, low, high = max(*xs, 1.0), min(ys), max(ys)
    rim = 0.04 * (high - low) or 0.1
    low, high = low - rim, high + rim

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / end
        return across, TOP + (HEIGHT - TOP - BOTTOM) * (high - y) / (high - low)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">']
    for share in (0.0, 0.5, 1.0):
        y = low + share * (high - low)
        _, down = at(0, y)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}" '
            f'stroke="var(--line)"/><text x="{LEFT - 6}" y="{down + 4:.1f}" '
            f'text-anchor="end">{y:.2f}</text>'
        )
        across, floor = at(share * end, low)
        anchor = "start" if share == 0 else "end" if share == 1 else "middle"
        told = _duration(share * end) if by_time else _tokens(share * end)
        parts.append(
            f'<text x="{across:.1f}" y="{floor + 20:.1f}" text-anchor="{anchor}">{told}</text>'
        )
    for number, points in enumerate(curves):
        line = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in points)
        dashes = ' stroke-dasharray="6 4"' if number else ""
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{COLOURS[number]}" '
            f'stroke-width="2"{dashes}/>'
        )
    return "".join(parts) + "</svg>"


def _tokens(count: float) -> str:
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:,.0f}"
