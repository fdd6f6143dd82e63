"""With audits, a member that computes something else than its share is found in that same step,
whatever it says. Nothing of it stays: the others' losses are those of one machine."""

import time
from pathlib import Path

import pytest

from p2p_dtfm.testbed.lies.lie import Lie
from p2p_dtfm.testbed.lies.played import MODULE
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from tests.e2e.helpers import logged, step_of, wait_until, write_spec
from tests.e2e.parity import assert_equals_the_plain_loop
from tests.e2e.test_bars import barred
from tests.e2e.test_liars import swarm

AUDIT = {"audit": {"rate": 1.0}}
STEPS = 30
LIED_AT = 5
HONEST_STEPS = 150
UNLIKE_SENT = "has sent most of the others other gradients, sums or losses than it claims"
FOUND = "works otherwise than those who computed it again"
TOLD = {
    "flip": FOUND,
    "zeros": FOUND,
    "bend": FOUND,
    "sum": FOUND,
    "loss": UNLIKE_SENT,
    "tokens": FOUND,
    "skipped": FOUND,
    "part": UNLIKE_SENT,
    "alien": "computes by another arithmetic than most",
    "accuse": "otherwise than those who computed it again",
    "opening": "not what its claim before was committed to",
}


def play(directory: Path, data: Path, lie: Lie) -> None:
    with swarm(directory, data, {2: lie}, STEPS, AUDIT) as (local, _):
        honest = [child for number, child in enumerate(local.children) if number != 2]
        end_s = time.monotonic() + 120
        while min(step_of(child) for child in honest) < STEPS - 1:
            assert time.monotonic() < end_s, [step_of(child) for child in honest]
            assert all(child.running for child in local.children)
            time.sleep(0.05)
        assert any(logged(child, TOLD[lie.kind]) for child in honest)
        assert not any(blamed(child, honest) for child in honest)
        wait_until(lambda: (honest[0].status() or {}).get("state") == "done", "the checkpoint")
    assert_equals_the_plain_loop(honest[0], STEPS)


@pytest.mark.nightly
def test_two_liars_of_four_are_barred_one_after_the_other(
    tmp_path: Path, prepared_data: Path
) -> None:
    """One liar leaves out a microbatch. Of the three that stay, one says another loss than it
    has."""
    lies = {1: Lie("skipped", LIED_AT), 2: Lie("loss", LIED_AT + 8)}
    with swarm(tmp_path, prepared_data, lies, STEPS, AUDIT) as (local, _):
        first, *liars, last = local.children
        wait_until(lambda: all(step_of(child) >= 0 for child in liars), "their first step")
        lying = {(child.status() or {})["peer_id"] for child in liars}
        wait_until(lambda: step_of(first) >= STEPS - 1, "the last step")
        assert all(child.running for child in local.children)
        assert barred(first) == barred(last) == lying
        assert not any(blamed(child, [first, last]) for child in (first, last))
        wait_until(lambda: (first.status() or {}).get("state") == "done", "the checkpoint")
    assert_equals_the_plain_loop(first, STEPS)


def blamed(child: Child, honest: list[Child]) -> bool:
    """Whether one of the honest members was left out for its work."""
    ids = [(other.status() or {})["peer_id"] for other in honest]
    return any(logged(child, f"{peer_id}: works otherwise") for peer_id in ids)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", sorted(TOLD))
def test_one_liar_of_four(tmp_path: Path, prepared_data: Path, kind: str) -> None:
    play(tmp_path, prepared_data, Lie(kind, LIED_AT))


@pytest.mark.nightly
def test_one_liar_of_four_that_lies_a_little(tmp_path: Path, prepared_data: Path) -> None:
    play(tmp_path, prepared_data, Lie("flip", LIED_AT, 0.05))


@pytest.mark.nightly
def test_nobody_is_blamed_in_a_swarm_that_loses_members(
    tmp_path: Path, prepared_data: Path
) -> None:
    """Each member has another number of threads. One is killed, and a newcomer comes in its
    place."""
    spec = write_spec(
        tmp_path,
        total_steps=HONEST_STEPS,
        data={"source": str(prepared_data)},
        checkpoint={"every_steps": 10, "keep": 2},
        audit={"rate": 0.5},
    )
    with LocalSwarm(tmp_path, ("--dashboard", "off"), MODULE) as local:
        first, address = local.found(["--run", str(spec), "--expect-peers", "4", "--threads", "1"])
        for threads in ("2", "3", "1"):
            last = local.join(address, ["--threads", threads])
        wait_until(lambda: step_of(first) >= 10, "ten steps")
        last.process.kill()
        newcomer = local.join(address, ["--threads", "2"])
        wait_until(lambda: step_of(newcomer) >= 0, "the newcomer takes part")
        wait_until(lambda: logged(newcomer, "it follows until step"), "it has no stage at first")
        wait_until(lambda: step_of(first) >= HONEST_STEPS - 1, "the last step")
        honest = [child for child in local.children if child is not last]
        assert all((child.status() or {}).get("audits", 0) > 0 for child in honest)
        for child in local.children:
            assert not logged(child, "something else than was claimed")
            assert not logged(child, "leaves out")
        wait_until(lambda: (first.status() or {}).get("state") == "done", "the checkpoint")
    assert_equals_the_plain_loop(first, HONEST_STEPS)
