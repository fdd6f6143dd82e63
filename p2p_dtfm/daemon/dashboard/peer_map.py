"""Where members lie on the dashboard's map: near in round trip, near on the map.

For pictures only: nothing of it reaches a plan.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from p2p_dtfm.core.protocol.records import PeerRecord

Array = npt.NDArray[np.float64]
Points = dict[str, tuple[float, float]]
ROUNDS = 100
UNSEEN = 1e-4
"""As a share of the largest distance: a round that moves nobody farther is the last one."""
FARTHEST_MS = 1000.0
"""Peers that are farther are drawn so far: what a peer says of itself may be years."""
UNKNOWN_ROUND_TRIP_NS = 200_000_000
"""Stands in where nobody has measured anything."""


def place_peers(records: Sequence[PeerRecord], before: Points | None = None) -> Points:
    """A point in the unit square for each peer.

    Distances resemble square roots of round trips, which keeps near peers apart and far ones on
    the page. The map is turned to resemble `before`, else so that it is widest from left to right.
    """
    names = [record.peer_id for record in records]
    if len(names) < 2:
        return dict.fromkeys(names, (0.5, 0.5))
    distances = np.sqrt(_round_trips_ms(records))
    points = _stress_reduced(_classical(distances), distances)
    known = [at for at, name in enumerate(names) if before is not None and name in before]
    if before is not None and len(known) >= 2:
        points = _turned(points, known, np.array([before[names[at]] for at in known]))
    points = _in_unit_square(points)
    return {name: (float(x), float(y)) for name, (x, y) in zip(names, points, strict=True)}


def _round_trips_ms(records: Sequence[PeerRecord]) -> Array:
    """Symmetric. Where two peers say unlike things the longer counts, so that nobody draws others
    near by words of its own. Unmeasured pairs get the shortest way through others (Floyd and
    Warshall)."""
    count = len(records)
    said = np.full((count, count), np.inf)
    for i, left in enumerate(records):
        for j, right in enumerate(records):
            link = left.link_to(right.peer_id)
            if link is not None and i != j:
                said[i, j] = min(link.round_trip_ns / 1e6, FARTHEST_MS)
    one_alone = np.isinf(said) != np.isinf(said.T)
    measured = np.where(one_alone, np.minimum(said, said.T), np.maximum(said, said.T))
    np.fill_diagonal(measured, 0.0)
    ways = measured
    for via in range(count):
        ways = np.minimum(ways, ways[:, via : via + 1] + ways[via : via + 1, :])
    times = np.where(np.isfinite(measured), measured, ways)
    finite = times[np.isfinite(times)]
    farthest = max(float(finite.max()), UNKNOWN_ROUND_TRIP_NS / 1e6)
    return np.where(np.isfinite(times), times, farthest)


def _classical(distances: Array) -> Array:
    """Classical scaling (Torgerson 1952): the two widest axes of the points' Gram matrix."""
    count = len(distances)
    centring = np.eye(count) - 1.0 / count
    gram = -0.5 * centring @ (distances**2) @ centring
    values, vectors = np.linalg.eigh(gram)
    points: Array = vectors[:, [-1, -2]] * np.sqrt(np.maximum(values[[-1, -2]], 0.0))
    # peers that measure alike would lie on one spot, from which no step leads away
    angles = np.arange(count) * np.pi * (3 - np.sqrt(5))
    nudge = 1e-3 * (float(distances.max()) or 1.0)
    return points + nudge * np.column_stack([np.cos(angles), np.sin(angles)])


def _stress_reduced(points: Array, distances: Array) -> Array:
    """Majorisation of the stress (de Leeuw 1977), every pair weighing the same."""
    count, unseen = len(points), UNSEEN * float(distances.max())
    for _ in range(ROUNDS):
        apart = np.linalg.norm(points[:, None] - points[None], axis=2)
        ratio = -distances / np.maximum(apart, 1e-9)
        np.fill_diagonal(ratio, 0.0)
        np.fill_diagonal(ratio, -ratio.sum(axis=1))
        before, points = points, ratio @ points / count
        if float(np.abs(points - before).max()) <= unseen:
            break
    return points


def _turned(points: Array, known: list[int], before: Array) -> Array:
    """Rotated, mirrored and scaled so that `known` lie where they were (Procrustes)."""
    mine = points[known]
    here, there = mine.mean(axis=0), before.mean(axis=0)
    left, stretch, right = np.linalg.svd((mine - here).T @ (before - there))
    size = float(((mine - here) ** 2).sum())
    scale = float(stretch.sum()) / size if size > 1e-12 else 1.0
    turned: Array = (points - here) @ (left @ right) * scale + there
    return turned


def _in_unit_square(points: Array) -> Array:
    """The same shape, as large as it can be, in the middle."""
    low, high = points.min(axis=0), points.max(axis=0)
    extent = float((high - low).max())
    if extent < 1e-9:
        return np.full_like(points, 0.5)
    scaled: Array = (points - (low + high) / 2) / extent + 0.5
    return scaled
