"""One attempt at a view: what has been gathered so far, and what follows from it."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from p2p_dtfm.core.commit.judgement import Conflict
from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.consensus.attempts.attempt_parts import (
    AttemptClock,
    Evidence,
    PassedOn,
    SetAside,
)
from p2p_dtfm.core.consensus.attempts.chosen import Chosen, chosen_of
from p2p_dtfm.core.consensus.attempts.outcome import Outcome
from p2p_dtfm.core.consensus.attempts.wide import Wide
from p2p_dtfm.core.membership.eligibility import (
    named_newcomers,
    still_counting,
    unanswered,
    universe,
    without_newcomers_in_doubt,
)
from p2p_dtfm.core.messages.agreement_messages import (
    Accusation,
    Charge,
    Contribution,
    Gather,
    Ready,
    knowledge_digest,
)
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, Snapshot, ViewId
from p2p_dtfm.core.recovery.furthest_step import FurthestStep
from p2p_dtfm.core.recovery.restart_point import recover


@dataclass
class Attempt:
    """`known` holds contributions as signed, `opened` the same ones decoded."""

    me: Member
    number: int
    planned: bool
    base: ViewId
    layer_count: int
    terms: StepTerms | None = None
    clock: AttemptClock = field(default_factory=AttemptClock)
    known: dict[Member, Signed] = field(default_factory=dict)
    opened: dict[Member, Contribution] = field(default_factory=dict)
    set_aside: SetAside = field(default_factory=SetAside)
    evidence: Evidence = field(default_factory=Evidence)
    digests: dict[Member, tuple[int, str]] = field(default_factory=dict)
    """Of each member: its newest round, and the digest of what it knew then."""
    passed_on: PassedOn = field(default_factory=PassedOn)
    outcome: Outcome = field(default_factory=Outcome)
    _cache: dict[str, tuple[object, object]] = field(default_factory=dict)

    @property
    def wide(self) -> Wide | None:
        """What is passed on along the overlay; None in a small swarm."""
        return self.passed_on.wide

    @property
    def snapshot(self) -> Snapshot | None:
        """The frozen knowledge; None while it is gathered."""
        return self.outcome.snapshot

    @property
    def plan(self) -> Plan | NoPlan | None:
        """The plan of the snapshot; None while it is computed."""
        return self.outcome.plan

    @property
    def ready(self) -> dict[Member, Ready]:
        """What each member has said as its Ready, to whatever view."""
        return self.outcome.ready

    @property
    def charges(self) -> dict[Accusation, Charge]:
        return self.evidence.charges

    @property
    def round(self) -> int:
        """How often this peer has said that it knows more; 0 before it has said anything."""
        return self.digests.get(self.me, (0, ""))[0]

    @property
    def own_digest(self) -> str:
        """Digest of what this peer has last said that it knows."""
        return self.digests[self.me][1]

    def next_round(self) -> None:
        """This peer says what it knows now."""
        is_told = self.wide is None or not self.is_waiting
        self.digests[self.me] = (self.round + 1, self.digest if is_told else "")

    def add(self, signed: Signed, contribution: Contribution) -> None:
        keeps, count = self._is_named_already(contribution), len(self.opened)
        if contribution.present is not None:
            self._cache["has_members"] = (None, None)
        self.opened[contribution.member] = contribution
        self.known[contribution.member] = signed
        if keeps:  # the contribution names nobody who is not named already
            sizes = len(self.opened), len(self.set_aside.contradicted)
            self._cache["universe"] = (sizes, self._cache["universe"][1])
            members = self._cache.get("members")
            if members is not None and members[0] == (count, sizes[1]) and members[1]:
                self._cache["members"] = (sizes, members[1])

    def _is_named_already(self, part: Contribution) -> bool:
        held, first = self._cache.get("universe"), self._cache.get("present")
        sizes = len(self.opened), len(self.set_aside.contradicted)
        if part.present is not None and first is None:
            self._cache["present"] = (part.present.members, None)
        if held is None or held[0] != sizes or part.member in self.opened:
            return False
        assert isinstance(held[1], frozenset)
        here = part.present.members if part.present is not None else None
        is_known = here is None or (first is not None and first[0] is here)
        if not is_known or part.member not in held[1]:
            return False
        return held[1].issuperset(part.joiners) or self._names_more(part, sizes)

    def _names_more(self, part: Contribution, sizes: tuple[int, int]) -> bool:
        """Whether all that the contribution adds is newcomers of whom no other life is named. If so
        they are added to those that must answer."""
        new, named_ids = set(part.joiners) - self.universe, self.awaited_ids
        new_ids = {member.peer_id for member in new}
        is_plain = len(new_ids) == len(new) and named_ids.isdisjoint(new_ids)
        if part.present is None or not self.planned or not is_plain:
            return False
        named = self.universe | new
        self._cache["universe"] = (sizes, named)
        self._cache["awaited_ids"] = (named, named_ids | new_ids)
        return True

    def park(self, signed: Signed, contribution: Contribution) -> None:
        """Keep a contribution until somebody names its contributor."""
        self.set_aside.park(signed, contribution, is_wide=self.wide is not None)

    def learn_absent(self, by: Member, silent: Iterable[Member]) -> None:
        """`by` says that it has not heard the `silent` before the deadline.

        Steps go on in a planned attempt, so nobody gives up a member for silence there. Whoever
        calls one silent, be it a newcomer, makes it up.
        """
        spared = self.members if self.planned else set()
        for member in self.universe & set(silent) - spared:
            self.evidence.called_absent.setdefault(member, set()).add(by)

    def believe_absent(self, has_waited: Callable[[Member], bool]) -> bool:
        """Hold those for absent that most of those heard call silent, and those that one calls
        silent and this peer has waited for, too. True if that is news."""
        if not self.evidence.called_absent:
            return False
        heard = self.universe & set(self.opened)  # of a peer with two lives the newer one
        news = {
            member
            for member, by in self.evidence.called_absent.items()
            if member not in self.evidence.absent
            and member not in self.opened
            and (has_waited(member) or 2 * len(by & heard) > len(heard))
        }
        self.evidence.absent |= news
        return bool(news)

    @property
    def accusations(self) -> set[Accusation]:
        return set(self.charges)

    @property
    def digest(self) -> str:
        """Digest of what a view would follow from; while somebody is waited for, of all that is
        known.

        Once nobody else is waited for, the word of those that are left out does not count.
        Otherwise they could say something late, to one member after another, and keep the rest from
        knowing the same.
        """
        named = self.universe
        if not self.is_waiting:
            chosen = {member: self.known[member] for member in self.participants}
            return knowledge_digest(self.number, chosen, set(named - chosen.keys()))
        counted = [item for item in self.charges if item.by in named and item.of in named]
        known = self.known | {member: _nothing(member) for member in self.set_aside.contradicted}
        return knowledge_digest(self.number, known, self.silent, counted)

    @property
    def silent(self) -> set[Member]:
        """Members held for absent that have not answered after all. One that has answered does not
        count any more: others may never have held it for absent."""
        return (self.evidence.absent & self.universe) - set(self.opened)

    @property
    def universe(self) -> frozenset[Member]:
        """All who must answer."""
        contradicted = self.set_aside.contradicted
        held, sizes = self._cache.get("universe"), (len(self.opened), len(contradicted))
        if held is None or held[0] != sizes:
            counted = self._uncontradicted
            if contradicted and not self.only_newcomers:
                counted = still_counting(counted, self.me, self.planned)
            held = self._cache["universe"] = (sizes, universe(counted, self.planned))
        assert isinstance(held[1], frozenset)
        return held[1]

    @property
    def _uncontradicted(self) -> dict[Member, Contribution]:
        gone = self.set_aside.contradicted
        return {m: it for m, it in self.opened.items() if m not in gone} if gone else self.opened

    @property
    def heard(self) -> dict[Member, Contribution]:
        """The contributions of those that must answer."""
        return {member: self.opened[member] for member in self.universe & self.opened.keys()}

    @property
    def awaited_ids(self) -> frozenset[str]:
        """Peer ids of all who must answer."""
        named = self.universe
        held = self._cache.get("awaited_ids")
        if held is None or held[0] is not named:
            held = self._cache["awaited_ids"] = (named, frozenset(m.peer_id for m in named))
        assert isinstance(held[1], frozenset)
        return held[1]

    @property
    def others(self) -> tuple[str, ...]:
        """Peer ids of all others that must answer: this peer sends to them."""
        return tuple(sorted(m.peer_id for m in self.universe if m.peer_id != self.me.peer_id))

    @property
    def waits_for(self) -> set[Member]:
        """Those whose contribution is still waited for."""
        watchers = self.wide.watchers if self.wide is not None else None
        absent, charges = self.evidence.absent, self.charges
        return unanswered(self.universe, self.known, absent, charges, watchers)

    @property
    def is_waiting(self) -> bool:
        """Whether this peer waits for any contribution; told at once where it waits for many."""
        excused = len(self.evidence.absent) + len(self.charges)
        is_far = self.wide is not None and len(self.universe) - len(self.known) > excused
        return is_far or bool(self.waits_for)

    @property
    def members(self) -> set[Member]:
        """All members of the views that contributors are in."""
        held = self._cache.get("members")
        sizes = len(self.opened), len(self.set_aside.contradicted)
        if held is None or held[0] != sizes:
            parts = self._uncontradicted.values()
            views = {part.present.view: part.present for part in parts if part.present}
            found = {member for view in views.values() for member in view.members}
            held = self._cache["members"] = (sizes, found)
        assert isinstance(held[1], set)
        return held[1]

    @property
    def named_newcomers(self) -> set[Member]:
        return named_newcomers(self._uncontradicted, self.planned)

    @property
    def dissenting(self) -> tuple[Member, ...]:
        """Participants that do not say that they know what this peer knows, unless most have
        frozen just that: each of these has heard it from all. Else one could say otherwise to this
        peer alone, for whose Ready all others would wait. Who has said nothing may not be heard at
        all: a view in which two members do not hear each other would not last."""
        mine, due = self.own_digest, self.participants
        if self.wide is not None:
            near = () if self.wide.hasty else self.wide.neighbours
            due = tuple(member for member in due if member.peer_id in near)
        left = tuple(m for m in due if self.digests.get(m, (0, ""))[1] != mine)
        says_otherwise = left and self.wide is None and all(m in self.digests for m in left)
        return () if says_otherwise and self._most_have_frozen(set(left)) else left

    def _most_have_frozen(self, unlike: set[Member]) -> bool:
        """Whether more than half of the others have said Ready and know what this peer knows. They
        do not all lie, so nobody can know more and not be late. Newcomers that members let in do
        not count: keys are made for nothing."""
        deciding = [it for it in self.participants if self.opened[it].present is not None]
        others = [it for it in deciding or self.participants if it != self.me]
        return 2 * sum(it in self.ready and it not in unlike for it in others) > len(others)

    @property
    def participants(self) -> tuple[Member, ...]:
        """Those of the contributors that can be in one view together."""
        return self.judged.participants

    @property
    def distrust(self) -> Conflict:
        """What the contributions say against their makers."""
        return self.judged.conflict

    @property
    def judged(self) -> Chosen:
        sizes = len(self.opened), len(self.charges), len(self.set_aside.contradicted)
        held = self._cache.get("participants")
        if held is None or held[0] != sizes:
            counted = self.opened.keys() - self.set_aside.contradicted.keys()
            heard, links = {m: self.opened[m] for m in self.universe & counted}, self.accusations
            if self.planned:
                heard, links = without_newcomers_in_doubt(heard, links)
            of_rest = self._reached_step, self._bounds
            chosen = chosen_of(heard, self.terms, links, *of_rest, planned=self.planned)
            held = self._cache["participants"] = (sizes, chosen)
        assert isinstance(held[1], Chosen)
        return held[1]

    def _reached_step(self, parts: list[Contribution]) -> int:
        target = recover(parts, self.layer_count, self.terms).target
        return -1 if target is None else target.step

    def _bounds(self, parts: Collection[Contribution]) -> FurthestStep:
        return FurthestStep(parts, self.layer_count, self.terms)

    @property
    def only_newcomers(self) -> bool:
        return "has_members" not in self._cache

    @property
    def has_lost_members(self) -> bool:
        """Whether members have taken part, and none of them is a participant any more.

        The newcomers may only be cut off from them, and do not go on by themselves while there are
        members.
        """
        left = any(self.opened[member].present is not None for member in self.participants)
        return not left and not self.only_newcomers

    def same_as(self, peer_ids: Iterable[str]) -> tuple[str, ...]:
        """Those of the peers that are known to know what this peer knows."""
        mine = self.own_digest
        same = {m.peer_id for m in self.universe if self.digests.get(m, (0, ""))[1] == mine}
        return tuple(peer_id for peer_id in peer_ids if peer_id in same)

    @property
    def kept_out(self) -> tuple[Member, ...]:
        """Those that asked to be let in, or answered, and yet are no participants."""
        asked = {joiner for part in self.opened.values() for joiner in part.joiners}
        return tuple(sorted((asked | set(self.opened)) & self.universe - set(self.participants)))

    def gather(self) -> Gather:
        """A Gather without contributions, for those that have them: it says what this peer knows by
        its digest."""
        return Gather(
            sender=self.me,
            number=self.number,
            planned=self.planned,
            base=self.base,
            round=self.round,
            contributions=(),
            absent=self.evidence.absent_told(self.silent, self.members),
            digest=self.own_digest,
            accusations=self.evidence.told(self.me, self.members),
        )

    @property
    def settled(self) -> bool:
        """Every participant knows the same, and nobody else is waited for."""
        return not self.is_waiting and not self.dissenting

    @property
    def sources(self) -> set[ViewId]:
        """The views that the contributors of the snapshot come from."""
        return {part.present.view for part in self.counted if part.present is not None}

    @property
    def counted(self) -> list[Contribution]:
        """The contributions that the snapshot counts."""
        assert self.snapshot is not None
        return [self.opened[member] for member in self.snapshot.contributors]


def _nothing(member: Member) -> Signed:
    """Counts in place of two contributions that one member has signed."""
    return Signed(member.peer_id, "", b"", b"")
