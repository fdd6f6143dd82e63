"""What `verify` says of a transcript, besides that it holds."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from p2p_dtfm.cli.commands.offline.verify import (
    UNJUDGED,
    _progress,
    _tell,
    _tell_refusal,
    verify,
)
from p2p_dtfm.core.transcript.checking import NotTrue
from p2p_dtfm.core.transcript.entries import FORMAT, Began, line_of
from p2p_dtfm.daemon.proof.sample_again import Judged
from tests.core.builders import run_spec

WARNED = "it to nobody who might not have been invited"


def transcript(folder: Path, **admission: str) -> Path:
    """The transcript of a run that nobody has computed yet."""
    spec = run_spec(admission=admission) if admission else run_spec()
    path = folder / "transcript.txt"
    path.write_text(line_of(Began(FORMAT, spec.canonical_bytes())) + "\n")
    return path


def test_the_transcript_of_an_invited_run_is_not_to_be_given_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verify([transcript(tmp_path)], "0", None, None, False, False)
    assert WARNED not in " ".join(capsys.readouterr().out.split())
    verify(
        [transcript(tmp_path, mode="invited", key="ab" * 32, founder="x" * 52)],
        "0",
        None,
        None,
        False,
        False,
    )
    assert WARNED in " ".join(capsys.readouterr().out.split())


def test_where_nothing_is_computed_again_nothing_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        verify([transcript(tmp_path)], "1%", None, None, False, True)
    assert ended.value.exit_code == UNJUDGED and '"holds": null' in capsys.readouterr().out


def test_where_nobody_can_judge_nobody_is_to_be_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checker = SimpleNamespace(spec=run_spec(), steps={})
    told = {"steps": 1, "views": 1, "tokens": 1, "missing": (), "damaged_lines": 0, "tallies": {}}
    told |= {"from_others": 0, "elsewhere": {}, "left_out": {}, "seed": 77, "drawn": []}
    judged = Judged(unjudged={"why": 2})
    _tell(checker, judged, [None, None], told)  # type: ignore[arg-type, list-item]
    said = " ".join(capsys.readouterr().out.split())
    assert "--sample 0" in said and "ask somebody" not in said
    assert "--seed 77 " in said, "by which the same works are drawn again"


@pytest.mark.parametrize("is_drawn", [True, False])
def test_who_is_refused_by_chance_is_told_how_to_draw_the_same_again(
    is_drawn: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json alone the seed was told: who read that a work was false could not show it to
    anybody, as each further look drew others."""
    told: dict[str, object] = {"step": 3, "refused": "false", "signed_by": "", "seed": 77}
    _tell_refusal(told | ({"drawn": [(3, "a")]} if is_drawn else {}), False)
    assert ("--seed 77 " in capsys.readouterr().out) == is_drawn


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_said_in_the_end_does_not_stand_behind_what_was_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The verdict, or a refusal, began in the middle of the progress line."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(NotTrue), _progress() as tell:
        tell(41, 50)
        raise NotTrue("it does not add up")
    assert sys.stderr.getvalue() == "\rcomputes step 41 ...\r\x1b[K"
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with _progress() as tell:
        tell(41, 50)
    assert not sys.stderr.getvalue()
