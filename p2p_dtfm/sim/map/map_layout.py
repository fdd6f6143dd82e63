"""Where groups and peers lie on the picture of a plan: near in latency, near on the map.

For pictures only: floats are welcome here, and nothing of it reaches a plan.
"""

import math
from dataclasses import dataclass

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.sim.scenario.scenario import Scenario

Point = tuple[float, float]
_ROUNDS = 400
_ROOMY_PEERS, _ROOMY = 24, 2.2
"""With few peers the circles are this many times as large, which leaves room for names."""
_ON_ONE_RING = 5
"""Up to so many peers of a group lie on one ring around its middle."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Centres and radii of groups, and a point for each peer, in pixels."""

    groups: dict[str, tuple[float, float, float]]
    peers: dict[str, Point]


def lay_out(scenario: Scenario, width: float, height: float, margin: float) -> Layout:
    """Groups by stress reduction on their latencies, peers on rings within their group."""
    members: dict[str, list[str]] = {}
    for peer in scenario.peers:
        members.setdefault(peer.group, []).append(peer.name)
    names = list(members)
    spread = _spread(_distances(scenario, members, names))
    scale = _ROOMY if len(scenario.peers) <= _ROOMY_PEERS else 1.0
    radii = {name: scale * (16.0 + 9.0 * math.sqrt(len(members[name]))) for name in names}
    centres = _fitted(spread, width, height, margin + max(radii.values()))
    _push_apart(centres, [radii[name] for name in names], width, height, margin)
    groups = {name: (*centre, radii[name]) for name, centre in zip(names, centres, strict=True)}
    peers: dict[str, Point] = {}
    for name in names:
        peers.update(_rings(members[name], groups[name]))
    return Layout(groups, peers)


def _distances(
    scenario: Scenario, members: dict[str, list[str]], names: list[str]
) -> list[list[float]]:
    """Square roots of latencies, which keep near groups apart and far ones on the page."""

    def between(a: str, b: str) -> float:
        if a == b:
            return 0.0
        try:
            latency_ns = scenario.link(members[a][0], members[b][0]).latency_ns
        except UserError:
            latency_ns = 200_000_000
        return math.sqrt(1.0 + latency_ns / 1e6)

    return [[between(a, b) for b in names] for a in names]


def _spread(distances: list[list[float]]) -> list[list[float]]:
    """Points whose distances resemble the given ones (stress reduction, de Leeuw 1977)."""
    count = len(distances)
    points = [
        [math.cos(2 * math.pi * at / count), 0.7 * math.sin(2 * math.pi * at / count)]
        for at in range(count)
    ]
    scale = max((max(row) for row in distances), default=1.0) or 1.0
    for turn in range(_ROUNDS):
        step = 0.1 * (1 - turn / _ROUNDS) + 0.005
        for a in range(count):
            for b in range(count):
                if a == b:
                    continue
                dx, dy = points[a][0] - points[b][0], points[a][1] - points[b][1]
                apart = math.hypot(dx, dy) or 1e-6
                pull = step * (2 * distances[a][b] / scale - apart) / apart
                points[a][0] += pull * dx / 2
                points[a][1] += pull * dy / 2
    return points


def _fitted(points: list[list[float]], width: float, height: float, margin: float) -> list[Point]:
    """The points stretched over the page."""
    fitted: list[list[float]] = []
    for axis, size in ((0, width), (1, height)):
        values = [point[axis] for point in points]
        low, high = min(values), max(values)
        room = size - 2 * margin
        fitted.append(
            [
                size / 2 if high - low < 1e-9 else margin + room * (value - low) / (high - low)
                for value in values
            ]
        )
    return list(zip(fitted[0], fitted[1], strict=True))


def _push_apart(
    centres: list[Point], radii: list[float], width: float, height: float, margin: float
) -> None:
    """Move circles apart until they do not overlap, as far as the page allows."""
    for _ in range(200):
        for a in range(len(centres)):
            for b in range(a):
                (ax, ay), (bx, by) = centres[a], centres[b]
                dx, dy = ax - bx or 0.01, ay - by or 0.01
                apart = math.hypot(dx, dy)
                lack = radii[a] + radii[b] + 36 - apart
                if lack > 0:
                    dx, dy = dx / apart * lack / 2, dy / apart * lack / 2
                    centres[a], centres[b] = (ax + dx, ay + dy), (bx - dx, by - dy)
        for at, (x, y) in enumerate(centres):
            edge = margin + radii[at]
            centres[at] = (
                min(max(x, edge), max(edge, width - edge)),
                min(max(y, edge), max(edge, height - edge)),
            )


def _rings(names: list[str], group: tuple[float, float, float]) -> dict[str, Point]:
    """Places of a group's peers. Few lie on one ring, more on a sunflower spiral: even density, no
    two alike (Vogel 1979)."""
    x, y, radius = group
    if len(names) == 1:
        return {names[0]: (x, y)}
    points: dict[str, Point] = {}
    few = len(names) <= _ON_ONE_RING
    turn = 2 * math.pi / len(names) if few else math.pi * (3 - math.sqrt(5))
    first = math.pi if len(names) == 2 else -math.pi / 2
    for at, name in enumerate(names):
        reach = (radius - 9) * (0.6 if few else math.sqrt((at + 0.5) / len(names)))
        angle = at * turn + first
        points[name] = (x + reach * math.cos(angle), y + reach * math.sin(angle))
    return points
