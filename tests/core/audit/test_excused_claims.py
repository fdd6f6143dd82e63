"""A peer that says it got something else when a step was done before is in doubt with the sender.
Nothing excuses a peer that says that nothing came, or that blames itself."""

import dataclasses

import msgspec
import pytest

from p2p_dtfm.core.audit.accounts import fault_of_account, findings
from p2p_dtfm.core.audit.earlier_claims import Alike
from p2p_dtfm.core.audit.work import excused_by
from p2p_dtfm.core.messages.audit_messages import Boundary, Claimed, Share
from tests.core.audit.parts import NAMES, PLAN, part, share_of, step_of, two_by_two
from tests.core.audit.test_earlier_claims import (
    HONEST,
    LIAR,
    SEGMENTS,
    claim,
    claims,
    in_a_stage,
    stopped,
    that_adds_up_otherwise,
)


def that_has_got(sender: str, word: str = "", part_of: bytes | None = None) -> Share:
    """The liar claims that this peer sent it something else of its chunk."""
    at, got = NAMES.index(LIAR), list(HONEST[LIAR].got[0])
    other = part(sender, at, word) if part_of is None else part_of
    got[NAMES.index(sender)] = (b"",) * at + (other,)
    return msgspec.structs.replace(HONEST[LIAR], got={0: tuple(got)})


@pytest.mark.parametrize(
    "misled",
    [
        msgspec.structs.replace(HONEST[LIAR], got={0: ((), (), (), ())}),
        that_has_got("a", part_of=b""),
        that_has_got(LIAR, "of its own"),
    ],
)
def test_who_says_that_nothing_came_to_it_is_held_to_its_sums_all_the_same(misled: Share) -> None:
    """The liar claimed that nothing came where it was drawn, and claimed what had come when the
    step was done again. Nobody compared its sums, and nobody was in doubt for it."""
    then, now = claims() | {LIAR: that_adds_up_otherwise(misled)}, claims()
    for before, again in ((then, now), (now, then)):
        there = stopped(before)
        assert there.changed(again) == [LIAR] and there.excused(again) == {}


def test_who_says_that_something_else_came_to_it_before_is_in_doubt_with_its_sender() -> None:
    misled = claims() | {LIAR: that_adds_up_otherwise(that_has_got("a", "other"))}
    before = stopped(misled)
    assert before.changed(claims()) == [], "one of the others may have sent it something else"
    assert before.excused(misled) == {}
    of_b = dataclasses.replace(before, me="b")
    assert of_b.excused(claims()) == {LIAR: "a"}
    assert dataclasses.replace(before, me=LIAR).excused(claims()) == {}
    assert of_b.excused(claims(), Alike(chunks=False)) == {}
    assert of_b.excused(claims(a=share_of("a", word="x"))) == {}, "it may have sent two things"
    alone = {name: it for name, it in misled.items() if name != "a"}
    assert stopped(alone).excused(claims()) == {}, "nobody knows what it claimed then"


def between_stages(sent: bytes, came: bytes) -> dict[str, Claimed]:
    """In the first pair: what `a` claims to have sent, and what `b` claims to have got."""
    b = in_a_stage("honest")
    edge = b.edges[0]
    gradient = Boundary(b"", sent * 32, edge.gradient_out, b"")
    a = Share("cpu-1", 1, {0: (part("a", 0),)}, {}, {0: gradient, 1: gradient})
    edges = {n: it._replace(activation_in=came * 32) for n, it in b.edges.items()}
    return {"a": claim("a", a), "b": claim("b", msgspec.structs.replace(b, edges=edges))}


def test_who_says_that_another_frame_came_to_it_before_is_in_doubt_with_its_sender() -> None:
    """What the receiver made of the other frame is held against nobody."""
    there = dataclasses.replace(stopped(claims()), me="c", plan=two_by_two())
    now = between_stages(b"s", b"s")
    before = dataclasses.replace(there, claims=between_stages(b"s", b"t"))
    assert before.changed(now) == [] and before.excused(now) == {"b": "a"}
    assert dataclasses.replace(before, claims=now).excused(before.claims) == {"b": "a"}
    assert dataclasses.replace(before, me="b").excused(now) == {}
    assert before.excused(now, Alike(codecs=False)) == {}, "it lay on the line in another form"
    other = dataclasses.replace(there, claims=between_stages(b"t", b"t"))
    assert other.changed(now) == ["a"] and other.excused(now) == {}
    alone = dataclasses.replace(before, claims={"b": before.claims["b"]})
    assert alone.excused(now) == {}, "nobody knows what was claimed to be sent"


def test_of_who_excuses_itself_so_most_of_all_have_to_have_heard_it() -> None:
    for names in ("abc", "abcd"):
        said = step_of(HONEST, {name: {LIAR: excused_by("a")} for name in names}, told="")
        assert not fault_of_account(said["b"].audit, PLAN, SEGMENTS, "b")
        found = findings(said, PLAN, SEGMENTS)
        assert set(found.doubts) == {("a", LIAR)} and not found.liars
    del said[LIAR]
    nothing = ({}, {}, set(), {})
    assert findings(said, PLAN, SEGMENTS) == nothing, "it says no Prepared"
    said = step_of(HONEST, {name: {LIAR: excused_by("a")} for name in "ab"}, told="")
    assert findings(said, PLAN, SEGMENTS) == nothing
    other = {"a": excused_by("a"), "b": excused_by("a"), "c": excused_by("b")}
    said = step_of(HONEST, {name: {LIAR: mark} for name, mark in other.items()}, told="")
    assert findings(said, PLAN, SEGMENTS) == nothing, "not of one and the same"
