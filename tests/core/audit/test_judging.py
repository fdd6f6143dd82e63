"""Members judge a work without having its layers. Colluders that are half of a stage's holders, or
most of them, are few among all who judge."""

import msgspec
import pytest

from p2p_dtfm.core.audit.accounts import Findings, fault_of_share, findings
from p2p_dtfm.core.audit.judging import judges_of, states_parameters
from p2p_dtfm.core.audit.work import claim_digest
from p2p_dtfm.core.commit.judgement import conflict_of
from p2p_dtfm.core.messages.audit_messages import Share
from tests.core.audit import parts
from tests.core.audit.test_boundaries import (
    HONEST,
    NAMES,
    PLAN,
    SEGMENTS,
    WORKS,
    digest,
    share_of,
    step_of,
)

LASTS = "bdf"
JUNK = b"0" * 32


def findings_of(shares: dict[str, Share], found: dict[str, dict[str, bytes]]) -> Findings:
    return findings(step_of(shares, found), PLAN, SEGMENTS)


def began_otherwise(*peers: str) -> dict[str, Share]:
    """These peers have begun the step from another state, all from the same one."""
    wrong = {peer: dict.fromkeys(PLAN.layers_of(peer), digest("another state")) for peer in peers}
    shares = {
        peer: msgspec.structs.replace(HONEST[peer], parameters=it) for peer, it in wrong.items()
    }
    return {**HONEST, **shares}


def lied(peer: str) -> dict[str, Share]:
    """The share of a liar whose own gradients are others than it should have computed."""
    share = msgspec.structs.replace(HONEST[peer], parts=dict(HONEST[peer].parts))
    number, chunks = next(iter(share.parts.items()))
    share.parts[number] = (digest("lie"), *chunks[1:])
    shares = {**HONEST, peer: share}
    place = SEGMENTS[number].holders.index(peer)
    owner = SEGMENTS[number].holders[0]  # the peer that sums this chunk has got what was claimed
    got = [list(it) for it in HONEST[owner].got[number]]
    if owner != peer:
        got[place][0] = digest("lie")
        told = {number: tuple(map(tuple, got))}
        shares[owner] = msgspec.structs.replace(HONEST[owner], got=told)
    return shares


def judging(shares: dict[str, Share], kept_microbatches: int = 100) -> tuple[str, str]:
    """The judges of a's work: its holders, and those to whom its parameters are lent."""
    found = judges_of("a", PLAN, shares, kept_microbatches)
    return "".join(found.holders), "".join(found.lent)


def test_whoever_has_the_same_arithmetic_judges_what_all_holders_began_with() -> None:
    assert judging(HONEST) == ("ce", "bdf")
    assert judging(began_otherwise("c")) == ("ce", ""), "whose is it?"
    unlike = {**HONEST, "b": msgspec.structs.replace(HONEST["b"], arithmetic="cpu-2")}
    assert judging(unlike) == ("ce", "df")
    nobodys = {**HONEST, "a": msgspec.structs.replace(HONEST["a"], arithmetic="")}
    assert judging(nobodys) == ("", "")
    assert judging(HONEST, 1) == ("", ""), "what came in is not kept"


def test_where_all_have_the_same_layers_no_parameters_are_stated() -> None:
    assert states_parameters(PLAN) and not states_parameters(parts.PLAN)
    none = msgspec.structs.replace(HONEST["a"], parameters={})
    assert "parameters" in fault_of_share(none, PLAN, SEGMENTS, "a")
    short = msgspec.structs.replace(HONEST["a"], parameters={0: b"short"})
    assert "another length" in fault_of_share(short, PLAN, SEGMENTS, "a")
    assert not fault_of_share(HONEST["a"], PLAN, SEGMENTS, "a")
    too_many = msgspec.structs.replace(parts.share_of("a"), parameters={0: digest("layer", 0)})
    assert "parameters" in fault_of_share(too_many, parts.PLAN, parts.PLAN.segments(), "a")


@pytest.mark.parametrize("liar", NAMES)
def test_a_liar_is_out_and_barred_by_members_of_other_stages(liar: str) -> None:
    """More than half of all members convict the liar, and most of these have not got its layers."""
    shares = lied(liar)
    found = {judge: {liar: WORKS[liar]} for judge in NAMES if judge != liar}
    result = findings_of(shares, found)
    assert set(result.liars) == result.convicted == {liar} and not result.doubts


def test_colluders_that_are_most_of_a_stage_are_out_and_the_honest_one_is_not() -> None:
    """The colluders say that the honest holder's work is false. Before, two of three were most."""
    found = {judge: {"a": WORKS["a"]} for judge in LASTS} | {it: {"a": JUNK} for it in "ce"}
    result = findings_of(HONEST, found)
    assert set(result.liars) == {"c", "e"} and not result.doubts and not result.even


def test_where_honest_ones_cannot_judge_holders_alone_decide() -> None:
    """A member that lacks the room for a stage says nothing, and liars need no room."""
    found = {"b": {"a": JUNK}, "d": {"a": JUNK}, "c": {"a": WORKS["a"]}}
    result = findings_of(HONEST, found)
    assert not result.liars and not result.doubts and not result.even
    for few in ({"b": {"a": JUNK}}, {"b": {"a": JUNK}, "e": {"a": WORKS["a"]}}):
        assert not findings_of(HONEST, few).liars, few
    of_holders = {"c": {"a": JUNK}, "e": {"a": WORKS["a"]}, "b": {"a": JUNK}}
    assert set(findings_of(HONEST, of_holders).liars) == {"c"}, "as without the others"


def test_who_accuses_the_other_holder_of_a_stage_in_secret_goes_where_others_could_judge() -> None:
    """It was a doubt between the two holders, which may cost the honest one its place. Only the
    stage's own holders were counted, though whoever finds a work false tells everybody who can
    compute it again."""
    plan = parts.two_by_two()
    shares = {peer: share_of(peer, plan) for peer in "abcd"}
    said = step_of(shares, {"c": {"a": JUNK}}, plan, told=False)
    result = findings(said, plan, plan.segments())
    assert set(result.liars) == {"c"} and "told nobody" in result.liars["c"]
    assert not result.doubts and not result.even and not result.convicted
    began = msgspec.structs.replace(shares["c"], parameters={0: digest("another state")})
    alone = step_of({**shares, "c": began}, {"c": {"a": JUNK}}, plan, told=False)
    result = findings(alone, plan, plan.segments())
    assert set(result.doubts) == {("a", "c")} and not result.liars, "as nobody else can judge"


def test_what_is_said_by_who_cannot_have_computed_it_is_no_word() -> None:
    """Three members of another stage accuse: there is no dispute, and there are no parameters that
    all agree on."""
    shares = began_otherwise("c")
    found = {judge: {"a": JUNK} for judge in LASTS}
    assert not {"a"} & set(findings_of(shares, found).liars)


def test_who_began_with_another_state_than_the_other_holders_is_out() -> None:
    conflict = conflict_of(step_of(began_otherwise("c"), {}), PLAN)
    assert set(conflict.liars) == {"c"}
    assert "another digest of layer 0" in conflict.liars["c"]


def test_the_claim_covers_the_parameters() -> None:
    """A member that states other parameters to some has signed two claims."""
    other = began_otherwise("a")["a"]
    assert claim_digest(HONEST["a"], WORKS["a"]) != claim_digest(other, WORKS["a"])
