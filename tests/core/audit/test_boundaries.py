"""What is claimed of the tensors between stages, and what becomes of claims that do not fit."""

import hashlib

import msgspec
import pytest
from pydantic import ValidationError

from p2p_dtfm.core.audit.accounts import CHUNKS_LIMIT, fault_of_share, findings
from p2p_dtfm.core.audit.boundaries import (
    Due,
    beside,
    fault_of_edges,
    held_out_is_kept,
    inputs_are_kept,
    unlike_boundaries,
)
from p2p_dtfm.core.audit.claim_book import ClaimBook, commitment_to
from p2p_dtfm.core.audit.told_losses import losses_digest, tellers
from p2p_dtfm.core.audit.work import (
    CLAIM_BYTES,
    WORK_BYTES,
    claim_digest,
    norms_made,
    own_digest,
    stated_work,
    sums_digest,
)
from p2p_dtfm.core.commit.step_terms import terms_of
from p2p_dtfm.core.gate.gate_table import TABLE
from p2p_dtfm.core.messages.agreement_messages import RetainedStep
from p2p_dtfm.core.messages.audit_messages import (
    Account,
    Boundary,
    Claimed,
    Edges,
    HeardClaim,
    Share,
)
from p2p_dtfm.core.messages.message_bounds import require_bounded_part
from p2p_dtfm.core.messages.prepared import Prepared, sign_prepared
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.sections.audit_spec import MICROBATCHES_LIMIT
from p2p_dtfm.core.schedule.sums_in_order import added_up
from p2p_dtfm.daemon.peers.wire import pack
from tests.core.audit.parts import OPENINGS, VIEW, two_by_two
from tests.core.builders import run_spec

NAMES = "abcdef"
PLAN = Plan(
    tuple(
        Pipeline((Stage(x, 0, 1, 1), Stage(y, 1, 3, 1)), 2 * i, 2)
        for i, (x, y) in enumerate(("ab", "cd", "ef"))
    ),
    (),
    1,
)
SEGMENTS = PLAN.segments()


def digest(*words: object) -> bytes:
    return hashlib.sha256(repr(words).encode()).digest()


def edges_of(peer: str, plan: Plan = PLAN) -> Edges:
    """The tensors between stages, as honest peers compute them."""
    found = {}
    for number, (before, after) in beside(plan, peer).items():
        forward = digest("forward", number)
        backward = digest("backward", number)
        found[number] = Boundary(
            forward if before else b"",
            forward if after else b"",
            backward if after else b"",
            backward if before else b"",
        )
    return found


def share_of(peer: str, plan: Plan = PLAN) -> Share:
    parts, got, norms = {}, {}, {}
    for number, segment in enumerate(plan.segments()):
        if peer in segment.holders:
            chunks = range(len(segment.holders))
            mine = segment.holders.index(peer)
            parts[number] = tuple(digest("part", peer, chunk) for chunk in chunks)
            norms[number] = tuple(1.0 + chunk for chunk in chunks)
            got[number] = tuple(
                ()
                if it == peer
                else tuple(digest("part", it, n) if n == mine else b"" for n in chunks)
                for it in segment.holders
            )
    parameters = {layer: digest("layer", layer) for layer in plan.layers_of(peer)}
    known = tellers(plan)
    heads = known.heads if peer in known.heads else known.to(peer)
    losses = dict.fromkeys(heads, losses_digest(3.0, 0.0))
    return Share("cpu-1", 1, parts, got, edges_of(peer, plan), parameters, losses, norms)


HONEST = {peer: share_of(peer) for peer in NAMES}


def work_of(share: Share, peer: str, plan: Plan = PLAN) -> bytes:
    sums = {n: peer.encode() * 16 for n in share.parts}
    norms = norms_made(peer, plan.segments(), share.norms)
    return own_digest(share.parts, 3.0, share.edges) + sums_digest(sums, norms)


WORKS = {peer: work_of(share, peer) for peer, share in HONEST.items()}


def step_of(
    shares: dict[str, Share],
    found: dict[str, dict[str, bytes]],
    plan: Plan = PLAN,
    told: bool = True,
) -> dict[str, Prepared]:
    """Everybody's Prepared of a step. `told`: all know whose work somebody doubts."""
    segments = plan.segments()
    heard = {
        peer: HeardClaim(claim_digest(share, work_of(share, peer, plan), OPENINGS), b"")
        for peer, share in shares.items()
    }
    works = {peer: work_of(share, peer, plan) for peer, share in shares.items()}
    doubted = {it for mine in found.values() for it, work in mine.items() if work != works[it]}
    said = {}
    for peer, share in shares.items():
        sums = {n: tuple(it.encode() * 16 for it in segments[n].holders) for n in share.parts}
        mine = found.get(peer, {})
        known = sorted(doubted) if told else ()
        disputed = {it: mine.get(it, works[it]) != works[it] for it in known}
        account = Account(share, heard, mine, disputed, OPENINGS)
        norms = {number: added_up(each) for number, each in share.norms.items()}
        said[peer] = Prepared(VIEW, 7, peer, norms, 3.0, 10, 0.0, 0, None, "", sums, audit=account)
    return said


def judged(
    shares: dict[str, Share], found: dict[str, dict[str, bytes]]
) -> tuple[set[str], set[tuple[str, str]]]:
    result = findings(step_of(shares, found), PLAN, SEGMENTS)
    return set(result.liars), set(result.doubts)


def changed(peer: str, **fields: bytes) -> dict[str, Share]:
    """One peer's claim of the first microbatch, changed."""
    edges = dict(HONEST[peer].edges)
    number = min(edges)
    edges[number] = edges[number]._replace(**fields)
    return {**HONEST, peer: msgspec.structs.replace(HONEST[peer], edges=edges)}


def test_a_stage_claims_what_its_neighbours_do() -> None:
    assert unlike_boundaries(HONEST, PLAN) == set()
    assert not any(fault_of_share(it, PLAN, SEGMENTS, peer) for peer, it in HONEST.items())
    assert judged(HONEST, {"c": {"a": WORKS["a"]}}) == (set(), set())


@pytest.mark.parametrize(
    "edge",
    [
        {},
        {0: edges_of("a")[0]},
        {**edges_of("a"), 9: edges_of("a")[0]},
        {**edges_of("a"), 1: Boundary(b"", b"x", b"x" * 32, b"")},
        {**edges_of("a"), 1: Boundary(b"x" * 32, b"x" * 32, b"x" * 32, b"")},
    ],
)
def test_a_claim_is_of_the_microbatches_and_edges_of_its_stage(edge: Edges) -> None:
    assert not fault_of_edges(edges_of("a"), PLAN, "a")
    assert fault_of_edges(edge, PLAN, "a")


def test_wrong_tensors_that_are_claimed_are_found_by_the_replicas() -> None:
    """Both ends claim what was sent, so the sender's work differs from what is computed again."""
    wrong = digest("wrong")
    shares = changed("a", activation_out=wrong)
    shares["b"] = changed("b", activation_in=wrong)["b"]
    found = {judge: {"a": WORKS["a"]} for judge in "ce"}
    assert judged(shares, found) == ({"a"}, set())


def test_unlike_claims_of_an_edge_leave_two_in_doubt() -> None:
    for peer, fields, pair in (
        ("a", {"activation_out": digest("wrong")}, ("a", "b")),
        ("b", {"activation_in": digest("wrong")}, ("a", "b")),
        ("b", {"gradient_out": digest("wrong")}, ("a", "b")),
        ("c", {"gradient_in": digest("wrong")}, ("c", "d")),
    ):
        assert judged(changed(peer, **fields), {}) == (set(), {pair})


def test_of_two_the_sender_whose_claim_is_not_what_it_should_have_computed_is_known() -> None:
    """The sender has sent the right tensor and claims another, to have its neighbour blamed."""
    shares = changed("a", activation_out=digest("wrong"))
    found = {judge: {"a": WORKS["a"]} for judge in "ce"}
    liars, doubts = judged(shares, found)
    assert liars == {"a"} and doubts == {("a", "b")}


def test_nobody_is_judged_by_an_input_that_was_not_sent() -> None:
    """b computes from what it has got, and says so; a says that it has sent something else."""
    shares = changed("a", activation_out=digest("wrong"))
    found = {judge: {"b": bytes(32)} for judge in "df"}
    assert judged(shares, found) == (set(), {("a", "b")})


def test_where_claims_do_not_fit_the_sender_is_drawn_and_the_receiver_is_not() -> None:
    shares = changed("a", activation_out=digest("wrong"))
    book = ClaimBook(VIEW, PLAN, 0, 100)
    for step in (7, 8):
        book.step_begins(step)
        for peer in NAMES:
            opening, following = (peer.encode() * 31 + bytes([n]) for n in (step, step + 1))
            share = shares[peer] if step == 8 else HONEST[peer]
            claim = Claimed(VIEW, step, share, WORKS[peer], opening, commitment_to(following))
            book.record(peer, claim)
        assert set(book.drawn()) == (set("a") if step == 8 else set(NAMES))


def test_what_is_kept_is_bounded() -> None:
    stages = tuple(Stage(name, n, n + 1, 1) for n, name in enumerate("abc"))
    middle = Plan((Pipeline(stages, 0, 5),), (), 1)
    assert inputs_are_kept(middle, "a", 5) and not inputs_are_kept(middle, "a", 4)
    whole = Plan((Pipeline((Stage("a", 0, 3, 1),), 0, 5),), (), 1)
    assert inputs_are_kept(whole, "a", 0)
    assert beside(two_by_two(), "d") == {2: ("c", ""), 3: ("c", "")}


EVALUATES, AFTER = Due(held_out=4), Due(trains=False, held_out=4)
"""Held-out microbatches 6 to 9: the first pair has 6 and 9, the other pairs one each."""


def evaluated(peer: str, due: Due) -> Edges:
    """What travels forward only: an evaluated microbatch has no backward."""
    edges = edges_of(peer) if due.trains else {}
    for number, (before, after) in beside(PLAN, peer, due).items():
        if number >= 6:
            there = digest("held-out", number)
            edges[number] = Boundary(there if before else b"", there if after else b"", b"", b"")
    return edges


@pytest.mark.parametrize("due", [EVALUATES, AFTER])
def test_what_is_evaluated_is_claimed_at_both_ends(due: Due) -> None:
    shares = {
        peer: msgspec.structs.replace(HONEST[peer], edges=evaluated(peer, due)) for peer in NAMES
    }
    trained = 2 * due.trains
    assert [len(shares[peer].edges) - trained for peer in NAMES] == [2, 2, 1, 1, 1, 1]
    assert not any(fault_of_edges(it.edges, PLAN, peer, due) for peer, it in shares.items())
    assert all(fault_of_edges(it.edges, PLAN, peer) for peer, it in shares.items())
    assert unlike_boundaries(shares, PLAN, due) == set()
    edges = dict(shares["a"].edges)
    edges[9] = edges[9]._replace(activation_out=digest("wrong"))
    shares["a"] = msgspec.structs.replace(shares["a"], edges=edges)
    assert unlike_boundaries(shares, PLAN, due) == {("b", "a")}
    edges[9] = edges[9]._replace(gradient_in=digest("back"))
    assert "another length" in fault_of_edges(edges, PLAN, "a", due), "nothing comes back of it"


def test_after_the_last_step_nothing_else_is_claimed() -> None:
    edges = evaluated("b", AFTER)
    nothing = {"parts": {}, "got": {}, "losses": {}, "norms": {}}
    share = msgspec.structs.replace(HONEST["b"], edges=edges, **nothing)
    assert fault_of_share(share, PLAN, SEGMENTS, "b", AFTER) == ""
    assert "of its segments" in fault_of_share(HONEST["b"], PLAN, SEGMENTS, "b", AFTER)


def test_a_held_out_loss_is_part_of_a_work_where_it_can_be_computed_again() -> None:
    for share, is_part in (
        (HONEST["b"], False),
        (msgspec.structs.replace(HONEST["b"], edges=evaluated("b", EVALUATES)), True),
        (msgspec.structs.replace(HONEST["b"], edges={}), True),
    ):
        one, other = (stated_work(share, 3.0, loss, {}) for loss in (1.0, 2.0))
        assert len(one) == WORK_BYTES and (one != other) == is_part


def test_what_is_evaluated_is_kept_beside_the_rest_or_not_claimed() -> None:
    """Each peer of the first pair has two microbatches forward and backward, and two forward
    only."""
    assert held_out_is_kept(PLAN, EVALUATES, 3) and not held_out_is_kept(PLAN, EVALUATES, 2)
    assert held_out_is_kept(PLAN, AFTER, 1) and not held_out_is_kept(PLAN, AFTER, 0)
    many = Due(held_out=3 * MICROBATCHES_LIMIT)
    assert not held_out_is_kept(PLAN, many, 1 << 30), "its claim would not fit in a message"
    sections: dict[str, dict[str, object]] = {
        "audit": {"rate": 0.1},
        "batch": {"global_batch": 6, "microbatch": 1},
        "evaluation": {"every_steps": 10, "sequences": 4},
    }
    terms = terms_of(run_spec(total_steps=25, **sections))
    assert terms.due(7, PLAN) == Due() and terms.due(10, PLAN) == EVALUATES
    assert terms.due(25, PLAN) == AFTER
    small = msgspec.structs.replace(terms, kept_microbatches=2)
    assert small.due(10, PLAN) == Due() and small.due(25, PLAN) == AFTER
    assert msgspec.structs.replace(terms, kept_microbatches=0).due(25, PLAN) is None
    assert msgspec.structs.replace(terms, audits=False).due(10, PLAN) is None


def test_the_evaluation_after_the_last_step_is_drawn_at_any_rate() -> None:
    drawn = []
    for last in (9, 8):
        due = {last: AFTER}
        book = ClaimBook(VIEW, PLAN, 0, 100, (), lambda step, due=due: due.get(step, Due()))
        for step in (7, 8):
            book.step_begins(step)
            for peer in NAMES:
                opening, following = (peer.encode() * 31 + bytes([n]) for n in (step, step + 1))
                share = HONEST[peer]
                if step == last:
                    edges = evaluated(peer, AFTER)
                    nothing = {"parts": {}, "got": {}, "losses": {}, "norms": {}}
                    share = msgspec.structs.replace(share, edges=edges, **nothing)
                claim = Claimed(VIEW, step, share, WORKS[peer], opening, commitment_to(following))
                book.record(peer, claim)
        drawn.append(set(book.drawn()))
    assert drawn == [set(), set(NAMES)]


def test_the_largest_claim_of_a_run_fits_in_all_that_carries_it() -> None:
    stages = tuple(Stage(peer, at, at + 1, 1) for at, peer in enumerate("abc"))
    plan = Plan((Pipeline(stages, 0, MICROBATCHES_LIMIT),), (), 1)
    edge = Boundary(*(digest(side) for side in range(4)))
    numbers = [1000 + number for number in range(MICROBATCHES_LIMIT)]
    many = tuple(digest("part", number) for number in range(CHUNKS_LIMIT))
    edges = dict.fromkeys(numbers, edge)
    layers = {1000 + layer: digest("layer", layer) for layer in range(100)}
    losses, norms = {"x" * 52: bytes(16)}, {1: (1.5,) * 64}
    claimed = Claimed(
        VIEW,
        1 << 40,
        Share("x" * 64, 1024, {1: many}, {1: ((), many)}, edges, layers, losses, norms),
        *(b"x" * 32,) * 3,
        b"x" * 64,
    )
    assert len(pack(1, claimed)) < TABLE["Claimed"].size_bytes
    few = many[:100]
    share = Share("x" * 64, 1024, {1: few}, {1: ((), few)}, edges, layers, losses, norms)
    heard = {
        "x" * 52 + str(number): HeardClaim(bytes(CLAIM_BYTES), bytes(64)) for number in range(64)
    }
    account = Account(share, heard, {})
    prepared = Prepared(VIEW, 7, "b", {1: 1.0}, 1.0, 1, 0.0, 0, None, "", {}, audit=account)
    signed = sign_prepared(prepared, lambda _: bytes(64))
    retained = RetainedStep(VIEW, 7, "", None, (), (signed,))
    require_bounded_part(retained, "b")
    assert fault_of_edges(dict.fromkeys(range(MICROBATCHES_LIMIT), edge), plan, "b") == ""
    run_spec(audit={"rate": 0.1}, batch={"global_batch": MICROBATCHES_LIMIT, "microbatch": 1})
    with pytest.raises(ValidationError, match="make batch"):
        run_spec(
            audit={"rate": 0.1}, batch={"global_batch": MICROBATCHES_LIMIT + 1, "microbatch": 1}
        )
