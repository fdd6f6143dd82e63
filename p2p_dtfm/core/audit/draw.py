"""Who is audited in a step, and by whom.

The draw is a digest of what all committed themselves to in the step before and open now. So nobody
knows it before all work of the step is done and claimed, and nobody alone decides it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from p2p_dtfm.core.audit.roles import WATCHED_MILLIONTHS
from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import Bar

ALARM_MILLIONTHS = 200_000
"""At least so many of all works are audited once somebody is convicted. Whoever lies together with
that peer is found soon, and little need be taken back for each."""
ALARM_STEPS = 300
"""The alarm lasts so many steps from the verdict's step on. Steps before that, which are done
again, are under it as well."""
COLLUDERS_DIVISOR = 4
"""At most one part in so many of the members lies together."""
BESIDES_LIMIT = 3
"""Auditors of one work besides the first: each takes as long as the work."""

_SCALE = 1 << 64


def rate_in_force(rate_millionths: int, bars: Iterable[Bar], step: int) -> int:
    """How many of a step's works are audited, by the verdicts in the view's snapshot."""
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
    """By peer that is drawn, or in `always`: its auditor, if anybody can compute its work again.
    `judges_of` a stage-holder: those who can.

    A step is drawn as a whole, with all who work in it. Each is audited as often as if it were
    drawn by itself. But all wait for audits in fewer steps, since the auditors work at once. And of
    those that lie together none is left. Who has the fewest works to audit so far is taken first,
    so that none has much to do.
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


def drawn_in_rounds(
    seed: str,
    plan: Plan,
    judges_of: Callable[[str], Sequence[str]],
    rate_millionths: int,
    always: Collection[str],
    misled: Collection[str],
    *,
    is_chosen: bool,
) -> tuple[dict[str, str], tuple[dict[str, str], ...]]:
    """`draw`, without the works of `misled`. If it `is_chosen`, also `drawn_besides`: colluders may
    have chosen the draw."""
    drawn = draw(seed, plan.stage_holders(), judges_of, rate_millionths, always)
    first = {peer: by for peer, by in drawn.items() if peer not in misled}
    besides = further_auditors(plan) if is_chosen else 0
    return first, drawn_besides(seed, first, judges_of, besides)


def further_auditors(plan: Plan) -> int:
    """How many audit a work besides the first one, where colluders may have chosen the draw. It
    goes by all members: each colluder may have a stage, while the spares are honest. It is rounded
    up: two colluders may be of eight members of whom one is away, and they can bring that about."""
    members = len(plan.stage_holders()) + len(plan.spares)
    return min(BESIDES_LIMIT, -(-members // COLLUDERS_DIVISOR) - 1)


def drawn_besides(
    seed: str, drawn: Mapping[str, str], judges_of: Callable[[str], Sequence[str]], count: int
) -> tuple[dict[str, str], ...]:
    """`count` more auditors for each peer that is drawn, no two of them the same. Colluders that
    have chosen the draw are fewer, so one auditor is honest."""
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
    """Which of the watched peers are audited; each is drawn by itself."""
    limit = WATCHED_MILLIONTHS * _SCALE
    return {it for it in watched if _number(seed, "watched", it) * 1_000_000 < limit}


def _number(seed: str, *words: str) -> int:
    """A number below 2^64, drawn from the seed and the words."""
    return int(digest_bytes(encode([seed, *words]))[:16], 16)
