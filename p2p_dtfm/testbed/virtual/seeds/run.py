"""The small run that seeds train, and what a single process makes of it."""

import functools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.testbed.plain_losses import plain_losses
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.judge import Reference
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.train.data import prepare
from p2p_dtfm.train.hugging_face.model_import import INITIAL_NAME
from p2p_dtfm.train.model.initial_state import write_initial
from p2p_dtfm.train.model.layer_state import LayerState

Tensor = Any

STEPS = 40
WITHIN_S = 600.0
OTHER_SEED = 8
"""The seed of given weights: a run's own beginning differs from it."""
_WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "on",
    "as",
    "with",
    "at",
    "by",
    "from",
    "peer",
    "step",
    "layer",
    "plan",
    "view",
    "data",
]


def make_run(folder: Path, steps: int = STEPS, saves_every_steps: int = 10) -> Path:
    """A run spec and its data."""
    draws = random.Random("text")
    text = folder / "text.txt"
    text.write_text(" ".join(draws.choice(_WORDS) for _ in range(6000)))
    prepare(
        [text],
        folder / "prepared",
        name="drawn words",
        licence="none",
        source="https://example.org",
        context=16,
        shard_tokens=20_000,
    )
    spec = RunSpec.model_validate(
        {
            "name": "virtual",
            "seed": 7,
            "total_steps": steps,
            "model": {"layers": 4, "width": 32, "heads": 2, "context": 16, "vocabulary": 256},
            "batch": {"global_batch": 8, "microbatch": 2},
            "optimizer": {"peak_learning_rate": 3e-3, "warmup_steps": 2},
            "evaluation": {"every_steps": 10, "sequences": 4},
            "checkpoint": {"every_steps": saves_every_steps, "keep": 2},
            "data": {"source": str(folder / "prepared")},
        }
    )
    path = folder / "run.json"
    path.write_text(spec.model_dump_json())
    return path


def with_audits(run: Path, rate: float = 0.5, follow_steps: int = 50, undo_steps: int = 0) -> Path:
    """The same run with audits of a part of all works. Its steps are the same."""
    spec = RunSpec.model_validate_json(run.read_text())
    audit = {"rate": rate, "follow_steps": follow_steps, "undo_steps": undo_steps}
    audited = RunSpec.model_validate({**spec.model_dump(), "audit": audit})
    path = run.with_name(f"audited-{rate}-{follow_steps}-{undo_steps}.json")
    path.write_text(audited.model_dump_json())
    return path


MODELS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "given": {"model": {"tied_head": True}},
    "adapters": {"lora": {"rank": 4}},
}
"""What differs in runs that start from given weights, by section of the run spec."""


def with_given_weights(run: Path, name: str) -> Path:
    """A run of `MODELS` on the same data; its losses are its own."""
    plain = RunSpec.model_validate_json(run.read_text()).model_dump()
    changed = {part: {**plain[part], **changes} for part, changes in MODELS[name].items()}
    model: dict[str, Any] = {**plain["model"], **changed.pop("model", {})}
    of_weights = RunSpec.model_validate({**plain, "model": model, "seed": OTHER_SEED})

    def weights(layer: int) -> Iterable[Tensor]:
        return [it.detach() for it in LayerState.genesis(of_weights, layer).module.parameters()]

    folder = run.with_name(name)
    initial = write_initial(folder / INITIAL_NAME, of_weights, weights)
    model["initial"] = initial.digest()
    path = folder / run.name
    path.write_text(RunSpec.model_validate({**plain, **changed, "model": model}).model_dump_json())
    return path


_LOCAL: Mapping[str, Mapping[str, object]] = {
    "sync": {"mode": "local", "inner_steps": 4},
    "batch": {"global_batch": 32},
}
"""The batch has a microbatch for each inner step of four replicas."""
RECIPES: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "muon": {"optimizer": {"kind": "muon"}},
    "local": _LOCAL,
    "signs": {**_LOCAL, "optimizer": {"kind": "muon"}, "codecs": {"reduction": "sign"}},
    "sparse": {
        **_LOCAL,
        "sync": {**_LOCAL["sync"], "outer_learning_rate": 1.0, "outer_momentum": 0.0},
        "codecs": {"reduction": "sparse", "sparse": {"one_in": 1, "keep_percent": 50, "bits": 4}},
    },
    "int8": {"codecs": {"activations": ["int8"], "gradients": ["int8"], "reduction": "int8"}},
}
"""What differs in runs that are trained otherwise."""
LIKE_ONE = ("muon",)
"""Recipes with which a single process comes to the same, however a swarm is cut."""


def with_recipe(run: Path, name: str) -> Path:
    """A run of `RECIPES` on the same data."""
    plain = RunSpec.model_validate_json(run.read_text()).model_dump()
    changed = {part: {**plain[part], **changes} for part, changes in RECIPES[name].items()}
    path = run.with_name(f"{name}.json")
    path.write_text(RunSpec.model_validate({**plain, **changed}).model_dump_json())
    return path


def with_named_ends(run: Path, named: Sequence[str], folder: Path) -> Path:
    """The same run, which leaves both ends and the data to these peer ids. Its steps are the
    same."""
    spec = RunSpec.model_validate_json(run.read_text())
    private = RunSpec.model_validate({**spec.model_dump(), "privacy": {"ends": named}})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "private.json"
    path.write_text(private.model_dump_json())
    return path


def steps_of(run: Path) -> int:
    return RunSpec.model_validate_json(run.read_text()).total_steps


@functools.lru_cache(maxsize=16)
def layer_count_of(run: Path) -> int:
    return RunSpec.model_validate_json(run.read_text()).model.layer_count


def unlike_one(run: Path) -> Reference:
    """The reference of a run of which a single process says nothing: its steps depend on who
    computes what. Only when the model is evaluated is known."""
    spec = RunSpec.model_validate_json(run.read_text())
    steps, every = spec.total_steps, spec.evaluation.every_steps
    held_out = dict.fromkeys([*range(0, steps, every), steps], math.nan)
    return Reference([math.nan] * steps, [math.nan] * steps, held_out, Path(), is_like_one=False)


def reference_of(run: Path, folder: Path) -> Reference:
    """The steps as a single daemon tells them. Its losses are those of plain PyTorch."""

    async def scene(swarm: Swarm) -> Peer:
        peer = swarm.peer("a", run=str(run))
        swarm.start(peer)
        await swarm.until(lambda: not peer.is_running, "a run by one", WITHIN_S)
        assert peer.ended is not None
        peer.ended.result()
        return peer

    peer = play(0, folder, scene)
    losses = plain_losses(peer.home, steps_of(run))
    assert losses is not None
    steps = {event["step"]: event for event in peer.events() if event["event"] == "step"}
    held_out = {step: it["held_out_loss"] for step, it in steps.items() if it["held_out_loss"]}
    norms = [steps[step]["gradient_norm"] for step in range(len(losses))]
    return Reference(losses, norms, held_out, peer.home)
