"""What a liar makes of its gradients is something else, or the lie would show nothing."""

import pytest
import torch

from p2p_dtfm.testbed.lies.kinds import BENT_PART, GRADIENT_LIES, Lie
from p2p_dtfm.testbed.lies.played import IN_DOUBT, LEFT_OUT, LieCase


def lied(kind: str, strength: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    honest = torch.randn(2 * BENT_PART)
    false = honest.clone()
    GRADIENT_LIES[kind](false, Lie(kind, 5, strength), torch.full_like(honest, 7.0))
    return honest, false


@pytest.mark.parametrize("kind", sorted(GRADIENT_LIES))
@pytest.mark.parametrize("strength", [1.0, 0.1])
def test_each_lie_changes_bits(kind: str, strength: float) -> None:
    honest, false = lied(kind, strength)
    assert not torch.equal(honest, false) and torch.isfinite(false).all()


def test_strengths_are_what_they_say() -> None:
    for kind, strength, factor in (("flip", 1.0, -1.0), ("flip", 0.1, 0.8), ("scale", 0.5, 1.5)):
        honest, false = lied(kind, strength)
        torch.testing.assert_close(false, factor * honest)
    honest, false = lied("bend")
    assert int((honest != false).sum()) == 2
    honest, false = lied("noise", 0.1)
    assert 0.05 < float((false - honest).norm() / honest.norm()) < 0.2
    assert set(lied("replay")[1].tolist()) == {7.0}


def test_a_case_has_a_quarter_of_liars_and_time_to_draw_them() -> None:
    assert [LieCase("tiny", "flip", 1.0, peers, 1.0).liars for peers in (4, 7, 8)] == [1, 1, 2]
    seldom, always = (LieCase("tiny", "flip", 1.0, 4, rate) for rate in (0.01, 1.0))
    assert seldom.steps > always.steps and seldom.limit_s > 1000 > always.limit_s


def test_what_daemons_say_of_liars_and_of_doubts_is_told_apart() -> None:
    text = "leaves out abc: works otherwise\nleaves out one of def and ghi: unlike"
    assert LEFT_OUT.findall(text) == ["abc"] and IN_DOUBT.findall(text) == [("def", "ghi")]
