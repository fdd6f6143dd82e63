"""What all have said and were told shows who lies; it never shows an honest member to lie."""

import math
from collections.abc import Iterable

import msgspec
import pytest

from p2p_dtfm.core.commit.judgement import conflict_of, fault_of
from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.messages.agreement_messages import (
    Contribution,
    PendingStep,
    PresentView,
    RetainedStep,
    open_contribution,
    sign_contribution,
)
from p2p_dtfm.core.messages.message_bounds import (
    CONTRIBUTION_LIMIT_BYTES,
    require_bounded_part,
)
from p2p_dtfm.core.messages.prepared import (
    Prepared,
    Statement,
    StepOutcome,
    open_prepared,
    sign_prepared,
)
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.lineage import extend
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, ViewId
from p2p_dtfm.core.recovery.complete_steps import Target
from p2p_dtfm.core.recovery.contradictions import evidence
from p2p_dtfm.core.recovery.recovery_evidence import RecoveryEvidence
from p2p_dtfm.core.recovery.restart_point import recover
from p2p_dtfm.sim.faults.simulated_process import sign_for, verify
from tests.core.builders import stated

VIEW = ViewId(3, "ab" * 32)
BASE = "the state of step 7"
NAMES = "abc"
# three replicas of all layers, of which each computes two microbatches
PLAN = Plan(tuple(Pipeline((Stage(n, 0, 3, 1),), 2 * i, 2) for i, n in enumerate(NAMES)), (), 1)
SUMS = (b"1" * 16, b"2" * 16, b"3" * 16)
TERMS = StepTerms(
    microbatch_tokens=5,
    evaluation_microbatches=4,
    evaluation_every=10,
    states_every=10,
    total_steps=100,
    loss_limit=20.0,
)
COUNTS = dict.fromkeys(NAMES, 2)


def prepared(peer: str, step: int = 7, **changes: object) -> Prepared:
    said = Prepared(VIEW, step, peer, {0: 4.0}, 30.0, 10, 0.0, 0, None, BASE, {0: SUMS})
    return msgspec.structs.replace(said, **changes)


def part(
    name: str, said: Iterable[Signed], retained: RetainedStep | None = None, **changes: object
) -> Contribution:
    members = tuple(Member(n, 1) for n in NAMES)
    contribution = Contribution(
        member=Member(name, 1),
        number=5,
        record=Signed(name, "record", b"", b""),
        present=PresentView(VIEW, members, PLAN),
        step=7,
        held=dict.fromkeys(range(3), 7),
        joiners=(),
        lineages={7: BASE},
        pending=PendingStep(7, BASE, tuple(said), (0, 1, 2), counts=COUNTS),
        retained=retained,
    )
    return msgspec.structs.replace(contribution, **changes)


def signed(statements: Iterable[Prepared]) -> tuple[Signed, ...]:
    return tuple(stated(item).signed for item in statements)


def test_what_honest_replicas_say_is_no_fault_and_no_conflict() -> None:
    said = {peer: prepared(peer) for peer in NAMES}
    assert [fault_of(item, PLAN, TERMS, COUNTS) for item in said.values()] == ["", "", ""]
    assert conflict_of(said, PLAN).reason == ""
    assert not evidence([part(peer, signed(said.values())) for peer in NAMES], TERMS).reason


@pytest.mark.parametrize(
    "changes, cause",
    [
        ({"token_count": 5}, "its share is 10"),
        ({"token_count": 1 << 70}, "its share is 10"),
        ({"loss_sum": 601.0}, "no model has"),
        ({"loss_sum": -1.0}, "negative"),
        ({"loss_sum": math.inf}, "not finite"),
        ({"held_out_token_count": 5}, "held-out"),
        ({"squared_norms": {0: 1e101}}, "no gradient has"),
        ({"sums": {}}, "sums of its segments"),
        ({"sums": {0: SUMS[:2]}}, "does not hold"),
        ({"sums": {0: SUMS, 1: SUMS}}, "does not hold"),
        ({"sums": {0: (b"1", *SUMS[1:])}}, "another length"),
        ({"states": {3: b"1" * 16}}, "does not hold"),
        ({"states": {1: b"1" * 17}}, "another length"),
        ({"ready_for": ViewId(4, "x" * 257)}, "a view or lineage that none has"),
        ({"ready_for": ViewId(-1, "x")}, "a view or lineage that none has"),
        ({"ready_for": ViewId(1 << 53, "x")}, "a view or lineage that none has"),
        ({"base": "x" * 257}, "a view or lineage that none has"),
        ({"step": 10, "held_out_token_count": 10}, "digests of its states"),
        ({"states": {1: b"1" * 16}}, "where nobody asks for them"),
    ],
    ids=str,
)
def test_what_the_plan_and_the_run_rule_out_is_a_fault(changes: dict, cause: str) -> None:
    assert cause in fault_of(prepared("a", **changes), PLAN, TERMS, COUNTS)


def test_whose_sequence_has_most_of_the_tokens_that_count_does_not_lie() -> None:
    """Of conversations answers alone count, and each token of theirs for many. In a step of 64
    replicas one sequence was a long answer and the others had ten tokens of answers each. The
    replica with the long one was refused by all, and so was whoever computed it next."""
    tokens, long, short, replicas, vocabulary = 1024, 1000, 10, 64, 50_257
    nats = math.log(vocabulary)
    weight = replicas * tokens / (long + (replicas - 1) * short)
    names = [f"{number:02}" for number in range(replicas)]
    stages = [(Stage(name, 0, 3, 1),) for name in names]
    plan = Plan(tuple(Pipeline(each, n, 1) for n, each in enumerate(stages)), (), 1)
    sums = tuple(name.encode() * 8 for name in names)
    terms = msgspec.structs.replace(
        TERMS,
        microbatch_tokens=tokens,
        evaluation_microbatches=replicas,
        loss_limit=10 * nats + 100,
    )
    counted = {name: long if name == names[0] else short for name in names}
    for name, count in counted.items():
        losses = {"loss_sum": weight * count * nats, "token_count": tokens, "sums": {0: sums}}
        trained = prepared(name, **losses)
        held_out = {"held_out_loss_sum": losses["loss_sum"], "held_out_token_count": tokens}
        states = dict.fromkeys(range(3), b"1" * 16)
        evaluated = msgspec.structs.replace(trained, step=20, states=states, **held_out)
        for item in (trained, evaluated):
            assert fault_of(item, plan, terms, dict.fromkeys(names, 1)) == ""
    idle = prepared(names[0], loss_sum=1.0, token_count=0, sums={0: sums})
    assert "no model has" in fault_of(idle, plan, terms, {})


def test_the_odd_norm_of_three_is_left_out_and_of_two_nobody_knows() -> None:
    said = {peer: prepared(peer) for peer in NAMES} | {"b": prepared("b", squared_norms={0: 5.0})}
    assert list(conflict_of(said, PLAN).liars) == ["b"]
    del said["c"]
    found = conflict_of(said, PLAN)
    assert not found.liars and not found.doubts and found.reason, "the third will say"
    two = Plan(tuple(Pipeline((Stage(n, 0, 3, 1),), 2 * i, 2) for i, n in enumerate("ab")), (), 1)
    found = conflict_of({peer: it for peer, it in said.items() if peer in "ab"}, two)
    assert not found.liars and list(found.doubts) == [("a", "b")]


def test_who_alone_was_given_other_sums_is_not_the_odd_one_among_colluders() -> None:
    """An owner gives one of the others another sum than the rest. With a colluder that says it got
    the same sum, the owner would be in the majority of those whose norms can be compared."""
    names = "abcdefgh"
    plan = Plan(tuple(Pipeline((Stage(n, 0, 3, 1),), i, 1) for i, n in enumerate(names)), (), 1)
    true = tuple(name.encode() * 16 for name in names)
    to_a = (*true[:6], b"?" * 16, true[7])
    said = {peer: prepared(peer, sums={0: true}) for peer in names}
    said["a"] = prepared("a", sums={0: to_a}, squared_norms={0: 4.5})
    for colluder in "gh":
        said[colluder] = prepared(colluder, sums={0: to_a}, squared_norms={0: 9.0})
    found = conflict_of(said, plan)
    assert found.reason and not found.liars
    assert {pair for pair in found.doubts if "a" in pair} == set()
    assert {pair[0] for pair in found.doubts if pair[1] == "g"} == set("bcdef")


def test_of_two_norms_with_two_behind_each_one_of_either_side_goes() -> None:
    one_each = (Pipeline((Stage(it, 0, 3, 1),), at, 1) for at, it in enumerate("abcd"))
    plan = Plan(tuple(one_each), (), 1)
    said = {peer: prepared(peer, sums={}) for peer in "abcd"}
    for peer in "bd":
        said[peer] = prepared(peer, sums={}, squared_norms={0: 5.0})
    found = conflict_of(said, plan)
    assert not found.liars and not found.doubts and list(found.even) == [("a", "b")]
    assert found.left_out == {"a", "b"}
    assert found.told()[0][0] == "both a and b"


def test_unlike_sums_put_their_owner_against_whoever_got_others() -> None:
    """Other norms follow from other sums, and accuse nobody."""
    said = {"a": prepared("a")}
    for peer in "bc":
        others = (peer.encode() * 16, *SUMS[1:])
        said[peer] = prepared(peer, sums={0: others}, squared_norms={0: float(ord(peer))})
    found = conflict_of(said, PLAN)
    assert set(found.doubts) == {("a", "b"), ("a", "c")} and not found.liars


def test_two_prepared_of_one_peer_convict_it_alone() -> None:
    """It does not matter whether both Prepared meet at one member, or each is heard by another."""
    twice = prepared("b", squared_norms={0: 5.0})
    to_a = signed([prepared("a"), prepared("b"), prepared("c")])
    to_c = signed([prepared("a"), twice, prepared("c")])
    for parts in ([part("a", to_a), part("c", to_c)], [part("a", (*to_a, *signed([twice])))]):
        found = evidence(parts, TERMS)
        assert list(found.liars) == ["b"] and not found.doubts


def test_a_refused_prepared_is_passed_on_and_convicts() -> None:
    ledger = Ledger(VIEW, PLAN, 7, TERMS, COUNTS)
    false = stated(prepared("b", loss_sum=math.nan))
    with pytest.raises(PeerFault, match="not finite"):
        ledger.record(false)
    assert ledger.has_refused(false.signed)
    assert ledger.freeze() == (false.signed,)
    assert list(evidence([part("a", ledger.freeze()), part("c", ())], TERMS).liars) == ["b"]


def test_no_word_of_a_liar_makes_what_honest_members_pass_on_too_long() -> None:
    """One stage-holder padded what it prepared, or what was refused. All others' words were then
    refused as too long. No view was agreed on any more, whoever failed."""
    padded = stated(prepared("b", ready_for=ViewId(4, "x" * 70_000))).signed
    with pytest.raises(PeerFault, match="of 70"):
        open_prepared(padded, verify)
    names = [f"liar {number}" for number in range(9)]
    one_each = (Pipeline((Stage(it, 0, 3, 1),), at, 1) for at, it in enumerate((*names, "a")))
    ledger = Ledger(VIEW, Plan(tuple(one_each), (), 1), 7)
    ledger.record(stated(prepared("a", sums={})))
    for name in names:
        with pytest.raises(PeerFault):
            ledger.record(stated(prepared(name, ready_for=ViewId(4, "x" * 60_000))))
    held = RecoveryEvidence()
    held.lineage.move_to(7, BASE)
    held.freeze(ledger)
    pending = held.pending(VIEW)
    assert pending.prepared[0].peer_id == "a"
    assert 4 <= len(pending.prepared) < len(names)
    said = part("a", (), pending=pending)
    require_bounded_part(said, said.member.peer_id)
    assert len(sign_contribution(said, sign_for("a")).payload) < CONTRIBUTION_LIMIT_BYTES


def test_a_fork_by_a_liar_is_found_one_step_later_and_nothing_commits_after_it() -> None:
    """Members that were told unlike norms have unlike outcomes, and the next Prepared show
    these."""
    outcomes = {"a": StepOutcome(6, 2.0, 3.0, 30, None, None)}
    outcomes["c"] = msgspec.structs.replace(outcomes["a"], gradient_norm=3.0)
    bases = {n: extend("before", 6, VIEW, outcome.digest) for n, outcome in outcomes.items()}
    assert bases["a"] != bases["c"]
    said = [prepared(n, base=bases.get(n, bases["a"])) for n in NAMES]
    ledger = Ledger(VIEW, PLAN, 7, TERMS, COUNTS)
    for item in said:
        ledger.record(stated(item))
    assert ledger.next_outcome() is None and ledger.conflict.forks
    lies = {"a": prepared("b", 6), "c": prepared("b", 6, squared_norms={0: 9.0})}
    parts = [
        part(
            name,
            signed(said),
            RetainedStep(VIEW, 6, "before", outcome, (), signed([lies[name]])),
            lineages={7: bases[name]},
            accepts_loss=True,
        )
        for name, outcome in outcomes.items()
    ]
    assert list(evidence(parts, TERMS).liars) == ["b"]
    assert recover(parts, 3, TERMS).target == Target(7, max(bases.values()))


def test_who_starts_from_another_state_than_most_is_left_out() -> None:
    said = signed([prepared("a"), prepared("b"), prepared("c", base="elsewhere")])
    assert list(evidence([part("a", said), part("b", said)], TERMS).liars) == ["c"]


def test_one_that_tells_alone_of_a_step_has_no_say_in_who_computed_what() -> None:
    """When a step has committed, all pass on the signed words by which it did. Counts that one
    member invents for it would make liars of all others."""
    six, seven = (signed(prepared(it, step=step) for it in NAMES) for step in (6, 7))
    kept = RetainedStep(VIEW, 6, "", None, (0, 1, 2), six)
    pending = PendingStep(7, "", seven, (0, 1, 2), counts=dict(COUNTS))
    invented = PendingStep(6, "", (), (), counts={"a": 5, "b": 1, "c": 2})
    parts = [
        msgspec.structs.replace(
            part(it, seven), retained=kept, pending=invented if it == "c" else pending
        )
        for it in NAMES
    ]
    found = evidence(parts, TERMS)
    assert not found.reason and not found.liars


def test_an_attempt_keeps_liars_out_and_one_of_a_pair_in_doubt() -> None:
    def participants(parts: list[Contribution]) -> str:
        attempt = Attempt(Member("a", 1), 5, False, GENESIS, 3, TERMS)
        for item in parts:
            attempt.add(Signed(item.member.peer_id, "", b"", b""), item)
        return "".join(member.peer_id for member in attempt.participants)

    norm = signed([prepared("a"), prepared("b"), prepared("c", squared_norms={0: 5.0})])
    assert participants([part(name, norm) for name in NAMES]) == "ab"
    sums = {0: (SUMS[0], b"?" * 16, SUMS[2])}
    doubt = signed([prepared("a"), prepared("b"), prepared("c", sums=sums)])
    assert participants([part(name, doubt) for name in NAMES]) in ("ab", "ac")


def test_a_forged_prepared_in_a_contribution_is_its_makers_fault() -> None:
    said = prepared("b")
    true = sign_prepared(said, sign_for("b"))
    forged = sign_prepared(said, sign_for("a"))
    honest = sign_contribution(part("a", [true]), sign_for("a"))
    assert open_contribution(honest, verify).pending is not None
    with pytest.raises(PeerFault, match="passes on a Prepared: forged") as caught:
        open_contribution(sign_contribution(part("a", [forged]), sign_for("a")), verify)
    assert caught.value.peer_id == "a"
    with pytest.raises(PeerFault, match="another peer"):
        open_prepared(sign_prepared(said, sign_for("a")).__class__("a", *true_parts(said)), verify)


def true_parts(said: Prepared) -> tuple[str, bytes, bytes]:
    """The true parts of a statement in which peer a speaks for peer b, with its own signature."""
    mine = sign_prepared(msgspec.structs.replace(said, peer_id="a"), sign_for("a"))
    payload = sign_prepared(said, sign_for("b")).payload
    covered = b"p2p-dtfm/1\x00prepared\x00a\x00" + payload
    return mine.kind, payload, sign_for("a")(covered)


def test_a_spare_skips_where_more_than_half_say_from_which_lineage() -> None:
    ledger = Ledger(VIEW, PLAN, 3, TERMS, COUNTS)
    assert ledger.says_ahead(stated(prepared("a", base="liar"))) is None
    assert ledger.says_ahead(stated(prepared("b"))) is None
    assert ledger.says_ahead(stated(prepared("c"))) == (7, BASE)
    with pytest.raises(PeerFault, match="without a stage"):
        ledger.says_ahead(Statement(prepared("z"), stated(prepared("z")).signed))


def test_a_spare_keeps_what_was_ahead_for_after_the_last_step_nothing_follows() -> None:
    ledger = Ledger(VIEW, PLAN, 5, TERMS)
    for step in (5, 6):
        for who in ("b", "c"):
            ledger.record(stated(prepared(who, step)))
    assert ledger.says_ahead(stated(prepared("b", 7))) is None, "those of a are late"
    for step in (5, 6):
        ledger.record(stated(prepared("a", step)))
        assert ledger.next_outcome() is not None
    ledger.record(stated(prepared("a", 7)))
    assert ledger.missing == ("c",)
    ledger.record(stated(prepared("c", 7)))
    assert ledger.next_outcome() is not None


def test_a_spare_that_skips_takes_along_what_was_ahead() -> None:
    ledger = Ledger(VIEW, PLAN, 3, TERMS)
    for who in "abc":
        found = ledger.says_ahead(stated(prepared(who, 7)))
    assert found == (7, BASE)
    ledger.skip_to(7)
    assert ledger.next_outcome() is not None, "all three were here"


@pytest.mark.parametrize(
    "wrong", [{"gradient_norm": math.nan}, {"gradient_norm": -1.0}, {"loss": math.inf}, {"step": 8}]
)
def test_nobody_passes_on_an_outcome_that_would_spoil_states(wrong: dict[str, object]) -> None:
    true = StepOutcome(6, 1.0, 3.0, 30, None, None)
    for outcome in (true, msgspec.structs.replace(true, **wrong)):
        said = part("a", [], RetainedStep(VIEW, 6, BASE, outcome, (0,)))
        envelope = sign_contribution(said, sign_for("a"))
        if outcome is true:
            open_contribution(envelope, verify)
            continue
        with pytest.raises(PeerFault, match="that no step has"):
            open_contribution(envelope, verify)


def test_who_trains_alone_makes_nobody_skip_past_the_end() -> None:
    alone = Plan((Pipeline((Stage("a", 0, 3, 1),), 0, 6),), ("b", "c"), 1)
    ledger = Ledger(VIEW, alone, 7, TERMS)
    assert ledger.says_ahead(stated(prepared("a", 100))) == (100, BASE)
    with pytest.raises(PeerFault, match="after the last"):
        ledger.says_ahead(stated(prepared("a", 101)))
