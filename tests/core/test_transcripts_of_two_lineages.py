"""A peer that was in two parts of a swarm has steps of two lineages in one file. Those count that
lead to where the peer is now, and none that a later view has given up."""

from collections.abc import Sequence

import msgspec
import pytest

from p2p_dtfm.core.commit.judgement import DIGEST_BYTES
from p2p_dtfm.core.commit.step_terms import terms_of
from p2p_dtfm.core.messages.agreement_messages import Ready
from p2p_dtfm.core.messages.prepared import Prepared, sign_prepared
from p2p_dtfm.core.messages.statements import certified, members_digest, stated
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.lineage import Epochs, marked
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.sections.audit_spec import AuditSpec
from p2p_dtfm.core.protocol.signed import Sign, signing_in
from p2p_dtfm.core.protocol.snapshot import GENESIS, ViewId, founding_snapshot
from p2p_dtfm.core.transcript.checking import Checker, NotTrue
from p2p_dtfm.core.transcript.entries import FORMAT, Began, Committed, TookOver
from p2p_dtfm.core.transcript.joining import differ_from, joined
from p2p_dtfm.sim.faults.simulated_process import sign_for, verify
from tests.core.builders import WORKLOAD, record, run_spec

SPEC = run_spec()
LAYERS = SPEC.model.layer_count


def sign_of(name: str) -> Sign:
    return signing_in(SPEC.digest(), sign_for(name))


def view(
    name: str,
    number: int,
    step: int,
    previous: ViewId = GENESIS,
    lineage: str = "",
    says_step: int | None = None,
) -> TookOver:
    """A view of one member alone; a view of an even number was planned. `says_step`: the step at
    which the writer says the view took over, in place of the true one."""
    plan = Plan((Pipeline((Stage(name, 0, LAYERS, 1),), 0, SPEC.microbatches_per_step),), (), 1)
    shot = msgspec.structs.replace(
        founding_snapshot(SPEC.digest(), WORKLOAD, [record(name)]),
        number=number,
        planned=number % 2 == 0,
        previous=previous,
        step=step,
        lineage=lineage,
    )
    (member,) = shot.members
    digest = members_digest(shot.members)
    ready = stated(Ready(member, shot.view_id, plan.digest(), digest), sign_of(name))
    proof = certified(shot.view_id, shot.members, [ready])
    return TookOver(shot, plan, proof, step if says_step is None else says_step)


def words(taken: TookOver, step: int, base: str) -> Committed:
    """The words of a step of a view, from this lineage."""
    assert isinstance(taken.plan, Plan)
    (name,) = taken.plan.stage_holders()
    held_out = terms_of(SPEC).held_out_tokens(step, taken.plan, name)
    tokens = SPEC.tokens_per_step if step < SPEC.total_steps else 0
    counts = (0.0, tokens, 0.0, held_out)
    tells = terms_of(SPEC).tells_states(step)
    states = dict.fromkeys(taken.plan.layers_of(name), bytes(DIGEST_BYTES)) if tells else {}
    said = Prepared(
        taken.snapshot.view_id, step, name, {0: 1.0}, *counts, None, base, states=states
    )
    return Committed((sign_prepared(said, sign_of(name)),))


def committed(checker: Checker, taken: TookOver, steps: Sequence[int], base: str = "") -> str:
    """Commit these steps one after the other. Returns the lineage to which they lead."""
    for step in steps:
        checker.take(words(taken, step, base))
        base = checker._lineage[step + 1]
    return base


def begun() -> Checker:
    checker = Checker(verify)
    checker.take(Began(FORMAT, SPEC.canonical_bytes()))
    return checker


def elsewhere(steps: int) -> tuple[TookOver, str]:
    """Another part of the swarm has come this many steps by itself. Returns its view and its
    lineage."""
    other, first = begun(), view("b", 1, 0)
    other.take(first)
    return first, committed(other, first, range(steps))


@pytest.mark.parametrize("is_planned", [True, False])
def test_who_goes_over_to_a_part_that_has_come_less_far_has_no_false_transcript(
    is_planned: bool,
) -> None:
    """Everybody refused its file from then on, for all that it had ever seen. The step in which it
    was let in starts from another state than its own step of that number had left."""
    checker, alone = begun(), view("a", 1, 0)
    checker.take(alone)
    committed(checker, alone, range(5))
    there, lineage = elsewhere(3)
    number = 4 if is_planned else 5
    joined = view("b", number, 3, there.snapshot.view_id, "" if is_planned else lineage)
    checker.take(joined)
    committed(checker, joined, (3, 4, 5), lineage)
    assert sorted(checker.steps) == [3, 4, 5] and checker.gaps == [(0, 3)]
    assert checker.repeated == 5, "what it had done elsewhere is given up"
    assert set(checker.tallies()) == {"b"}


def test_within_a_view_and_into_the_next_planned_one_each_step_starts_where_the_last_has_led() -> (
    None
):
    _, lineage = elsewhere(3)
    for planned_next in (False, True):
        checker, first = begun(), view("a", 1, 0)
        checker.take(first)
        committed(checker, first, range(3))
        taken = view("a", 2, 3, first.snapshot.view_id) if planned_next else first
        if planned_next:
            checker.take(taken)
        with pytest.raises(NotTrue, match="another lineage"):
            committed(checker, taken, (3,), lineage)


def test_what_a_view_has_given_up_stays_given_up_wherever_its_writer_says_that_it_began() -> None:
    """Members of an unplanned view have signed from which step it goes on; the line beside it is
    its writer's word alone. With another number there and one step left out, steps that had been
    taken back counted for those who had done them."""
    checker, first = begun(), view("a", 1, 0)
    checker.take(first)
    committed(checker, first, range(10))
    kept = checker._lineage[4]
    back = view("b", 3, 4, first.snapshot.view_id, kept, says_step=10)
    checker.take(back)
    assert sorted(checker.steps) == [0, 1, 2, 3] and checker.repeated == 6
    committed(checker, back, (4, 5), kept)
    assert checker.tallies()["a"].stage_steps == 4


def test_an_unplanned_view_starts_from_the_state_that_all_have_signed() -> None:
    checker, first = begun(), view("a", 1, 0)
    checker.take(first)
    led_to = committed(checker, first, range(4))
    back = view("b", 3, 4, first.snapshot.view_id, led_to)
    checker.take(back)
    with pytest.raises(NotTrue, match="another lineage"):
        committed(checker, back, (4,), elsewhere(4)[1])


@pytest.mark.parametrize("number", [1, 2])
def test_the_first_step_starts_from_what_the_run_begins_with(number: int) -> None:
    checker, first = begun(), view("a", number, 0, lineage="0" * 64 if number == 1 else "")
    checker.take(first)
    with pytest.raises(NotTrue, match="another lineage"):
        committed(checker, first, (0,), "0" * 64)


def test_a_view_whose_line_is_lost_costs_its_own_steps_and_accuses_nobody() -> None:
    """The writer's disk was full for a moment, or a byte of the line has changed. The next Prepared
    was of no view in the file, and the peer that had rightly signed it was named for that."""
    checker, first = begun(), view("a", 1, 0)
    checker.take(first)
    led_to = committed(checker, first, range(3))
    lost = view("b", 3, 3, first.snapshot.view_id, led_to)
    checker.take(words(lost, 3, led_to))
    checker.take(words(lost, 4, "0" * 64))
    assert sorted(checker.steps) == [0, 1, 2]
    after = view("a", 4, 5, lost.snapshot.view_id)
    checker.take(after)
    committed(checker, after, (5, 6), "f" * 64)
    assert checker.gaps == [(3, 5)] and sorted(checker.tallies()) == ["a"]


def test_words_of_several_steps_are_no_step() -> None:
    checker, first = begun(), view("a", 1, 0)
    checker.take(first)
    committed(checker, first, range(2))
    both = words(first, 2, checker._lineage[2]).signed + words(first, 3, "0" * 64).signed
    with pytest.raises(NotTrue, match="several steps"):
        checker.take(Committed(both))


def test_a_view_that_nobody_has_agreed_on_is_none() -> None:
    """A view's contributors must have signed it. A view without contributors lacked nobody's
    signature."""
    taken = view("a", 1, 0)
    shot = msgspec.structs.replace(taken.snapshot, contributors=())
    assert isinstance(taken.plan, Plan)
    proof = msgspec.structs.replace(taken.certificate, view=shot.view_id, ready=())
    with pytest.raises(NotTrue, match="nobody"):
        begun().take(TookOver(shot, taken.plan, proof, 0))


def test_who_looks_at_the_finished_model_once_more_in_a_later_view_goes_no_other_way() -> None:
    """One member stayed after the end, as somebody always does. Its whole transcript was said to be
    of another way than that of the member that had left."""
    end = SPEC.total_steps
    one, other, first = begun(), begun(), view("a", 1, 0)
    for checker in (one, other):
        checker.take(first)
        led_to = committed(checker, first, range(end))
    committed(one, first, (end,), led_to)
    after = view("b", 3, end, first.snapshot.view_id, led_to)
    other.take(after)
    committed(other, after, (end,), led_to)
    assert differ_from(one, other) is None and differ_from(other, one) is None

    apart, alone = begun(), view("b", 1, 0)
    apart.take(alone)
    committed(apart, alone, range(end + 1))
    assert differ_from(one, apart) == 0
    apart.steps = {end: apart.steps[end]}
    assert differ_from(one, apart) == end, "of another model"


@pytest.fixture
def killed_and_back() -> tuple[Checker, Checker]:
    """A writer alone had committed step 2 when it was killed. The others have done that step again,
    and two more, until it was back. Returns its transcript, and that of one who stayed."""
    one, other, first = begun(), begun(), view("a", 1, 0)
    for checker in (one, other):
        checker.take(first)
        led_to = committed(checker, first, range(2))
    committed(one, first, (2,), led_to)
    without = view("b", 3, 2, first.snapshot.view_id, led_to)
    other.take(without)
    there = committed(other, without, (2, 3, 4), led_to)
    back = view("a", 4, 5, without.snapshot.view_id)
    for checker in (one, other):
        checker.take(back)
        committed(checker, back, (5, 6), there)
    assert one.gaps == [(3, 5)] and not other.gaps
    return one, other


def test_a_step_that_others_have_done_again_is_theirs_once_their_transcript_shows_it(
    killed_and_back: tuple[Checker, Checker],
) -> None:
    """The steps that it lacked came from the other transcript, and its own step 2, which leads
    elsewhere, stayed before them. It counted, no gap was told of, and whoever had rightly signed
    step 3 was refused by the states of the false one."""
    main, added = joined(killed_and_back)
    one, other = killed_and_back
    assert main is one and added == 3 and not main.gaps and differ_from(main, other) is None
    assert {peer: it.stage_steps for peer, it in main.tallies().items()} == {"a": 4, "b": 3}


def test_what_leads_elsewhere_is_left_out_though_nobody_here_has_that_step(
    killed_and_back: tuple[Checker, Checker],
) -> None:
    one, other = killed_and_back
    for step in (0, 1, 2):
        del other.steps[step]
    main, added = joined([one, other])
    assert main is one and added == 2 and main.gaps == [(2, 3)]


def test_a_view_begins_where_its_members_have_signed_also_if_its_writer_names_an_earlier_step() -> (
    None
):
    """The first step may be what is left of one that failed, so nobody knows whose losses count in
    it. By its writer's word another step was the first, and whoever had rightly signed this one was
    named for counting too few."""
    checker, first = begun(), view("a", 1, 0)
    checker.take(first)
    led_to = committed(checker, first, range(4))
    back = view("b", 3, 4, first.snapshot.view_id, led_to, says_step=3)
    checker.take(back)
    assert sorted(checker.steps) == [0, 1, 2, 3], "nothing was given up"
    (signed,) = words(back, 4, led_to).signed
    rest = msgspec.structs.replace(decode(signed.payload, Prepared), token_count=1)
    checker.take(Committed((sign_prepared(rest, sign_of("b")),)))
    assert sorted(checker.steps) == [0, 1, 2, 3, 4]


def test_nobody_answers_for_where_a_writer_has_put_its_words() -> None:
    """A writer that moved a line, or mixed two, had an honest signer named for it."""
    checker, first = begun(), view("a", 1, 0)
    checker.take(first)
    led_to = committed(checker, first, range(2))
    after = view("b", 4, 2, first.snapshot.view_id)
    checker.take(after)
    late = words(first, 2, led_to)
    with pytest.raises(NotTrue, match="a view that was over") as found:
        checker.take(late)
    assert (found.value.step, found.value.peer_id) == (2, "")
    with pytest.raises(NotTrue, match="several views") as found:
        checker.take(Committed((*words(after, 2, led_to).signed, *late.signed)))
    assert (found.value.step, found.value.peer_id) == (2, "")


@pytest.mark.parametrize("is_first", [True, False])
def test_what_the_run_has_taken_back_is_not_what_has_come_furthest(is_first: bool) -> None:
    """A member was killed after ten steps. The others took back six of them, for a liar's sake, and
    have done three anew. The steps that were taken back were judged, and said to hold."""
    away, here, first = begun(), begun(), view("a", 1, 0)
    for checker in (away, here):
        checker.take(first)
        committed(checker, first, range(10))
    start = marked(here._lineage[4], Epochs().next_one(4))
    back = view("b", 3, 4, first.snapshot.view_id, start)
    here.take(back)
    committed(here, back, range(4, 7), start)
    for checker in (away, here):  # here nobody signs what audits ask for
        checker.spec = SPEC.model_copy(update={"audit": AuditSpec(rate=0.1, undo_steps=4)})
    main, added = joined([here, away] if is_first else [away, here])
    assert main is here and not added and not main.gaps
    assert sorted(main.steps) == list(range(7)) and differ_from(main, away) == 4
