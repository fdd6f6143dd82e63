"""The public page: one file that runs nothing and loads nothing, made while it is asked for."""

from html import escape

from p2p_dtfm.core.protocol.facts.in_words import counted, duration
from p2p_dtfm.web.public_facts import Dot, PublicFacts, history_of
from p2p_dtfm.web.qr import qr_picture
from p2p_dtfm.web.report import CURVE_STYLE, STYLE, loss_curve

REFRESH_S = 30
MAP_WIDTH, MAP_HEIGHT, RIM = 760, 220, 16
MORE_STYLE = """
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 12px }
dt { color: var(--quiet); font-size: 13px } dd { margin: 0; font-size: 22px; font-weight: 600 }
progress { width: 100%; height: 8px; appearance: none; border: 0; border-radius: 4px;
  overflow: hidden; background: var(--line) }
progress::-webkit-progress-bar { background: var(--line) }
progress::-webkit-progress-value { background: var(--curve) }
progress::-moz-progress-bar { background: var(--curve) } .code { width: 200px; background: #fff }
"""


def public_html(facts: PublicFacts) -> str:
    """All text is escaped: the model's and the run's may be anything."""
    name = escape(facts.run) or _nameless(facts)
    sections = [f"<h1>{name}</h1>", f'<p class="quiet">{_in_a_line(facts)}</p>']
    if facts.note:
        sections.append(f'<p role="status"><b>{escape(facts.note)}</b></p>')
    if facts.run or not facts.note:  # otherwise the note is all there is to say
        sections += [_progress(facts), _tiles(facts)]
    sections += [f"<p>{escape(mark)}</p>" for mark in facts.marks]
    if facts.losses:
        sections += ["<h2>Loss</h2>", loss_curve(history_of(facts))]
    if facts.dots:
        sections += ["<h2>Peers</h2>", _map(facts.dots)]
    if facts.samples:
        sections.append("<h2>What it writes</h2>")
    for sample in reversed(facts.samples):
        sections.append(f"<small>after {counted(sample.step, 'step')}</small>")
        sections.append(f"<pre><b>{escape(facts.prompt)}</b>{escape(sample.text)}</pre>")
    sections += ["<h2>Take part</h2>", _join(facts)]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="refresh" content="{REFRESH_S}">'
        f"<style>{STYLE}{CURVE_STYLE}{MORE_STYLE}</style>"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _nameless(facts: PublicFacts) -> str:
    return f"run {escape(facts.digest[:16])}" if facts.digest else "a run that is being prepared"


def _in_a_line(facts: PublicFacts) -> str:
    if not facts.run:
        return "nothing is known of it yet"
    return (
        f"{facts.parameter_count:,} parameters, trained together over the internet; "
        f"run {facts.digest[:16]}"
    )


def _progress(facts: PublicFacts) -> str:
    most = max(1, facts.total_steps)
    return f'<progress aria-label="steps committed" max="{most}" value="{facts.step}"></progress>'


def _tiles(facts: PublicFacts) -> str:
    tiles = (
        ("state", facts.state),
        ("step", f"{facts.step:,} of {facts.total_steps:,}"),
        ("loss", _number(facts.loss)),
        ("held-out loss", _number(facts.held_out_loss)),
        ("tokens per second", "–" if facts.tokens_per_s is None else f"{facts.tokens_per_s:,.0f}"),
        ("time left", "–" if facts.left_s is None else duration(facts.left_s)),
        # who is in no view, as in a pause, does not see how many train
        ("peers", f"{facts.peers:,}" if facts.peers else "–"),
        ("pipelines", f"{facts.pipelines:,}" if facts.peers else "–"),
    )
    return f"<dl>{''.join(f'<div><dt>{n}</dt><dd>{escape(t)}</dd></div>' for n, t in tiles)}</dl>"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _map(dots: tuple[Dot, ...]) -> str:
    circles = "".join(
        f'<circle cx="{RIM + dot.x * (MAP_WIDTH - 2 * RIM):.0f}" '
        f'cy="{RIM + dot.y * (MAP_HEIGHT - 2 * RIM):.0f}" r="6" {_paint(dot)}/>'
        for dot in dots
    )
    return (
        f'<svg viewBox="0 0 {MAP_WIDTH} {MAP_HEIGHT}" role="img" '
        f'aria-label="{counted(len(dots), "peer")} by their round trips">{circles}</svg>'
        '<p class="quiet">Near in round trip, near here; a colour for each pipeline, a ring '
        "without a stage.</p>"
    )


def _paint(dot: Dot) -> str:
    if dot.pipeline is None:
        return 'fill="none" stroke="#7d8b97" stroke-width="2"'
    hue = (215 + dot.pipeline * 137.508) % 360
    return f'fill="hsl({hue:.0f} 60% 50%)"'


def _join(facts: PublicFacts) -> str:
    if facts.is_complete:
        return "<p>The run is complete: nothing of it is left to compute.</p>"
    if not facts.join_line:
        return (
            "<p>Newcomers need an invitation, or another member's address: whoever told you of "
            "this page can give it to you.</p>"
        )
    picture = qr_picture(facts.join_line)
    code = (
        f'<svg class="code" viewBox="0 0 {picture.size} {picture.size}" role="img" '
        f'aria-label="the same as a QR code"><path d="{picture.path}"/></svg>'
        if picture.path
        else ""
    )
    return (
        f"<p>Type this where p2p-dtfm is installed:</p><pre>{escape(facts.join_line)}</pre>{code}"
    )
