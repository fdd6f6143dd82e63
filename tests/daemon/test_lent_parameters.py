"""Parameters that are lent to an auditor that has other layers: right ones, or none."""

import asyncio
from collections.abc import Sequence

import pytest
from blake3 import blake3

from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.step import lent_parameters
from p2p_dtfm.daemon.step.lent_parameters import BegunWith, Borrowing, NoParameters, begun_with
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.replay.work import LentLayer
from tests.core.builders import run_spec

SPEC = run_spec()
END = SPEC.model.layer_count
PLAN = Plan(
    tuple(
        Pipeline((Stage(one, 0, 2, 1), Stage(other, 2, END, 1)), n, 1)
        for n, (one, other) in enumerate(("ab", "cd"))
    ),
    (),
    1,
)
STATES = {layer: LayerState.genesis(SPEC, layer) for layer in range(END)}
FIRSTS = {layer: STATES[layer] for layer in (0, 1)}
LASTS = {layer: STATES[layer] for layer in range(2, END)}


def borrowed(
    lender: BegunWith, answers: dict[str, str], plan: Plan = PLAN
) -> dict[int, LentLayer] | None:
    """The parameters that b borrows, for a's work. `answers`: "gives", "denies", "is far",
    "cuts" or "lingers", by holder."""

    async def fetch(peer_ids: Sequence[str], blob: str, size_bytes: int) -> bytes:
        assert set(peer_ids) == answers.keys()
        for peer_id in peer_ids:
            found = lender.find(blob)
            assert found is not None and len(found) == size_bytes
            if answers[peer_id] == "lingers":
                await asyncio.sleep(1.0)
            if answers[peer_id] in ("gives", "cuts", "lingers"):
                return bytes(found)[: -4 if answers[peer_id] == "cuts" else None]
        denied = {peer_id for peer_id in peer_ids if answers[peer_id] == "denies"}
        raise BlobUnavailable(blob, answers, denied)

    compute = Compute()
    try:
        borrowing = Borrowing("b", SPEC, plan, LASTS, fetch, compute, lambda peer_id: 1 << 20)
        return asyncio.run(borrowing.borrowed("a", lender.digests))
    finally:
        compute.close()


def test_who_has_other_layers_gets_the_parameters_that_were_claimed() -> None:
    lender = begun_with(PLAN, FIRSTS)
    assert lender is not None
    for answers in ({"a": "gives", "c": "gives"}, {"a": "denies", "c": "gives"}):
        found = borrowed(lender, answers)
        assert found is not None and set(found) == {0, 1}
        for layer, lent in found.items():
            assert lent.parameters.equal(STATES[layer].parameters)
            assert lent.parameters.data_ptr() % 64 == 0, "kernels add as where the state lies"
            assert lender.digests[layer] == blake3(lent.parameters.numpy().tobytes()).digest()


def test_what_all_holders_have_claimed_and_none_shows_is_held_against_them() -> None:
    """Otherwise nobody would audit a holder that withholds its parameters."""
    lender = BegunWith(FIRSTS)
    with pytest.raises(NoParameters) as told:
        borrowed(lender, {"a": "denies", "c": "denies"})
    assert set(told.value.peer_ids) == {"a", "c"}
    with pytest.raises(NoParameters):
        borrowed(lender, {"a": "cuts", "c": "cuts"})


@pytest.mark.parametrize("a", ["denies", "is far"])
def test_what_no_holder_gives_is_lost_like_any_tensor(a: str) -> None:
    """Otherwise nobody would audit holders that are always too busy to give it."""
    with pytest.raises(BlobUnavailable):
        borrowed(BegunWith(FIRSTS), {"a": a, "c": "is far"})


def test_what_its_only_holder_lends_slower_than_its_line_carries_is_lost_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The judge asked for it for as long as anything came. All others took it for the one that
    holds them up, each judge in turn."""
    monkeypatch.setattr(lent_parameters, "LENT_WITHIN_S", 0.2)
    with pytest.raises(BlobUnavailable) as told:
        borrowed(BegunWith(FIRSTS), {"a": "lingers"}, Plan(PLAN.pipelines[:1], (), 1))
    assert set(told.value.causes) == {"a"} and not told.value.denied


def test_of_several_holders_none_is_blamed_as_one_of_them_lingers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others have it, and are asked next."""
    monkeypatch.setattr(lent_parameters, "LENT_WITHIN_S", 0.2)
    assert borrowed(BegunWith(FIRSTS), {"a": "lingers", "c": "lingers"})


def test_without_room_there_is_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_parameters, "free_bytes", lambda device: 1 << 10)
    assert borrowed(BegunWith(FIRSTS), {"a": "gives", "c": "gives"}) is None


def test_what_a_step_has_changed_is_not_lent() -> None:
    state = LayerState.genesis(SPEC, 1)
    lender = BegunWith({1: state})
    digest = lender.digests[1].hex()
    assert lender.find(digest) is not None and lender.find("ab" * 32) is None
    state.version += 1
    assert lender.find(digest) is None


def test_where_all_have_all_layers_nothing_is_digested() -> None:
    whole = Plan(tuple(Pipeline((Stage(n, 0, END, 1),), 0, 1) for n in "ab"), (), 1)
    assert begun_with(whole, STATES) is None
