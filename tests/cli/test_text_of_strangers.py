"""Other peers' words about themselves are shown as text: no markup, no terminal commands."""

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console

from p2p_dtfm.cli.commands import data, demo, doctor, swarm, trace
from p2p_dtfm.cli.commands.offline.verify import _tell, _tell_refusal
from p2p_dtfm.cli.terminal.live_view import panel
from p2p_dtfm.cli.terminal.logs import set_up_logging
from p2p_dtfm.cli.terminal.plain import plain
from p2p_dtfm.daemon.peers import doctor as doctors
from p2p_dtfm.daemon.peers.checks.check import Check, Grade
from p2p_dtfm.daemon.proof.sample_again import Judged
from p2p_dtfm.train.model import generate
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
        "links": {}, "layers": [], "heard_s_ago": 1.0, "name": name, "is_this_peer": False,
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


@pytest.mark.parametrize("reason", ["unjudged", "passed over", "refused", "missing"])
def test_what_a_transcript_says(reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A forger of a transcript names its arithmetic. The name could make the terminal say that all
    was computed again."""
    if reason == "refused":
        _tell_refusal({"refused": EVIL, "step": 3, "signed_by": EVIL}, False)
    else:
        judged = Judged(works=1)
        if reason == "unjudged":
            judged.unjudged[EVIL] = 1
        elif reason == "missing":
            judged.open[3, 5] = EVIL
        else:
            judged.passed_over.append(EVIL)
        checker: Any = SimpleNamespace(spec=run_spec(), steps={})
        told = {"steps": 1, "tokens": 1, "views": 1, "missing": list(judged.open)}
        told |= {"from_others": 0, "damaged_lines": 0, "elsewhere": {}, "left_out": {}}
        _tell(checker, judged, [(0, PEER)], told | {"tallies": {}, "stage_steps": 1})
    assert_harmless(capsys.readouterr().out)


@pytest.mark.parametrize("on_terminal", [True, False])
def test_what_a_model_writes(
    on_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Strangers have taught the model, and a model of bytes writes any byte. A file gets the text
    as it is."""
    loaded = (SimpleNamespace(model=SimpleNamespace(width=1 << 20)), [])
    monkeypatch.setattr(data, "_model_of", lambda _: (loaded, SimpleNamespace(end_of_document=0)))
    monkeypatch.setattr(generate, "stream_until", lambda *_: iter(EVIL))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: on_terminal)
    data.generate(Path("none"), "def ")
    written = capsys.readouterr().out
    if on_terminal:
        assert_harmless(written)
    else:
        assert written == f"def {EVIL}\n"


def test_what_the_model_of_a_demo_writes(capsys: pytest.CaptureFixture[str]) -> None:
    demo._say_sample(Console(width=200), EVIL)
    assert_harmless(capsys.readouterr().out)


def test_what_a_scenario_says_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = SimpleNamespace(name="n", description=EVIL, peers=[], faults=[])
    monkeypatch.setattr(demo, "read_scenario", lambda _: scenario)
    monkeypatch.setattr(demo, "cast_scenario", lambda *_: [])
    monkeypatch.setattr(demo, "threads_of", lambda _: 1)
    swarm: Any = SimpleNamespace(directory=tmp_path)
    demo._cast(swarm, "n", None, Console(width=200))
    assert_harmless(capsys.readouterr().out)


def test_what_the_doctor_was_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def examine(what: object, tell: Callable[[Check], None]) -> list[Check]:
        tell(Check("initial peer", Grade.WARNING, EVIL, EVIL))
        return []

    monkeypatch.setattr(doctors, "examine", examine)
    monkeypatch.setattr(doctor, "set_up_logging", lambda _: None)
    with pytest.raises(typer.Exit):
        doctor.doctor(home=tmp_path)
    assert_harmless(capsys.readouterr().out)


def test_who_does_not_answer_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {
        "peer_id": PEER, "steps": {"1": [["forward", 0, 0, 1]]}, "clock_error_ns": 0,
        "pipeline": 0, "position": 0, "layers": [0, 1],
    }  # fmt: skip
    answer = {"peers": [told], "names": {PEER: EVIL}, "missing": [PEER]}
    monkeypatch.setattr(trace, "call_daemon", lambda *_, **__: answer)
    trace.trace(tmp_path / "trace.json")
    assert_harmless(capsys.readouterr().err)


def test_what_is_cut_says_so() -> None:
    assert plain("abc") == "abc" and plain("x" * 400).endswith("…")
    assert plain("tokenizers für 日本") == "tokenizers für 日本"
