"""A peer counts as slow as most others have seen it, or as its own word says if that is slower."""

from itertools import product

import msgspec
import pytest

from p2p_dtfm.core.audit.believed_speeds import believed, pace_of, seen_slower
from p2p_dtfm.core.planner.planner import compute_plan, fixed_plan
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.facts.seen_paces import PACES_LIMIT, middle_of
from p2p_dtfm.core.protocol.measured_plans import MeasuredPlan, shape_of
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import (
    LAYER_LIMIT_NS,
    Device,
    LayerTiming,
    open_record,
    sign_record,
)
from p2p_dtfm.core.protocol.snapshot import GENESIS, Bar, Snapshot
from p2p_dtfm.net.contacts.identity import identity_of_seed, verify
from tests.core.builders import device, record, run_spec
from tests.core.planning import Peer, name_of, snapshot

HONEST_NS, SAID_NS = 30_000_000, 1_500_000
LIAR = 3


def told_by(paces: dict[int, dict[int, int]], stages: tuple[int, ...] = (1, 1, 1, 1)) -> Snapshot:
    """Four peers that each hold the whole model; the last one says that it is 20 times as fast."""
    made = snapshot([Peer(HONEST_NS)] * 3 + [Peer(SAID_NS)])
    named = {by: {name_of(of): ns for of, ns in each.items()} for by, each in paces.items()}
    records = tuple(
        msgspec.structs.replace(each, paces=named.get(number, {}))
        for number, each in enumerate(made.records)
    )
    return msgspec.structs.replace(made, records=records, present=fixed_plan(made, stages))


def shares(found: Snapshot) -> dict[str, int]:
    plan = compute_plan(found)
    assert isinstance(plan, Plan)
    return {p.stages[0].peer_id: p.microbatch_count for p in plan.pipelines if len(p.stages) == 1}


TRUE_NS = pace_of(told_by({}).records[0].device, told_by({}).workload)


def test_what_most_have_seen_takes_the_work_back() -> None:
    before = shares(told_by({}))
    after = shares(told_by({by: {LIAR: TRUE_NS} for by in range(3)}))
    assert before.get(name_of(LIAR), 64) > 32
    assert after[name_of(LIAR)] == 16
    assert believed(told_by({})) == told_by({})


def test_one_alone_is_not_heard_whatever_it_says() -> None:
    for by, of in product(range(4), range(4)):
        found = told_by({by: {of: 1 << 59}})
        assert seen_slower(found) == {}
        assert shares(found) == shares(told_by({})), (by, of)


def test_a_liar_among_those_that_have_seen_it_gets_no_further_than_they() -> None:
    seen = {0: {LIAR: TRUE_NS}, 1: {LIAR: TRUE_NS + 1}}
    for lie in (1, 1 << 59):
        slow = seen_slower(told_by(seen | {2: {LIAR: lie}}))
        assert TRUE_NS <= slow[name_of(LIAR)] <= TRUE_NS + 1


def test_the_slower_of_its_own_word_and_theirs() -> None:
    found = told_by({by: {0: TRUE_NS - 1, LIAR: TRUE_NS} for by in (1, 2, 3, 0)})
    assert seen_slower(found).keys() == {name_of(LIAR)}
    device = believed(found).record(name_of(LIAR)).device
    assert abs(pace_of(device, found.workload) - TRUE_NS) < TRUE_NS // 100


def test_those_without_a_stage_have_seen_only_who_has_all_alone() -> None:
    seen = {by: {LIAR: TRUE_NS} for by in range(3)}
    alone = msgspec.structs.replace(fixed_plan(told_by({}), (1,)), predicted_step_ns=1)
    lone = told_by({by: {0: TRUE_NS * 9} for by in (1, 2, 3)}, (1,))
    assert lone.present == msgspec.structs.replace(alone, predicted_step_ns=0)
    assert seen_slower(lone).keys() == {name_of(0)}
    of_some = {by: {LIAR: TRUE_NS} for by in (1, 2)}
    assert seen_slower(told_by(of_some, (1, 1))) == {}, "one of the two has no stage"
    assert seen_slower(msgspec.structs.replace(told_by(seen), present=None)) == {}


def test_who_is_new_where_work_is_audited_is_not_asked() -> None:
    seen = told_by({by: {LIAR: TRUE_NS} for by in range(3)})
    news = tuple(Bar(GENESIS, 0, name_of(n), 0, 50, "new") for n in (0, 1))
    assert seen_slower(msgspec.structs.replace(seen, bars=news)) == {}


def test_steps_of_plans_that_went_by_a_false_word_are_forgotten() -> None:
    found = told_by({by: {LIAR: TRUE_NS} for by in range(3)})
    assert found.present is not None
    of_all, of_one = (
        MeasuredPlan(shape_of(plan), 5) for plan in (found.present, fixed_plan(found, (1,)))
    )
    records = tuple(msgspec.structs.replace(it, measured=(of_all, of_one)) for it in found.records)
    found = msgspec.structs.replace(found, records=records)
    assert all(it.measured == (of_one,) for it in believed(found).records)


@pytest.mark.parametrize(
    ("told", "expected"), [([], 0), ([5], 0), ([0, 5], 0), ([4, 5], 4), ([0, 5, 9], 5)]
)
def test_the_lower_middle_of_two_or_more(told: list[int], expected: int) -> None:
    assert middle_of(told) == expected


def test_records_tell_of_few_and_of_nothing_that_cannot_be() -> None:
    identity = identity_of_seed(bytes(32))

    def opened(paces: dict[str, int]) -> dict[str, int]:
        made = record(identity.peer_id, paces=paces)
        return open_record(sign_record(made, identity.sign), run_spec().digest(), verify).paces

    assert opened({"b": 5}) == {"b": 5}
    many = {name_of(number): 5 for number in range(PACES_LIMIT + 1)}
    for wrong in ({"b": 0}, {"b": -1}, {"b": 1 << 60}, {"": 5}, {"x" * 65: 5}, many):
        with pytest.raises(PeerFault):
            opened(wrong)


def test_layers_that_the_run_does_not_list_hide_nothing() -> None:
    """A liar that also timed unlisted layers was slower by its own word than anybody had seen
    it."""
    said = told_by({}).records[LIAR].device
    long = (LayerTiming(1 << 40, 1 << 40),)
    found = stated(told_by({by: {LIAR: TRUE_NS} for by in range(3)}), said, listed=long)
    assert shares(found)[name_of(LIAR)] == 16


def test_who_says_that_it_takes_no_time_is_as_slow_as_it_was_seen() -> None:
    """A multiple of no time was still no time."""
    seen, none = {by: {LIAR: TRUE_NS} for by in range(3)}, LayerTiming(0, 0)
    said = told_by({}).records[LIAR].device
    found = stated(told_by(seen), said, embedding=none, block=none, head=none)
    taken = believed(found).record(name_of(LIAR)).device
    assert pace_of(taken, found.workload) * 2 > TRUE_NS
    assert shares(found)[name_of(LIAR)] < 32


def stated(found: Snapshot, said: Device, **changes: object) -> Snapshot:
    """A snapshot in which the liar says something else of its device."""
    said = msgspec.structs.replace(said, **changes)
    liar = msgspec.structs.replace(found.records[LIAR], device=said)
    return msgspec.structs.replace(found, records=(*found.records[:LIAR], liar))


@pytest.mark.parametrize("wrong_ns", [-1, LAYER_LIMIT_NS, (1 << 60) - 1])
def test_no_layer_takes_so_long_that_others_could_not_tell_of_it(wrong_ns: int) -> None:
    identity, run = identity_of_seed(bytes(32)), run_spec().digest()

    def opened(ns: int, kind: str) -> Device:
        times = LayerTiming(1, ns)
        said = msgspec.structs.replace(device(), **{kind: (times,) if kind == "listed" else times})
        made = record(identity.peer_id, device=said)
        return open_record(sign_record(made, identity.sign), run, verify).device

    for kind in ("embedding", "block", "head", "listed"):
        assert opened(LAYER_LIMIT_NS - 1, kind)
        with pytest.raises(PeerFault, match="takes less than no time, or most of a day"):
            opened(wrong_ns, kind)
