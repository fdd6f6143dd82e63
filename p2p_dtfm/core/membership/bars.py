"""Who was convicted of false work, and has no place for a while: it is in each snapshot.

A verdict of more than half of all stage-holders bars a key, for so many steps that no daemon's
restart and no new life ends it. Whoever is only in doubt is not barred: it may be the honest one.
Decision 73 says why, `docs/decisions/0073-bars-and-new-keys.md`.
"""

from collections.abc import Collection, Iterable, Mapping

from p2p_dtfm.core.messages.agreement_messages import Contribution
from p2p_dtfm.core.messages.message_bounds import BARS_LIMIT
from p2p_dtfm.core.protocol.snapshot import Bar, ViewId

FIRST_STEPS = 400
"""A device that erred once comes back; whoever lies again waits twice as long each time."""
DOUBLINGS_LIMIT = 30


def agreed_bars(contributions: Collection[Contribution]) -> tuple[Bar, ...]:
    """Of those whom more than half of the voters name, by whatever verdict.

    Parts of a split swarm that meet may each have convicted it. The bar that stays is the longest
    than which more than half name none that is shorter: it lies between two that honest members
    name, and a few can neither end a bar nor draw it out.
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
    """The members of the newest view that any contributor is in, whichever they say that they are
    in: who has been left out since an older one has no word, though somebody says that this is the
    present one. Where nobody is in a view, as when all have started again, all contributors."""
    present = [part.present for part in contributions if part.present is not None]
    if not present:
        return list(contributions)
    members = frozenset(max(present, key=lambda it: it.view).members)
    return [it for it in contributions if it.present is not None and it.member in members]


def _how_long(bar: Bar) -> tuple[int, int, Bar]:
    return bar.until_step, bar.count, bar


def step_of_most(contributions: Collection[Contribution]) -> int:
    """A step that at least half of the voters have committed, or say so: nobody alone has a bar end
    by it."""
    steps = sorted(part.step for part in voters(contributions))
    return steps[(len(steps) - 1) // 2] if steps else 0


def with_convicted(
    bars: Iterable[Bar],
    convicted: Mapping[str, tuple[ViewId, int]],
    reasons: Mapping[str, str],
    here: Collection[str] = (),
) -> tuple[Bar, ...]:
    """`convicted` in which view, and of which step's work; `here`: who stays."""
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
    """The step from which it has a place again, by its own last verdict. `until_step` is later
    where those of others have it wait for a stage (`core.audit.roles`): that bars nobody, and is no
    reason to remember it for longer."""
    return min(bar.until_step, _ends_step(bar.step, bar.count))


def _ends_step(step: int, count: int) -> int:
    return step + (FIRST_STEPS << min(count - 1, DOUBLINGS_LIMIT))


def united(bars: Iterable[Bar], here: Collection[str] = ()) -> tuple[Bar, ...]:
    """Of each peer the one that lasts longest; of too many those that are needed most, in order.
    `here`: who is in the view that they are for.

    Those that end last stay: one that is over goes first, and whoever makes keys to have others
    forgotten must lose a place with each. Then those that are in the view, so that nobody's own
    entry goes.
    """
    longest: dict[str, Bar] = {}
    for bar in sorted(bars):
        held = longest.get(bar.peer_id)
        if held is None or (held.count, held.until_step) <= (bar.count, bar.until_step):
            longest[bar.peer_id] = bar

    def how_needed(bar: Bar) -> tuple[bool, bool, int, int, int, Bar]:
        """Verdicts outlive what is only known of a key, or many new keys would have them forgotten.
        Then a member without an entry is established, and no key is while it follows: those that
        come after it and go again do not have it forgotten."""
        ends_step = bar_ends_step(bar) if bar.count > 0 else 0
        return (bar.count > 0, bar.peer_id in here, ends_step, *_how_long(bar))

    return tuple(sorted(sorted(longest.values(), key=how_needed)[-BARS_LIMIT:]))


def barred_at(bars: Iterable[Bar], step: int) -> dict[str, Bar]:
    """Who has no place in a view that goes on from `step`."""
    return {bar.peer_id: bar for bar in bars if bar.count > 0 and step < bar_ends_step(bar)}
