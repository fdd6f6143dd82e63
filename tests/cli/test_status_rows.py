"""What `p2p-dtfm status` says of this peer's contribution, and how it is watched."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.cli.commands import demo, swarm, trace
from p2p_dtfm.cli.commands.swarm import _carriers, _given, _safe
from p2p_dtfm.core.protocol.errors import UserError


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
    """The daemon is paused, or there is no run yet."""
    assert _given({"given": None}) is None
    assert _given({}) is None


def test_a_newcomer_does_not_say_that_a_crash_undoes_everything() -> None:
    """The newcomer has seen no copy of its states; the others have some, and checkpoints."""
    facts: dict[str, Any] = {"step": 279, "view": 16, "members": ["a", "b"], "safe_step": None}
    assert (_safe(facts) or "").startswith("not known yet")
    assert (_safe({**facts, "safe_step": 270}) or "").startswith("270: a crash")
    assert (_safe({**facts, "members": ["a"]}) or "").startswith("0: a crash"), "nobody has any"


def test_a_trace_of_one_peer_is_of_one_peer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It said "of 1 peers"."""
    peer = {"peer_id": "p", "pipeline": 0, "position": 0, "layers": [0, 6], "clock_error_ns": 0,
            "steps": {"3": [["forward", 0, 1, 2]]}}  # fmt: skip
    answer = {"peers": [peer], "missing": [], "names": {}}
    monkeypatch.setattr(trace, "call_daemon", lambda *_, **__: answer)
    trace.trace(tmp_path / "steps.json", 1, None)
    assert "of 1 peer in" in capsys.readouterr().out


def test_all_is_said_of_nothing_less(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A demo that went on said that it was done."""
    facts = {
        "state": "joining", "reason": "asks", "since_s": time.time(), "peer_id": "p", "run": "r",
        "run_digest": "0" * 64, "data": None, "eta_s": None, "members": [], "layers": [],
        "stage": [], "checkpoints": None, "addresses": [], "dashboard": None, "name": "n",
        "names": {}, "work": {"what": "fetches data", "share": 0.9999, "left_s": None},
    }  # fmt: skip
    monkeypatch.setattr(swarm, "call_daemon", lambda *_: facts)
    swarm.status()
    assert "fetches data: 99%" in capsys.readouterr().out
    lead = {"step": 9996, "total_steps": 10_000, "members": [], "view": 1}
    assert "(99%)" in demo._headline(lead, 0.9996)
    assert "(100%)" in demo._headline(lead, 1.0)


def test_what_carries_tensors_to_each_neighbour() -> None:
    over = {
        "b": {"forward": "line", "reduce": "line"},
        "a": {"forward": "line"},
        "c": {"reduce": "libp2p"},
        "d": {"reduce": "libp2p", "state": "line"},
    }
    text = "direct lines to a, b; libp2p to c; direct lines and libp2p to d"
    assert sorted((_carriers({"tensors_over": over}) or "").split("; ")) == sorted(text.split("; "))
    assert _carriers({"tensors_over": {}}) is None and _carriers({}) is None


def test_who_watches_goes_on_watching_while_the_daemon_starts_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ended with an error. A user who watched a restart had to start it again."""
    answers: list[Any] = [
        {"state": "a"},
        UserError("no daemon answers", "start one"),
        {"state": "b"},
    ]

    def answer(*_: object) -> Any:
        if not answers:
            raise KeyboardInterrupt
        if isinstance(first := answers.pop(0), UserError):
            raise first
        return first

    monkeypatch.setattr(swarm, "call_daemon", answer)
    monkeypatch.setattr(swarm, "homes_here", lambda home: [home])
    monkeypatch.setattr(swarm, "WATCH_EVERY_S", 0.0)
    swarm.status(None, as_json=True, ids=False, watch=True)
    told = capsys.readouterr()
    assert [json.loads(line)["state"] for line in told.out.splitlines()] == ["a", "b"]
    assert told.err.strip() == "no daemon answers"
    answers.append(UserError("no daemon answers", "start one"))
    with pytest.raises(UserError):
        swarm.status(None, as_json=True, ids=False, watch=True)
