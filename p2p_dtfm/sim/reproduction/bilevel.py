"""The paper's figure 2, drawn for any scenario: groups, their matchings, and the path through them.

The panels are peers as a communication graph with its groups; the coarsened graph, each edge as
long as the best matching's slowest pair; the matching of one edge; and the path, which is the
pipeline.
"""

import html
import math
from itertools import pairwise

from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.sim.map.map_layout import lay_out
from p2p_dtfm.sim.paper.cost import PaperPlan, PaperProblem, matching
from p2p_dtfm.sim.reproduction.charts import svg
from p2p_dtfm.sim.scenario.scenario import Scenario

PANEL_WIDTH, PANEL_HEIGHT, HEAD = 420, 340, 44
MOST_DRAWN_PAIRS = 400
"""The most pairs of the communication graph that are drawn, the fastest ones."""


def bilevel_svg(scenario: Scenario, problem: PaperProblem, plan: PaperPlan) -> str:
    """An SVG image of four panels."""
    heading = (
        f"{scenario.name}: {len(plan.stages)} groups of {problem.replica_count}; "
        f"{plan.total_ns / 1e9:.3f} s = {plan.data_parallel_ns / 1e9:.3f} s data parallel + "
        f"{plan.pipeline_ns / 1e9:.3f} s pipeline"
    )
    panels = (
        ("1. Who is near whom, and the groups (stages) by colour", _graph(scenario, problem, plan)),
        ("2. Groups as nodes; an edge is its matching's slowest pair", _coarse(problem, plan)),
        ("3. One edge: the matching of the path's slowest", _matching(problem, plan)),
        ("4. The path through all groups, and its pipelines", _path(problem, plan)),
    )
    parts = [f'<text class="title" x="12" y="24">{html.escape(heading)}</text>']
    for number, (title, drawn) in enumerate(panels):
        x = (number % 2) * PANEL_WIDTH
        y = HEAD + (number // 2) * PANEL_HEIGHT
        parts += [
            f'<g transform="translate({x} {y})"><text x="12" y="18">{html.escape(title)}</text>',
            *drawn,
            "</g>",
        ]
    return svg(2 * PANEL_WIDTH, HEAD + 2 * PANEL_HEIGHT, heading, parts)


def _colour(number: int) -> str:
    return f"hsl({number * 137.508 % 360:.0f} 55% 48%)"


def _numbers(problem: PaperProblem, plan: PaperPlan) -> list[tuple[int, ...]]:
    at = {name: number for number, name in enumerate(problem.peer_ids)}
    return [tuple(at[name] for name in group) for group in plan.stages]


def _graph(scenario: Scenario, problem: PaperProblem, plan: PaperPlan) -> list[str]:
    layout = lay_out(scenario, PANEL_WIDTH, PANEL_HEIGHT - 30, 16)
    group = {name: number for number, names in enumerate(plan.stages) for name in names}
    count, names = problem.peer_count, problem.peer_ids
    pairs = sorted(
        (problem.pipeline_ns[a * count + b], a, b) for a in range(count) for b in range(a)
    )
    parts = ['<g transform="translate(0 26)">']
    for _, a, b in pairs[:MOST_DRAWN_PAIRS]:
        (ax, ay), (bx, by) = layout.peers[names[a]], layout.peers[names[b]]
        parts.append(
            f'<line class="rule" x1="{ax:.1f}" y1="{ay:.1f}" x2="{bx:.1f}" y2="{by:.1f}"/>'
        )
    for name in names:
        x, y = layout.peers[name]
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{_colour(group[name])}">'
            f"<title>{html.escape(name)}: group {group[name] + 1}</title></circle>"
        )
    for name, (x, y, radius) in layout.groups.items():
        parts.append(
            f'<text class="quiet" x="{x:.1f}" y="{y - radius - 2:.1f}" text-anchor="middle">'
            f"{html.escape(name)}</text>"
        )
    return [*parts, "</g>"]


def _circle(count: int) -> list[tuple[float, float]]:
    """Places on a ring, the first at the left and on clockwise."""
    x, y, radius = PANEL_WIDTH / 2, PANEL_HEIGHT / 2 + 12, PANEL_HEIGHT / 2 - 52
    angles = [math.pi + 2 * math.pi * at / count for at in range(count)]
    return [(x + 1.25 * radius * math.cos(a), y + radius * math.sin(a)) for a in angles]


def _coarse(problem: PaperProblem, plan: PaperPlan) -> list[str]:
    groups, places = _numbers(problem, plan), _circle(len(plan.stages))
    edges = {
        (a, b): matching(problem, groups[a], groups[b])[0]
        for a in range(len(groups))
        for b in range(a)
    }
    most, on_path = (
        max(edges.values(), default=1),
        {(b, a) for a, b in pairwise(range(len(groups)))},
    )
    parts = []
    for (a, b), length in sorted(edges.items(), key=lambda edge: -edge[1]):
        (ax, ay), (bx, by) = places[a], places[b]
        thick = 0.6 + 3.4 * (1 - length / most)
        chosen = (a, b) in on_path
        stroke = "var(--simulated)" if chosen else "var(--rule)"
        parts.append(
            f'<line x1="{ax:.1f}" y1="{ay:.1f}" x2="{bx:.1f}" y2="{by:.1f}" stroke="{stroke}" '
            f'stroke-width="{thick:.1f}"><title>groups {b + 1} and {a + 1}: '
            f"{length / 1e9:.3f} s</title></line>"
        )
        if chosen:
            parts.append(
                f'<text class="quiet" x="{(ax + bx) / 2:.1f}" y="{(ay + by) / 2 - 4:.1f}" '
                f'text-anchor="middle">{length / 1e9:.2f} s</text>'
            )
    return [*parts, *_nodes(places)]


def _nodes(places: list[tuple[float, float]]) -> list[str]:
    return [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="12" fill="{_colour(number)}"/>'
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" style="fill:#fff">'
        f"{number + 1}</text>"
        for number, (x, y) in enumerate(places)
    ]


def _matching(problem: PaperProblem, plan: PaperPlan) -> list[str]:
    groups = _numbers(problem, plan)
    if len(groups) < 2:
        return ['<text class="quiet" x="12" y="60">one group: nothing to match</text>']
    slowest = max(
        range(len(groups) - 1), key=lambda at: matching(problem, groups[at], groups[at + 1])[0]
    )
    left, right = groups[slowest], groups[slowest + 1]
    longest, partners = matching(problem, left, right)
    room = (PANEL_HEIGHT - 70) / max(1, len(left))
    rows = {peer: 46 + room * (at + 0.5) for at, peer in enumerate(right)}
    parts = []
    for at, (peer, partner) in enumerate(zip(left, partners, strict=True)):
        y = 46 + room * (at + 0.5)
        length = problem.pipeline_ns[peer * problem.peer_count + partner]
        strong = "var(--c1)" if length == longest else "var(--simulated)"
        parts.append(
            f'<line x1="150" x2="270" y1="{y:.1f}" y2="{rows[partner]:.1f}" stroke="{strong}" '
            f'stroke-width="1.6"><title>{length / 1e9:.3f} s</title></line>'
        )
    size = min(12.0, room)
    for column, group, anchor, x in (
        (slowest, left, "end", 142),
        (slowest + 1, right, "start", 278),
    ):
        for at, peer in enumerate(group):
            y = 46 + room * (at + 0.5)
            cx = 150 if anchor == "end" else 270
            parts.append(
                f'<circle cx="{cx}" cy="{y:.1f}" r="{size / 3:.1f}" fill="{_colour(column)}"/>'
                f'<text x="{x}" y="{y + size / 3:.1f}" text-anchor="{anchor}" '
                f'style="font-size:{size:.1f}px">{html.escape(problem.peer_ids[peer])}</text>'
            )
    parts.append(
        f'<text class="quiet" x="12" y="36">groups {slowest + 1} and {slowest + 2}: '
        f"{longest / 1e9:.3f} s at the slowest (orange)</text>"
    )
    return parts


def _path(problem: PaperProblem, plan: PaperPlan) -> list[str]:
    count = len(plan.stages)
    step = (PANEL_WIDTH - 60) / max(1, count - 1)
    room = (PANEL_HEIGHT - 80) / max(1, len(plan.pipelines))
    at = {name: number for number, name in enumerate(problem.peer_ids)}
    parts = []
    for row, pipeline in enumerate(plan.pipelines):
        y = 56 + room * (row + 0.5)
        for number, (here, there) in enumerate(pairwise(pipeline)):
            length = problem.pipeline_ns[at[here] * problem.peer_count + at[there]]
            parts.append(
                f'<line x1="{30 + step * number:.1f}" x2="{30 + step * (number + 1):.1f}" '
                f'y1="{y:.1f}" y2="{y:.1f}" stroke="var(--quiet)"><title>'
                f"{html.escape(here)} → {html.escape(there)}: {length / 1e9:.3f} s</title></line>"
            )
        for number, name in enumerate(pipeline):
            parts.append(
                f'<circle cx="{30 + step * number:.1f}" cy="{y:.1f}" r="{min(8.0, room / 3):.1f}" '
                f'fill="{_colour(number)}"><title>{html.escape(name)}: stage {number + 1}</title>'
                "</circle>"
            )
    parts.append(
        f'<text class="quiet" x="12" y="42">{counted(len(plan.pipelines), "pipeline")}, '
        "from the first stage to the last</text>"
    )
    return parts
