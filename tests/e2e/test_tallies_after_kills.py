"""Each peer's share of the computing is known to the last step, though processes were killed that
had not written it down."""

from pathlib import Path

import msgspec
import pytest

from p2p_dtfm.daemon.machine.local_client import call_daemon
from p2p_dtfm.daemon.telemetry.contribution import FILE, KeptTallies
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.train.model.gpt import layer_count
from tests.core.builders import run_spec
from tests.e2e.helpers import (
    DEADLINE_S,
    logged,
    losses,
    state_of,
    step_of,
    takes_part,
    wait_until,
    write_spec,
)

STEPS = 500
LONG = 900
"""Steps of a run that lasts until all have read in the others' transcripts what they missed."""
MODEL = {"layers": 4, "width": 64, "heads": 2, "context": 64, "vocabulary": 256}


def kept(child: Child) -> KeptTallies:
    (path,) = child.home.glob(f"runs/*/{FILE}")
    return msgspec.json.decode(path.read_bytes(), type=KeptTallies)


def peer_id_of(child: Child) -> str:
    return Identity.load_or_create(child.home / "identity.key").peer_id


def killed(child: Child) -> None:
    child.process.kill()
    child.process.wait(DEADLINE_S)


@pytest.mark.nightly
def test_tallies_add_up_to_the_run_after_kills(tmp_path: Path) -> None:
    spec_path = write_spec(tmp_path, total_steps=STEPS, model=MODEL, checkpoint={"every_steps": 50})
    spec = run_spec(total_steps=STEPS, model=MODEL)
    each_step = spec.tokens_per_step * layer_count(spec)
    arguments = ["--threads", "1", "--exit-when-done", "--dashboard", "off"]
    with LocalSwarm(tmp_path, arguments) as swarm:
        first, _ = swarm.found(["--run", str(spec_path)])
        wait_until(lambda: step_of(first) >= 60, "a checkpoint")
        killed(first)
        (first.home / "stdout").unlink()  # its old address is over
        founder, address = swarm.found([], home=first.home)
        joiner = swarm.join(address, ["--memory-gib", "0.0049"])
        wait_until(lambda: step_of(joiner) >= 0, "it takes part")
        at = step_of(joiner)
        wait_until(lambda: step_of(joiner) >= at + 20, "twenty steps of two")
        assert step_of(joiner) < STEPS - 50, "it is killed in the middle of the run"
        killed(joiner)
        back = swarm.join(address, ["--memory-gib", "0.0049"], home=joiner.home)
        for child in (founder, back):
            assert child.process.wait(DEADLINE_S) == 0, child.log_tail()
    ever = kept(founder)
    (day,) = ever.days.values()
    assert day.steps >= STEPS and ever.older.steps == 0, "of a founder's day"
    tallies = ever.tallies
    assert tallies.step_count == STEPS, "also those of the life that was killed"
    assert sum(tallies.board().values()) == STEPS * each_step
    # the sum over both homes: tests/testbed/test_boards_of_late_joiners.py; this run is over before
    # the joiner reads in a transcript what became of its last steps before it was killed
    assert ever.undone > 0, "what the killed founder had done since the checkpoint"
    for child in (founder, back):
        own, mine = kept(child), peer_id_of(child)
        tokens = own.older.tokens + sum(day.tokens for day in own.days.values())
        assert tokens * layer_count(spec) == pytest.approx(own.tallies.of(mine) + own.undone)
    seen = kept(back).tallies
    assert seen.step_count >= len(losses(back)), "its file of events spans both of its lives"
    assert sum(seen.board().values()) == seen.step_count * each_step


@pytest.mark.nightly
def test_what_each_has_given_adds_up_to_the_run(tmp_path: Path) -> None:
    """Of four daemons one is killed and comes back, and one leaves. The tokens that each counts for
    itself are the run's, to the last one."""
    spec_path = write_spec(tmp_path, total_steps=LONG, model=MODEL, checkpoint={"every_steps": 100})
    spec = run_spec(total_steps=LONG, model=MODEL)
    half = ["--memory-gib", "0.0049"]
    with LocalSwarm(tmp_path, ["--threads", "1", "--dashboard", "off"]) as swarm:
        founder, address = swarm.found(["--run", str(spec_path), *half, "--expect-peers", "3"])
        rooms = (half, half, [])
        others = [swarm.join(address, room) for room in rooms]
        wait_until(lambda: min(map(step_of, others)) >= 40, "they train")
        wait_until(lambda: any(map(has_stage, others)), "more than the founder has a stage")
        place = next(n for n, child in enumerate(others) if has_stage(child))
        mortal = others.pop(place)
        killed(mortal)
        at = step_of(founder)
        wait_until(lambda: step_of(founder) >= at + 40, "the others go on")
        back = swarm.join(address, rooms[place], home=mortal.home)
        wait_until(lambda: takes_part(back), "it is back")
        # of the steps that it had seen committed, the others have done some again: whoever leaves
        # at once does not hear of it, and the one that comes back may be the one that leaves
        wait_until(lambda: logged(back, "more, by the transcript of"), "it has read of its steps")
        everybody = (founder, back, *others)
        wait_until(lambda: any(map(has_stage, everybody[1:])), "one has a stage")
        guest = next(filter(has_stage, everybody[1:]))
        call_daemon(guest.home, "leave", "POST")
        guest.process.wait(DEADLINE_S)
        assert step_of(founder) < LONG, "all of it happened while they trained"
        here = [child for child in everybody if child is not guest]
        wait_until(
            lambda: all((child.status() or {}).get("state") == "done" for child in here),
            "the run is complete",
            2 * DEADLINE_S,
        )
    assert all(kept(child).tallies.step_count == LONG for child in here)
    assert own_share(back) > 0 and own_share(guest) > 0, "who has a stage gives something"
    whole = LONG * spec.tokens_per_step * layer_count(spec)
    assert sum(map(own_share, everybody)) == whole


def has_stage(child: Child) -> bool:
    return state_of(child)[0] == "training"


def own_share(child: Child) -> int:
    """Tokens times layers that this daemon says it has computed, and that stayed."""
    return kept(child).tallies.of(peer_id_of(child))
