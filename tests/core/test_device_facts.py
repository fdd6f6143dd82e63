"""A record says what its peer's device is; guardians keep layers where there is memory for them."""

import msgspec
import pytest
import torch

from p2p_dtfm.core.cost_model.guardians import guards_in
from p2p_dtfm.core.cost_model.guarding import Guarding
from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.facts.device_facts import DeviceFacts
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import open_record, sign_record
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.train.stage.device.facts import device_facts, product_mflops
from tests.core.builders import device, record, run_spec
from tests.core.planning import Peer
from tests.core.planning import snapshot as snapshot_of

CARD = DeviceFacts(
    24 << 30, 64 << 30, 20 << 30, 35_000_000, 71_000_000, "8.6", "550", "2", 12 << 30
)


def signed(facts: DeviceFacts):
    made = record("a", device=msgspec.structs.replace(device(), facts=facts))
    return made, sign_record(made, lambda payload: b"")


def test_a_record_with_facts_is_opened_as_it_was_signed() -> None:
    made, said = signed(CARD)
    assert open_record(said, run_spec().digest(), lambda *_: True) == made
    assert len(said.payload) < 800


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"driver": "x" * 65}, "too long"),
        ({"torch": "\x1b[2J"}, "no words"),
        ({"host_bytes": -1}, "below 0"),
        ({"fp32_mflops": 1 << 60}, "above 2"),
    ],
)
def test_facts_that_cannot_be_are_refused(change: dict[str, object], why: str) -> None:
    _, said = signed(msgspec.structs.replace(CARD, **change))
    with pytest.raises(PeerFault, match=why):
        open_record(said, run_spec().digest(), lambda *_: True)


def with_cards(snapshot: Snapshot, host_free_bytes: list[int | None]) -> Snapshot:
    """Peers with a card and this much memory beside it; None states no memory."""
    records = []
    for each, free in zip(snapshot.records, host_free_bytes, strict=True):
        facts = msgspec.UNSET
        if free is not None:
            facts = msgspec.structs.replace(CARD, host_free_bytes=free)
        card = msgspec.structs.replace(each.device, kind="cuda", facts=facts)
        records.append(msgspec.structs.replace(each, device=card))
    return msgspec.structs.replace(snapshot, records=tuple(records))


def test_guardians_are_where_the_hosts_memory_is() -> None:
    """Two stages and a spare have a card each. Only the spare's machine has memory beside its
    card."""
    bare = snapshot_of([Peer(memory_bytes=180 << 20)] * 2 + [Peer(memory_bytes=60 << 20)])
    plan = compute_plan(with_cards(bare, [None] * 3))
    assert isinstance(plan, Plan)
    (spare,) = {each.peer_id for each in bare.records} - set(plan.stage_holders())
    assert len(plan.pipelines) == 1 and len(plan.stage_holders()) == 2

    beside = [(8 << 30) if each.peer_id == spare else 1 for each in bare.records]
    told = with_cards(bare, list(beside))
    assert set(guards_in(told, plan).values()) == {spare}
    assert problem_of(told).watchers.beside_bytes == dict(enumerate(beside))
    other_way = with_cards(bare, [1 if free > 1 else 8 << 30 for free in beside])
    assert set(guards_in(other_way, plan).values()) == set(plan.stage_holders())
    numbers = tuple(map(problem_of(told).peer_ids.index, plan.stage_holders()))
    kept = Guarding(problem_of(other_way)).by(numbers, (0, 7, 14), (1, 1))
    assert {each.guardian for each in kept} == set(numbers)

    silent = with_cards(bare, [None] * 3)
    as_much = with_cards(bare, [each.device.memory_bytes for each in bare.records])
    assert guards_in(silent, plan) == guards_in(as_much, plan)
    assert problem_of(silent).watchers.beside_bytes == {}


class GivenCard:
    """A stand-in for what a machine with a card would say."""

    def __init__(self) -> None:
        self.waits = 0

    def memory_bytes(self) -> int:
        return 24 << 30

    def capability(self) -> str:
        return "8.6"

    def driver(self) -> str:
        return "550.54.14" * 20

    def finish(self) -> None:
        self.waits += 1


def test_facts_of_this_machine_and_of_a_card_that_is_given() -> None:
    here = device_facts(torch.device("cpu"))
    assert here.memory_bytes == here.host_bytes > here.host_free_bytes > 0
    assert here.fp32_mflops > 100 and here.bf16_mflops > 0
    assert (here.driver, here.host_bytes_per_s) == ("", 0)
    assert here.torch == torch.__version__

    card = GivenCard()
    given = device_facts(torch.device("cpu"), card)
    assert (given.memory_bytes, given.capability) == (24 << 30, "8.6")
    assert given.driver == ("550.54.14" * 20)[:64]
    assert given.host_bytes_per_s > 0 and card.waits >= 4
    assert given.host_free_bytes < here.host_bytes // 2


def test_an_operation_that_takes_longer_counts_as_less() -> None:
    slow = product_mflops(torch.device("cpu"), torch.float32, lambda: _spin())
    assert slow < product_mflops(torch.device("cpu"), torch.float32)


def _spin() -> None:
    torch.mm(torch.ones(900, 900), torch.ones(900, 900))
