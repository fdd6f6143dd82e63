"""A convicted member stays out, whatever it says in a new life, and whichever members have started
again."""

import time
from pathlib import Path

import pytest

from p2p_dtfm.testbed.lies.lie import Lie
from p2p_dtfm.testbed.local_swarm import Child
from tests.e2e.helpers import logged, step_of, wait_until
from tests.e2e.test_liars import swarm

AUDIT = {"audit": {"rate": 1.0}}
STEPS = 100_000
LIED_AT = 5
AGAIN_S = 14.0
"""A member that was left out for anything else is heard again after ten seconds."""


def barred(child: Child) -> set[str]:
    return {it["peer_id"] for it in (child.status() or {}).get("barred", ())}


def is_told(child: Child) -> bool:
    """Whether the convicted member is told of its bar on its own screen."""
    facts = child.status() or {}
    problems = [it["what"] for it in facts.get("problems", ())]
    told = [text for text in (facts.get("reason", ""), *problems) if "barred until step" in text]
    assert not told or not facts.get("waits_for"), "it is in no view that waits for anybody"
    return len(told) >= 2 and all("it works otherwise than those" in text for text in told)


def members(child: Child) -> set[str]:
    return set((child.status() or {}).get("members", ()))


def stays_out(liar: str, honest: list[Child]) -> None:
    end_s = time.monotonic() + AGAIN_S
    while time.monotonic() < end_s:
        assert not any(liar in members(child) for child in honest)
        time.sleep(0.2)


@pytest.mark.nightly
def test_who_is_found_out_and_says_no_more_is_barred(tmp_path: Path, prepared_data: Path) -> None:
    """A Prepared of the liar's own is not needed to prove that it lies."""
    lies = {2: Lie("mute", LIED_AT)}
    with swarm(tmp_path, prepared_data, lies, STEPS, AUDIT) as (local, _):
        liar = local.children[2]
        honest = [child for child in local.children if child is not liar]
        wait_until(lambda: step_of(liar) >= 0, "the liar's first step")
        liar_id = (liar.status() or {})["peer_id"]
        wait_until(lambda: all(barred(child) == {liar_id} for child in honest), "it is barred")
        wait_until(lambda: is_told(liar), "it is told so")


@pytest.mark.nightly
def test_neither_a_new_life_nor_a_restart_of_the_others_ends_a_bar(
    tmp_path: Path, prepared_data: Path
) -> None:
    lies = {2: Lie("zeros", LIED_AT)}
    with swarm(tmp_path, prepared_data, lies, STEPS, AUDIT) as (local, address):
        first, second, liar, last = local.children
        honest = [first, second, last]
        wait_until(lambda: step_of(liar) >= 0, "the liar's first step")
        liar_id = (liar.status() or {})["peer_id"]
        wait_until(lambda: all(barred(child) == {liar_id} for child in honest), "it is barred")
        assert logged(first, f"leaves out {liar_id}: works otherwise")
        stays_out(liar_id, honest)
        liar.process.kill()
        liar.process.wait()
        reformed = local.join(address, home=liar.home)
        wait_until(lambda: (reformed.status() or {}).get("peer_id") == liar_id, "it is back")
        stays_out(liar_id, honest)
        assert reformed.running

        last.process.kill()
        last.process.wait()
        back = local.join(address, home=last.home)
        step = step_of(first)
        wait_until(lambda: len(members(first)) == 3 and step_of(back) > step, "it trains again")
        assert barred(back) == {liar_id}
        newcomer = local.join(address)
        wait_until(lambda: len(members(newcomer)) == 4, "a newcomer trains")
        assert barred(newcomer) == {liar_id}, "it is told with its first view"
        stays_out(liar_id, [first, second, back, newcomer])
