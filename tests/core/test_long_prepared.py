"""Prepared are so long that nobody can pass on all of a step; all living members together can."""

import random
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import pytest

from p2p_dtfm.core.audit.boundaries import beside
from p2p_dtfm.core.audit.judging import PARAMETERS_BYTES
from p2p_dtfm.core.audit.told_losses import losses_digest
from p2p_dtfm.core.audit.work import claim_digest, work_of
from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.messages.agreement_messages import (
    Contribution,
    PresentView,
    sign_contribution,
)
from p2p_dtfm.core.messages.audit_messages import Account, Boundary, HeardClaim, Share
from p2p_dtfm.core.messages.message_bounds import CONTRIBUTION_LIMIT_BYTES
from p2p_dtfm.core.messages.prepared import Prepared, Statement, with_room
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.records import RECORD_LIMIT_BYTES
from p2p_dtfm.core.protocol.sections.audit_spec import MICROBATCHES_LIMIT
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery import contradictions
from p2p_dtfm.core.recovery.believed_claims import said_in
from p2p_dtfm.core.recovery.recovery_evidence import PENDING_LIMIT_BYTES, RecoveryEvidence
from p2p_dtfm.core.recovery.restart_point import recover
from p2p_dtfm.sim.faults.simulated_process import sign_for
from tests.core.builders import stated

VIEW = ViewId(3, "ab" * 32)
STEP = 7
NAMES = "abcdefgh"
STAGES = tuple(Stage(name, layer, layer + 1, 1) for layer, name in enumerate(NAMES))
PLAN = Plan((Pipeline(STAGES, 0, MICROBATCHES_LIMIT),), (), 1)
PRESENT = PresentView(VIEW, tuple(Member(name, 1) for name in NAMES), PLAN)
OPENINGS = bytes(16)
LOSSES = losses_digest(30.0, 0.0)


def share_of(name: str) -> Share:
    layer = NAMES.index(name)
    edges = {
        number: Boundary(
            *(b"%32d" % number if is_there else b"" for is_there in (low, high, high, low))
        )
        for number, (low, high) in beside(PLAN, name).items()
    }
    parts, parameters = {layer: (bytes(32),)}, {layer: bytes(PARAMETERS_BYTES)}
    losses = {NAMES[-1]: LOSSES} if name in NAMES[-2:] else {}
    return Share("cpu-1", 1, parts, {}, edges, parameters, losses)


@lru_cache(maxsize=1)
def all_prepared() -> dict[str, Statement]:
    """Everybody's honest Prepared; those of stages in the middle are longest."""
    segments, bare = PLAN.segments(), dict[str, Prepared]()
    for layer, name in enumerate(NAMES):
        counted = (30.0, 10) if name == NAMES[-1] else (0.0, 0)
        account = Account(share_of(name), {}, {}, {}, OPENINGS)
        base = "the state of step 7"
        bare[name] = Prepared(
            VIEW, STEP, name, {layer: 4.0}, *counted, 0.0, 0, None, base, audit=account
        )
    heard = {
        name: HeardClaim(claim_digest(share_of(name), work_of(it, segments), OPENINGS), bytes(64))
        for name, it in bare.items()
    }
    said = {}
    for name, it in bare.items():
        account = Account(share_of(name), heard, {}, {}, OPENINGS)
        said[name] = stated(msgspec.structs.replace(it, audit=account))
    return said


@dataclass
class Peer:
    """A stage-holder that has heard all Prepared, and has or has not committed the step by them."""

    name: str
    has_committed: bool

    def contribution(self) -> Contribution:
        """What this peer contributes after a failure."""
        layer = NAMES.index(self.name)
        held = RecoveryEvidence(self.name)
        held.lineage.move_to(STEP, "the state of step 7")
        held.held = {layer: STEP}
        held.reduced(VIEW, STEP, {layer})
        ledger = Ledger(VIEW, PLAN, STEP)
        for statement in all_prepared().values():
            ledger.record(statement)
        if self.has_committed:
            outcome = ledger.next_outcome()
            assert outcome is not None
            held.committed(VIEW, outcome, range(layer, layer + 1), ledger.last_commit)
        held.freeze(ledger)
        return Contribution(
            member=Member(self.name, 1),
            number=5,
            record=Signed(self.name, "record", bytes(RECORD_LIMIT_BYTES), b""),
            present=PRESENT,
            step=held.step,
            held=held.held,
            joiners=(),
            lineages=held.lineages(),
            pending=held.pending(VIEW),
            retained=held.told_of_last_step(planned=False, sees_fork=False),
        )


PARTS = [Peer(name, has_committed=name == "a").contribution() for name in NAMES]


def test_one_of_eight_has_committed_a_step_of_long_prepared_and_it_is_rolled_forward() -> None:
    """All passed on the same ones, the shortest, and nobody the longest, not even its maker. What
    one peer had committed could not be shown, and was taken back."""
    found = recover(PARTS, len(NAMES))
    assert found.target is not None and found.target.step == STEP + 1
    assert [it.peer_id for it in found.prepared] == [*NAMES]
    assert found.held == {it.member: (layer,) for layer, it in enumerate(PARTS)}


@pytest.mark.parametrize("lost", NAMES)
def test_what_one_that_is_lost_has_said_the_others_pass_on(lost: str) -> None:
    living = [part for part in PARTS if part.member.peer_id != lost]
    assert {signed.peer_id for signed in said_in(living)} == set(NAMES)
    if lost == "a":  # then nobody has committed, and all have what they need to
        assert recover(living, 0).outcome is not None


def told_by(me: str, said: tuple[Signed, ...]) -> set[str]:
    """The makers of the Prepared that this peer passes on."""
    return {it.peer_id for it in with_room(said, PENDING_LIMIT_BYTES, me)}


@pytest.mark.parametrize("seed", range(50))
def test_of_each_prepared_two_pass_it_on_however_long_the_others_are(seed: int) -> None:
    chance = random.Random(seed)
    names = [f"{at:02}" for at in range(chance.randrange(2, 24))]
    chance.shuffle(names)
    sizes = [chance.choice((500, 30_000, 34_000, 64 * 1024)) for _ in names]
    said = tuple(
        Signed(name, "prepared", bytes(size), b"") for name, size in zip(names, sizes, strict=True)
    )
    for it in said:
        assert sum(it.peer_id in told_by(name, said) for name in names) >= 2


def test_whoever_says_much_keeps_out_nobody_who_says_little() -> None:
    """Liars stand beside the lost peer in the order, and have said as much as anybody hears,
    twice."""
    honest, liars = [f"honest {at}" for at in range(31)], [f"liar {at}" for at in range(9)]
    order = [*honest[:20], *liars, *honest[20:]]
    lengths = [64 * 1024 if name in liars else 500 for name in order]
    said = [
        Signed(name, "prepared", bytes(it), b"") for name, it in zip(order, lengths, strict=True)
    ]
    refused = [Signed(name, "prepared", b"2" * 64 * 1024, b"") for name in liars]
    for me in (*honest, "a guardian", "zoe"):
        assert told_by(me, (*said, *refused)) >= set(honest), me


def test_of_hundreds_each_passes_on_what_fits_beside_its_outline() -> None:
    """What each passes on is one message with the outline that names it; together they pass on
    all."""
    names = [f"{at:03}" for at in range(200)]
    said = tuple(Signed(name, "prepared", bytes(20_000), b"") for name in names)
    told = [with_room(said, PENDING_LIMIT_BYTES, name) for name in names]
    assert {it.peer_id for each in told for it in each} == set(names)
    assert max(sum(len(it.payload) for it in each) for each in told) < PENDING_LIMIT_BYTES


def test_what_is_passed_on_fits_in_a_contribution() -> None:
    for part in PARTS:
        assert part.pending is not None
        signed = sign_contribution(part, sign_for(part.member.peer_id))
        assert 128 * 1024 < len(signed.payload) < CONTRIBUTION_LIMIT_BYTES


def test_of_long_prepared_only_the_newest_stay_open() -> None:
    """Opened Prepared take up to eight times as much, and anybody's may be passed on. Contributions
    of a few members hold 4,096 of them, which took gigabytes at each member."""

    def long_one(number: int) -> Signed:
        sums = {0: (b"",) * 60_000}  # one byte each, and eight when opened
        made = Prepared(VIEW, number, "stranger", {}, 0.0, 0, 0.0, 0, None, sums=sums)
        return stated(made).signed

    first, again = long_one(0), long_one(0)
    kept = contradictions.stated(first)
    assert contradictions.stated(again) is kept
    for number in range(1, 1 + (16 << 20) // 60_000):
        contradictions.stated(long_one(number))
    assert contradictions.stated(first) is not kept
