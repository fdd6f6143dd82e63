"""What a key may do that is new to a run with audits.

Keys cost nothing: a convicted liar could come back at once as somebody else. So a key that comes to
a run under way is a spare for some steps. Then it gets a stage only beside somebody who is
established, and is audited more often than others. Then it is established, by time alone. A barred
key waits longer, and twice as long each time. The snapshot says since when a key is known: among
the bars, in an entry without a verdict. Where there are no bars, everybody is established.

Where a run takes back what the convicted have done, each verdict costs everybody steps, and a liar
has ever new keys. So each verdict has keys without a stage wait: all that are new, and all that
were ever convicted. Where there was no verdict of late, nobody waits for that.
"""

from collections.abc import Collection, Iterable

import msgspec

from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import GENESIS, Bar, Snapshot

WATCHED_STEPS = 300
"""A key is watched for so many steps, from the first in which it may have a stage."""
WATCHED_MILLIONTHS = 200_000
"""So many of a watched peer's works are audited, besides those of steps that are drawn."""
RETURN_STEPS = 50
"""Steps without a stage after a first bar has ended; after each further one twice as many."""
DOUBLINGS_LIMIT = 20
QUIET_FACTOR = 12
"""A verdict has new keys wait for at most so many times `undo_steps`, after the waits for earlier
ones. With what audits take, that keeps nine tenths of what is computed, where a quarter lies
(`benchmarks.liars.economy`)."""
LATE_FACTOR = 100
"""After so many times `undo_steps` nobody waits for a verdict any more, and it does not count."""
KNOWN = "known since the run began, or for longer than newcomers are watched"
NEW = "came while the run was under way"


def with_roles(
    bars: Iterable[Bar],
    members: Collection[str],
    joining: Collection[str],
    step: int,
    follow_steps: int,
    quiet_from_step: int = 0,
) -> tuple[Bar, ...]:
    """`bars` with an entry for each of `members` and `joining` that has none. Such a member is
    established, as it was there before anybody was counted. Where a run begins, or nobody here
    remembers anything, all are. `quiet_from_step`: nobody new has a stage earlier."""
    found = tuple(bars)
    known = {bar.peer_id for bar in found}
    news = sorted({*members, *joining} - known)
    begins = not members and not known
    return found + tuple(
        Bar(GENESIS, step, peer_id, 0, 0, KNOWN)
        if begins or peer_id in members
        else Bar(GENESIS, step, peer_id, 0, max(step + follow_steps, quiet_from_step), NEW)
        for peer_id in news
    )


def quiet_from(bars: Iterable[Bar], step: int, follow_steps: int, undo_steps: int) -> int:
    """The step before which the verdicts of late let nobody new have a stage; 0 if there are none,
    or such verdicts take nothing back.

    Each verdict adds a wait to those before it, however far apart they are. Who has several keys
    convicted one after the other, to have others wait each time, pays for each wait with a key. The
    first verdict adds little, each further one four times as much, up to a bound.
    """
    late_steps, most_steps = LATE_FACTOR * undo_steps, QUIET_FACTOR * undo_steps
    verdicts = ((it.step, it.count) for it in bars if it.count > 0)
    late = sorted(it for it in verdicts if step < it[0] + late_steps)
    until_step, number = 0, 0
    for at, count in late:
        number += count
        wait_steps = follow_steps << min(2 * number, DOUBLINGS_LIMIT)
        until_step = max(until_step, at) + min(wait_steps, most_steps)
    return min(until_step, late[-1][0] + late_steps) if late else 0


def held_off(
    bars: Iterable[Bar], stage_holders: Collection[str], step: int, quiet_from_step: int
) -> tuple[Bar, ...]:
    """The bars after a verdict at `step`. A key without a stage that is new, or was ever convicted,
    waits for one as long as a key that comes now. A key with a stage does not: what it has done so
    far is audited more often, and taken back with it."""
    return tuple(
        bar
        if bar.peer_id in stage_holders or (bar.count == 0 and step >= watched_until(bar))
        else msgspec.structs.replace(bar, until_step=max(bar.until_step, quiet_from_step))
        for bar in bars
    )


def probation_ends_step(bar: Bar) -> int:
    """The step from which the key may have a stage."""
    if bar.count == 0:
        return bar.until_step
    return bar.until_step + (RETURN_STEPS << min(bar.count - 1, DOUBLINGS_LIMIT))


def watched_until(bar: Bar) -> int:
    """The step from which the key is established."""
    until_step = probation_ends_step(bar)
    return until_step + WATCHED_STEPS if until_step > 0 else 0


def on_probation(bars: Iterable[Bar], step: int) -> dict[str, int]:
    """By key that may not have a stage yet at `step`: the step from which it may."""
    return {it.peer_id: until for it in bars if step < (until := probation_ends_step(it))}


def watched(bars: Iterable[Bar], step: int) -> frozenset[str]:
    """Keys that are not established at `step`; those on probation are among them."""
    return frozenset(bar.peer_id for bar in bars if step < watched_until(bar))


def without_stage_yet(snapshot: Snapshot) -> frozenset[str]:
    """Peers on probation, which get no stage. Who has one in the plan in force keeps it: else its
    states would be lost."""
    return frozenset(on_probation(snapshot.bars, snapshot.step)) - _stages(snapshot)


def alone(snapshot: Snapshot, plan: Plan) -> frozenset[str]:
    """Watched peers to which the plan newly gives layers that no established peer holds as well."""
    new = watched(snapshot.bars, snapshot.step)
    holders = plan.stage_holders()
    if not new or new.isdisjoint(holders):
        return frozenset()
    covered = {n for peer in holders if peer not in new for n in plan.layers_of(peer)}
    found = {
        peer for peer in holders if peer in new and not covered.issuperset(plan.layers_of(peer))
    }
    return frozenset(found - _stages(snapshot))


def unproven(snapshot: Snapshot) -> frozenset[str]:
    """Watched peers that have no stage yet."""
    return watched(snapshot.bars, snapshot.step) - _stages(snapshot)


def comes_of_age(snapshot: Snapshot, peer_id: str, step: int) -> bool:
    """Whether the peer may do more at `step` than when the view was agreed on."""
    groups = (lambda at: on_probation(snapshot.bars, at), lambda at: watched(snapshot.bars, at))
    return any(peer_id in group(snapshot.step) and peer_id not in group(step) for group in groups)


def _stages(snapshot: Snapshot) -> frozenset[str]:
    return frozenset(snapshot.present.stage_holders() if snapshot.present is not None else ())
