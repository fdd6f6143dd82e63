"""A run with every choice of a recipe, by daemons in virtual time: a middle stage fetches what it
must know of the text, and all losses are those of the plain loop."""

import json
import math
from pathlib import Path

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.testbed.plain_losses import plain_losses
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.train.data import prepare

STEPS = 4
MEMORY_GIB = 0.6 / 1024
"""Room for two layers of six."""


def recipe_run(folder: Path) -> Path:
    """A run of short documents, so that most sequences hold the ends of some."""
    path = make_run(folder, STEPS, saves_every_steps=4)
    words = (folder / "text.txt").read_text().split()
    lines = [" ".join(words[start : start + 2]) + f" {start}" for start in range(0, 6000, 2)]
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    prepare([rows], folder / "rows", context=16, shard_tokens=20_000)
    values = json.loads(path.read_text())
    values["data"] |= {"source": str(folder / "rows"), "packing": "documents"}
    values["optimizer"] |= {"schedule": "wsd", "decay_embeddings": False, "z_loss": 1e-3}
    path.write_text(RunSpec.model_validate(values).model_dump_json())
    return path


def test_three_train_by_a_recipe(tmp_path: Path) -> None:
    run = recipe_run(tmp_path)

    async def scene(swarm: Swarm) -> None:
        swarm.memory_gib = MEMORY_GIB
        first = swarm.peer("first", run=str(run), expect_peers=3)
        others = [swarm.peer(name, initial_peers=(swarm.address(first),)) for name in "bc"]
        swarm.start(first)
        await swarm.until(lambda: first.has_run, "the run is founded", 60)
        for peer in others:
            swarm.start(peer)
        await swarm.until(lambda: first.step() >= 1, "two steps", 120)
        stages = [p.daemon.status_json()["stage"] for p in swarm.peers if p.daemon is not None]
        assert [2, 3] in stages, "one is between the others"
        await swarm.until(lambda: not any(p.is_running for p in swarm.peers), "the end", 600)
        losses = {step: loss for peer in swarm.peers for step, loss in peer.losses().items()}
        expected = plain_losses(first.home, STEPS)
        assert expected is not None
        assert sorted(losses) == list(range(STEPS))
        for step, loss in losses.items():
            assert math.isclose(loss, expected[step], abs_tol=1e-4)
        assert not any(peer.failures() for peer in swarm.peers)

    play(1, tmp_path / "world", scene)
