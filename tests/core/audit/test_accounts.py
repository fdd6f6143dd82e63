"""Whom the accounts of all peers leave out: the liar where most peers know it, and never an honest
peer."""

import itertools

import msgspec
import pytest

from p2p_dtfm.core.audit.accounts import fault_of_account, findings
from p2p_dtfm.core.audit.work import require_signed, signed_claim
from p2p_dtfm.core.commit.judgement import conflict_of, fault_of
from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.messages.audit_messages import Claimed, HeardClaim, claim_text
from p2p_dtfm.core.messages.prepared import Prepared, open_prepared, sign_prepared
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.sim.faults.simulated_process import sign_for, verify
from tests.core.audit.parts import NAMES, PLAN, VIEW, part, share_of, step_of, work_of_share
from tests.core.builders import stated

HONEST = {name: share_of(name) for name in NAMES}
WORKS = {name: work_of_share(share, name) for name, share in HONEST.items()}
SEGMENTS = PLAN.segments()
TERMS = StepTerms(5, 4, 10, 10, 100, 20.0)
OTHER_CLAIM = HeardClaim(b"x" * 16, b"")


def judged(said: dict[str, Prepared]) -> tuple[set[str], set[tuple[str, ...]]]:
    found = findings(said, PLAN, SEGMENTS)
    return set(found.liars), set(found.doubts) | {("both", *pair) for pair in found.even}


def everybody_finds(peer: str, work: bytes, but: str = "") -> dict[str, dict[str, bytes]]:
    return {judge: {peer: work} for judge in NAMES if judge not in (peer, *but)}


def test_honest_members_have_nothing_against_each_other() -> None:
    ring = {name: {other: WORKS[other]} for name, other in zip(NAMES, "bcda", strict=True)}
    for found in ({}, ring, *(everybody_finds(name, WORKS[name]) for name in NAMES)):
        said = step_of(HONEST, found)
        assert judged(said) == (set(), set())
        assert not conflict_of(said, PLAN).reason
        assert not any(fault_of_account(p.audit, PLAN, SEGMENTS, n) for n, p in said.items())


def test_a_false_gradient_is_one_against_three() -> None:
    lied = {**HONEST, "c": share_of("c", word="flipped")}
    # what came to the others is what this peer claims
    for name in "abd":
        got = [list(each) for each in lied[name].got[0]]
        at = NAMES.index(name)
        got[2][at] = part("c", at, "flipped")
        lied[name] = msgspec.structs.replace(lied[name], got={0: tuple(map(tuple, got))})
    assert judged(step_of(lied, {})) == (set(), set()), "nobody was drawn"
    said = step_of(lied, everybody_finds("c", WORKS["c"]))
    assert judged(said) == ({"c"}, set())
    conflict = conflict_of(said, PLAN)
    assert set(conflict.liars) == {"c"} and conflict.reason


def test_a_false_accusation_is_one_against_three() -> None:
    found = everybody_finds("c", WORKS["c"], but="b") | {"b": {"c": b"0" * 32}}
    assert judged(step_of(HONEST, found)) == ({"b"}, set())


def test_an_accusation_of_which_nobody_was_told_costs_its_maker() -> None:
    assert judged(step_of(HONEST, {"b": {"c": b"0" * 32}})) == ({"b"}, set())


def test_of_two_against_two_one_of_either_goes() -> None:
    """By links in doubt one side would go as a whole, and that side may be honest. Colluders that
    are half of a layer's holders would then be most of them."""
    wrong = b"0" * 32
    found = {"a": {"c": wrong}, "b": {"c": wrong}, "d": {"c": WORKS["c"]}}
    liars, both = judged(step_of(HONEST, found))
    assert not liars and both in ({("both", "a", "c")}, {("both", "b", "c")})
    assert not findings(step_of(HONEST, found), PLAN, SEGMENTS).convicted

    again = {"a": {"c": wrong, "d": wrong}, "b": {"c": wrong, "d": wrong}}
    again |= {"c": {"d": WORKS["d"]}, "d": {"c": WORKS["c"]}}
    assert judged(step_of(HONEST, again)) == (set(), both), "one pair at a time"


@pytest.mark.parametrize(("pair", "other"), [("ab", "d"), ("bd", "a"), ("ad", "b")])
def test_two_that_have_told_nobody_go_though_as_many_say_otherwise(pair: str, other: str) -> None:
    """It does not matter which of the four has the lowest id."""
    found = {it: {"c": b"0" * 32} for it in pair} | {other: {"c": WORKS["c"]}}
    assert judged(step_of(HONEST, found, told="")) == (set(pair), set())


def test_where_three_come_to_three_works_nobody_knows() -> None:
    found = {"a": {"c": b"0" * 32}, "b": {"c": b"1" * 32}, "d": {"c": WORKS["c"]}}
    liars, doubts = judged(step_of(HONEST, found))
    assert not liars and {("a", "c"), ("b", "c"), ("a", "b")} <= doubts


def test_of_two_that_can_judge_nobody_knows_who_is_wrong() -> None:
    shares = {n: share_of(n, f"cpu-{n in 'ab'}{n if n in 'cd' else ''}") for n in NAMES}
    works = work_of_share(shares["b"], "b")
    assert works == WORKS["b"]
    assert judged(step_of(shares, {"a": {"b": b"0" * 32}})) == (set(), {("a", "b")})


def test_who_was_sent_other_gradients_is_not_judged_by_its_sums() -> None:
    """What c sends is not what c claims, so the others cannot say what their sums should be."""
    shares = dict(HONEST)
    for name in "abd":
        got = [list(each) for each in HONEST[name].got[0]]
        got[2][NAMES.index(name)] = part("c", 0, "flipped")
        shares[name] = msgspec.structs.replace(HONEST[name], got={0: tuple(map(tuple, got))})
    other_sums = {n: WORKS[n][:16] + b"0" * 16 for n in "abd"}
    found = {n: {o: other_sums[o] for o in "abd" if o != n} for n in NAMES}
    doubts = {("a", "c"), ("b", "c"), ("c", "d")}
    assert judged(step_of(shares, found)) == ({"c"}, doubts), "by the word of more than half"
    own = {n: b"0" * 16 + WORKS[n][16:] for n in "b"}
    liars, _ = judged(step_of(shares, {n: own for n in "acd"}))
    assert liars == {"b", "c"}, "of its own gradient it is"


def test_whom_more_than_half_got_other_gradients_from_is_convicted_and_of_fewer_doubted() -> None:
    """Otherwise a liar that sees that it is drawn would claim what it should have sent, and be back
    soon."""
    for receivers, convicted in (("ab", set[str]()), ("abd", {"c"})):
        shares = dict(HONEST)
        for name in receivers:
            got = [list(each) for each in HONEST[name].got[0]]
            got[2][NAMES.index(name)] = part("c", 0, "flipped")
            shares[name] = msgspec.structs.replace(HONEST[name], got={0: tuple(map(tuple, got))})
        found = findings(step_of(shares, {}), PLAN, SEGMENTS)
        assert found.convicted == set(found.liars) == convicted
        assert {tuple(sorted((name, "c"))) for name in receivers} == set(found.doubts)


def test_who_accounts_for_another_work_than_it_has_claimed() -> None:
    told = {name: {"c": OTHER_CLAIM} for name in NAMES}
    found = findings(step_of(HONEST, {}, told), PLAN, SEGMENTS)
    assert set(found.liars) == found.convicted == {"c"} and "accounts for" in found.liars["c"]
    false_audits = {"a": {"b": b"0" * 32}, "d": {"b": b"0" * 32}, "c": {"b": b"0" * 32}}
    assert judged(step_of(HONEST, false_audits, told)) == ({"c"}, set()), "b was not heard either"


def test_who_claims_two_things_is_convicted_by_its_own_signatures() -> None:
    """The liar is convicted though only one peer has heard its other claim, and whether or not its
    own Prepared comes."""
    said = step_of(HONEST, {}, {"a": {"c": OTHER_CLAIM}})
    for told in (said, {name: said[name] for name in "ab"}):
        found = findings(told, PLAN, SEGMENTS)
        assert set(found.liars) == found.convicted == {"c"} and not found.doubts
        assert "one thing to some" in found.liars["c"]
    ledger = Ledger(VIEW, PLAN, 7)
    for name in "ba":
        assert not ledger.conflict.reason
        ledger.record(stated(said[name]))
    assert set(ledger.conflict.convicted) == {"c"}, "nobody waits for the rest"


def test_nobody_is_convicted_by_a_claim_that_it_has_not_signed() -> None:
    """A peer that says it has heard such a claim is told so."""
    true = HeardClaim(OTHER_CLAIM.claim, sign_for("c")(claim_text("c", VIEW, 7, OTHER_CLAIM.claim)))
    said = step_of(HONEST, {})["a"]
    assert said.audit is not None
    for heard, is_true in ((true, True), (OTHER_CLAIM, False)):
        account = msgspec.structs.replace(said.audit, heard={"c": heard})
        signed = sign_prepared(msgspec.structs.replace(said, audit=account), sign_for("a"))
        if is_true:
            assert open_prepared(signed, verify).audit == account
            continue
        with pytest.raises(PeerFault, match="has heard what c has not signed") as fault:
            open_prepared(signed, verify)
        assert fault.value.peer_id == "a"


def test_a_claim_is_of_its_view_and_step() -> None:
    claim = Claimed(VIEW, 7, HONEST["c"], WORKS["c"], b"o" * 32, b"c" * 32)
    signed = signed_claim(claim, "c", sign_for("c"))
    require_signed(signed, "c", verify)
    others = (
        claim,
        msgspec.structs.replace(signed, step=8),
        msgspec.structs.replace(signed, view=ViewId(4, VIEW.snapshot)),
        msgspec.structs.replace(signed, work=WORKS["a"]),
    )
    for other in others:
        with pytest.raises(PeerFault, match="not signed"):
            require_signed(other, "c", verify)
    with pytest.raises(PeerFault, match="not signed"):
        require_signed(signed, "a", verify)


def test_a_few_that_blame_one_behind_the_others_backs_go_themselves() -> None:
    """The accusers are most of those that have computed the work again, because nobody else was
    asked to."""
    found = {"a": {"c": b"0" * 32}, "b": {"c": b"0" * 32}}
    assert judged(step_of(HONEST, found, told="")) == ({"a", "b"}, set())
    found["d"] = {"c": WORKS["c"]}  # the auditor, who has told everybody that the work is right
    assert judged(step_of(HONEST, found, told="")) == ({"a", "b"}, set())


def test_who_is_found_out_and_withholds_its_prepared_is_convicted() -> None:
    said = step_of(HONEST, everybody_finds("c", b"0" * 32))
    del said["c"]
    found = findings(said, PLAN, SEGMENTS)
    assert set(found.liars) == found.convicted == {"c"} and not found.doubts
    assert "works otherwise" in conflict_of(said, PLAN).liars["c"]


def test_nor_do_many_signatures_of_one_claim_help() -> None:
    """One key can sign the same text in many ways."""
    account = step_of(HONEST, {})["a"].audit
    assert account is not None
    claim = account.heard["c"].claim
    heard = {name: {"c": HeardClaim(claim, name.encode() * 64)} for name in NAMES}
    said = step_of(HONEST, everybody_finds("c", b"0" * 32), heard)
    del said["c"]
    assert findings(said, PLAN, SEGMENTS).convicted == {"c"}


def test_nobody_waits_for_the_prepared_of_one_whom_most_deny() -> None:
    ledger = Ledger(VIEW, PLAN, 7)
    said = step_of(HONEST, everybody_finds("c", b"0" * 32))
    for name in "ab":
        ledger.record(stated(said[name]))
        assert not ledger.conflict.reason
    ledger.record(stated(said["d"]))
    assert set(ledger.conflict.liars) == {"c"} and ledger.next_outcome() is None


def test_half_do_not_convict_one_whose_prepared_is_missing() -> None:
    for but in "abd":
        said = step_of(HONEST, everybody_finds("c", b"0" * 32, but=but))
        del said["c"]
        assert not findings(said, PLAN, SEGMENTS).convicted


def test_who_is_accused_falsely_and_falls_silent_is_not_convicted() -> None:
    found = everybody_finds("c", WORKS["c"], but="a") | {"a": {"c": b"0" * 32}}
    said = step_of(HONEST, found)
    del said["c"]
    assert not findings(said, PLAN, SEGMENTS).liars


def test_nobody_denies_what_it_has_not_computed_again() -> None:
    said = step_of(HONEST, everybody_finds("c", b"0" * 32))["a"]
    assert said.audit is not None
    for disputed in ({"c": True, "b": True}, {"x": False}):
        account = msgspec.structs.replace(said.audit, disputed=disputed)
        assert fault_of_account(account, PLAN, SEGMENTS, "a")


def test_nothing_is_judged_while_one_is_missing() -> None:
    said = step_of(HONEST, everybody_finds("c", b"0" * 32), told="")
    for missing in NAMES:
        assert judged({n: p for n, p in said.items() if n != missing}) == (set(), set())


def test_no_minority_of_liars_has_an_honest_one_convicted() -> None:
    """Whatever one of four peers says of the others, alone or after everybody was told, convicts no
    honest one."""
    words = [{}, *({peer: b"0" * 32} for peer in "bcd"), dict.fromkeys("bcd", b"0" * 32)]
    for lie, told in itertools.product(words, (False, True)):
        found: dict[str, dict[str, bytes]] = {n: {} for n in "bcd"} | {"a": lie}
        for judge in "bcd" if told else "":
            found[judge] = {peer: WORKS[peer] for peer in lie if peer != judge}
        liars, doubts = judged(step_of(HONEST, found))
        assert liars <= {"a"} and not doubts


def test_who_computes_otherwise_than_most_has_no_place_if_the_run_says_so() -> None:
    said = step_of({**HONEST, "b": share_of("b", "cpu-2")}, {})
    assert judged(said) == (set(), set())
    assert set(findings(said, PLAN, SEGMENTS, one_arithmetic=True).liars) == {"b"}
    halves = {name: share_of(name, f"cpu-{name in 'ab'}") for name in NAMES}
    assert not findings(step_of(halves, {}), PLAN, SEGMENTS, one_arithmetic=True).liars
    nobodys = {name: share_of(name, "") for name in NAMES}
    assert not findings(step_of(nobodys, {}), PLAN, SEGMENTS, one_arithmetic=True).liars


def test_who_is_out_for_its_work_makes_no_arithmetic_that_of_most() -> None:
    """One of four named the arithmetic of two, in a work that both of these found false. They were
    three of four then, and the fourth was out for its own."""
    arithmetics = {"a": "cpu-1", "b": "cpu-1", "c": "cpu-2", "d": "cpu-1"}
    said = {it: share_of(it, name) for it, name in arithmetics.items()}
    false = {judge: {"d": b"0" * 32} for judge in "ab"}
    found = findings(step_of(said, false), PLAN, SEGMENTS, one_arithmetic=True)
    assert set(found.liars) == {"d"}
    found = findings(step_of(said, {}), PLAN, SEGMENTS, one_arithmetic=True)
    assert set(found.liars) == {"c"}, "nobody finds it false"


@pytest.mark.parametrize("audits", [False, True])
def test_an_account_is_due_where_the_run_audits(audits: bool) -> None:
    terms = msgspec.structs.replace(TERMS, audits=audits)
    counts = dict.fromkeys(NAMES, 2)
    with_one = step_of(HONEST, {})["a"]
    without = msgspec.structs.replace(with_one, audit=None)
    assert bool(fault_of(with_one, PLAN, terms, counts)) != audits
    assert bool(fault_of(without, PLAN, terms, counts)) == audits
