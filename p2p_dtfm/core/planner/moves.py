"""Neighbours of a placement."""

from collections.abc import Callable
from typing import NamedTuple

from p2p_dtfm.core.cost_model.costs import Placement, PlacementCost
from p2p_dtfm.core.protocol.prng import Prng


class _Drawn(NamedTuple):
    """A place in each of two pipelines, which may be the same one."""

    pipelines: list[list[int]]
    source: list[int]
    here: int
    target: list[int]
    there: int
    peer_count: int
    prng: Prng

    def spares(self) -> list[int]:
        used = set[int]().union(*self.pipelines)
        if len(used) == self.peer_count:  # as it mostly is
            return []
        return [peer for peer in range(self.peer_count) if peer not in used]


def random_move(cost: PlacementCost, peer_count: int, prng: Prng) -> Placement | None:
    """A neighbour; None when the move drawn does not apply.

    A third of the moves concern the peer that holds up the reduction.
    """
    pipelines = list(map(list, cost.placement))
    below = prng.below
    source = pipelines[below(len(pipelines))]
    if cost.critical >= 0 and below(3) == 0:
        source = next(peers for peers in pipelines if cost.critical in peers)
        here = source.index(cost.critical)
    else:
        here = below(len(source))
    target = pipelines[below(len(pipelines))]
    there = below(len(target))
    move = _MOVES[below(len(_MOVES))]
    if move is _join and source is target:
        return None
    move(_Drawn(pipelines, source, here, target, there, peer_count, prng))
    return tuple(filter(None, map(tuple, pipelines))) or None


def _swap(source: list[int], here: int, target: list[int], there: int) -> None:
    source[here], target[there] = target[there], source[here]


def _swap_places(drawn: _Drawn) -> None:
    _swap(drawn.source, drawn.here, drawn.target, drawn.there)


def _swap_alike(drawn: _Drawn) -> None:
    """Swaps a peer with the one that has the same place in the other pipeline."""
    there = min(drawn.here, len(drawn.target) - 1)
    _swap(drawn.source, drawn.here, drawn.target, there)


def _move_over(drawn: _Drawn) -> None:
    peer = drawn.source.pop(drawn.here)
    drawn.target.insert(min(drawn.there, len(drawn.target)), peer)


def _insert_spare(drawn: _Drawn) -> None:
    if spares := drawn.spares():
        drawn.source.insert(drawn.here, spares[drawn.prng.below(len(spares))])


def _put_spare_in_place(drawn: _Drawn) -> None:
    if spares := drawn.spares():
        drawn.source[drawn.here] = spares[drawn.prng.below(len(spares))]


def _add_pipeline_of_spares(drawn: _Drawn) -> None:
    if spares := drawn.spares():
        drawn.prng.below(len(spares))  # the draw that its siblings make
        drawn.prng.shuffle(spares)
        drawn.pipelines.append(spares[: len(drawn.source)])


def _leave_out(drawn: _Drawn) -> None:
    del drawn.source[drawn.here]


def _dissolve(drawn: _Drawn) -> None:
    """Hands the peers of a pipeline to the other pipelines, each to some place."""
    others = [peers for peers in drawn.pipelines if peers is not drawn.source]
    if not others:
        return
    for peer in drawn.source:
        target = others[drawn.prng.below(len(others))]
        target.insert(drawn.prng.below(len(target) + 1), peer)
    drawn.source.clear()


def _swap_stages(pipelines: list[list[int]], prng: Prng) -> None:
    """Swaps two stages alike in all pipelines, since replicas gain by having equal cuts."""
    longest = max(map(len, pipelines))
    a, b = prng.below(longest), prng.below(longest)
    for peers in pipelines:
        if max(a, b) < len(peers):
            _swap(peers, a, peers, b)


def _reverse_all(drawn: _Drawn) -> None:
    for peers in drawn.pipelines:
        peers.reverse()


def _join(drawn: _Drawn) -> None:
    drawn.source.extend(drawn.target)
    drawn.target.clear()


def _split(drawn: _Drawn) -> None:
    drawn.pipelines.append(drawn.source[drawn.here :])
    del drawn.source[drawn.here :]


_MOVES: tuple[Callable[[_Drawn], None], ...] = (
    *(_swap_alike, _swap_alike, _swap_alike, _swap_places, _swap_places),
    *(_move_over, _move_over),
    *(_insert_spare, _put_spare_in_place, _put_spare_in_place, _add_pipeline_of_spares),
    _leave_out,
    lambda drawn: drawn.source.clear(),
    _dissolve,
    lambda drawn: _swap_stages(drawn.pipelines, drawn.prng),
    lambda drawn: _swap_stages([drawn.source], drawn.prng),
    _reverse_all,
    lambda drawn: drawn.source.reverse(),
    *(_join, _split),
)
"""Each move is drawn as often as it stands here."""
