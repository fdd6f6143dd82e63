"""What other peers say of themselves is shown as text: no markup, no terminal commands."""

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.cli.commands import swarm
from p2p_dtfm.cli.commands.offline.verify import _tell, _tell_refusal
from p2p_dtfm.cli.terminal.live_view import panel
from p2p_dtfm.cli.terminal.logs import set_up_logging
from p2p_dtfm.cli.terminal.plain import plain
from p2p_dtfm.daemon.proof.sample_again import Judged
from p2p_dtfm.web.state import DashboardState, Live, Problem
from tests.core.builders import run_spec

EVIL = "\x1b[2J\x1b]0;owned\x07[bold red]x[/nothing][link=file:///etc]\r\n\u202edlrow\x9b31m"
OBEYED = ("\x1b", "\x07", "\x9b", "\r", "\u202e", "\x00")


def assert_harmless(shown: str) -> None:
    assert not any(letter in shown for letter in OBEYED), repr(shown)
    assert "[/nothing]" in shown.replace("\n", ""), "it is all there, as text"


PEER = "12D3KooWDTS2zccYgYAVktrACJybE6dvK6Zvyh2gzZBptHFXCyLG"


def member(name: str) -> dict:
    return {
        "peer_id": PEER,
        "device": {"kind": "cpu", "name": name, "memory_bytes": 1 << 30,
                   "block": {"forward_ns": 1, "backward_ns": 1}},
        "links": {}, "layers": [], "heard_s_ago": 1.0, "name": name,
    }  # fmt: skip


def test_peers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setattr(swarm, "call_daemon", lambda *_: [member("[/nothing]\x1b[2J\u202e" * 2)])
    swarm.peers()
    assert_harmless(capsys.readouterr().out)
    monkeypatch.setattr(swarm, "call_daemon", lambda *_: [member("x" * 10_000)])
    swarm.peers()
    assert len(capsys.readouterr().out) < 3000, "a long name is cut"


def test_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {
        "state": "training", "reason": EVIL, "since_s": time.time(), "peer_id": "p", "run": "r",
        "run_digest": "0" * 64, "data": EVIL, "eta_s": None, "members": [], "layers": [],
        "stage": [], "checkpoints": None, "addresses": [], "dashboard": None,
        "name": EVIL, "names": {PEER: EVIL}, "waits_for": [PEER],
        "problems": [{"what": EVIL, "fix": EVIL}],
        "work": {"what": "fetches " + EVIL, "share": 0.5, "left_s": None},
    }  # fmt: skip
    monkeypatch.setattr(swarm, "call_daemon", lambda *_: facts)
    swarm.status()
    assert_harmless(capsys.readouterr().out)


def test_the_terminal_view() -> None:
    live = Live(
        0.0, "0", "p", "training", EVIL, 0.0, problems=(Problem(EVIL, EVIL),), work=EVIL,
        work_share=0.5,
    )  # fmt: skip
    rows = panel(DashboardState(live), 1.0, 400).renderables
    assert_harmless("\n".join(row.plain for row in rows))  # type: ignore[union-attr]


def test_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        set_up_logging("human")
        logging.getLogger("p2p_dtfm").warning("refused: %s", EVIL)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert_harmless(capsys.readouterr().err)


@pytest.mark.parametrize("reason", ["unjudged", "passed over", "refused"])
def test_what_a_transcript_says(reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever made it up chose what its arithmetic is called, and could have the terminal say that
    all was computed again."""
    if reason == "refused":
        _tell_refusal({"refused": EVIL, "step": 3, "signed_by": EVIL}, False)
    else:
        judged = Judged(works=1)
        if reason == "unjudged":
            judged.unjudged[EVIL] = 1
        else:
            judged.passed_over.append(EVIL)
        checker: Any = SimpleNamespace(spec=run_spec(), steps={})
        told = {"steps": 1, "tokens": 1, "views": 1, "missing": [], "damaged_lines": 0}
        _tell(checker, judged, [(0, PEER)], told | {"tallies": {}, "stage_steps": 1})
    assert_harmless(capsys.readouterr().out)


def test_what_is_cut_says_so() -> None:
    assert plain("abc") == "abc" and plain("x" * 400).endswith("…")
    assert plain("tokenizers für 日本") == "tokenizers für 日本"
