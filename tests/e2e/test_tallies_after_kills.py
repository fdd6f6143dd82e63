"""Who computed how much is known to the last step, though processes were killed that had not
written it down."""

from pathlib import Path

import msgspec
import pytest

from p2p_dtfm.daemon.telemetry.contribution import FILE, KeptTallies
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.train.model.gpt import layer_count
from tests.core.builders import run_spec
from tests.e2e.helpers import DEADLINE_S, losses, step_of, wait_until, write_spec

STEPS = 500
MODEL = {"layers": 4, "width": 64, "heads": 2, "context": 64, "vocabulary": 256}


def kept(child: Child) -> KeptTallies:
    (path,) = child.home.glob(f"runs/*/{FILE}")
    return msgspec.json.decode(path.read_bytes(), type=KeptTallies)


def peer_id_of(child: Child) -> str:
    return Identity.load_or_create(child.home / "identity.key").peer_id


def killed(child: Child) -> None:
    child.process.kill()
    child.process.wait(DEADLINE_S)


def test_tallies_add_up_to_the_run_after_kills(tmp_path: Path) -> None:
    spec_path = write_spec(tmp_path, total_steps=STEPS, model=MODEL, checkpoint={"every_steps": 50})
    spec = run_spec(total_steps=STEPS, model=MODEL)
    each_step = spec.tokens_per_step * layer_count(spec)
    arguments = ["--threads", "1", "--exit-when-done", "--dashboard", "off"]
    with LocalSwarm(tmp_path, arguments) as swarm:
        first, _ = swarm.found(["--run", str(spec_path)])
        wait_until(lambda: step_of(first) >= 60, "a checkpoint")
        killed(first)
        (first.home / "stdout").unlink()  # where it was is over
        founder, address = swarm.found([], home=first.home)
        joiner = swarm.join(address, ["--memory-gib", "0.0042"])
        wait_until(lambda: step_of(joiner) >= 0, "it takes part")
        at = step_of(joiner)
        wait_until(lambda: step_of(joiner) >= at + 20, "twenty steps of two")
        assert step_of(joiner) < STEPS - 50, "it is killed in the middle of the run"
        killed(joiner)
        back = swarm.join(address, ["--memory-gib", "0.0042"], home=joiner.home)
        for child in (founder, back):
            assert child.process.wait(DEADLINE_S) == 0, child.log_tail()
    ever = kept(founder)
    (day,) = ever.days.values()
    assert day.steps >= STEPS and ever.older.steps == 0, "of a founder's day"
    tallies = ever.tallies
    assert tallies.step_count == STEPS, "also those of the life that was killed"
    assert sum(tallies.board().values()) == STEPS * each_step
    # over both homes: tests/testbed/test_boards_of_late_joiners.py, for this run is over before
    # the joiner reads in a transcript what became of its last steps before it was killed
    assert ever.undone > 0, "what the killed founder had done since the checkpoint"
    for child in (founder, back):
        own, mine = kept(child), peer_id_of(child)
        tokens = own.older.tokens + sum(day.tokens for day in own.days.values())
        assert tokens * layer_count(spec) == pytest.approx(own.tallies.of(mine) + own.undone)
    seen = kept(back).tallies
    assert seen.step_count >= len(losses(back)), "its file of events spans both of its lives"
    assert sum(seen.board().values()) == seen.step_count * each_step
