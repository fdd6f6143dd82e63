"""The run specs in configs/ load, and need what their comments say."""

import re
import tomllib
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.core.protocol.workload import workload_of

CONFIGS = Path(__file__).parents[2] / "configs"


def load(name: str) -> RunSpec:
    path = CONFIGS / f"{name}.toml"
    return parse_run_spec(tomllib.loads(path.read_text(encoding="utf-8")), str(path))


@pytest.mark.parametrize(
    "name", ["tiny", "tiny-speedrun", "gpt2-small", "gpt2-small-homes", "gpt3-xl"]
)
def test_run_spec_loads_and_is_named_after_its_file(name: str) -> None:
    spec = load(name)
    assert spec.name == name
    assert RunSpec.from_canonical_bytes(spec.canonical_bytes()) == spec


@pytest.mark.parametrize("name", ["gpt2-small", "gpt2-small-homes", "gpt3-xl"])
def test_comment_states_the_memory(name: str) -> None:
    workload = workload_of(load(name))
    state_bytes = sum(workload.cost(n).state_bytes for n in range(workload.layer_count))
    text = (CONFIGS / f"{name}.toml").read_text(encoding="utf-8").replace("\n#", " ")
    text = " ".join(text.split())
    stated = re.search(r"(?:two moments|owes twice)\): ([0-9.]+) GB", text)
    assert stated and float(stated[1]) == pytest.approx(state_bytes / 1e9, rel=0.02)


def test_gpt3_xl_is_that_of_the_paper() -> None:
    spec = load("gpt3-xl")
    assert (spec.model.layers, spec.model.width, spec.model.heads) == (24, 2048, 16)
    assert (spec.model.context, spec.batch.microbatch, spec.batch.global_batch) == (2048, 1, 1024)
