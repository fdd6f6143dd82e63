"""A run with real daemons leaves its ends to members that it names. Others train between them and
get neither text nor embedding nor head, even when a named member is killed and comes back."""

import os
import signal
from pathlib import Path

import pytest

from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.train.model.checkpoint import list_checkpoints
from tests.e2e.helpers import (
    logged,
    run_program,
    state_of,
    step_of,
    takes_part,
    wait_until,
    write_spec,
)
from tests.e2e.parity import assert_equals_the_plain_loop

LITTLE, MUCH = ["--memory-gib", "0.009"], ["--memory-gib", "0.03"]
"""Memory for an end and one block at most, and memory for all blocks."""
SMALL = ("--threads", "1", "--dashboard", "off", "--no-nearby", "--exit-when-done")
LAST = 5


def _files(child: Child) -> set[str]:
    return {path.name for path in (child.home / "runs").rglob("*") if path.is_file()}


def _layers(child: Child) -> tuple[int, ...]:
    return tuple((child.status() or {}).get("layers", ()))


def _saved_layers(child: Child) -> set[int]:
    [run] = (child.home / "runs").iterdir()
    return {layer for found in list_checkpoints(run / "checkpoints") for layer in found.layers}


@pytest.mark.nightly
def test_others_hold_neither_end_nor_text(tmp_path: Path) -> None:
    steps = 60
    with LocalSwarm(tmp_path, SMALL) as swarm:
        named_home = swarm.home(1)
        told = run_program("id", "--home", named_home)
        assert told.stdout.strip() == Identity.load_or_create(named_home / "identity.key").peer_id
        spec = write_spec(
            tmp_path,
            total_steps=steps,
            model={"layers": 4, "width": 128, "heads": 2, "context": 128, "vocabulary": 256},
            batch={"global_batch": 32, "microbatch": 4},
            evaluation={"every_steps": 10, "sequences": 8},
            optimizer={"peak_learning_rate": 2e-4, "warmup_steps": 20},
            checkpoint={"every_steps": 10},
            privacy={"ends": ["founder", told.stdout.strip()]},
        )
        founder, address = swarm.found(["--run", str(spec), "--expect-peers", "4", *LITTLE])
        named = swarm.join(address, LITTLE)
        others = [swarm.join(address, MUCH) for _ in range(2)]
        wait_until(lambda: step_of(founder) >= 12, "twelve steps")
        held = {child.name: _layers(child) for child in swarm.children}
        ends = {child.name for child in swarm.children if {0, LAST} & set(held[child.name])}
        assert ends == {founder.name, named.name}, held
        os.kill(named.process.pid, signal.SIGKILL)
        named.process.wait()
        wait_until(lambda: state_of(founder)[0] == "waiting", "nobody else takes the end over")
        again = swarm.join(address, LITTLE, home=named_home)
        wait_until(lambda: takes_part(again) and takes_part(founder), "it is back and goes on")
        for child in (founder, again, *others):
            child.process.wait(240)
            assert child.process.returncode == 0, child.log_tail()
    assert_equals_the_plain_loop(founder, steps, may_repeat=True)
    assert _saved_layers(founder) == set(range(LAST + 1))
    shards = _shards(founder)
    assert shards
    for other in others:
        assert logged(other, "its data, embedding and head are left to 2 members")
        assert not {0, LAST} & _saved_layers(other), _saved_layers(other)
        assert not shards & _files(other), "no shard of the data came here"
        assert "bug" not in (other.home / "stderr").read_text()


def _shards(child: Child) -> set[str]:
    """The shards of the data: every tokenizer and manifest is smaller than these files."""
    blobs = next((child.home / "runs").iterdir()) / "blobs"
    return {path.name for path in blobs.iterdir() if path.stat().st_size > 100_000}
