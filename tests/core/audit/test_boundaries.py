"""What is claimed of the tensors between stages, and what comes of claims that do not fit."""

import hashlib

import msgspec
import pytest
from pydantic import ValidationError

from p2p_dtfm.core.audit.accounts import CHUNKS_LIMIT, fault_of_share, findings
from p2p_dtfm.core.audit.boundaries import (
    beside,
    fault_of_edges,
    inputs_are_kept,
    unlike_boundaries,
)
from p2p_dtfm.core.audit.claim_book import ClaimBook, commitment_to
from p2p_dtfm.core.audit.work import CLAIM_BYTES, claim_digest, own_digest, sums_digest
from p2p_dtfm.core.gate.gate_table import TABLE
from p2p_dtfm.core.messages.agreement_messages import RetainedStep
from p2p_dtfm.core.messages.audit_messages import Account, Boundary, Claimed, Edges, Share
from p2p_dtfm.core.messages.message_bounds import require_bounded_part
from p2p_dtfm.core.messages.prepared import Prepared, sign_prepared
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.sections.audit_spec import MICROBATCHES_LIMIT
from p2p_dtfm.daemon.peers.wire import pack
from tests.core.audit.parts import VIEW, two_by_two
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


def edges_of(peer: str) -> Edges:
    """As all that is honest computes."""
    found = {}
    for number, (before, after) in beside(PLAN, peer).items():
        forward = digest("forward", number)
        backward = digest("backward", number)
        found[number] = Boundary(
            forward if before else b"",
            forward if after else b"",
            backward if after else b"",
            backward if before else b"",
        )
    return found


def share_of(peer: str) -> Share:
    parts, got = {}, {}
    for number, segment in enumerate(SEGMENTS):
        if peer in segment.holders:
            chunks = range(len(segment.holders))
            mine = segment.holders.index(peer)
            parts[number] = tuple(digest("part", peer, chunk) for chunk in chunks)
            got[number] = tuple(
                ()
                if it == peer
                else tuple(digest("part", it, n) if n == mine else b"" for n in chunks)
                for it in segment.holders
            )
    return Share("cpu-1", 1, parts, got, edges_of(peer))


HONEST = {peer: share_of(peer) for peer in NAMES}


def work_of(share: Share, peer: str) -> bytes:
    sums = {n: peer.encode() * 16 for n in share.parts}
    return own_digest(share.parts, 3.0, share.edges) + sums_digest(sums)


WORKS = {peer: work_of(share, peer) for peer, share in HONEST.items()}


def step_of(shares: dict[str, Share], found: dict[str, dict[str, bytes]]) -> dict[str, Prepared]:
    heard = {peer: claim_digest(share, work_of(share, peer)) for peer, share in shares.items()}
    works = {peer: work_of(share, peer) for peer, share in shares.items()}
    doubted = {it for mine in found.values() for it, work in mine.items() if work != works[it]}
    said = {}
    for peer, share in shares.items():
        sums = {n: tuple(it.encode() * 16 for it in SEGMENTS[n].holders) for n in share.parts}
        mine = found.get(peer, {})
        disputed = {it: mine.get(it, works[it]) != works[it] for it in sorted(doubted)}
        account = Account(share, heard, mine, disputed)
        norms = dict.fromkeys(share.parts, 4.0)
        said[peer] = Prepared(VIEW, 7, peer, norms, 3.0, 10, 0.0, 0, None, "", sums, audit=account)
    return said


def judged(
    shares: dict[str, Share], found: dict[str, dict[str, bytes]]
) -> tuple[set[str], set[tuple[str, str]]]:
    result = findings(step_of(shares, found), PLAN, SEGMENTS)
    return set(result.liars), set(result.doubts)


def changed(peer: str, **fields: bytes) -> dict[str, Share]:
    """Of the first microbatch, what one peer claims."""
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
    """Sent, and claimed by both ends: the sender's work is another than what is computed again."""
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
    """It has sent what is right and claims something else, so as to have its neighbour blamed."""
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


def test_the_largest_claim_of_a_run_fits_in_all_that_carries_it() -> None:
    stages = tuple(Stage(peer, at, at + 1, 1) for at, peer in enumerate("abc"))
    plan = Plan((Pipeline(stages, 0, MICROBATCHES_LIMIT),), (), 1)
    edge = Boundary(*(digest(side) for side in range(4)))
    numbers = [1000 + number for number in range(MICROBATCHES_LIMIT)]
    many = tuple(digest("part", number) for number in range(CHUNKS_LIMIT))
    edges = dict.fromkeys(numbers, edge)
    claimed = Claimed(
        VIEW, 1 << 40, Share("x" * 64, 1024, {1: many}, {1: ((), many)}, edges), *(b"x" * 32,) * 3
    )
    assert len(pack(1, claimed)) < TABLE["Claimed"].size_bytes
    share = Share("x" * 64, 1024, {1: many[:100]}, {1: ((), many[:100])}, edges)
    heard = {"x" * 52 + str(number): bytes(CLAIM_BYTES) for number in range(64)}
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
