"""In a swarm of many: what is new is passed on along the overlay, each thing once to each peer.

Nothing here decides anything: it carries what Gather and Ready carry, and to neighbours only.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from enum import Enum
from itertools import islice

import msgspec

from p2p_dtfm.core.consensus.actions import BATCH_NS, Actions, PassOnSoon, SendMessage
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.message_parts import message_parts
from p2p_dtfm.core.consensus.attempts.wide import (
    ASKED_AT_ONCE,
    CameFrom,
    Item,
    News,
    Wide,
    fullest,
    whence,
)
from p2p_dtfm.core.consensus.overlay.grid import Grid, grid_in_order, hosts_of, near_grid
from p2p_dtfm.core.consensus.parts.wide.steps_beside import StepsBeside
from p2p_dtfm.core.messages.agreement_messages import (
    Bodies,
    Charge,
    Contribution,
    Ready,
    ReadySet,
    Spread,
)
from p2p_dtfm.core.messages.message_bounds import READY_SETS_LIMIT
from p2p_dtfm.core.messages.outlines import prepared_name, record_name, sign_outline
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member


class Knows(Enum):
    """What need not be sent along with outlines."""

    NOTHING = "a newcomer, or a peer that asks"
    VIEWS = "who was told of the contributors' views before"
    FELLOW = "a member of this view: it has the records of all its members"


class Spreading:
    """Works on wide attempts only."""

    def __init__(self, state: AgreementState) -> None:
        self._state = state
        self._steps = StepsBeside(state)

    # this peer's own part -------------------------------------------------------------------------

    def is_wide(self, number: int) -> bool:
        """Whether a new attempt is wide: there are many, or others spread it along the overlay."""
        state, newcomers = self._state, self._state.others.newcomers
        count = len(state.members) or 1 + newcomers.count
        heard = state.attempts.spread_number == number
        if heard or count > state.timing.wide_above:
            return True
        lets_in = bool(state.members) and number % 2 == 0  # a planned one
        return lets_in and self._is_crowd(count + newcomers.count)

    def _is_crowd(self, count: int) -> bool:
        """Whether so many, newcomers included, need the overlay. Along it all are in two seconds
        later; but without it each would have to speak with all."""
        return 2 * count > 3 * self._state.timing.wide_above

    def widen(self, attempt: Attempt) -> None:
        """Make a planned attempt wide if a crowd is let in: each peer knows only a part of it at
        first."""
        if self._is_crowd(len(attempt.universe)) and attempt.planned and attempt.wide is None:
            attempt.passed_on.wide = Wide(hasty=False)

    def begin(self, attempt: Attempt, mine: Contribution) -> None:
        """Begin a wide attempt with this peer's own contribution."""
        state, rows = self._state, tuple[int, ...]()
        has_failed = state.promises.passed_number > state.view_id.number
        is_first = not has_failed and not state.attempts.failures
        attempt.passed_on.wide = Wide(hasty=is_first, giver=state.attempts.spread_giver)
        bodies = state.others.bodies
        if state.is_newcomer and mine.joiners:
            mine, rows = self._arranged(mine)
            bodies.keep_rows(state.me, rows)
        outline = bodies.outlined(mine, rows)
        attempt.add(sign_outline(outline, state.settings.sign), bodies.filled(outline) or mine)

    def _arranged(self, mine: Contribution) -> tuple[Contribution, tuple[int, ...]]:
        """The founder knows all records: in its contribution it says who stands in a row with
        whom."""
        state = self._state
        records = [*state.others.newcomers.opened, state.open_record(mine.record)]
        me, lives = state.me.peer_id, {member.peer_id: member for member in mine.joiners}
        ordered = sorted(near_grid(records).rows, key=lambda row: me not in row)
        peers = sorted(ordered[0], key=lambda peer: peer != me)
        peers += [peer for row in ordered[1:] for peer in row]
        joiners = tuple(lives[peer] for peer in peers if peer != me)
        return msgspec.structs.replace(mine, joiners=joiners), tuple(map(len, ordered))

    # the overlay ----------------------------------------------------------------------------------

    def place(self, attempt: Attempt, wide: Wide) -> Grid:
        """The grid of an attempt; it stays the same from when its members are known."""
        if wide.grid is None or not wide.grid.places:
            wide.grid = self._grid(attempt)
            me = self._state.me.peer_id
            wide.watchers = wide.grid.watchers
            wide.neighbours = wide.watchers.get(me, frozenset())
        return wide.grid

    def _grid(self, attempt: Attempt) -> Grid:
        state = self._state
        if state.view is not None:
            return state.grid_of(state.view)
        if not attempt.only_newcomers:
            return Grid((tuple(sorted(member.peer_id for member in attempt.members)),))
        founders = [part for part in attempt.opened.values() if part.joiners]
        if not founders:
            return Grid(())
        founder = max(founders, key=lambda part: (len(part.joiners), part.member))
        order = (founder.member.peer_id, *(member.peer_id for member in founder.joiners))
        return grid_in_order(order, state.others.bodies.rows_of(founder.member))

    def _leaves(self, attempt: Attempt, wide: Wide, grid: Grid) -> list[str]:
        """Peers without a place for which this peer speaks."""
        me = self._state.me.peer_id
        if me not in grid.places or len(attempt.universe) <= len(grid.places):
            return []
        key = attempt.universe, wide.repairs, len(attempt.charges), len(attempt.known)
        if wide.leaves is None or wide.leaves[0] != key:
            others = sorted(m for m in attempt.universe if m.peer_id not in grid.places)
            mine = [m.peer_id for m in others if self._host(attempt, wide, grid, m) == me]
            wide.leaves = key, mine
        return wide.leaves[1]

    def _host(self, attempt: Attempt, wide: Wide, grid: Grid, leaf: Member) -> str:
        lost = self._lost(attempt)
        record, held = self._record(attempt, leaf), wide.hosts.get(leaf)
        if held is None or held[0] is not record or not grid.places:
            held = wide.hosts[leaf] = record, hosts_of(leaf.peer_id, record, grid)
        hosts = held[1]
        alive = [peer for peer in hosts if peer not in lost] or [*hosts] or [""]
        heard = leaf in attempt.opened or leaf == attempt.me
        return alive[0 if heard and leaf != attempt.me else wide.repairs % len(alive)]

    def _record(self, attempt: Attempt, member: Member) -> PeerRecord | None:
        state = self._state
        if member == state.me:
            return state.open_record(state.record) if state.record is not None else None
        part, named = attempt.opened.get(member), attempt.passed_on.newcomers.get(member)
        if part is None and named is None:
            return None
        signed = part.record if part is not None else named
        assert signed is not None
        return state.open_record(signed)

    def _lost(self, attempt: Attempt) -> set[str]:
        """Peers that are not relied on to pass anything on."""
        doubts, known = self._state.doubts, attempt.opened
        named = doubts.suspects | doubts.distrusted
        named |= {charge.of for charge in attempt.charges if charge.of not in known}
        named |= attempt.evidence.absent
        return {member.peer_id for member in named}

    # passing on -----------------------------------------------------------------------------------

    def note(self, attempt: Attempt, now_ns: int) -> Actions:
        """Note what may be new: it goes on at once, or soon and with what comes meanwhile."""
        wide = attempt.wide
        assert wide is not None
        me = self._state.me.peer_id
        came_from = whence(self.place(attempt, wide), me)
        givers = self._state.attempts.givers
        before = len(wide.news)
        count = len(attempt.known) - wide.counts.get("contributions", 0)
        wide.makers |= {it.peer_id: it for it in islice(reversed(attempt.known), count)}
        wide.note("contributions", attempt.known.values(), came_from, me, givers)
        wide.note("contradicted", attempt.set_aside.contradicted.values(), came_from, me, givers)
        wide.note("charges", attempt.charges.values(), came_from, me)
        wide.note("ready", attempt.ready.values(), came_from, me)
        says_more = not wide.hasty and wide.told.digest_told != attempt.own_digest
        leaves = len(attempt.universe) > len(self.place(attempt, wide).places)
        new = wide.news[before:]
        if wide.told.is_due or not (says_more or leaves or any(map(_goes_on, new))):
            return []
        own = any(it.came_from is CameFrom.OUTSIDE for it in new)
        if own and (wide.told.flushed_ns is None or now_ns - wide.told.flushed_ns >= BATCH_NS):
            return self.flush(attempt, now_ns)
        wide.told.is_due = True
        return [PassOnSoon(BATCH_NS)]

    def pass_on(self, now_ns: int) -> Actions:
        """It is time to pass on what waits."""
        attempt = self._state.attempt
        if attempt is None or attempt.wide is None or not attempt.wide.told.is_due:
            return []
        return self.flush(attempt, now_ns)

    def flush(self, attempt: Attempt, now_ns: int) -> Actions:
        """Tell each neighbour what it has not been told."""
        wide, me = attempt.wide, self._state.me.peer_id
        assert wide is not None
        wide.told.is_due, wide.told.flushed_ns = False, now_ns
        grid, lost, actions = self.place(attempt, wide), self._lost(attempt), Actions()
        told = set[str]()
        if me in grid.places:
            # a peer in doubt may live, and must know as much as all others: nobody relies on it
            row, is_first = grid.row_mates(me), not wide.told.row_at
            new = wide.not_from_row()
            own = self._tell(attempt, row, new, has=wide.told.row_prepared)
            actions += _with_reason(own, attempt) if is_first else own
            told |= set(row) if new else set()
            across = grid.across(me, lost)
            actions += self._tell_stand_ins(attempt, wide, across)
            far = tuple(dict.fromkeys((*across, *grid.across(me))))
            new = wide.from_outside()
            own = self._tell(attempt, far, new, has=wide.told.across_prepared)
            actions += _with_reason(own, attempt) if is_first else own
            told |= set(far) if new else set()
        wide.told.row_at = wide.told.across_at = len(wide.news)
        for leaf in self._leaves(attempt, wide, grid):
            actions += self._tell_leaf(attempt, wide, leaf)
        if me not in grid.places and grid.places:
            actions += self._tell_leaf(attempt, wide, self._host(attempt, wide, grid, attempt.me))
        return actions + self._tell_digest(attempt, wide, told)

    def _tell_stand_ins(self, attempt: Attempt, wide: Wide, across: Sequence[str]) -> Actions:
        """Tell the stand-ins of lost peers, which may not have told their rows."""
        before, wide.told.across_to = wide.told.across_to, frozenset(across)
        new = tuple(peer for peer in across if before and peer not in before)
        told = wide.news[: wide.told.across_at] if new else []
        items = [it.item for it in told if it.came_from is CameFrom.OUTSIDE]
        return _with_reason(self._tell(attempt, new, items), attempt)

    def _tell_leaf(self, attempt: Attempt, wide: Wide, leaf: str) -> Actions:
        is_first = not wide.told.leaf_at.get(leaf, 0)
        knows = Knows.NOTHING if is_first else Knows.VIEWS
        return self._tell(attempt, (leaf,), wide.for_leaf(leaf), with_proofs=is_first, knows=knows)

    def _tell_digest(self, attempt: Attempt, wide: Wide, told: set[str]) -> Actions:
        """Say that this peer knows all, where others wait for that."""
        mine = attempt.own_digest
        if wide.hasty or mine in ("", wide.told.digest_told):
            return []
        wide.told.digest_told = mine
        to = tuple(sorted(wide.neighbours - told))
        return [SendMessage(to, self._head(attempt))] if to else []

    def _tell(
        self,
        attempt: Attempt,
        to: Sequence[str],
        items: Iterable[Item],
        with_proofs: bool = False,
        knows: Knows = Knows.FELLOW,
        has: set[bytes] | None = None,
    ) -> Actions:
        """`has`: names of Prepared that they have been sent, to which what is sent now is added."""
        items, has = list(items), set[bytes]() if has is None else has
        if not to or not items:
            return []
        actions: Actions = []
        for number, part in enumerate(message_parts(items, self._size_of(attempt, has))):
            message = self._message(attempt, part, with_proofs and number == 0, knows)
            message = self._steps.add(message, has)
            actions.append(SendMessage(tuple(to), message))
        return actions

    def _message(
        self, attempt: Attempt, items: list[Item], with_proofs: bool, knows: Knows
    ) -> Spread:
        signed = [item for item in items if isinstance(item, Signed)]
        charges = tuple(item for item in items if isinstance(item, Charge))
        certificates = attempt.passed_on.certificates
        return msgspec.structs.replace(
            self._head(attempt),
            contributions=tuple(signed),
            bodies=self._bodies(attempt, signed, knows),
            accusations=charges,
            certificates=tuple(certificates.values()) if with_proofs else (),
            ready_sets=ready_sets(item for item in items if isinstance(item, Ready)),
        )

    def _head(self, attempt: Attempt) -> Spread:
        state = self._state
        round_, mine = attempt.digests.get(attempt.me, (0, ""))
        silent = attempt.evidence.absent_told(attempt.silent, attempt.members)
        number, planned, base = attempt.number, attempt.planned, attempt.base
        return Spread(state.me, number, planned, base, round_, mine, absent=silent)

    def _parts(self, attempt: Attempt, signed: Iterable[Signed]) -> list[Contribution]:
        """The contributions of which these are the outlines."""
        assert attempt.wide is not None
        makers = (attempt.wide.makers.get(item.peer_id) for item in signed)
        return [attempt.opened[member] for member in makers if member in attempt.opened]

    def _bodies(self, attempt: Attempt, signed: list[Signed], knows: Knows) -> Bodies:
        """What the outlines in `signed` name that may be news to the receivers."""
        if not signed:
            return Bodies()
        state, parts = self._state, self._parts(attempt, signed)
        newcomers, named = attempt.passed_on.newcomers, dict[Signed, None]()
        is_founding = attempt.only_newcomers
        for part in parts:
            joiners = () if is_founding else part.joiners
            named |= {newcomers[member]: None for member in joiners if member in newcomers}
        if knows is not Knows.FELLOW:
            found = state.others.bodies.bodies_of(parts)
            records = dict.fromkeys((*named, *found.records))
            if knows is Knows.VIEWS:
                return Bodies(tuple(records))
            return Bodies(tuple(records), found.views, found.plans)
        common = state.present_record_names
        own = [part for part in parts if record_name(part.record) not in common]
        records = dict.fromkeys((*named, *(part.record for part in own)))
        foreign = [p for p in parts if p.present is not None and p.present.view != state.view_id]
        found = state.others.bodies.bodies_of(foreign)
        return Bodies(tuple(records), found.views, found.plans)

    def _size_of(self, attempt: Attempt, has: Set[bytes]) -> Callable[[Item], int]:
        sizes, counted = dict[Item, int](), set(has)

        def size_of(item: Item) -> int:
            if not isinstance(item, Signed):
                return 256
            if item not in sizes:  # asked again where a message ends before it
                sizes[item] = sized(item)
            return sizes[item]

        def sized(item: Signed) -> int:
            parts, named = self._parts(attempt, [item]), attempt.passed_on.newcomers
            bodies = [part.record for part in parts]
            if not attempt.only_newcomers:
                bodies += [named[it] for part in parts for it in part.joiners if it in named]
            found, names = self._steps.of(item)
            size_bytes = len(item.payload) + 256
            if not names <= counted:
                bodies += [it for it in found.prepared if prepared_name(it) not in counted]
                size_bytes += len(encode(found.retained))
                counted.update(names)
            return size_bytes + sum(len(it.payload) + 128 for it in bodies)

        return size_of

    # repairing ------------------------------------------------------------------------------------

    def repair(self, attempt: Attempt, now_ns: int) -> Actions:
        """Nothing was sent for a while: ask again for what has been lost on its way."""
        wide = attempt.wide
        assert wide is not None
        wide.repairs += 1
        wide.told.digest_told = ""
        actions = self.flush(attempt, now_ns)
        wants, wants_ready = _lacking(attempt)
        asked = self._asked(attempt, wide)
        first: list[Item] = [attempt.known[attempt.me]]  # by it others may take part
        if asked and (wants or wants_ready or not wide.hasty):
            head = self._message(attempt, first, with_proofs=False, knows=Knows.NOTHING)
            head = self._steps.add(head, set())
            asking = msgspec.structs.replace(head, wants=wants, wants_ready=wants_ready)
            actions += _with_reason([SendMessage(asked, asking)], attempt)
        # peers that have not been heard, and that hear of the attempt from their neighbours only
        unheard = {peer for peer in wants if peer in wide.neighbours and peer not in asked}
        told = self._tell(attempt, sorted(unheard), first, with_proofs=True)
        actions += _with_reason(told, attempt)
        return actions + self._tell_disputed(attempt, wide)

    def _tell_disputed(self, attempt: Attempt, wide: Wide) -> Actions:
        """Tell neighbours that do not say the same what is in dispute, others each time. Nobody
        asks for a lost accusation, nor for the contribution of one that it can do without."""
        behind = [] if attempt.is_waiting else sorted(m.peer_id for m in attempt.dissenting)
        if attempt.snapshot is not None or not behind:
            return []
        begin = wide.repairs * ASKED_AT_ONCE
        chosen = {behind[(begin + n) % len(behind)] for n in range(ASKED_AT_ONCE)}
        doubted = {charge.of for charge in attempt.charges}
        items: list[Item] = [s for m, s in attempt.known.items() if m in doubted]
        items += [*attempt.set_aside.contradicted.values(), *attempt.charges.values()]
        return self._tell(attempt, sorted(chosen), items, knows=Knows.NOTHING)

    def _asked(self, attempt: Attempt, wide: Wide) -> tuple[str, ...]:
        """Neighbours to ask, others each time; for a peer without a place, a host."""
        grid, lost, me = self.place(attempt, wide), self._lost(attempt), attempt.me.peer_id
        if me not in grid.places:
            return (self._host(attempt, wide, grid, attempt.me),) if grid.places else ()
        ways = [it for it in (grid.across(me, lost), grid.row_mates(me, lost)) if it]
        ways = ways or [it for it in (grid.across(me), grid.row_mates(me)) if it]
        return tuple(it[wide.repairs % len(it)] for it in ways[:ASKED_AT_ONCE])

    def answer(self, attempt: Attempt, message: Spread) -> Actions:
        """What somebody asks for, as far as this peer has it."""
        wants, wants_ready = set(message.wants), set(message.wants_ready)
        items: list[Item] = [s for m, s in attempt.known.items() if m.peer_id in wants]
        items += [r for m, r in attempt.ready.items() if m.peer_id in wants_ready]
        items += [said for it, said in attempt.charges.items() if it.of.peer_id in wants]
        to = (message.sender.peer_id,)
        return self._tell(attempt, to, items, with_proofs=bool(wants), knows=Knows.NOTHING)


def _lacking(attempt: Attempt) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those whose contribution this peer lacks, and those whose Ready it lacks."""
    if attempt.snapshot is None:
        return tuple(sorted(member.peer_id for member in attempt.waits_for)), ()
    due = attempt.snapshot.contributors if attempt.plan is not None else ()
    return (), tuple(member.peer_id for member in due if member not in attempt.ready)


def _with_reason(told: Actions, attempt: Attempt) -> Actions:
    """The messages `told`, the first with the outline by which this peer takes part. A peer whose
    own outline comes alone is taken for the one that stopped the steps (`possible_openers`). Others
    bring what that outline names."""
    if attempt.planned or attempt.only_newcomers or not told:
        return told
    [first, *rest] = told
    assert isinstance(first, SendMessage) and isinstance(first.message, Spread)
    signed = [attempt.known[it] for it in islice(attempt.known, 2) if it != attempt.me]
    brought = tuple(dict.fromkeys((*first.message.contributions, *signed)))
    message = msgspec.structs.replace(first.message, contributions=brought)
    return [SendMessage(first.to, message), *rest]


def _goes_on(news: News) -> bool:
    """Whether news goes on. A charge does: it may be against a peer that was to pass on news."""
    return news.came_from is not CameFrom.ROW or isinstance(news.item, Charge)


def ready_sets(ready: Iterable[Ready]) -> tuple[ReadySet, ...]:
    """The Ready in sets that say the same; of too many sets those with most in them. Whoever takes
    part may say what nobody else does, and would otherwise crowd out the rest."""
    alike: dict[tuple[object, ...], list[Ready]] = {}
    for item in ready:
        key = item.view, item.plan_digest, item.members_digest
        alike.setdefault(key, []).append(item)
    return tuple(
        ReadySet(
            said[0].view,
            said[0].plan_digest,
            said[0].members_digest,
            tuple((item.sender, item.signature) for item in said),
        )
        for said in fullest(alike.values(), READY_SETS_LIMIT)
    )
