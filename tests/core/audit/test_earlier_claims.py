"""A member that stops the step in which it is drawn is held to what it claimed, or sent, in that
step. Most members together may hold it to that, and never a few."""

import dataclasses
import hashlib

import msgspec
import pytest

from p2p_dtfm.core.audit.accounts import fault_of_account, findings
from p2p_dtfm.core.audit.claim_book import ClaimBook, commitment_to
from p2p_dtfm.core.audit.earlier_claims import STAYING_LIMIT, Alike, StoppedStep, way_of
from p2p_dtfm.core.audit.work import (
    GONE_WORK,
    OWN_BYTES,
    SENT_OTHER,
    changed_work,
    sums_of_others,
)
from p2p_dtfm.core.commit.judgement import SUM_DIGEST_BYTES, conflict_of
from p2p_dtfm.core.messages.audit_messages import Audited, Boundary, Claimed, Share
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from tests.core.audit.parts import (
    LOSSES,
    NAMES,
    PLAN,
    SUMS,
    VIEW,
    part,
    share_of,
    step_of,
    two_by_two,
    work_of_share,
)

ALL = 1_000_000
STEP, BASE = 7, "lineage"
LIAR = "d"
SEGMENTS = PLAN.segments()
HONEST = {name: share_of(name) for name in NAMES}
FLIPPED = share_of(LIAR, word="flipped")


def claim(name: str, share: Share) -> Claimed:
    opening = name.encode() * 32
    work = work_of_share(share, name)
    return Claimed(VIEW, STEP, share, work, opening, commitment_to(opening))


def claims(**others: Share) -> dict[str, Claimed]:
    return {name: claim(name, share) for name, share in (HONEST | others).items()}


def that_got(name: str, word: str) -> Share:
    """What this peer got from the liar."""
    at, got = NAMES.index(name), list(HONEST[name].got[0])
    got[NAMES.index(LIAR)] = tuple(
        part(LIAR, n, word) if n == at else b"" for n in range(len(NAMES))
    )
    return msgspec.structs.replace(HONEST[name], got={0: tuple(got)})


def stopped(
    said: dict[str, Claimed], audited: tuple[str, ...] = (), work: bytes = b""
) -> StoppedStep:
    """A stopped step, as `a` has heard it. What the auditors of these peers come to is known:
    `work`, or what was claimed."""
    book = ClaimBook(VIEW, PLAN, ALL)
    book.step_begins(STEP)
    for name, each in said.items():
        book.record(name, each)
    for name in audited:
        by = book.drawn()[name]
        book.record(by, Audited(VIEW, STEP, name, work or said[name].work))
    return book.stopped("a", BASE)


def test_who_claims_another_work_when_the_step_is_done_again_is_seen() -> None:
    before = stopped(claims(d=FLIPPED))
    assert before.is_done_again(STEP, BASE)
    assert not before.is_done_again(STEP, "1:5:x") and not before.is_done_again(STEP + 1, BASE)
    assert before.changed(claims()) == [LIAR]
    assert before.changed(claims(d=FLIPPED)) == []
    assert stopped(claims()).changed(claims(a=share_of("a", word="x"))) == [], "not this peer"


@pytest.mark.parametrize("change", [{"threads": 2}, {"arithmetic": "gpu-1"}, {"arithmetic": ""}])
def test_what_is_computed_in_another_way_is_another_work(change: dict[str, object]) -> None:
    other = msgspec.structs.replace(HONEST[LIAR], **change)
    before, again = stopped(claims(d=FLIPPED)), claims(d=other)
    assert before.changed(again) == []
    assert before.in_other_ways(again, ()) == [LIAR], "it is computed again as it was"
    assert before.in_other_ways(again, (LIAR,)) == before.in_other_ways(claims(), ()) == []
    assert stopped(claims(), audited=(LIAR,)).in_other_ways(again, ()) == []
    alien = stopped(claims(d=other))
    is_judged_here = "threads" in change
    assert alien.in_other_ways(claims(), ()) == [LIAR] * is_judged_here


@pytest.mark.parametrize("name", ["gpu-1", ""])
def test_who_names_another_arithmetic_where_it_is_drawn_is_held_to_that_of_before(
    name: str,
) -> None:
    """Nobody is drawn for the new arithmetic."""
    alien = msgspec.structs.replace(FLIPPED, arithmetic=name)
    before = stopped(claims(d=alien))
    ways = {peer: way_of(share) for peer, share in HONEST.items()}
    known = dataclasses.replace(before, not_audited=frozenset(), earlier_ways=ways)
    assert known.changed(claims()) == [] and known.in_other_ways(claims(), ()) == [LIAR]
    assert known.in_other_ways(claims(d=alien), ()) == [], "it may be so"
    assert before.in_other_ways(claims(), ()) == [], "how it computed before nobody knows"


def begun_before(said: dict[str, Claimed]) -> ClaimBook:
    """A step in which all have committed themselves in the step before; nothing is drawn."""
    book = ClaimBook(VIEW, PLAN, 0)
    book.step_begins(STEP - 1)
    for name, each in claims().items():
        book.record(name, msgspec.structs.replace(each, step=STEP - 1))
    book.step_begins(STEP)
    for name, each in said.items():
        book.record(name, each)
    return book


WITHOUT_LIAR = Plan(tuple(Pipeline((Stage(n, 0, 3, 1),), 2, 2) for n in "abc"), (), 1)


def test_where_an_opening_is_false_all_are_to_be_computed_again() -> None:
    """A false opening may have been chosen so that nobody is drawn, for its maker or for a
    colluder."""
    said = claims()
    assert begun_before(said).stopped("a", BASE).not_audited == frozenset()
    said[LIAR] = msgspec.structs.replace(said[LIAR], opening=bytes(32))
    before = dataclasses.replace(begun_before(said).stopped("a", BASE), was_drawn=True)
    assert before.not_audited == {*NAMES}
    assert set(before.unjudged(WITHOUT_LIAR, ())) == {"b", "c", LIAR}


@pytest.mark.parametrize("name", ["gpu-1", ""])
def test_who_names_another_arithmetic_and_is_gone_is_judged_by_that_of_before(name: str) -> None:
    """Nobody was drawn for this peer, and it was out for its change of arithmetic alone."""
    said = claims(d=msgspec.structs.replace(FLIPPED, arithmetic=name))
    before = begun_before(said).stopped("a", BASE)
    assert before.not_audited == {LIAR} and before.unjudged(WITHOUT_LIAR, ()) == [LIAR]


def that_kept_its_claim() -> dict[str, Claimed]:
    said = claims(**{name: that_got(name, "flipped") for name in "abc"})
    del said[LIAR]
    return said


def in_known_ways(before: StoppedStep) -> StoppedStep:
    """A book in which each peer has computed a step before, in a known way."""
    ways = {name: way_of(share) for name, share in HONEST.items()}
    return dataclasses.replace(before, ways=ways)


@pytest.mark.parametrize("change", [{"threads": 2}, {"arithmetic": "gpu-1"}, {"arithmetic": ""}])
def test_nor_is_it_held_against_who_has_kept_its_claim(change: dict[str, object]) -> None:
    """A peer may have come back that computes in another way. Devices that do not repeat bits are
    held to nothing."""
    before = in_known_ways(stopped(that_kept_its_claim()))
    other = msgspec.structs.replace(HONEST[LIAR], **change)
    assert before.changed(claims(d=other)) == []
    known = [LIAR] if other.arithmetic else []
    assert before.in_other_ways(claims(d=other), ()) == known, "as it did in the steps before"
    assert stopped(that_kept_its_claim()).changed(claims()) == [], "how it computed nobody knows"


def test_who_has_kept_its_claim_to_itself_is_held_to_what_it_sent() -> None:
    said = that_kept_its_claim()
    before = in_known_ways(stopped(said))
    assert before.not_audited == {*NAMES}, "it alone knew the draw: its own, and its colluder's"
    assert before.changed(claims()) == [LIAR]
    assert before.changed(claims(d=FLIPPED)) == []
    del said["b"]
    assert stopped(said).not_audited == frozenset(), "nobody knew it"


def test_who_has_kept_its_claim_to_itself_is_held_to_the_loss_of_which_it_told() -> None:
    other = dict(HONEST["a"].losses) | {LIAR: b"l" * len(LOSSES)}
    said = claims(a=msgspec.structs.replace(HONEST["a"], losses=other))
    del said[LIAR]
    before = in_known_ways(stopped(said))
    assert before.changed(claims()) == [LIAR] and before.denies(LIAR, b"", {}, LOSSES)
    told = dict.fromkeys(NAMES, other[LIAR])
    assert before.changed(claims(d=msgspec.structs.replace(HONEST[LIAR], losses=told))) == []
    nothing = dict(other) | {LIAR: b""}
    said |= claims(a=msgspec.structs.replace(HONEST["a"], losses=nothing))
    del said[LIAR]
    assert in_known_ways(stopped(said)).changed(claims()) == [], "no frame came from it"


def test_of_who_is_gone_the_work_is_to_be_computed_again_unless_it_was() -> None:
    without = Plan(tuple(Pipeline((Stage(n, 0, 3, 1),), 2, 2) for n in "abc"), (), 1)
    before = stopped(claims(d=FLIPPED))
    assert before.not_audited == set(NAMES)
    assert before.unjudged(without, ()) == [LIAR] and before.unjudged(without, (LIAR,)) == []
    assert set(before.unjudged(PLAN, ())) == {"b", "c", LIAR}, "chunks are others now"
    assert stopped(claims(), audited=(LIAR,)).unjudged(without, ()) == []
    told = stopped(claims(d=FLIPPED), audited=(LIAR,), work=bytes(32))
    assert told.unjudged(without, ()) == [LIAR], "it went when one had found it"
    own = work_of_share(HONEST[LIAR], LIAR)[:OWN_BYTES]
    assert before.denies(LIAR, own, HONEST[LIAR].parts, LOSSES)
    assert not stopped(claims()).denies(LIAR, own, HONEST[LIAR].parts, LOSSES)
    sent_other = stopped(claims(a=that_got("a", "flipped")))
    assert sent_other.denies(LIAR, own, HONEST[LIAR].parts, LOSSES), "whatever it has claimed"
    alien = msgspec.structs.replace(HONEST[LIAR], arithmetic="gpu-1")
    assert stopped(claims(d=alien)).unjudged(without, ()) == [], "nobody here computes alike"


def test_of_who_is_still_there_it_is_computed_again_as_well_where_the_step_was_drawn() -> None:
    """A colluder went whenever somebody was drawn. All others then had other microbatches, and
    nobody could hold them to what they had claimed."""
    without = Plan(tuple(Pipeline((Stage(n, 0, 3, 1),), 2, 2) for n in "acd"), (), 1)
    before = dataclasses.replace(stopped(claims(d=FLIPPED)), was_drawn=True)
    found = [before.unjudged(without, (), view) for view in ("one", "another")]
    assert found == [["b", LIAR, "c"], ["b", "c", LIAR]], "who is gone is the first"
    names = [f"peer-{number:02}" for number in range(3 * STAYING_LIMIT)]
    many = Plan(tuple(Pipeline((Stage(n, 0, 3, 1),), 0, 1) for n in names), (), 1)
    fewer = msgspec.structs.replace(many, pipelines=many.pipelines[1:])
    ways = dict.fromkeys(names, way_of(HONEST[LIAR]))
    of_many = StoppedStep(names[1], STEP, BASE, many, {}, frozenset(names), ways, was_drawn=True)
    chosen = [of_many.unjudged(fewer, (), view) for view in ("one", "other")]
    assert all(names[0] in each and len(each) == 1 + STAYING_LIMIT for each in chosen)
    assert chosen[0] != chosen[1], "nobody knows whose before the view is agreed on"
    assert dataclasses.replace(of_many, was_drawn=False).unjudged(fewer, ()) == [names[0]]


def in_a_stage(word: str, loss: bytes = LOSSES) -> Share:
    """A share of `b`, the last of the first pair: from the same input it makes `word`."""
    edge = Boundary(b"a" * 32, b"", b"", hashlib.sha256(word.encode()).digest())
    losses = {name: loss for name in "bd"}
    return Share("cpu-1", 1, {1: (part("b", 0, word),)}, {}, {0: edge, 1: edge}, losses=losses)


@pytest.mark.parametrize(
    ("now", "is_found", "is_found_with_other_codecs"),
    [
        (in_a_stage("honest"), False, False),
        (in_a_stage("other"), True, False),
        (in_a_stage("honest", b"l" * len(LOSSES)), True, True),
        (msgspec.structs.replace(in_a_stage("other"), threads=2), False, False),
    ],
)
def test_where_chunks_are_others_what_a_stage_has_sent_and_its_losses_are_held_against_it(
    now: Share, is_found: bool, is_found_with_other_codecs: bool
) -> None:
    """The gradients of a peer whose record tells of another link are cut into other chunks."""
    before = stopped(claims())
    plan = two_by_two()
    then = {"b": claim("b", in_a_stage("honest"))}
    there = dataclasses.replace(before, plan=plan, claims=then)
    said = {"b": claim("b", now)}
    assert there.changed(said, Alike(chunks=False)) == ["b"] * is_found
    assert there.changed(said, Alike(False, False)) == ["b"] * is_found_with_other_codecs


def test_who_states_other_parameters_of_the_same_states_has_claimed_another_work() -> None:
    """A peer stated other parameters of one layer where it was drawn, and nothing that it made of
    them was compared. A peer that came in its view's first step may have been given false states by
    others."""
    held = [
        msgspec.structs.replace(in_a_stage("honest"), parameters={1: word * 32, 2: b"p" * 32})
        for word in (b"p", b"q")
    ]
    there = dataclasses.replace(stopped(claims()), plan=two_by_two(), was_drawn=True)
    before = dataclasses.replace(there, claims={"b": claim("b", held[1])})
    of_who_came = dataclasses.replace(before, was_drawn=False)
    assert of_who_came.changed({"b": claim("b", held[0])}) == []
    for change in ({}, {"threads": 2}, {"arithmetic": ""}):
        now = {"b": claim("b", msgspec.structs.replace(held[0], **change))}
        assert before.changed(now) == before.changed(now, Alike(False, False)) == ["b"]
        assert before.changed(now, got_states=("b",)) == []
        assert dataclasses.replace(there, claims=now).changed(now) == []


def test_of_what_a_stage_holds_alone_no_chunks_are_others() -> None:
    alone = Plan((Pipeline((Stage("a", 0, 1, 1), Stage("b", 1, 3, 1)), 0, 2),), (), 1)
    before, said = {}, {}
    for each, word in ((before, "honest"), (said, "flipped")):
        share = msgspec.structs.replace(in_a_stage("honest"), parts={1: (part("b", 0, word),)})
        each["b"] = claim("b", share)
    there = dataclasses.replace(stopped(claims()), plan=alone, claims=before)
    assert there.changed(said, Alike(False, False)) == ["b"]
    assert there.changed(before, Alike(False, False)) == []


def test_what_came_into_a_stage_is_gone_with_its_view() -> None:
    plan, before = two_by_two(), stopped(claims())
    in_pairs = msgspec.structs.replace(PLAN, pipelines=plan.pipelines)
    there = StoppedStep("a", STEP, BASE, in_pairs, before.claims, before.not_audited, before.ways)
    assert there.unjudged(PLAN, ()) == []


def test_who_has_claimed_what_it_had_not_sent_is_seen_though_its_work_is_right() -> None:
    """The liar knew from the others' claims that it is drawn."""
    said = claims(a=that_got("a", "flipped"))
    before = stopped(said, audited=NAMES)
    assert before.not_audited == frozenset() and before.changed(claims()) == []
    assert before.sent_other() == [LIAR] and stopped(claims()).sent_other() == []
    assert stopped(claims(a=that_got("a", "flipped"), d=FLIPPED)).sent_other() == []
    assert stopped(claims(b=that_got("b", "flipped"))).sent_other() == [], "b tells it of itself"
    book = ClaimBook(VIEW, PLAN, ALL)
    book.step_begins(STEP)
    for name, each in said.items():
        book.record(name, each)
    assert [book.unlike_to(name) for name in NAMES] == [[LIAR], [], [], []]
    other = dict(HONEST["a"].losses) | {LIAR: b"l" * len(LOSSES)}
    told = claims(a=msgspec.structs.replace(HONEST["a"], losses=other))
    assert stopped(told).sent_other() == [LIAR], "it had told of another loss"


def that_is_split() -> Claimed:
    """What the peer has sent, and beside it the right work."""
    return msgspec.structs.replace(claim(LIAR, FLIPPED), work=work_of_share(HONEST[LIAR], LIAR))


def test_who_claims_what_it_has_sent_and_the_right_work_has_claimed_another_one() -> None:
    """The audit found the liar's work right, and the receivers found its parts to be what it
    claimed."""
    said = {name: claim(name, that_got(name, "flipped")) for name in "abc"}
    before = stopped(said | {LIAR: that_is_split()}, audited=NAMES)
    assert before.sent_other() == [], "it claims what came"
    assert before.changed(claims()) == [LIAR]
    assert before.changed(claims() | {LIAR: that_is_split()}) == []
    alone = stopped(claims() | {LIAR: that_is_split()})
    own = work_of_share(HONEST[LIAR], LIAR)[:OWN_BYTES]
    assert alone.denies(LIAR, own, HONEST[LIAR].parts, LOSSES), "also where nothing came from it"


OTHER_SUMS = b"o" * SUM_DIGEST_BYTES


def that_adds_up_otherwise(share: Share = HONEST[LIAR]) -> Claimed:
    return msgspec.structs.replace(
        claim(LIAR, share), work=work_of_share(share, LIAR, sums=OTHER_SUMS)
    )


def test_who_claims_other_sums_of_the_same_parts_is_seen_when_the_step_is_done_again() -> None:
    before = stopped(claims() | {LIAR: that_adds_up_otherwise()})
    assert before.changed(claims()) == [LIAR]
    assert before.changed(claims(), Alike(chunks=False)) == []


def test_whose_sums_are_not_those_that_came_from_it_is_seen_in_that_step_and_afterwards() -> None:
    came = sums_of_others("a", SEGMENTS, {0: (*SUMS[:3], OTHER_SUMS)}, {})
    before = dataclasses.replace(stopped(claims(), audited=NAMES), sums=came)
    assert before.sent_other() == [LIAR] and before.changed(claims()) == []
    book = begun_before(claims())
    book.sums = came
    assert book.unlike_to("a") == [LIAR] and book.stopped("a", BASE).sent_other() == [LIAR]
    book.step_begins(STEP + 1)
    assert book.sums == {}
    book = begun_before(claims() | {LIAR: that_adds_up_otherwise()})
    book.sums = came
    assert book.unlike_to("a") == [], "it claims what it has sent"


def test_the_sums_of_who_adds_up_elsewhere_as_well_are_not_known_whole() -> None:
    three = (Stage("a", 0, 1, 1), Stage("b", 1, 3, 1)), (Stage("c", 0, 3, 1),)
    plan = Plan(tuple(Pipeline(it, 2 * n, 2) for n, it in enumerate(three)), (), 1)
    mine = next(n for n, it in enumerate(plan.segments()) if it.holders == ("a", "c"))
    assert sums_of_others("a", plan.segments(), {mine: SUMS[:2]}, {}) == {}
    assert set(sums_of_others("c", plan.segments(), {0: SUMS[:2], 1: SUMS[:2]}, {})) == {"a", "b"}
    assert sums_of_others("a", SEGMENTS, {}, {}) == {}, "nothing was trained"


@pytest.mark.parametrize(("receivers", "convicted"), [("abc", {LIAR}), ("ab", set())])
def test_whose_sums_most_have_got_otherwise_than_it_states_is_convicted(
    receivers: str, convicted: set[str]
) -> None:
    """The liar was in doubt with each of the others, and back in ten seconds."""
    said = step_of(HONEST, {})
    for name in receivers:
        said[name] = msgspec.structs.replace(said[name], sums={0: (*SUMS[:3], OTHER_SUMS)})
    assert findings(said, PLAN, SEGMENTS).convicted == convicted
    found = conflict_of(said, PLAN)
    assert set(found.convicted) == convicted
    assert {pair for pair in found.doubts if LIAR in pair} == {(it, LIAR) for it in receivers}


def said_by(names: str, peer: str, work: bytes) -> dict[str, Prepared]:
    """Each of these peers denies that work, and says that it comes to `work`."""
    said = step_of(HONEST, {name: {peer: work} for name in names}, told="")
    for name in names:
        account = said[name].audit
        assert account is not None
        denied = msgspec.structs.replace(account, disputed={peer: True})
        said[name] = msgspec.structs.replace(said[name], audit=denied)
        assert not fault_of_account(denied, PLAN, SEGMENTS, name)
    return said


@pytest.mark.parametrize(
    ("peer", "work"),
    [
        (LIAR, changed_work(work_of_share(HONEST[LIAR], LIAR))),
        (LIAR, SENT_OTHER),
        ("gone", GONE_WORK),
        ("gone", SENT_OTHER),
    ],
)
def test_more_than_half_of_all_convict_it_and_of_fewer_nothing_follows(
    peer: str, work: bytes
) -> None:
    found = findings(said_by("abc", peer, work), PLAN, SEGMENTS)
    assert set(found.liars) == found.convicted == {peer} and not found.doubts
    for few in ("", "a", "ab"):
        assert findings(said_by(few, peer, work), PLAN, SEGMENTS) == ({}, {}, set(), {})
    for silent in (LIAR, "c"):
        said = said_by("abc", peer, work)
        del said[silent]
        convicted = {peer} if silent == LIAR else set()
        assert findings(said, PLAN, SEGMENTS).convicted == convicted, "it may say no Prepared"


def test_who_has_got_something_else_counts_beside_those_that_have_computed_it_again() -> None:
    """Otherwise a liar that lies to some in what it sends, and to all in its work, has too few
    against it in either."""
    computed, sent = said_by("ab", LIAR, bytes(32)), said_by("c", LIAR, SENT_OTHER)
    said = {name: (sent if name == "c" else computed)[name] for name in "abc"}
    assert findings(said, PLAN, SEGMENTS).convicted == {LIAR}
    said = step_of(
        HONEST, {"a": {LIAR: bytes(32)}, "b": {LIAR: bytes(32)}, "c": {LIAR: SENT_OTHER}}
    )
    assert findings(said, PLAN, SEGMENTS).convicted == {LIAR}, "all have spoken"
    unlike = {name: said_by(name, LIAR, name.encode() * 32)[name] for name in "abc"}
    assert findings(unlike, PLAN, SEGMENTS) == ({}, {}, set(), {}), "none of these says what it is"


def test_an_account_names_few_that_are_gone() -> None:
    (said, *_) = step_of(HONEST, {}).values()
    assert said.audit is not None
    for gone in ([f"gone-{n}" for n in range(9)], ["x" * 129]):
        account = msgspec.structs.replace(said.audit, found=dict.fromkeys(gone, GONE_WORK))
        assert "that are gone" in fault_of_account(account, PLAN, SEGMENTS, "a")
