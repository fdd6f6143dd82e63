"""Who is audited: nobody knows it before all have claimed, and audits come as often as the run spec
says."""

from collections import Counter
from collections.abc import Collection, Mapping

import msgspec
import pytest

from p2p_dtfm.core.audit.boundaries import beside
from p2p_dtfm.core.audit.claim_book import ClaimBook, commitment_to
from p2p_dtfm.core.audit.draw import (
    ALARM_MILLIONTHS,
    ALARM_STEPS,
    draw,
    drawn_besides,
    rate_in_force,
    seed_of,
)
from p2p_dtfm.core.audit.judging import judges_of
from p2p_dtfm.core.audit.roles import NEW
from p2p_dtfm.core.audit.told_losses import tellers
from p2p_dtfm.core.messages.audit_messages import COULD_NOT, Audited, Boundary, Claimed, Share
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import GENESIS, Bar
from tests.core.audit.parts import LOSSES, NAMES, PLAN, VIEW, share_of, two_by_two

SHARES = {name: share_of(name) for name in NAMES}
ALL = 1_000_000


def seeds(count: int) -> list[str]:
    return [seed_of("1:ab", step, {"a": bytes([step % 256]) * 32}) for step in range(count)]


def drawn(
    seed: str,
    rate: int,
    plan: Plan = PLAN,
    shares: Mapping[str, Share] = SHARES,
    kept: int = 100,
    always: Collection[str] = (),
) -> dict[str, str]:
    def all_of(peer_id: str) -> tuple[str, ...]:
        return judges_of(peer_id, plan, shares, kept).all

    return draw(seed, plan.stage_holders(), all_of, rate, always)


def test_at_a_rate_of_one_all_are_audited_and_nobody_audits_more_than_two() -> None:
    for seed in seeds(50):
        found = drawn(seed, ALL)
        assert set(found) == set(NAMES)
        assert max(map(list(found.values()).count, NAMES)) <= 2
        assert all(peer != auditor for peer, auditor in found.items())


def test_so_many_are_drawn_as_the_rate_says_and_each_auditor_as_often() -> None:
    steps = [drawn(seed, 100_000) for seed in seeds(2000)]
    assert 0.08 < sum(map(len, steps)) / (2000 * len(NAMES)) < 0.12
    by = [auditor for found in steps for auditor in found.values()]
    assert all(0.15 < by.count(name) / len(by) < 0.35 for name in NAMES)


def test_once_somebody_is_convicted_a_fifth_is_drawn_for_a_while() -> None:
    """The colluders of a convicted peer are found soon, also in steps that are done again."""
    verdict = Bar(VIEW, 40, "x", 1, 440, "lies")
    known = Bar(GENESIS, 40, "y", 0, 90, NEW)
    for step in (0, 40, 40 + ALARM_STEPS - 1):
        assert rate_in_force(20_000, (known, verdict), step) == ALARM_MILLIONTHS
        assert rate_in_force(500_000, (known, verdict), step) == 500_000
    assert rate_in_force(20_000, (known, verdict), 40 + ALARM_STEPS) == 20_000
    assert rate_in_force(20_000, (known,), 0) == 20_000
    drawn_steps = []
    for bars in ((), (verdict,)):
        book = ClaimBook(VIEW, PLAN, 0, bars=bars)
        count = 0
        for step in range(7, 207):
            claimed(book, step)
            count += bool(book.drawn()) and step > 7  # in a view's first step all members are drawn
        drawn_steps.append(count)
    assert drawn_steps[0] == 0 and 25 < drawn_steps[1] < 55


def test_all_are_drawn_in_the_same_steps_so_that_waits_do_not_add_up() -> None:
    steps = [drawn(seed, 100_000) for seed in seeds(2000)]
    assert {len(found) for found in steps} == {0, len(NAMES)}
    assert 0.08 < sum(map(bool, steps)) / 2000 < 0.12


def test_another_arithmetic_audits_nobody_and_who_has_the_same_layers_does() -> None:
    names = {"a": "cpu-2", "b": "", "c": "cpu-1", "d": "cpu-1"}
    unlike = {name: share_of(name, arithmetic) for name, arithmetic in names.items()}
    assert drawn(seeds(1)[0], ALL, shares=unlike) == {"c": "d", "d": "c"}
    halves = two_by_two()
    pairs = {"a": "c", "c": "a", "b": "d", "d": "b"}
    assert drawn(seeds(1)[0], ALL, halves, kept=2) == pairs
    assert drawn(seeds(1)[0], ALL, halves, kept=1) == {}, "too much to be kept"
    assert drawn(seeds(1)[0], 0, halves, kept=2, always={"d"}) == {"d": "b"}
    other = Pipeline((Stage("c", 0, 2, 1), Stage("d", 2, 3, 1)), 2, 2)
    unlike_cuts = Plan((halves.pipelines[0], other), (), 1)
    found = drawn(seeds(1)[0], ALL, unlike_cuts, kept=2)
    assert found == {"a": "c", "d": "b"}, "of more layers than the other's"


def test_where_parameters_are_stated_each_member_is_drawn_for_each() -> None:
    """A liar's only colluder is then drawn for the liar once in three times, not each time."""
    plan = two_by_two()
    shares = {
        name: msgspec.structs.replace(share, parameters=dict.fromkeys(plan.layers_of(name), b"p"))
        for name, share in SHARES.items()
    }
    by = [drawn(seed, ALL, plan, shares)["a"] for seed in seeds(600)]
    assert all(0.25 < by.count(name) / len(by) < 0.42 for name in "bcd")


def stage_share(plan: Plan, name: str) -> Share:
    """A share of a stage that several pairs hold."""
    parts, got, chunk = {}, {}, b"c" * 32
    for number, segment in enumerate(plan.segments()):
        if name in segment.holders:
            mine = segment.holders.index(name)
            count = len(segment.holders)
            parts[number] = (chunk,) * count
            came = tuple(chunk if it == mine else b"" for it in range(count))
            got[number] = tuple(() if it == name else came for it in segment.holders)
    edge = b"e" * 32
    edges = {
        number: Boundary(
            edge if before else b"",
            edge if after else b"",
            edge if after else b"",
            edge if before else b"",
        )
        for number, (before, after) in beside(plan, name).items()
    }
    known = tellers(plan)
    losses = dict.fromkeys(known.heads if name in known.heads else known.to(name), LOSSES)
    norms = {n: (1.0,) * len(each) for n, each in got.items()}
    return Share("cpu-1", 1, parts, got, edges, losses=losses, norms=norms)


def claim(name: str, step: int, *, opened: bool = True) -> Claimed:
    opening = name.encode() * 31 + bytes([step])
    following = name.encode() * 31 + bytes([step + 1 if opened else 99])
    return Claimed(VIEW, step, share_of(name), b"w" * 32, opening, commitment_to(following))


def claimed(book: ClaimBook, step: int, *, opened: bool = True) -> None:
    book.step_begins(step)
    for name in NAMES:
        assert name in book.not_claimed()
        book.record(name, claim(name, step, opened=opened))
    assert not book.not_claimed()


def test_in_the_first_step_of_a_view_all_are_audited() -> None:
    book = ClaimBook(VIEW, PLAN, 1)
    claimed(book, 7)
    assert set(book.drawn()) == set(NAMES)
    claimed(book, 8)
    assert book.drawn() == {} and book.false_openings() == {}


def test_for_who_has_other_layers_and_no_room_a_holder_is_drawn_instead() -> None:
    """Otherwise nobody audits what an auditor without room has drawn."""
    plan = two_by_two()
    book = ClaimBook(VIEW, plan, ALL)
    book.step_begins(7)
    assert book.borrowers() == {}, "not all have claimed"
    for name in NAMES:
        layers = dict.fromkeys(plan.layers_of(name), b"p" * 32)
        share = msgspec.structs.replace(stage_share(plan, name), parameters=layers)
        book.record(name, msgspec.structs.replace(claim(name, 7), share=share))
    drawn = book.drawn()
    outside = {peer: by for peer, by in drawn.items() if not book.has_layers(by, peer)}
    assert 0 < len(outside) < 4 and book.drawn_instead() == ()
    assert book.borrowers() == Counter(outside.values())
    for peer, by in drawn.items():
        word = COULD_NOT if peer in outside else b"w" * 32
        book.record(by, Audited(VIEW, 7, peer, word))
    (instead,) = book.drawn_instead()
    assert set(instead) == set(outside) and set(book.not_audited()) == set(instead.values())
    for peer, by in instead.items():
        assert book.has_layers(by, peer)
        book.record(by, Audited(VIEW, 7, peer, b"x" * 32))
    assert book.not_audited() == () and book.disputed() == sorted(outside)
    asked = Counter({it: n for it, n in book.borrowers().items() if n})
    others = [judge for peer in outside for judge in NAMES if not book.has_layers(judge, peer)]
    assert asked == Counter(others), "all of them judge it"


def in_pairs(count: int, opening: bytes = b"o" * 32, is_reversed: bool = False) -> ClaimBook:
    """The draw in a view's first step among so many members. All have claimed, the last member
    first where the order `is_reversed`."""
    names = [f"{number:02}" for number in range(count)]
    both = zip(names[::2], names[1::2], strict=True)
    stages = [(Stage(x, 0, 1, 1), Stage(y, 1, 3, 1)) for x, y in both]
    plan = Plan(tuple(Pipeline(two, n, 1) for n, two in enumerate(stages)), (), 1)
    book = ClaimBook(VIEW, plan, ALL)
    book.step_begins(7)
    for name in reversed(names) if is_reversed else names:
        layers = dict.fromkeys(plan.layers_of(name), b"p" * 32)
        share = msgspec.structs.replace(stage_share(plan, name), parameters=layers)
        book.record(name, Claimed(VIEW, 7, share, b"w" * 32, opening, b"c" * 32))
    return book


def test_who_is_drawn_instead_nobody_knows_before_all_have_claimed() -> None:
    """The draw followed from the view and the step. It was known when the step began which of the
    colluders would audit in place of a member without room."""
    instead: dict[tuple[str, ...], set[str]] = {}
    for number in range(64):
        book = in_pairs(8, number.to_bytes(32))
        peer = "00"
        auditors = tuple(drawn[peer] for drawn in book.rounds())
        again = in_pairs(8, number.to_bytes(32), is_reversed=True)
        audits = [
            (by, Audited(VIEW, 7, it, COULD_NOT if it == peer else b"w" * 32))
            for drawn in book.rounds()
            for it, by in drawn.items()
        ]
        for each, heard in ((book, audits), (again, reversed(audits))):
            for by, said in heard:
                each.record(by, said)
        assert again.drawn_instead() == book.drawn_instead(), "all come to the same"
        places = [each[peer] for each in book.drawn_instead()]
        instead.setdefault(auditors, set()).update(places[:1])
    assert max(map(len, instead.values())) > 1


@pytest.mark.parametrize(("count", "failing"), [(8, 1), (12, 1), (12, 2), (16, 3)])
def test_for_each_further_auditor_that_had_no_room_a_holder_is_drawn_instead(
    count: int, failing: int
) -> None:
    """Otherwise a liar that chooses the draw has its colluder drawn, and beside it members without
    room."""
    book, tried = in_pairs(count), 0
    for peer in book.drawn():
        auditors = [drawn[peer] for drawn in book.rounds()]
        colluders, honest = auditors[:-failing], auditors[-failing:]
        if any(book.has_layers(by, peer) for by in honest):
            continue
        tried += 1
        book = in_pairs(count)
        for drawn in book.rounds():
            for it, by in drawn.items():
                work = COULD_NOT if it == peer and by in honest else b"w" * 32
                assert book.drawn_instead() == (), "not all have spoken"
                book.record(by, Audited(VIEW, 7, it, work))
        instead = [drawn[peer] for drawn in book.drawn_instead()]
        assert len(set(instead)) == failing and not set(instead) & {*colluders, *honest, peer}
        assert all(book.has_layers(by, peer) for by in instead)
        assert set(book.not_audited()) <= set(instead) and book.disputed() == []
        for by in instead:
            book.record(by, Audited(VIEW, 7, peer, b"x" * 32))
        assert book.not_audited() == () and book.disputed() == [peer]
    assert tried


def test_in_the_first_step_of_a_view_nobody_is_audited_by_its_colluders_alone() -> None:
    """Whoever speaks last in that step chooses the draw. A liar may have three colluders among
    sixteen."""
    for holders, besides in ((7, 0), (8, 1), (12, 2), (16, 3), (40, 3)):
        names = [f"{number:02}" for number in range(holders)]
        judges = {it: [name for name in names if name != it] for it in names}
        for seed in seeds(4):
            first = draw(seed, names, judges.__getitem__, ALL)
            more = drawn_besides(seed, first, judges.__getitem__, besides)
            assert len(more) == besides
            for peer in names:
                auditors = {each[peer] for each in (first, *more)}
                assert len(auditors) == 1 + besides and peer not in auditors
            done = Counter(by for each in (first, *more) for by in each.values())
            assert max(done.values()) <= 2 + besides, "none has much more to do than others"


@pytest.mark.parametrize(
    ("holders", "spares", "auditors"),
    [(4, 0, 1), (7, 0, 2), (7, 1, 2), (5, 3, 2), (10, 1, 3), (8, 30, 4)],
)
def test_spares_and_who_is_away_count_where_colluders_may_have_chosen_the_draw(
    holders: int, spares: int, auditors: int
) -> None:
    """Two colluders of eight members may both have a stage. With seven stages each work had one
    auditor in a view's first step, and the last of the two to claim chose the other one. So it was
    where one of the honest members was away: a norm of 1.03 was committed in place of 1.81."""
    names, idle = [f"{n:02}" for n in range(holders)], tuple(f"x{n}" for n in range(spares))
    pipelines = (Pipeline((Stage(it, 0, 3, 1),), n, 1) for n, it in enumerate(names))
    plan = Plan(tuple(pipelines), idle, 1)
    book = ClaimBook(VIEW, plan, 1)
    for step in (7, 8):
        book.step_begins(step)
        for name in names:
            share = msgspec.structs.replace(stage_share(plan, name), norms={})
            now, after = (f"{name}{n:030}".encode() for n in (step, step + 1))
            said = Claimed(VIEW, step, share, b"w" * 32, now, commitment_to(after))
            book.record(name, said)
        by = [{each[it] for each in book.rounds() if it in each} for it in names]
        assert {len(each) for each in by} == {auditors if step == 7 else 0}


def test_nobody_opens_another_thing_than_it_has_committed_itself_to() -> None:
    book = ClaimBook(VIEW, PLAN, ALL)
    claimed(book, 7)
    book.step_begins(8)
    forged = msgspec.structs.replace(claim("b", 8), opening=bytes(32))
    for name in NAMES:
        book.record(name, forged if name == "b" else claim(name, 8))
    assert list(book.false_openings()) == ["b"]


@pytest.mark.parametrize("before", ["cpu-of-its-own", ""])
def test_nobody_changes_to_the_arithmetic_of_others(before: str) -> None:
    """Two of eight named an arithmetic of their own, which nobody could audit. Wherever nobody was
    drawn they named that of three others, made it the one of most, and three honest ones lost their
    places, again and again. Nobody found that out."""
    book = ClaimBook(VIEW, PLAN, 1)
    for step, name in ((7, before), (8, "cpu-1")):
        book.step_begins(step)
        for peer in NAMES:
            mine = {"b": name, "c": "cpu-2"}.get(peer, "cpu-1")
            share = share_of(peer, mine)
            book.record(peer, msgspec.structs.replace(claim(peer, step), share=share))
        assert list(book.impossible()) == (["b"] if step == 8 else [])
        assert book.false_openings() == {}


def test_who_names_none_or_one_of_its_own_is_left_to_the_others_count() -> None:
    """A card may find out that its bits do not repeat."""
    for other in ("", "cpu-of-its-own"):
        book = ClaimBook(VIEW, PLAN, 1)
        for step, name in ((7, "cpu-1"), (8, other)):
            book.step_begins(step)
            for peer in NAMES:
                share = share_of(peer, name if peer == "b" else "cpu-1")
                book.record(peer, msgspec.structs.replace(claim(peer, step), share=share))
        assert not book.impossible()


def test_what_is_found_unlike_is_disputed() -> None:
    book = ClaimBook(VIEW, PLAN, ALL)
    claimed(book, 7)
    pairs = book.drawn()
    assert set(book.not_audited()) == set(NAMES)
    for peer, auditor in pairs.items():
        book.record(auditor, Audited(VIEW, 7, peer, b"x" * 32 if peer == "c" else b"w" * 32))
    assert not book.not_audited() and book.disputed() == ["c"]


def test_a_claim_is_said_once_and_in_its_form() -> None:
    book = ClaimBook(VIEW, PLAN, ALL)
    book.step_begins(7)
    good = claim("a", 7)
    book.record("a", good)
    book.record("a", good)
    with pytest.raises(PeerFault, match="two different claims"):
        book.record("a", msgspec.structs.replace(good, work=b"v" * 32))
    share = good.share
    for changed in (
        {"work": b""},
        {"opening": b"1"},
        {"commitment": b"1"},
        {"share": msgspec.structs.replace(share, threads=0)},
        {"share": msgspec.structs.replace(share, arithmetic="x" * 65)},
        {"share": msgspec.structs.replace(share, parts={})},
        {"share": msgspec.structs.replace(share, got={0: ()})},
        {"share": msgspec.structs.replace(share, parts={0: (b"short",)})},
    ):
        with pytest.raises(PeerFault):
            book.record("b", msgspec.structs.replace(good, **changed))
    with pytest.raises(PeerFault, match="without a stage"):
        book.record("z", good)
    with pytest.raises(PeerFault, match="while step 7 is open"):
        book.record("b", claim("b", 9))
    book.record("b", claim("b", 8))
    assert book.not_claimed() == ("b", "c", "d")
