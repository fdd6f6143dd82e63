"""Each run spec that comes along says at its top what it needs, and that is so."""

import re

import pytest

from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.train.model.kinds.registry import with_sizes
from tests.documentation.pages import ROOT

SPECS = sorted(path.stem for path in (ROOT / "configs").glob("*.toml"))


def top_of(name: str) -> str:
    """The remarks before the first setting, as one line."""
    text = (ROOT / "configs" / f"{name}.toml").read_text(encoding="utf-8")
    return re.sub(r"\s*\n#?\s*", " ", text.split("\nname = ")[0])


@pytest.mark.parametrize("name", SPECS)
def test_a_run_spec_says_at_its_top_what_it_needs(name: str) -> None:
    assert re.search(r"\bneeds\b", top_of(name))


@pytest.mark.parametrize("name", [it for it in SPECS if "MB of state" in top_of(it)])
def test_what_a_run_spec_says_of_its_state_is_what_plans_count(name: str) -> None:
    spec = read_run_spec(name)
    workload = workload_of(with_sizes(spec) if spec.layers else spec)
    counted = sum(workload.cost(layer).state_bytes for layer in range(workload.layer_count))
    stated = re.search(r"([\d.]+) MB of state", top_of(name))
    assert stated is not None
    assert float(stated[1]) == pytest.approx(counted / 1e6, rel=0.1)
