"""Who was convicted of false work, and has no place for a while: each snapshot says so.

A verdict of more than half of all stage-holders bars a key for a number of steps: no restart of a
daemon and no new life ends it. A peer that is only in doubt is not barred: it may be the honest
one. Decision 73 says why, `docs/decisions/0073-bars-and-new-keys.md`.
"""

from collections.abc import Collection, Iterable, Mapping

from p2p_dtfm.core.messages.agreement_messages import Contribution
from p2p_dtfm.core.messages.message_bounds import BARS_LIMIT
from p2p_dtfm.core.protocol.snapshot import Bar, ViewId

FIRST_STEPS = 400
"""Steps of a first bar. A device that erred once comes back; a peer that lies again waits twice as
long each time."""
DOUBLINGS_LIMIT = 30


def agreed_bars(contributions: Collection[Contribution]) -> tuple[Bar, ...]:
    """The bars of those whom more than half of the voters name, by whatever verdict.

    Parts of a split swarm that meet may each have convicted the peer. The bar that stays is the
    longest such that more than half of the voters name it or a longer one. It lies between two that
    honest members name, so a few can neither end a bar nor draw it out.
    """
    heard = voters(contributions)
    here = {part.member.peer_id for part in contributions}
    named: dict[str, list[Bar]] = {}
    for part in heard:
        for bar in united(part.bars):
            named.setdefault(bar.peer_id, []).append(bar)
    needed = len(heard) // 2 + 1
    enough = (bars for bars in named.values() if len(bars) >= needed)
    found = (sorted(bars, key=_how_long, reverse=True)[needed - 1] for bars in enough)
    return united(found, here)


def voters(contributions: Collection[Contribution]) -> list[Contribution]:
    """The contributors that are members of the newest view that any contributor is in, whichever
    view they say that they are in. A peer that has been left out since an older view has no vote,
    though somebody says that the older one is the present one. If nobody is in a view, as when all
    have started again, all contributors vote."""
    present = [part.present for part in contributions if part.present is not None]
    if not present:
        return list(contributions)
    members = frozenset(max(present, key=lambda it: it.view).members)
    return [it for it in contributions if it.present is not None and it.member in members]


def _how_long(bar: Bar) -> tuple[int, int, Bar]:
    return bar.until_step, bar.count, bar


def step_of_most(contributions: Collection[Contribution]) -> int:
    """A step that at least half of the voters say they have committed: nobody alone can have a bar
    end by it."""
    steps = sorted(part.step for part in voters(contributions))
    return steps[(len(steps) - 1) // 2] if steps else 0


def with_convicted(
    bars: Iterable[Bar],
    convicted: Mapping[str, tuple[ViewId, int]],
    reasons: Mapping[str, str],
    here: Collection[str] = (),
) -> tuple[Bar, ...]:
    """The bars after these verdicts. `convicted`: by peer, in which view, and for which step's
    work. `here`: who stays."""
    known = {bar.peer_id: bar for bar in bars}
    for peer_id, (view, step) in sorted(convicted.items()):
        before = known.get(peer_id)
        if before is not None and (before.view, before.step) == (view, step):
            continue  # the same verdict, in an attempt that repeats another
        count = 1 if before is None else before.count + 1
        until_step = _ends_step(step, count)
        known[peer_id] = Bar(view, step, peer_id, count, until_step, reasons.get(peer_id, ""))
    return united(known.values(), here)


def bar_ends_step(bar: Bar) -> int:
    """The step from which the peer has a place again, by its own last verdict. `until_step` is
    later where the verdicts of others have it wait for a stage (`core.audit.roles`). That bars
    nobody, and is no reason to remember the bar for longer."""
    return min(bar.until_step, _ends_step(bar.step, bar.count))


def _ends_step(step: int, count: int) -> int:
    return step + (FIRST_STEPS << min(count - 1, DOUBLINGS_LIMIT))


def united(bars: Iterable[Bar], here: Collection[str] = ()) -> tuple[Bar, ...]:
    """Of each peer the bar that counts most verdicts, then lasts longest; if they are too many,
    those that are needed most. They are sorted. `here`: who is in the view that they are for.

    Verdicts are needed more than entries without one. Among these, those of peers in the view are
    needed more, so that nobody's own entry goes. Then those that end later: a bar that is over goes
    first, and who makes keys to have others forgotten must lose a place with each.
    """
    longest: dict[str, Bar] = {}
    for bar in sorted(bars):
        held = longest.get(bar.peer_id)
        if held is None or (held.count, held.until_step) <= (bar.count, bar.until_step):
            longest[bar.peer_id] = bar

    def how_needed(bar: Bar) -> tuple[bool, bool, int, int, int, Bar]:
        """Verdicts outlive entries of keys that are only known, or many new keys would have them
        forgotten. A member without an entry is established, and no key may become so while it
        follows: those that come after it and go again do not have its entry forgotten."""
        ends_step = bar_ends_step(bar) if bar.count > 0 else 0
        return (bar.count > 0, bar.peer_id in here, ends_step, *_how_long(bar))

    return tuple(sorted(sorted(longest.values(), key=how_needed)[-BARS_LIMIT:]))


def barred_at(bars: Iterable[Bar], step: int) -> dict[str, Bar]:
    """Who has no place in a view that goes on from `step`."""
    return {bar.peer_id: bar for bar in bars if bar.count > 0 and step < bar_ends_step(bar)}
