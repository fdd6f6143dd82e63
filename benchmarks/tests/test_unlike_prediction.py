"""How long a step of unlike layers really takes, against what its plan says."""

import statistics
from pathlib import Path

import pytest

from benchmarks.emulated_swarm import emulated_spec, four_of, play
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.kinds.registry import with_sizes


def unlike_spec(microbatches: int = 16) -> RunSpec:
    """Narrow blocks at the ends, and between them half as many of twice the width."""
    narrow = {"kind": "block"}
    wide = {"kind": "block", "heads": 8}
    layers = [
        {"kind": "embedding"},
        *[narrow] * 4,
        {"kind": "projection", "width": 256},
        *[wide] * 4,
        {"kind": "projection", "width": 128},
        *[narrow] * 2,
        {"kind": "head"},
    ]
    values = emulated_spec(len(layers) - 2, microbatches).model_dump(mode="json")
    return with_sizes(RunSpec.model_validate(values | {"layers": layers}))


@pytest.mark.nightly
def test_a_step_of_unlike_layers_takes_as_long_as_its_plan_says(tmp_path: Path) -> None:
    played = play(four_of("two-labs"), 6, tmp_path, unlike_spec())
    measured_s = statistics.median(played.step_s)
    predicted_s = played.plan.predicted_step_ns / 1e9
    print(f"measured {measured_s:.3f} s, predicted {predicted_s:.3f} s")
    assert max(len(pipeline.stages) for pipeline in played.plan.pipelines) > 1
    assert abs(measured_s / predicted_s - 1) <= 0.10
