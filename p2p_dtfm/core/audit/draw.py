"""Who is audited in a step, and by whom.

The draw is a digest of what all have committed themselves to in the step before and open now, so
that nobody knows it before all work of the step is done and claimed, and nobody alone decides it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from p2p_dtfm.core.audit.roles import WATCHED_MILLIONTHS
from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.snapshot import Bar

ALARM_MILLIONTHS = 200_000
"""Of all works so many are audited, at least, once somebody is convicted: whoever lies together
with it is found soon, and little need be taken back for each."""
ALARM_STEPS = 300
"""From the verdict's step on, and in those before it that are done again."""

_SCALE = 1 << 64


def rate_in_force(rate_millionths: int, bars: Iterable[Bar], step: int) -> int:
    """Of the works of a step, by the verdicts that stand in the view's snapshot."""
    is_alarmed = any(bar.count > 0 and step < bar.step + ALARM_STEPS for bar in bars)
    return max(rate_millionths, ALARM_MILLIONTHS) if is_alarmed else rate_millionths


def seed_of(view: str, step: int, openings: Mapping[str, bytes]) -> str:
    return digest_bytes(encode([view, step, sorted(openings.items())]))


def draw(
    seed: str,
    holders: Sequence[str],
    judges_of: Callable[[str], Sequence[str]],
    rate_millionths: int,
    always: Collection[str] = (),
) -> dict[str, str]:
    """The auditor of each that is drawn, or in `always`, if anybody can replay its work.
    `judges_of` a stage-holder: who that is.

    A step is drawn as a whole, with all who work in it: each is audited as often as if it were
    drawn by itself, but all wait for audits in so many steps only, since the auditors work at once.
    And of those that lie together none is left. Who audits little so far is taken first, so that
    none has much to do.
    """
    busy: Counter[str] = Counter()
    found: dict[str, str] = {}
    is_drawn = _number(seed, "drawn") * 1_000_000 < rate_millionths * _SCALE
    for peer_id in sorted(holders, key=lambda peer: _number(seed, "order", peer)):
        if not is_drawn and peer_id not in always:
            continue
        if judges := judges_of(peer_id):
            turn = {it: (busy[it], _number(seed, "auditor", peer_id, it)) for it in judges}
            auditor = min(judges, key=turn.__getitem__)
            busy[auditor] += 1
            found[peer_id] = auditor
    return found


def drawn_besides(
    seed: str, drawn: Mapping[str, str], judges_of: Callable[[str], Sequence[str]], count: int
) -> tuple[dict[str, str], ...]:
    """So many more auditors for each that is drawn, all of them unlike: of colluders that have
    chosen the draw there are fewer, so that one is honest."""
    busy = Counter(drawn.values())
    taken = {peer_id: {by} for peer_id, by in drawn.items()}
    rounds = []
    for _ in range(count):
        found: dict[str, str] = {}
        for peer_id in sorted(drawn, key=lambda peer: _number(seed, "order", peer)):
            if judges := [it for it in judges_of(peer_id) if it not in taken[peer_id]]:
                turn = {it: (busy[it], _number(seed, "besides", peer_id, it)) for it in judges}
                found[peer_id] = auditor = min(judges, key=turn.__getitem__)
                busy[auditor] += 1
                taken[peer_id].add(auditor)
        rounds.append(found)
    return tuple(rounds)


def drawn_watched(seed: str, watched: Collection[str]) -> set[str]:
    """Of those that are watched who is audited, each by itself."""
    limit = WATCHED_MILLIONTHS * _SCALE
    return {it for it in watched if _number(seed, "watched", it) * 1_000_000 < limit}


def _number(seed: str, *words: str) -> int:
    """Below 2^64."""
    return int(digest_bytes(encode([seed, *words]))[:16], 16)
