"""Without audits, one of four replicas turns its gradients around and makes them ten times as
large. Trimmed sums go on learning."""

from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.testbed.lies.lie import Lie
from tests.e2e.helpers import losses, step_of, wait_until
from tests.e2e.test_liars import swarm

STEPS = 60
LIED_AT = 5
TEN_TIMES = 5.5
"""How strong the lie is: turned around, and ten times as large."""


def last_losses(directory: Path, data: Path, liars: Any, sums: str) -> float:
    """Mean of the last ten steps, as an honest member has them."""
    directory.mkdir()
    with swarm(directory, data, liars, STEPS, {"sync": {"sums": sums}}) as (local, _):
        first = local.children[0]
        wait_until(lambda: step_of(first) >= STEPS - 1, "the last step")
        wait_until(lambda: (first.status() or {}).get("state") == "done", "the checkpoint")
        found = losses(first)
    assert sorted(found) == list(range(STEPS))
    return sum(found[step] for step in range(STEPS - 10, STEPS)) / 10


@pytest.mark.nightly
def test_a_liar_among_four_replicas_moves_little(tmp_path: Path, prepared_data: Path) -> None:
    liar = {2: Lie("flip", LIED_AT, TEN_TIMES)}
    honest = last_losses(tmp_path / "honest", prepared_data, {}, "trimmed")
    held = last_losses(tmp_path / "held", prepared_data, liar, "trimmed")
    spoilt = last_losses(tmp_path / "spoilt", prepared_data, liar, "plain")
    assert held < honest + 0.5 * (spoilt - honest), (honest, held, spoilt)
    assert spoilt > honest + 0.05, "or nothing was spoilt"
