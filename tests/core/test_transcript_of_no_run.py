"""Transcripts of what no run can have, though all who are named in them have signed."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.commit.step_terms import terms_of
from p2p_dtfm.core.cost_model.links.coordinates import ORIGIN
from p2p_dtfm.core.messages.agreement_messages import Ready
from p2p_dtfm.core.messages.prepared import Prepared, sign_prepared
from p2p_dtfm.core.messages.statements import certified, members_digest, stated
from p2p_dtfm.core.protocol.facts.brief_links import BriefLinks, Link
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.records import Intent, PeerRecord
from p2p_dtfm.core.protocol.run_spec import Codec
from p2p_dtfm.core.protocol.snapshot import founding_snapshot
from p2p_dtfm.core.protocol.workload import UnlikeLayers, Workload
from p2p_dtfm.core.transcript.checking import NotTrue
from p2p_dtfm.core.transcript.entries import Committed, TookOver
from tests.core.builders import WORKLOAD, record
from tests.core.test_transcripts_of_two_lineages import (
    LAYERS,
    SPEC,
    begun,
    sign_of,
    view,
    words,
)


def test_a_step_after_the_last_one_is_none() -> None:
    """A reader that computes such a step again starts from where the last step led. `verify` waited
    for ever for the step before it."""
    step = SPEC.total_steps + 1
    checker, last = begun(), view("a", 1, step)
    checker.take(last)
    assert isinstance(last.plan, Plan)
    held_out = terms_of(SPEC).held_out_tokens(step, last.plan, "a")
    said = Prepared(last.snapshot.view_id, step, "a", {0: 1.0}, 0.0, 0, 0.0, held_out, None)
    with pytest.raises(NotTrue, match="no such step"):
        checker.take(Committed((sign_prepared(said, sign_of("a")),)))


def test_there_is_no_step_before_the_first() -> None:
    """Whoever had a transcript could add such a step, of nobody's work, and nothing undid it."""
    odd = view("x", 1, -1)
    with pytest.raises(NotTrue, match="from step -1"):
        begun().take(odd)
    checker, first = begun(), view("x", 1, 0)
    checker.take(first)
    with pytest.raises(NotTrue, match="no such step"):
        checker.take(words(first, -1, ""))


def agreed(
    plan: Plan, workload: Workload = WORKLOAD, more: Sequence[PeerRecord] = (), **of_second: Any
) -> TookOver:
    """A view that two members have agreed on."""
    records = [record("a"), msgspec.structs.replace(record("b"), **of_second)]
    shot = founding_snapshot(SPEC.digest(), workload, records)
    shot = msgspec.structs.replace(shot, records=(*shot.records, *more))
    members = members_digest(shot.members)
    ready = [
        stated(Ready(it, shot.view_id, plan.digest(), members), sign_of(it.peer_id))
        for it in shot.contributors
    ]
    return TookOver(shot, plan, certified(shot.view_id, shot.members, ready), 0)


def pair(second: str, *codecs: tuple[Codec, Codec]) -> Plan:
    """A pipeline of two stages."""
    stages = Stage("a", 0, 3, 1), Stage(second, 3, LAYERS, 1)
    return Plan((Pipeline(stages, 0, SPEC.microbatches_per_step, codecs),), (), 1)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (pair("c"), "somebody who is no member"),
        (msgspec.structs.replace(pair("b"), spares=("c",)), "somebody who is no member"),
        (pair("b", ("int8", "fp32")), "a codec that the run does not allow"),
        (pair("b", ("fp32", "bf16")), "a codec that the run does not allow"),
    ],
    ids=["stage", "spare", "activations", "gradients"],
)
def test_a_plan_that_the_members_could_not_have_made(plan: Plan, reason: str) -> None:
    with pytest.raises(NotTrue, match=reason):
        begun().take(agreed(plan))


@pytest.mark.parametrize("plan", [pair("b"), pair("b", ("fp32", "fp32"))])
def test_a_plan_that_they_could_is_taken(plan: Plan) -> None:
    begun().take(agreed(plan))


@pytest.mark.parametrize(
    ("taken", "reason"),
    [
        (agreed(pair("b"), msgspec.structs.replace(WORKLOAD, block_count=1)), "of 3 layers"),
        (
            agreed(pair("b"), msgspec.structs.replace(WORKLOAD, microbatch_count=1)),
            "1 microbatch a",
        ),
        (agreed(pair("b"), more=[record(f"m{n:05}") for n in range(1023)]), "1,025 members"),
        (agreed(pair("b"), intent=Intent.SPARE), "who does not train"),
        (agreed(pair("b"), brief=BriefLinks(ORIGIN, bytes(7))), "links of 7 bytes"),
        (agreed(pair("b"), uplink_bytes_per_s=-1), "a number below 0"),
        (agreed(pair("b"), links={"a": Link(1, -1)}), "a number below 0"),
    ],
    ids=["layers", "microbatches", "members", "intent", "links", "uplink", "rate"],
)
def test_a_view_of_which_nothing_could_be_computed(taken: TookOver, reason: str) -> None:
    """One signer made `verify` build tables of each pair of 20,000 members that nobody had seen, or
    end with an assertion."""
    with pytest.raises(NotTrue, match=reason):
        begun().take(taken)


def test_a_layer_that_takes_no_work() -> None:
    """Members plan by times of layers. By a layer that takes none nobody could, and `verify` ended
    with a traceback."""
    plan = Plan((Pipeline((Stage("a", 0, LAYERS, 1),), 0, SPEC.microbatches_per_step),), ("b",), 1)
    unlike = UnlikeLayers((), (), ())
    block = msgspec.structs.replace(WORKLOAD.block, unlike=unlike)
    taken = agreed(plan, msgspec.structs.replace(WORKLOAD, block=block))
    checker = begun()
    checker.take(taken)
    checker.take(words(taken, 0, ""))
    with pytest.raises(NotTrue, match="what is so of no machine, link or layer") as found:
        checker.tallies()
    assert (found.value.step, found.value.peer_id) == (0, "")
