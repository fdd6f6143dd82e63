"""Each pair of a phase and a message is handled, or refused with a reason; the docs say the same.

`python -m tests.core.test_agreement_table` writes the table into `docs/agreement.md`.
"""

import copy
from pathlib import Path
from typing import get_args

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.consensus.phase import DESCRIBED, MEMBERS, NEWCOMERS, Phase, phase_of
from p2p_dtfm.core.consensus.table import (
    HANDLERS,
    INSIDE,
    IS_OUTSIDE,
    MESSAGES,
    Handler,
    Refusal,
    Row,
)
from p2p_dtfm.core.messages.agreement_messages import (
    AgreementMessage,
    Heartbeat,
    JoinRequest,
    Ready,
    Synced,
)
from p2p_dtfm.core.messages.statements import stated
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_process import sign_for
from tests.core.liars import are_together, swarm

DOCS = Path(__file__).parents[2] / "docs" / "agreement.md"
BEGIN, END = "<!-- from core/consensus/table.py -->\n", "<!-- end of the table -->\n"


def state_table() -> str:
    """The table for `docs/agreement.md`: the phases, and what each message comes to in them."""
    lines = ["| phase | what holds | how it ends |", "|---|---|---|"]
    lines += [f"| {phase} | {it.holds} | {it.ends} |" for phase, it in DESCRIBED.items()]
    lines += ["", "| message | in the phases | what comes of it |", "|---|---|---|"]
    lines.append(f"| all | {Phase.OUTSIDE} | refused: {IS_OUTSIDE.reason} |")
    for message in MESSAGES:
        rows: dict[Row, list[Phase]] = {}
        for phase in INSIDE:
            rows.setdefault(HANDLERS[phase, message], []).append(phase)
        told = [(_named(frozenset(phases)), row) for row, phases in rows.items()]
        for phases, row in sorted(told, key=lambda item: item[0]):
            does = row.does if isinstance(row, Handler) else f"refused: {row.reason}"
            lines.append(f"| {message.__name__} | {phases} | {does} |")
    return "\n".join(lines) + "\n"


def _named(phases: frozenset[Phase]) -> str:
    """A set of phases in words, or its name where it has one."""
    names = {INSIDE: "all others", MEMBERS: "a member's", NEWCOMERS: "a newcomer's"}
    for known, name in names.items():
        if phases == known:
            return name
    if phases > MEMBERS:
        return f"a member's; {_named(phases - MEMBERS)}"
    return "; ".join(phase for phase in Phase if phase in phases)


def test_each_pair_has_a_row() -> None:
    assert set(MESSAGES) == set(get_args(AgreementMessage))
    assert HANDLERS.keys() == {(phase, message) for phase in Phase for message in MESSAGES}
    assert DESCRIBED.keys() == set(Phase) == NEWCOMERS | MEMBERS | {Phase.OUTSIDE}
    for row in HANDLERS.values():
        assert row.does if isinstance(row, Handler) else row.reason


def test_the_docs_hold_the_table() -> None:
    text = DOCS.read_text()
    told = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert told == state_table(), "python -m tests.core.test_agreement_table writes it"


def phases_of(world: AgreementWorld) -> dict[str, Phase]:
    return {name: phase_of(peer.agreement._state) for name, peer in world.peers.items()}


@pytest.fixture(scope="module")
def seen() -> dict[Phase, tuple[str, Agreement]]:
    """An agreement in each phase: one peer joins, one is silent for good, and the others go on."""
    found: dict[Phase, tuple[str, Agreement]] = {}
    world = swarm(["a", "b", "c"])

    def is_over(names: list[str]) -> bool:
        for name, phase in phases_of(world).items():
            if phase not in found:
                found[phase] = name, copy.deepcopy(world.peers[name].agreement)
        return are_together(world, names)

    world.add_peer("d")
    world.peers["d"].agreement.wants_view()
    world.run_until(lambda: is_over(["a", "b", "c", "d"]))
    world.crash("d", lose_disk=False)
    world.run_until(lambda: is_over(["a", "b", "c"]))
    world.cut([("a", "b"), ("b", "a"), ("a", "c"), ("c", "a")], "a is alone")
    world.run_to(world.now_ns + 30 * SECOND_NS)
    is_over([])
    a = world.peers["a"]
    a.agreement._machines.outsiders.rejoin("a test")
    found[Phase.OUTSIDE] = "a", a.agreement
    return found


def test_phases_are_passed_through(seen: dict[Phase, tuple[str, Agreement]]) -> None:
    passed = {Phase.NEWCOMER, Phase.NEWCOMER_GATHERING, Phase.NEWCOMER_AGREED}
    passed |= {Phase.IN_VIEW, Phase.GATHERING, Phase.READY, Phase.AGREED, Phase.OUTSIDE}
    assert passed <= seen.keys()


def test_where_a_peer_stands_is_said_in_each_phase(
    seen: dict[Phase, tuple[str, Agreement]],
) -> None:
    for phase, (_, agreement) in seen.items():
        before = phase_of(agreement._state), agreement.step, agreement.ready_for
        found = agreement.outlook(0)
        assert found.phase is phase and found.reason
        assert before == (phase_of(agreement._state), agreement.step, agreement.ready_for)


def test_only_who_vouches_promises(seen: dict[Phase, tuple[str, Agreement]]) -> None:
    """Reading what a member's Prepared would say does not say it."""
    agreement = copy.deepcopy(seen[Phase.AGREED][1])
    agreed = agreement._state.agreed
    assert agreed.view is not None
    agreed.synced, agreed.vouched = set(agreed.view.members), None
    assert agreement.ready_for == agreed.view.id and agreed.vouched is None
    assert agreement.vouch() == agreement.vouch() == agreed.vouched == agreed.view.id
    agreement._state.agreed.doom("a test")
    assert agreement.next_view is not None, "it stays until the step commits"
    assert agreement.vouch() is None, "and nothing more is promised"


@pytest.mark.parametrize("message", [Ready, Synced, Heartbeat])
def test_what_is_refused_changes_nothing(
    seen: dict[Phase, tuple[str, Agreement]], message: type[AgreementMessage]
) -> None:
    refusals = 0
    for phase, (name, agreement) in seen.items():
        row = HANDLERS[phase, message]
        if not isinstance(row, Refusal):
            continue
        sender = next(it for it in "abc" if it != name)
        said = a_message(message, sender)
        assert agreement.receive(sender, said, 0) == []
        assert phase_of(agreement._state) is phase
        if message is not Heartbeat:
            assert agreement.last_heard is not None and agreement.last_heard.reason == row.reason
        refusals += 1
    assert refusals >= 2


def a_message(message: type[AgreementMessage], sender: str) -> AgreementMessage:
    member = Member(sender, 1)
    view = ViewId(77, "f" * 64)
    if message is Ready:
        return stated(Ready(member, view, "e" * 64, "d" * 64), sign_for(sender))
    if message is Synced:
        return stated(Synced(member, view), sign_for(sender))
    assert message is Heartbeat
    return Heartbeat(member, 0)


def test_nobody_is_outside_a_view_that_it_asks_for() -> None:
    """A request is handled in every phase but one."""
    refused = [phase for phase in Phase if isinstance(HANDLERS[phase, JoinRequest], Refusal)]
    assert refused == [Phase.OUTSIDE]


if __name__ == "__main__":
    text = DOCS.read_text()
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    DOCS.write_text(head + state_table() + tail)
