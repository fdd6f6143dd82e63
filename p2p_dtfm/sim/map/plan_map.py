"""A plan as a picture: peers where they are, pipelines through them, how busy each link is."""

import html
import math
from dataclasses import dataclass
from itertools import pairwise

from p2p_dtfm.core.cost_model.codings import boundary_loads
from p2p_dtfm.core.protocol.facts.in_words import bytes_text, counted, layers_text
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.sim.map.map_layout import Layout, lay_out
from p2p_dtfm.sim.scenario.scenario import Scenario

WIDTH, HEIGHT, PANEL, MARGIN = 900, 700, 400, 40
PHONE = (390, 430)
NAMED_PEERS = 24
"""The most peers that are named on the map: more names would hide one another."""
TOLD_GROUPS = 4
"""The most groups whose links are drawn with their latency and rate."""
_STYLE = """
svg{--ink:#22303c;--quiet:#5f6f7b;--page:#fff;--land:#eef2f5;--shore:#c3ced6}
@media(prefers-color-scheme:dark){svg{--ink:#e6edf3;--quiet:#9fb0bd;--page:#11181f;--land:#1c2731;
--shore:#3a4a57}}
text{font:12px system-ui,sans-serif;fill:var(--ink)}.page{fill:var(--page)}
.group{fill:var(--land);stroke:var(--shore)}.quiet{fill:var(--quiet)}
.label{text-anchor:middle;paint-order:stroke;stroke:var(--page);stroke-width:4px;
stroke-linejoin:round}.groupname{font-size:13px;font-weight:600}.name{font-size:11px}
.inside{font-size:10px;fill:#fff;text-anchor:middle}
.peer{stroke:var(--page);stroke-width:1.5}.spare{fill:var(--page);stroke:var(--quiet);
stroke-width:1.5;stroke-dasharray:2.5 2}.between{stroke:var(--shore);stroke-dasharray:2 5}
.flow{fill:none;stroke-linecap:round;opacity:.7}.title{font-size:18px;font-weight:600}
.pipeline:hover .flow{opacity:1}svg:has(.pipeline:hover) .pipeline:not(:hover){opacity:.1}
"""


_TOP = 126
"""Where the first bar begins."""


@dataclass(frozen=True, slots=True)
class _Flow:
    """The tensors of a step from one stage to the next and back."""

    here: Stage
    there: Stage
    load_bytes: int
    use: float
    """Fraction of the predicted step for which the slower direction transmits."""


def plan_svg(plan: Plan, scenario: Scenario, workload: Workload) -> str:
    """An SVG image. Hovering over a pipeline singles it out where the viewer knows CSS."""
    height = max(HEIGHT, _TOP + 26 * len(plan.pipelines) + 60)
    layout = lay_out(scenario, WIDTH, min(height, WIDTH), MARGIN)
    parts = [
        f'<svg class="wide" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {WIDTH + PANEL} {height}" '
        f'width="{WIDTH + PANEL}" height="{height}" role="img">',
        f"<title>{html.escape(scenario.name)}: plan of {len(scenario.peers)} peers</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{WIDTH + PANEL}" height="{height}"/>',
        *_links(layout),
        *_groups(layout),
        *_spares(plan, layout),
        *_heading(plan, scenario),
    ]
    for number, pipeline in enumerate(plan.pipelines):
        parts += _pipeline(number, pipeline, plan, scenario, workload, layout)
    return "\n".join([*parts, *_names(layout, scenario), "</svg>", ""])


def phone_svg(plan: Plan, scenario: Scenario, workload: Workload) -> str:
    """The map alone, upright: on a phone the wide picture could not be read."""
    width, height = PHONE
    layout = lay_out(scenario, width, height, MARGIN)
    parts = [
        f'<svg class="phone" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'role="img">',
        f"<title>{html.escape(scenario.name)}: plan of {len(scenario.peers)} peers</title>",
        f"<style>{_STYLE}</style>",
        *_links(layout),
        *_groups(layout),
        *_spares(plan, layout),
    ]
    for number, pipeline in enumerate(plan.pipelines):
        parts += _pipeline(number, pipeline, plan, scenario, workload, layout, strip=False)
    return "\n".join([*parts, *_names(layout, scenario), "</svg>", ""])


def plan_html(
    plan: Plan, scenario: Scenario, workload: Workload, more: str = "", style: str = ""
) -> str:
    """A page of its own with the picture and a table of the pipelines; needs no network. `more` is
    HTML below the picture, and `style` its style sheet."""
    rows = "\n".join(
        f"<tr><td>{number + 1}</td><td>{pipeline.microbatch_count}</td><td>"
        + " → ".join(
            f"{html.escape(s.peer_id)} <small>{_layers(s.layers)}, {s.in_flight} in flight</small>"
            for s in pipeline.stages
        )
        + "</td></tr>"
        for number, pipeline in enumerate(plan.pipelines)
    )
    spares = ", ".join(map(html.escape, plan.spares)) or "none"
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(scenario.name)}: plan</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">
<style>body{{font:15px system-ui,sans-serif;margin:24px;color:#22303c;background:#fff}}
svg{{max-width:100%;height:auto}}svg.phone{{display:none;width:100%}}
table{{border-collapse:collapse}}td,th{{padding:4px 12px;text-align:left;
border-bottom:1px solid #8884}}small{{opacity:.7}}
h1{{font-size:22px}}h2{{font-size:18px}}p,li{{max-width:76ch}}
td{{overflow-wrap:anywhere}}@media(max-width:600px){{body{{margin:12px}}td,th{{padding:4px 6px}}
svg.wide{{display:none}}svg.phone{{display:block}}}}
@media(prefers-color-scheme:dark){{body{{color:#e6edf3;background:#11181f}}}}{style}</style>
<h1>{html.escape(scenario.name)}: {_seconds(plan.predicted_step_ns)} a step</h1>
{plan_svg(plan, scenario, workload)}
{phone_svg(plan, scenario, workload)}
{more}
<h2>Who holds what</h2>
<table><tr><th>pipeline</th><th>microbatches</th><th>stages</th></tr>
{rows}
</table>
<p>Spares: {spares}</p>
</html>
"""


def _between(layout: Layout) -> list[tuple[str, str]]:
    """Each pair of groups, where there are few."""
    names = list(layout.groups)
    few = 1 < len(names) <= TOLD_GROUPS
    return [(here, there) for at, here in enumerate(names) for there in names[:at] if few]


def _links(layout: Layout) -> list[str]:
    parts = []
    for here, there in _between(layout):
        (ax, ay, _), (bx, by, _) = layout.groups[here], layout.groups[there]
        parts.append(
            f'<line class="between" x1="{ax:.1f}" y1="{ay:.1f}" x2="{bx:.1f}" y2="{by:.1f}"/>'
        )
    return parts


def _link_labels(layout: Layout, scenario: Scenario) -> list[str]:
    """Labels halfway between two groups' rims: the link from the first peer of one to that of the
    other."""
    first = {peer.group: peer.name for peer in reversed(scenario.peers)}
    parts = []
    for here, there in _between(layout):
        (ax, ay, a), (bx, by, b) = layout.groups[here], layout.groups[there]
        apart = max(1.0, math.hypot(bx - ax, by - ay))
        at = min(0.9, max(0.1, 0.5 + (a - b) / (2 * apart)))
        link = scenario.link(first[here], first[there])
        parts.append(
            f'<text class="label quiet" x="{ax + at * (bx - ax):.1f}" '
            f'y="{ay + at * (by - ay):.1f}">'
            f"{link.latency_ns / 1e6:.0f} ms, {link.bytes_per_s * 8 / 1e6:.0f} Mbit/s</text>"
        )
    return parts


def _groups(layout: Layout) -> list[str]:
    return [
        f'<circle class="group" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
        for x, y, radius in layout.groups.values()
    ]


def _names(layout: Layout, scenario: Scenario) -> list[str]:
    """Names of groups, and of peers if few. They lie on top of all lines, with a rim in the page's
    colour."""
    parts = _link_labels(layout, scenario)
    parts += [
        f'<text class="label groupname" x="{x:.1f}" y="{y - radius - 7:.1f}">'
        f"{html.escape(name)}</text>"
        for name, (x, y, radius) in layout.groups.items()
    ]
    if len(scenario.peers) > NAMED_PEERS:
        return parts
    for name, (x, y) in layout.peers.items():
        text = html.escape(name.rsplit("-", 1)[-1])
        parts.append(f'<text class="label name" x="{x:.1f}" y="{y + 22:.1f}">{text}</text>')
    return parts


def _spares(plan: Plan, layout: Layout) -> list[str]:
    return [
        f'<circle class="spare" cx="{layout.peers[name][0]:.1f}" cy="{layout.peers[name][1]:.1f}" '
        f'r="5"><title>{html.escape(name)}: spare</title></circle>'
        for name in plan.spares
        if name in layout.peers
    ]


def _heading(plan: Plan, scenario: Scenario) -> list[str]:
    x = WIDTH + 20
    peers, pipelines = len(plan.stage_holders()), len(plan.pipelines)
    spares = f"; {len(plan.spares)} spare, dashed" if plan.spares else ""
    lines = [
        f"{_seconds(plan.predicted_step_ns)} a step; {_counted(peers, 'peer')} in "
        f"{_counted(pipelines, 'pipeline')}{spares}",
        "A line is as thick as its link is busy.",
        "A strip: a pipeline's layers by stage; its microbatches.",
    ]
    return [
        f'<text class="title" x="{x}" y="44">{html.escape(scenario.name)}</text>',
        *(
            f'<text class="{"quiet" if at else "fact"}" x="{x}" y="{66 + 18 * at}">'
            f"{html.escape(line)}</text>"
            for at, line in enumerate(lines)
        ),
    ]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _pipeline(
    number: int,
    pipeline: Pipeline,
    plan: Plan,
    scenario: Scenario,
    workload: Workload,
    layout: Layout,
    strip: bool = True,
) -> list[str]:
    """The pipeline on the map, and beside it the strip of its layers."""
    colour = f"hsl({number * 137.508 % 360:.0f} 55% {36 + 6 * (number % 2)}%)"
    parts = ['<g class="pipeline">', f"<title>{html.escape(_told(number, pipeline))}</title>"]
    for flow in _flows(pipeline, plan, scenario, workload):
        (ax, ay), (bx, by) = layout.peers[flow.here.peer_id], layout.peers[flow.there.peer_id]
        bend = 0.12 + 0.015 * (number % 5)
        cx, cy = (ax + bx) / 2 - bend * (by - ay), (ay + by) / 2 + bend * (bx - ax)
        thick = 1.0 + 6.0 * min(1.0, flow.use)
        parts.append(
            f'<path class="flow" stroke="{colour}" stroke-width="{thick:.1f}" '
            f'd="M{ax:.1f} {ay:.1f}Q{cx:.1f} {cy:.1f} {bx:.1f} {by:.1f}">'
            f"<title>{html.escape(flow.here.peer_id)} → {html.escape(flow.there.peer_id)}: "
            f"{bytes_text(flow.load_bytes)} a step each way, "
            f"busy {100 * flow.use:.0f}%</title></path>"
        )
    for stage in pipeline.stages:
        x, y = layout.peers[stage.peer_id]
        size = 4 + 5 * math.sqrt(len(stage.layers) / workload.layer_count)
        parts.append(
            f'<circle class="peer" fill="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}">'
            f"<title>{html.escape(stage.peer_id)}: "
            f"{_layers(stage.layers)}, "
            f"{stage.in_flight} in flight</title></circle>"
        )
    if strip:
        parts += _bar(number, pipeline, workload, colour)
    return [*parts, "</g>"]


def _bar(number: int, pipeline: Pipeline, workload: Workload, colour: str) -> list[str]:
    """Layers of each stage as a strip beside the map, with the peer's name where it has room."""
    y, x, room = _TOP + 26 * number, WIDTH + 50, PANEL - 120
    parts = [f'<text x="{WIDTH + 20}" y="{y + 13}">{number + 1}</text>']
    for stage in pipeline.stages:
        start = x + room * stage.first_layer / workload.layer_count
        length = room * len(stage.layers) / workload.layer_count
        parts.append(
            f'<rect x="{start:.1f}" y="{y}" width="{max(1.0, length - 2):.1f}" height="18" rx="3" '
            f'fill="{colour}"><title>{html.escape(stage.peer_id)}: '
            f"{counted(len(stage.layers), 'layer')}"
            "</title></rect>"
        )
        if length > 7 * len(stage.peer_id):
            parts.append(
                f'<text class="inside" x="{start + length / 2 - 1:.1f}" y="{y + 13}">'
                f"{html.escape(stage.peer_id)}</text>"
            )
    parts.append(
        f'<text class="quiet" x="{x + room + 8}" y="{y + 13}">{pipeline.microbatch_count}</text>'
    )
    return parts


def _flows(pipeline: Pipeline, plan: Plan, scenario: Scenario, workload: Workload) -> list[_Flow]:
    flows = []
    loads = map(max, boundary_loads(workload, pipeline))
    for (here, there), load in zip(pairwise(pipeline.stages), loads, strict=True):
        rate = min(
            scenario.link(here.peer_id, there.peer_id).bytes_per_s,
            scenario.link(there.peer_id, here.peer_id).bytes_per_s,
        )
        use = load * 1e9 / max(1, rate) / max(1, plan.predicted_step_ns)
        flows.append(_Flow(here, there, load, use))
    return flows


def _told(number: int, pipeline: Pipeline) -> str:
    names = " → ".join(stage.peer_id for stage in pipeline.stages)
    return (
        f"pipeline {number + 1}: {counted(pipeline.microbatch_count, 'microbatch')} through {names}"
    )


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / 1e9:.2f} s" if duration_ns >= 10**9 else f"{duration_ns / 1e6:.0f} ms"


def _layers(layers: range) -> str:
    return layers_text(layers.start, layers.stop).replace("-", "–")
