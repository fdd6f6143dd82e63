"""How far a run goes back when somebody is barred, and in which epoch its members are.

Only a verdict that bars takes steps back, once: neither doubt nor accusation does. Steps more than
`undo_steps` before the proof stay: a liar in each of so many steps would have been found before.
Where more is audited than the run's rate, fewer steps are enough: while somebody is new, and after
a verdict. So ever new keys, and colluders that are found one after the other, cost a tenth of what
the first one does. Decision 74 says why, `docs/decisions/0074-undo.md`.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from p2p_dtfm.core.audit.draw import ALARM_MILLIONTHS, ALARM_STEPS
from p2p_dtfm.core.audit.roles import WATCHED_MILLIONTHS, watched_until
from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.membership.bars import agreed_bars, bar_ends_step, voters
from p2p_dtfm.core.messages.agreement_messages import Contribution
from p2p_dtfm.core.protocol.lineage import Epochs, epochs_of
from p2p_dtfm.core.protocol.snapshot import Bar, ViewId
from p2p_dtfm.core.recovery.restart_point import Undo

NEVER = 1 << 60


def agreed_epochs(contributions: Collection[Contribution]) -> Epochs:
    """The highest epochs that more than half of the voters have come to, as with their bars. Where
    fewer know of a verdict it is found again, and with it what it takes back."""
    told = sorted((_epochs(part) for part in voters(contributions)), reverse=True)
    if not told:
        return Epochs()
    number = told[len(told) // 2].number
    named = Counter(epochs for epochs in told if epochs.number == number)
    return max(named, key=lambda epochs: (named[epochs], epochs))


def _epochs(part: Contribution) -> Epochs:
    """For a member: the epochs of the step under way. For a peer in no view: the last that it has
    seen."""
    if part.pending is not None:
        return epochs_of(part.pending.base)
    names = [*part.lineages.values(), *(it.lineage for it in (*part.saved, *part.cuts))]
    return max(map(epochs_of, names), default=Epochs())


def bars_gone_back_for(
    known: Iterable[Bar],
    convicted: Collection[str],
    contributions: Collection[Contribution],
    epochs: Epochs,
) -> tuple[Bar, ...]:
    """Those of the `known` bars for which the run has gone back before it came to `epochs`.

    Of a peer that is convicted now, only those that are in these epochs can say so. Where some have
    taken over the view that goes back, and as many have not, a colluder decides what most say. It
    could name the bar and not the epoch: then nobody would go back, for good.
    """
    there = [it for it in voters(contributions) if _epochs(it).number == epochs.number]
    named = (bar for bar in agreed_bars(there) if bar.peer_id in convicted)
    return (*(bar for bar in known if bar.peer_id not in convicted), *named)


def undo_due(
    before: Iterable[Bar],
    bars: Iterable[Bar],
    terms: StepTerms | None,
    epochs: Epochs,
) -> Undo | None:
    """What is to be taken back for those that are barred now, and in `before` were not, or for
    something else.

    The last verdict may have taken back `undo_steps` steps. A liar that is found in these again was
    there the first time as well, and no draw in all of them found it. So older steps stay.
    """
    if terms is None or not terms.undo_steps:
        return None
    known = {bar.peer_id: bar for bar in before}
    news = {
        bar.peer_id: bar
        for bar in bars
        if bar.count > 0 and bar.count > _count(known.get(bar.peer_id))
    }
    if not news:
        return None
    begun = epochs.starts[-1] if epochs.starts else 0
    reached = max((bar.step for bar in known.values() if bar.count > 0), default=0)
    least = begun if reached - begun >= terms.undo_steps else 0
    alarm = range(_alarmed_from(known.values(), epochs, terms), reached + ALARM_STEPS)
    newest = min(
        max(_sure_from(bar.step, known.get(it), alarm, terms), _first_step(known.get(it)), least)
        for it, bar in news.items()
    )
    return Undo(tuple(sorted(news)), newest, terms.undo_every)


def _alarmed_from(known: Iterable[Bar], epochs: Epochs, terms: StepTerms) -> int:
    """The first of the steps that stand now since which all were made under an alarm.

    Those are the steps of the epoch that the last verdict began. Epochs before it count as far back
    as each was, until the next one began, under the alarm of the verdict that began it.
    """
    steps: dict[ViewId, int] = {}
    for bar in known:
        if bar.count > 0:
            steps[bar.view] = max(bar.step, steps.get(bar.view, 0))
    verdicts = sorted(steps.items(), reverse=True)
    if not verdicts:
        return NEVER
    alarmed_from = verdicts[0][1]
    for (_, step), begun in zip(verdicts, reversed(epochs.starts), strict=False):
        is_its_epoch = begun <= step < begun + terms.undo_steps + terms.undo_every
        if not is_its_epoch or alarmed_from > step + ALARM_STEPS:
            break
        alarmed_from = min(alarmed_from, begun)
    return alarmed_from


def _sure_from(step: int, before: Bar | None, alarm: range, terms: StepTerms) -> int:
    """A step before the proof's step, `step`. A liar in each step since then would have been found
    as surely as in `undo_steps` steps that are audited at the run's rate."""
    watch, rate = _watch_of(before), max(1, terms.rate_millionths)
    due, at = terms.undo_steps * rate, step
    while due > 0 and at > 0:
        at -= 1
        while_new = WATCHED_MILLIONTHS if at in watch else 0
        due -= max(rate, while_new, ALARM_MILLIONTHS if at in alarm else 0)
    return at


def _count(bar: Bar | None) -> int:
    return 0 if bar is None else bar.count


def _first_step(bar: Bar | None) -> int:
    """The first step in which the key may have had a stage: not before it was known, nor while it
    was barred."""
    if bar is None or bar.until_step == 0:
        return 0
    return bar_ends_step(bar) if bar.count > 0 else bar.step


def _watch_of(bar: Bar | None) -> range:
    """The steps in which a fifth of the key's works were audited, if it had a stage. If verdicts of
    others had a convicted key wait again, what it did before was audited like anybody's."""
    if bar is None:
        return range(0)
    return range(bar.until_step if bar.count > 0 else bar.step, watched_until(bar))
