"""What was claimed and found in the steps of one view, as one member has heard it."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from p2p_dtfm.core.audit.accounts import fault_of_claim
from p2p_dtfm.core.audit.boundaries import TRAINING, Due, unlike_boundaries
from p2p_dtfm.core.audit.draw import drawn_in_rounds, drawn_watched, rate_in_force, seed_of
from p2p_dtfm.core.audit.earlier_claims import StoppedStep, WayOfWork, way_of
from p2p_dtfm.core.audit.judging import FEWEST_JUDGES, Judges, judged_for_norms, judges_of
from p2p_dtfm.core.audit.roles import watched
from p2p_dtfm.core.audit.told_losses import unlike_losses
from p2p_dtfm.core.audit.work import (
    NO_MICROBATCH_LIMIT,
    OWN_BYTES,
    WORK_BYTES,
    has_layers_of,
    heard_claim,
    require_signed,
    unlike_norms,
    unlike_parts,
)
from p2p_dtfm.core.messages.audit_messages import (
    AUDITS_LIMIT,
    COULD_NOT,
    UNLIKE_LIMIT,
    Audited,
    Claimed,
    HeardAudit,
    HeardClaim,
    Share,
    ShownClaims,
    auditor_and_audited,
    is_audit_by,
    is_claim_of,
)
from p2p_dtfm.core.messages.prepared import STEPS_AHEAD_LIMIT
from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Verify
from p2p_dtfm.core.protocol.snapshot import Bar, ViewId

ALL_MILLIONTHS = 1_000_000


def always_training(step: int) -> Due | None:
    return TRAINING


def commitment_to(opening: bytes) -> bytes:
    return bytes.fromhex(digest_bytes(b"opening\0" + opening))


@dataclass
class _Step:
    claims: dict[str, Claimed] = field(default_factory=dict)
    audited: dict[tuple[str, str], bytes] = field(default_factory=dict)
    """By (auditor, maker of the work): what the auditor has said of it."""
    signatures: dict[tuple[str, str], bytes] = field(default_factory=dict)
    """By the same keys: the auditor's signature."""
    unlike_audits: dict[tuple[str, str], tuple[bytes, bytes]] = field(default_factory=dict)
    """What else the auditor has said of that work, and its signature."""
    shown: dict[str, HeardClaim] = field(default_factory=dict)
    """Claims that others show, of peers whose own has not come here yet."""
    unlike: dict[str, HeardClaim] = field(default_factory=dict)
    """By peer: another claim that it has signed than the one that came here."""

    def knows(self, named: tuple[str, str], work: bytes) -> bool:
        """Whether this word of the auditor is known here, or that it has said two things."""
        return named in self.unlike_audits or self.audited.get(named) == work

    def hear(self, named: tuple[str, str], work: bytes, signature: bytes) -> None:
        if named in self.audited:
            self.unlike_audits[named] = work, signature
        else:
            self.audited[named], self.signatures[named] = work, signature


class ClaimBook:
    """Of one view. `step_begins` forgets earlier steps, but for commitments and ways of work."""

    def __init__(
        self,
        view: ViewId,
        plan: Plan,
        rate_millionths: int,
        kept_microbatches: int = NO_MICROBATCH_LIMIT,
        bars: tuple[Bar, ...] = (),
        due: Callable[[int], Due | None] = always_training,
    ) -> None:
        """`bars` of the view's snapshot say who is watched. `due(step)`: what is claimed of that
        step; None if nothing is."""
        self.view = view
        self._due = due
        self._bars = bars
        self._kept_microbatches = kept_microbatches
        self._plan = plan
        self._segments = plan.segments()
        self._holders = frozenset(plan.stage_holders())
        self._rate = rate_millionths
        self._step = 0
        self._steps: dict[int, _Step] = {}
        self._commitments: dict[str, bytes] = {}
        self._ways: dict[str, WayOfWork] = {}
        """By peer: the way in which it computed last."""
        self.untold: set[tuple[str, str]] = set()
        """(peer, maker): in some step the peer long lacked the maker's claim, which was here."""
        self.sums: Mapping[str, bytes] = {}
        """Of the open step: `work.sums_of_others`, once this peer has claimed."""
        self._draw: dict[str, str] | None = None
        self._besides: tuple[dict[str, str], ...] = ()

    def step_begins(self, step: int) -> None:
        """The step before has committed, if it was in this view."""
        if step == self._step:
            return
        before = self._steps.get(step - 1)
        claims = before.claims if before is not None else {}
        self._commitments = {peer: claim.commitment for peer, claim in claims.items()}
        self._ways |= {peer: way_of(claim.share) for peer, claim in claims.items()}
        self._step, self._draw, self.sums = step, None, {}
        self._steps = {n: kept for n, kept in self._steps.items() if n >= step}

    def record(self, sender: str, said: Claimed | Audited) -> None:
        """Takes a claim or an audit; late ones are ignored. Raises `PeerFault`."""
        if sender not in self._holders:
            raise PeerFault(f"a {type(said).__name__} from a peer without a stage", sender)
        if said.step < self._step:
            return
        if said.step >= self._step + STEPS_AHEAD_LIMIT:
            raise PeerFault(f"claims step {said.step} while step {self._step} is open", sender)
        if isinstance(said, Claimed):
            self._claimed(sender, said)
        else:
            self._audited(sender, said)

    def _claimed(self, sender: str, said: Claimed) -> None:
        due = self._due(said.step)
        if due is None:
            raise PeerFault(f"a claim of step {said.step}, of which nothing is claimed", sender)
        fault = fault_of_claim(said, self._plan, self._segments, sender, due)
        if fault:
            raise PeerFault(fault, sender)
        here = self._at(said.step)
        if here.claims.setdefault(sender, said) != said:
            if (heard := heard_claim(said)).claim != heard_claim(here.claims[sender]).claim:
                here.unlike.setdefault(sender, heard)
            raise PeerFault(f"two different claims of step {said.step}", sender)
        shown = here.shown.pop(sender, None)
        if shown is not None and shown.claim != heard_claim(said).claim:
            here.unlike[sender] = shown

    def _audited(self, sender: str, said: Audited) -> None:
        if said.peer_id not in self._holders or len(said.work) not in (0, WORK_BYTES):
            raise PeerFault("an audit of nobody's work", sender)
        here, named = self._at(said.step), (sender, said.peer_id)
        if not here.knows(named, said.work):
            here.hear(named, said.work, said.signature)

    def show(self, sender: str, said: ShownClaims, verify: Verify) -> None:
        """Takes what another member has heard. Raises `PeerFault`."""
        if sender not in self._holders or not said.heard.keys() <= self._holders:
            raise PeerFault("claims of peers without a stage, or shown by one", sender)
        if not self._step <= said.step < self._step + STEPS_AHEAD_LIMIT:
            return
        here = self._at(said.step)
        for peer_id, shown in sorted(said.heard.items()):
            held = here.claims.get(peer_id)
            is_known = held is not None and shown.claim == heard_claim(held).claim
            if is_known or peer_id in here.unlike or here.shown.get(peer_id) == shown:
                continue
            if not is_claim_of(peer_id, said.view, said.step, shown, verify):
                raise PeerFault("shows a claim that its maker has not signed", sender)
            (here.shown if held is None else here.unlike)[peer_id] = shown
        self._show_audits(sender, said, here, verify)
        for peer_id, claim in said.whole.items():
            if peer_id not in here.claims and (claim.view, claim.step) == (self.view, said.step):
                require_signed(claim, peer_id, verify)
                self.record(peer_id, claim)

    def _show_audits(self, sender: str, said: ShownClaims, here: _Step, verify: Verify) -> None:
        """What an auditor has told `sender` alone counts as told to this peer as well."""
        if len(said.audits) > AUDITS_LIMIT:
            raise PeerFault(f"shows {len(said.audits)} audits", sender)
        holders = sorted(self._holders)
        for audit in said.audits:
            named = auditor_and_audited(audit, holders)
            if named is None or len(audit.work) not in (0, WORK_BYTES):
                raise PeerFault("shows an audit of nobody's work", sender)
            if here.knows(named, audit.work):
                continue
            if not is_audit_by(named[0], said.view, said.step, named[1], audit, verify):
                raise PeerFault("shows an audit that its maker has not signed", sender)
            here.hear(named, audit.work, audit.signature)

    def lacks_audits(self, said: ShownClaims, secret: bytes) -> tuple[HeardAudit, ...]:
        """The audits that this peer has heard and the sender of `said` has not."""
        if said.step != self._step or said.heard.keys() != self._holders:
            return ()
        shown = {(audit.by, audit.of) for audit in said.audits}
        return tuple(it for it in self.heard_audits(secret) if (it.by, it.of) not in shown)

    def unlike(self) -> dict[str, HeardClaim]:
        """By peer that has claimed two things of the open step: the claim that did not come here.
        Of many only some are given: each that goes now is one less in the next step."""
        return dict(sorted(self._at(self._step).unlike.items())[:UNLIKE_LIMIT])

    def contradicted(self) -> frozenset[str | tuple[str, str]]:
        """Peers of whom two claims of the open step are known here. Once audits can be shown, also
        (auditor, maker) where the auditor has said two things of that maker's work."""
        here = self._at(self._step)
        return frozenset([*here.unlike, *(() if self.not_claimed() else here.unlike_audits)])

    def heard_audits(self, secret: bytes) -> tuple[HeardAudit, ...]:
        """What drawn auditors have said, as an account has it. Where one has said two things of a
        work both are given, for some such works. If room is short doubts come first, then others
        by chance. The `secret` keeps that chance unknown: else an auditor that says unlike things
        would know who passes on neither."""
        if self.not_claimed():
            return ()
        here, place = self._at(self._step), {it: n for n, it in enumerate(sorted(self._holders))}
        due = {it for drawn in (*self.rounds(), *self.drawn_instead()) for it in drawn.items()}
        unlike = sorted(here.unlike_audits)[:UNLIKE_LIMIT]

        def turn(named: tuple[str, str]) -> tuple[bool, str]:
            as_claimed = here.audited[named] == self.claims[named[1]].work
            return as_claimed, digest_bytes(encode([secret, named]))

        drawn = [(by, peer) for peer, by in due if (by, peer) in here.audited]
        others = sorted({*drawn} - {*unlike}, key=turn)[: AUDITS_LIMIT - 2 * len(unlike)]
        said = [(it, here.audited[it], here.signatures[it]) for it in (*unlike, *sorted(others))]
        said += [(it, *here.unlike_audits[it]) for it in unlike]
        return tuple(HeardAudit(place[by], place[of], *more) for (by, of), *more in said)

    def _at(self, step: int) -> _Step:
        return self._steps.setdefault(step, _Step())

    # of the open step ---------------------------------------------------------------------------

    @property
    def claims(self) -> Mapping[str, Claimed]:
        return self._at(self._step).claims

    def not_claimed(self) -> tuple[str, ...]:
        """The stage-holders whose claim has not come."""
        return tuple(peer for peer in self._plan.stage_holders() if peer not in self.claims)

    def has_committed(self, peer_id: str) -> bool:
        """Whether the peer committed itself in its claim of the step before, of this view."""
        return peer_id in self._commitments

    def false_openings(self) -> dict[str, str]:
        """By peer that opens what it has not committed itself to: why that is known."""
        return {
            peer: "an opening that is not what its claim before was committed to"
            for peer, claim in self.claims.items()
            if peer in self._commitments and commitment_to(claim.opening) != self._commitments[peer]
        }

    def impossible(self) -> dict[str, str]:
        """By peer whose claim no honest one makes: why. To change to the arithmetic of others could
        make that the one of most, by turns, and have honest ones left out for theirs."""
        names, why = self.arithmetics(), "another arithmetic than its claim before named"
        counts = Counter(filter(None, names.values()))
        changed = {it: why for it in self._named_others() if counts[names[it]] > 1}
        return changed | self.false_openings()

    def drawn(self) -> dict[str, str]:
        """By audited peer its auditor, once all have claimed.

        In a view's first step nobody has committed itself yet, so all are audited: withholding an
        opening brings such a step about. Several audit each (`rounds`), as the last to speak there
        chooses the draw. A sender is always audited if a neighbour says that it got other tensors
        from it, or somebody other losses. That neighbour is not: there is no input for its work.
        Newcomers are drawn more often (`roles`), and for a while after a verdict everybody is.
        After the last step all are audited, by several as well. That result is the number by which
        a run is known, there is only one, and a liar has no step to lose. The last to claim would
        lie if its colluder is drawn for it: no frame goes from it that could tell of its loss.
        """
        assert not self.not_claimed()
        if self._draw is None:
            is_chosen = not (self._holders <= self._commitments.keys() and self._open.trains)
            seed = self._seed()
            rate = rate_in_force(self._rate, self._bars, self._step)
            rate = ALL_MILLIONTHS if is_chosen else rate
            unlike = unlike_boundaries(self._shares(), self._plan, self._open)
            always = {sender for _, sender in unlike | unlike_losses(self._shares())}
            always |= drawn_watched(seed, watched(self._bars, self._step))
            judges = {it: self._judges_of(it).all for it in self._plan.stage_holders()}
            misled = {receiver for receiver, _ in unlike}
            self._draw, self._besides = drawn_in_rounds(
                seed, self._plan, judges.__getitem__, rate, always, misled, is_chosen=is_chosen
            )
        return self._draw

    def _seed(self) -> str:
        openings = {peer: claim.opening for peer, claim in self.claims.items()}
        return seed_of(f"{self.view.number}:{self.view.snapshot}", self._step, openings)

    def rounds(self) -> tuple[dict[str, str], ...]:
        """`drawn`, and in a view's first step and after the last step further auditors of the same
        works. A liar may have chosen the first ones by what it opens, or its word by who it knows
        is drawn. But it has fewer colluders than there are auditors."""
        return (self.drawn(), *self._besides)

    def _judges_of(self, peer_id: str) -> Judges:
        return judges_of(peer_id, self._plan, self._shares(), self._kept_microbatches)

    def _shares(self) -> dict[str, Share]:
        return {peer: claim.share for peer, claim in self.claims.items()}

    def arithmetics(self) -> dict[str, str]:
        return {peer: claim.share.arithmetic for peer, claim in self.claims.items()}

    def not_audited(self) -> tuple[str, ...]:
        """Auditors that have not said what they have found, of the first draw that has any. Draws
        instead of others come last."""
        late = [self.silent(drawn) for drawn in (*self.rounds(), *self.drawn_instead())]
        return next(filter(None, late), ())

    def silent(self, drawn: Mapping[str, str]) -> tuple[str, ...]:
        """The auditors in `drawn` (by maker) that have said nothing. Nobody is waited for once
        somebody is shown to have claimed two things, or said two of a work: other members may have
        drawn other auditors, and wait for this peer."""
        here = self._at(self._step)
        if here.unlike or here.unlike_audits:
            return ()
        return tuple(sorted({by for peer, by in drawn.items() if (by, peer) not in here.audited}))

    def drawn_instead(self) -> tuple[dict[str, str], ...]:
        """Holders of a stage that audit it where auditors with other layers could not, as for lack
        of room. Once all drawn have spoken, each of these is replaced by a holder that does not
        audit the work already. Else whoever chooses the draw, and has heard who has no room, could
        have nobody audit a work, or colluders alone."""
        rounds, audited = self.rounds(), self._at(self._step).audited
        if any(self.silent(drawn) for drawn in rounds):
            return ()
        found: tuple[dict[str, str], ...] = tuple({} for _ in rounds)
        for peer in self.drawn():
            auditors = [drawn[peer] for drawn in rounds if peer in drawn]
            failed = [it for it in auditors if audited.get((it, peer)) == COULD_NOT]
            if not failed:
                continue
            judges = self._judges_of(peer)
            free = sorted(set(judges.holders).difference(auditors), key=self._turn_instead(peer))
            lacking = [it for it in failed if it not in judges.holders]
            for instead, by, _ in zip(found, free, lacking, strict=False):
                instead[peer] = by
        return tuple(filter(None, found))

    def _turn_instead(self, peer_id: str) -> Callable[[str], str]:
        """The holders' order, which nobody knows, like the draw, until all have claimed."""
        seed = self._seed()
        return lambda it: digest_bytes(f"{seed} {peer_id} {it}".encode())

    def borrowers(self) -> Counter[str]:
        """By judge: how many works it is to judge of stages that it does not hold."""
        found: Counter[str] = Counter()
        if self.not_claimed():
            return found
        for peer, by in (it for drawn in self.rounds() for it in drawn.items()):
            found[by] += by in self._judges_of(peer).lent
        for judge, makers in self.disputes().items():
            found.update(judge for it in makers if judge in self._judges_of(it).lent)
        return found

    def disputes(self) -> dict[str, tuple[str, ...]]:
        """By judge: whose disputed works it computes again, without those it was drawn for."""
        found: dict[str, tuple[str, ...]] = {}
        for peer in () if self.not_claimed() or self.not_audited() else self.disputed():
            drawn = {by for each in self.rounds() for by in (each.get(peer),)}
            for judge in self._judges_of(peer).all:
                if judge not in drawn:
                    found[judge] = (*found.get(judge, ()), peer)
        return found

    def disputed(self) -> list[str]:
        """Makers whose auditor comes to something else than what was claimed. Also some makers of
        whose sums others claim another norm: most holders may lie together, so all are to look."""
        here = self._at(self._step)
        draws = (*self.rounds(), *self.drawn_instead())
        said = [it for drawn in draws for it in drawn.items()]
        alike = {peer: (COULD_NOT, self.claims[peer].work) for peer, _ in said}
        found = {(peer, here.audited.get((by, peer), COULD_NOT)) for peer, by in said}
        found |= {(peer, work) for (_, peer), (work, _) in here.unlike_audits.items()}
        doubted = {peer for peer, work in found if work not in alike.get(peer, (work,))}
        return sorted(doubted | self.unlike_norms())

    def unlike_norms(self) -> set[str]:
        """Makers whose work is computed again, as others state another norm of their sums."""
        shares = self._shares()
        if not (unlike := unlike_norms(shares, self._segments)):
            return set()
        able = {it for _, it in unlike if len(self._judges_of(it).all) >= FEWEST_JUDGES - 1}
        misled = {it for it, _ in unlike_boundaries(shares, self._plan, self._open)}
        return judged_for_norms(unlike, able - misled - self.misled(), self._seed())

    def stopped(self, me: str, base: str) -> StoppedStep:
        """The open step, once the view is over."""
        waiting = self._not_judged() | self._named_others()
        ways = self._ways | {peer: way_of(claim.share) for peer, claim in self.claims.items()}
        of_it = me, self._step, base, self._plan, dict(self.claims), frozenset(waiting)
        earlier, due = dict(self._ways), self._open
        return StoppedStep(*of_it, ways, earlier, sums=self.sums, due=due)

    def _not_judged(self) -> set[str]:
        """Makers whose work of the open step a drawn auditor has not confirmed. All holders, if one
        claim alone is missing, as its maker knew the draw. All holders, too, if an opening is
        false: by it anything may be drawn, or nobody, and that may be for a colluder's sake."""
        missing, audited, claims = self.not_claimed(), self._at(self._step).audited, self.claims
        if len(missing) == 1 or self.false_openings():
            return {*self._holders}
        if missing:
            return set()
        drawn = (it for each in self.rounds() for it in each.items())
        return {it for it, by in drawn if audited.get((by, it)) != claims[it].work}

    def _named_others(self) -> set[str]:
        """Peers of another arithmetic than in the step before: nobody could be drawn for them."""
        return {
            it
            for it, claim in self.claims.items()
            if it in self._ways and claim.share.arithmetic != self._ways[it].arithmetic
        }

    def misled(self) -> set[str]:
        """Who says that something else came to it than its sender has claimed."""
        segments = self._segments if self._open.trains else ()
        return {owner for owner, _ in unlike_parts(self._shares(), segments)}

    def unlike_to(self, me: str) -> list[str]:
        """Peers whose claim does not fit what came from them to `me`, or what they told it."""
        segments, shares = self._segments if self._open.trains else (), self._shares()
        unlike = unlike_parts(shares, segments, (me,)) | unlike_losses(shares)
        works = {it: self.claims[it].work[OWN_BYTES:] for it in self.sums}
        summed = {it for it, work in works.items() if work != self.sums[it]}
        return sorted(summed.union(sender for receiver, sender in unlike if receiver == me))

    @property
    def _open(self) -> Due:
        return self._due(self._step) or TRAINING

    def has_layers(self, judge: str, peer_id: str) -> bool:
        return has_layers_of(judge, peer_id, self._plan)

    def may_judge(self, judge: str, peer_id: str) -> bool:
        """Whether `judge` has the layers, or may be lent them, as all their holders state alike."""
        return judge in self._judges_of(peer_id).all
