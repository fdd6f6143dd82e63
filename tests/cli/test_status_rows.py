"""What `p2p-dtfm status` says of what this peer has given."""

from typing import Any

import pytest

from p2p_dtfm.cli.commands.swarm import _given


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((900.0, 12_000.0, 0.0), "900 tokens today, 12,000 ever"),
        ((1.0, 1.0, 0.0), "1 token today, 1 ever"),
        ((0.0, 12_000.5, 300.2), "0 tokens today, 12,000 ever, of which 300 repeated"),
        ((0.0, 0.0, 0.0), None),
    ],
)
def test_given(given: tuple[float, float, float], text: str | None) -> None:
    facts: dict[str, Any] = {"given": dict(zip(("today", "ever", "repeated"), given, strict=True))}
    assert _given(facts) == text


def test_nothing_is_said_while_it_is_not_known() -> None:
    """While paused, and before there is a run."""
    assert _given({"given": None}) is None
    assert _given({}) is None
