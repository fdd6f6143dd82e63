"""Two daemons learn to answer: a run on conversations, of which only answers count."""

import json
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.testbed.local_swarm import LocalSwarm
from tests.core.builders import run_spec
from tests.e2e.helpers import DEADLINE_S, losses, run_program, wait_until
from tests.e2e.parity import assert_equals_the_plain_loop

STEPS = 30
CONTEXT = 48


def run_on_conversations(directory: Path) -> tuple[Path, RunSpec]:
    """A run prepared as a user would; answers are of unlike lengths, so microbatches weigh
    unlike."""
    rows = [
        {"prompt": f"say {n}: ", "completion": chr(97 + n % 26) * (1 + n % 17)} for n in range(400)
    ]
    (directory / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_program(
        *("prepare", directory / "chats.jsonl", "--conversations"),
        *("--out", directory / "chats", "--context", str(CONTEXT), "--held-out", "0.1"),
    )
    assert done.returncode == 0, done.stderr
    spec = run_spec(
        total_steps=STEPS,
        model={"layers": 4, "width": 32, "heads": 2, "context": CONTEXT, "vocabulary": 256},
        optimizer={"peak_learning_rate": 1e-3, "warmup_steps": 2},
        evaluation={"every_steps": 10, "sequences": 4},
        checkpoint={"every_steps": 10},
        data={"source": str(directory / "chats")},
    )
    path = directory / "run.json"
    path.write_text(spec.model_dump_json())
    return path, spec


@pytest.mark.nightly
def test_two_daemons_learn_answers_as_one_process_would(tmp_path: Path) -> None:
    run, spec = run_on_conversations(tmp_path)
    work = workload_of(spec)
    costs = [work.cost(layer) for layer in range(work.layer_count)]
    whole = sum(cost.state_bytes + cost.saved_bytes for cost in costs)
    part = ["--memory-gib", f"{0.8 * whole / 2**30:.6f}"]
    with LocalSwarm(tmp_path, ["--threads", "1", "--exit-when-done", *part]) as swarm:
        founder, address = swarm.found(["--run", str(run), "--expect-peers", "2"])
        other = swarm.join(address)
        wait_until(lambda: losses(other), "the first step")
        held = [child.status()["layers"] for child in (founder, other)]
        for child in (founder, other):
            assert child.process.wait(DEADLINE_S) == 0, child.log_tail()
    assert all(0 < len(layers) < work.layer_count for layers in held), "each holds a part"
    assert losses(founder) == losses(other)
    assert_equals_the_plain_loop(founder, STEPS)
    assert losses(founder)[STEPS - 1] < losses(founder)[0] - 0.5
