"""A plan as a picture: peers where they are, pipelines through them, how busy each link is."""

import html
import math
from dataclasses import dataclass
from itertools import pairwise

from p2p_dtfm.core.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.workload import Workload
from p2p_dtfm.sim.map_layout import Layout, lay_out
from p2p_dtfm.sim.scenario import Scenario

WIDTH, HEIGHT, PANEL, MARGIN = 900, 760, 360, 40
_STYLE = """
text{font:12px system-ui,sans-serif;fill:#22303c}
.group{fill:#eef2f5;stroke:#c9d3da}.groupname{font-weight:600;fill:#5a6b78;text-anchor:middle}
.peer{stroke:#fff;stroke-width:1.5}.spare{fill:#fff;stroke:#9aa8b3;stroke-width:1.5}
.flow{fill:none;stroke-linecap:round;opacity:.75}.title{font-size:18px;font-weight:600}
.quiet{fill:#6b7b87}.pipeline:hover .flow{opacity:1;stroke-width:7}
svg:has(.pipeline:hover) .pipeline:not(:hover){opacity:.12}
"""


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
    layout = lay_out(scenario, WIDTH, HEIGHT, MARGIN)
    height = max(HEIGHT, 120 + 26 * len(plan.pipelines) + 20)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + PANEL} {height}" '
        f'width="{WIDTH + PANEL}" height="{height}" role="img">',
        f"<title>{html.escape(scenario.name)}: plan of {len(scenario.peers)} peers</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{WIDTH + PANEL}" height="{height}" fill="#fff"/>',
        *_groups(layout),
        *_spares(plan, layout),
        *_heading(plan, scenario),
    ]
    for number, pipeline in enumerate(plan.pipelines):
        parts += _pipeline(number, pipeline, plan, scenario, workload, layout)
    return "\n".join([*parts, "</svg>", ""])


def plan_html(plan: Plan, scenario: Scenario, workload: Workload) -> str:
    """A page of its own with the picture and a table of the pipelines; needs no network."""
    rows = "\n".join(
        f"<tr><td>{number + 1}</td><td>{pipeline.microbatch_count}</td><td>"
        + " → ".join(
            f"{html.escape(s.peer_id)} <small>layers {s.first_layer}–{s.end_layer - 1}, "
            f"{s.in_flight} in flight</small>"
            for s in pipeline.stages
        )
        + "</td></tr>"
        for number, pipeline in enumerate(plan.pipelines)
    )
    spares = ", ".join(map(html.escape, plan.spares)) or "none"
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(scenario.name)}: plan</title>
<style>body{{font:15px system-ui,sans-serif;margin:24px;color:#22303c}}svg{{max-width:100%;
height:auto}}table{{border-collapse:collapse}}td,th{{padding:4px 12px;text-align:left;
border-bottom:1px solid #dde4e9}}small{{color:#6b7b87}}</style>
{plan_svg(plan, scenario, workload)}
<table><tr><th>pipeline</th><th>microbatches</th><th>stages</th></tr>
{rows}
</table>
<p>Spares: {spares}</p>
</html>
"""


def _groups(layout: Layout) -> list[str]:
    parts = []
    for name, (x, y, radius) in layout.groups.items():
        parts.append(f'<circle class="group" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>')
        parts.append(
            f'<text class="groupname" x="{x:.1f}" y="{y - radius - 6:.1f}">'
            f"{html.escape(name)}</text>"
        )
    return parts


def _spares(plan: Plan, layout: Layout) -> list[str]:
    return [
        f'<circle class="spare" cx="{layout.peers[name][0]:.1f}" cy="{layout.peers[name][1]:.1f}" '
        f'r="5"><title>{html.escape(name)}: spare</title></circle>'
        for name in plan.spares
        if name in layout.peers
    ]


def _heading(plan: Plan, scenario: Scenario) -> list[str]:
    used = len(plan.stage_holders())
    x = WIDTH + 20
    return [
        f'<text class="title" x="{x}" y="44">{html.escape(scenario.name)}</text>',
        f'<text x="{x}" y="66">{_seconds(plan.predicted_step_ns)} a step, '
        f"{len(plan.pipelines)} pipelines of {used} peers, {len(plan.spares)} spares</text>",
        f'<text class="quiet" x="{x}" y="84">a line is as thick as its link is busy; '
        "a bar shows layers by stage</text>",
    ]


def _pipeline(
    number: int,
    pipeline: Pipeline,
    plan: Plan,
    scenario: Scenario,
    workload: Workload,
    layout: Layout,
) -> list[str]:
    colour = f"hsl({number * 137.508 % 360:.0f} 62% {46 + 8 * (number % 2)}%)"
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
            f"{flow.load_bytes / 1e6:.0f} MB a step each way, "
            f"busy {100 * flow.use:.0f}%</title></path>"
        )
    for stage in pipeline.stages:
        x, y = layout.peers[stage.peer_id]
        size = 4 + 5 * math.sqrt(len(stage.layers) / workload.layer_count)
        parts.append(
            f'<circle class="peer" fill="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}">'
            f"<title>{html.escape(stage.peer_id)}: layers {stage.first_layer}–"
            f"{stage.end_layer - 1}, {stage.in_flight} in flight</title></circle>"
        )
    parts += _bar(number, pipeline, workload, colour)
    return [*parts, "</g>"]


def _bar(number: int, pipeline: Pipeline, workload: Workload, colour: str) -> list[str]:
    """Layers of each stage as a strip beside the map."""
    y, x, room = 106 + 26 * number, WIDTH + 60, PANEL - 140
    parts = [f'<text x="{WIDTH + 20}" y="{y + 12}">{number + 1}</text>']
    for stage in pipeline.stages:
        start = x + room * stage.first_layer / workload.layer_count
        length = room * len(stage.layers) / workload.layer_count
        parts.append(
            f'<rect x="{start:.1f}" y="{y}" width="{max(1.0, length - 2):.1f}" height="16" rx="3" '
            f'fill="{colour}"><title>{html.escape(stage.peer_id)}: {len(stage.layers)} layers'
            "</title></rect>"
        )
    parts.append(
        f'<text class="quiet" x="{x + room + 8}" y="{y + 12}">{pipeline.microbatch_count} mb</text>'
    )
    return parts


def _flows(pipeline: Pipeline, plan: Plan, scenario: Scenario, workload: Workload) -> list[_Flow]:
    flows = []
    for here, there in pairwise(pipeline.stages):
        load = pipeline.microbatch_count * workload.boundary_bytes
        rate = min(
            scenario.link(here.peer_id, there.peer_id).bytes_per_s,
            scenario.link(there.peer_id, here.peer_id).bytes_per_s,
        )
        use = load * 1e9 / max(1, rate) / max(1, plan.predicted_step_ns)
        flows.append(_Flow(here, there, load, use))
    return flows


def _told(number: int, pipeline: Pipeline) -> str:
    names = " → ".join(stage.peer_id for stage in pipeline.stages)
    return f"pipeline {number + 1}: {pipeline.microbatch_count} microbatches through {names}"


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / 1e9:.2f} s" if duration_ns >= 10**9 else f"{duration_ns / 1e6:.0f} ms"
