"""A complete run as one page that needs nothing beside it: to keep, to send, to print.

All of it but the figures is text of strangers or of the model, and is escaped.
"""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from datetime import datetime
from hashlib import sha256
from html import escape

from p2p_dtfm.core.protocol.facts.in_words import counted, duration
from p2p_dtfm.web.state import ContributionBoard, Course, DashboardState, History, Sample

WIDTH, HEIGHT = 760, 280
LEFT, TOP, RIGHT, BOTTOM = 88, 10, 10, 40
EVENTS_SHOWN = 40
STYLE = """
:root { color-scheme: light dark; --text: #1c2630; --quiet: #5d6b78; --line: #d5dce2; --page: #fff;
  --curve: #2563c4; --points: #c9620c }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4eaf0; --quiet: #9aa7b3; --line: #38424c; --page: #14191e;
    --curve: #6ca6f5; --points: #f0924a } }
body { font: 15px/1.55 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 800px; margin: 0 auto; padding: 20px }
h1 { font-size: 26px; margin-bottom: 0 } h2 { font-size: 18px; margin-top: 2em }
table { border-collapse: collapse; width: 100% }
td, th { padding: 4px 8px 4px 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; overflow-wrap: anywhere }
td:first-child { min-width: 5.5em }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--line);
  padding-left: 12px; margin: 6px 0 }
small, .quiet { color: var(--quiet) } svg { max-width: 100%; height: auto }
svg text { font: 12px system-ui, sans-serif; fill: var(--quiet) }
"""
CURVE_STYLE = """
.curve text { font-size: 14px }
@media (max-width: 500px) { .curve text { font-size: 26px } }
"""
"""The curve's style. A phone draws the whole curve half as large, so it gets larger letters."""


STYLE_POLICY = (
    "default-src 'none'; script-src 'none'; connect-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; "
    f"style-src 'sha256-{b64encode(sha256((STYLE + CURVE_STYLE).encode()).digest()).decode()}'"
)
"""The policy with which the page is served: nothing but its own style."""


def report_html(state: DashboardState, commands: Sequence[str]) -> str:
    """The report's page. `commands`: what can be typed next."""
    run, history, given = state.run, state.history, state.contribution
    name = escape(run.name) if run else "a run"
    sections = [f"<h1>{name}</h1>", f'<p class="quiet">{_in_a_line(state)}</p>', _facts(state)]
    if history.loss:
        sections += ["<h2>Loss</h2>", loss_curve(history)]
    if given.board:
        rows = ((row.name, f"{row.tokens:,.0f}") for row in given.board)
        sections += ["<h2>Who took part</h2>", _table(("peer", "tokens"), rows)]
        if more := given.board_peers - len(given.board):
            sections.append(f"<p>and {more:,} more, with fewer</p>")
        steps = counted(given.board_steps, "step")
        sections.append(
            f'<p class="quiet">Of the {steps} that this peer has seen or was shown; who '
            "computes half of the layers has half a token for each. Thank you, all of you.</p>"
        )
    if state.samples.written:
        sections.append("<h2>What it wrote as it learned</h2>")
        prompt = f"<b>{escape(state.samples.prompt)}</b>"
        for sample in _few(state.samples.written):
            loss = "" if sample.held_out_loss is None else f", held-out {sample.held_out_loss:.3f}"
            sections.append(f"<small>after {counted(sample.step, 'step')}{loss}</small>")
            sections.append(f"<pre>{prompt}{escape(sample.text)}</pre>")
    if commands:
        lines = escape("\n".join(commands))
        sections += ["<h2>What to do with it</h2>", f"<pre>{lines}</pre>"]
    if state.events:
        events = ((event.kind, event.text) for event in state.events[:EVENTS_SHOWN])
        sections += ["<h2>What happened</h2>", _table(("", "newest first"), events)]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{CURVE_STYLE}</style><body>{''.join(sections)}</body></html>\n"
    )


def _in_a_line(state: DashboardState) -> str:
    live, run = state.live, state.run
    if run is None:
        return "nothing is known of it"
    tokens = live.step * run.tokens_per_step
    return (
        f"{run.parameter_count:,} parameters, {live.step:,} of {run.total_steps:,} steps, "
        f"{counted(tokens, 'token')}, by {counted(state.contribution.board_peers, 'peer')} "
        "that this one saw"
    )


def _facts(state: DashboardState) -> str:
    live, ever, course = state.live, state.contribution.ever, state.contribution.course
    rows = [
        ("loss", _number(live.loss)),
        ("held-out loss", _number(live.held_out_loss)),
        # A home that is older than this count has those that its page shows.
        ("views", f"{max(course.views, len(state.history.view_step)):,}"),
        ("peers lost", f"{course.losses:,}, without those that left in an orderly way"),
        ("began", _when(course.began_s)),
        ("ended", _when(course.ended_s)),
        ("took", _took(course)),
        ("with this peer", f"{duration(ever.seconds)}, {counted(ever.steps, 'step')}"),
        ("it computed", counted(ever.tokens, "token") + _repeated(state.contribution)),
        ("run", state.run.digest if state.run else "unknown"),
    ]
    return _table(("", ""), rows) + "".join(f"<p>{escape(mark)}</p>" for mark in live.marks)


def _when(wall_s: float | None) -> str:
    if wall_s is None:
        return "this peer did not see it"
    return f"{datetime.fromtimestamp(wall_s).astimezone():%Y-%m-%d %H:%M %Z}, as this peer saw it"


def _took(course: Course) -> str:
    if course.began_s is None or course.ended_s is None:
        return "unknown"
    return duration(course.ended_s - course.began_s)


def _repeated(given: ContributionBoard) -> str:
    again = round(given.repeated_tokens)
    return f", of which {again:,} were lost in a failure and done again" if again else ""


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(text)}</th>" for text in head) if any(head) else ""
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{cells}</tr>{body}</table>" if cells else f"<table>{body}</table>"


def _few(items: Sequence[Sample], limit: int = 6) -> list[Sample]:
    """The first item, the last, and some between, evenly."""
    if len(items) <= limit:
        return list(items)
    return [items[round(at * (len(items) - 1) / (limit - 1))] for at in range(limit)]


def loss_curve(history: History) -> str:
    """Loss over steps; points are held-out losses. It leaves room for the larger letters of
    `CURVE_STYLE`."""
    losses = [*history.loss, *history.held_out_loss]
    low, high = min(losses), max(losses)
    last = max((*history.step, *history.held_out_step, 1))
    floor, end = HEIGHT - BOTTOM, WIDTH - RIGHT

    def at(step: int, loss: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / last
        return x, TOP + (floor - TOP) * (high - loss) / max(high - low, 1e-9)

    points = [at(step, loss) for step, loss in zip(history.step, history.loss, strict=True)]
    dots = [at(*item) for item in zip(history.held_out_step, history.held_out_loss, strict=True)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="loss over steps">'
        f'<line x1="{LEFT}" x2="{end}" y1="{floor}" y2="{floor}" stroke="var(--line)"/>'
        f'<text x="{LEFT - 6}" y="{TOP}" dy="0.7em" text-anchor="end">{high:.2f}</text>'
        f'<text x="{LEFT - 6}" y="{floor}" text-anchor="end">{low:.2f}</text>'
        f'<text x="{LEFT}" y="{floor}" dy="1.15em">0</text>'
        f'<text x="{end}" y="{floor}" dy="1.15em" text-anchor="end">step {last:,}</text>'
        f'<polyline points="{line}" fill="none" stroke="var(--curve)" stroke-width="1.5"/>'
        + "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="var(--points)"/>' for x, y in dots
        )
        + '</svg><p class="quiet">Nats per token; the points are of text that is held out.</p>'
    )
