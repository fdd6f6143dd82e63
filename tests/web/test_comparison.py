"""Two runs' curves: which steps count, at which tokens and when, and the page that shows them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands.offline import compare as command  # noqa: F401  (registers it)
from p2p_dtfm.cli.commands.offline.compare import headings
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.train.model.checkpoint import CheckpointManifest
from p2p_dtfm.web.comparison import RunCurves, compare, comparison_html, comparison_rows, read_rows
from tests.programs import skip_without
from tests.web import chromium as browser
from tests.web.screens import MIXED_UNITS, TOO_PALE


def said(step: int, time_s: float, loss: float, held_out: float | None = None) -> bytes:
    facts = {"time_s": time_s, "event": "step", "step": step, "loss": loss, "view": 1}
    return json.dumps({**facts, "held_out_loss": held_out}).encode()


def curves(name: str, tokens_per_step: int, s_per_step: float, factor: float) -> RunCurves:
    lines = [
        said(at, 100 + at * s_per_step, 5 - factor * at, 5 - factor * at if at % 10 == 0 else None)
        for at in range(101)
    ]
    return RunCurves(name, "ab" * 32, tokens_per_step, read_rows(lines)[0])


def test_of_repeated_steps_the_last_time_counts() -> None:
    lines = [
        json.dumps({"time_s": 1.0, "event": "view", "view": 1}).encode(),
        *(said(at, 10.0 + at, 5.0) for at in range(4)),
        said(2, 20.0, 4.0),
        said(3, 21.0, 3.0),
        b'{"time_s": 22.0, "event": "st',
        b'{"view": ' + b"[" * 100_000,
    ]
    rows, unreadable = read_rows(lines)
    assert [(row.step, row.seconds, row.loss) for row in rows] == [
        (0, 0.0, 5.0), (1, 1.0, 5.0), (2, 10.0, 4.0), (3, 11.0, 3.0)
    ]  # fmt: skip
    assert unreadable == 2, "the line under way, and one without a bottom"


def test_what_was_measured_after_the_last_step_is_no_step_more() -> None:
    """A run of 100 steps was said to have 101."""
    under_way = curves("a", 1000, 1.0, 0.02)
    after = msgspec.structs.replace(under_way.rows[-1], step=101, loss=None)
    complete = msgspec.structs.replace(under_way, rows=(*under_way.rows, after))
    assert comparison_rows(under_way, complete)[0] == ("steps", "101", "101")


def test_equal_tokens_and_equal_times_are_unlike() -> None:
    """The second run learns as much in a step, from half the tokens, and takes twice as long for
    each."""
    first, second = curves("a", 1000, 1.0, 0.02), curves("b", 500, 2.0, 0.02)
    found = {(each.kind, each.axis): each for each in compare(first, second).common}
    by_tokens, by_time = found["held-out", "tokens"], found["held-out", "seconds"]
    assert by_tokens.at == 50_000 and by_tokens.losses == pytest.approx((4.0, 3.0))
    assert by_time.at == 100 and by_time.losses == pytest.approx((3.0, 4.0))
    reached = compare(first, curves("c", 1000, 2.0, 0.01)).reached
    assert reached is not None and reached.loss == pytest.approx(4.0)
    assert reached.tokens == pytest.approx((50_000, 100_000))
    assert reached.seconds == pytest.approx((50, 200))


def test_runs_that_share_no_stretch_are_not_compared_there() -> None:
    early = RunCurves("a", "00", 10, read_rows([said(at, at, 5.0) for at in range(5)])[0])
    late = RunCurves("b", "00", 10, read_rows([said(at, at, 4.0) for at in range(50, 60)])[0])
    found = compare(early, late)
    assert {(each.kind, each.axis) for each in found.common} == {("training", "seconds")}
    assert "None yet" in comparison_html(early, late), "no held-out losses"


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    yield home(tmp_path / "one", 0.02), home(tmp_path / "other", 0.01)


def home(root: Path, factor: float) -> Path:
    spec = read_run_spec("tiny")
    run = root / "runs" / spec.digest()[:16]
    checkpoint = run / "checkpoints" / "step-00000100"
    checkpoint.mkdir(parents=True)
    text = spec.canonical_bytes().hex()
    manifest = CheckpointManifest(1, spec.digest(), text, 100, 153_600, "", {})
    (checkpoint / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    older = [said(at, at, 5 - factor * at) for at in range(30)]
    newer = [said(at, at, 5 - factor * at, 5 - factor * at) for at in range(30, 120)]
    (run / "events.old").write_bytes(b"\n".join(older) + b"\n")
    (run / "events.jsonl").write_bytes(b"\n".join(newer) + b"\n")
    return root


def test_two_homes_are_compared(homes: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "curves.html"
    words = ["compare", *map(str, homes)]
    done = CliRunner().invoke(app, [*words, "--html", str(page)], env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    assert "held-out loss at 182,784 tokens" in done.output and "2.6200" in done.output
    text = page.read_text()
    assert text.count("<polyline") == 8 and not re.search(r"<script|src=|url\(|https?:", text)
    facts = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert facts["common"][0]["losses"] == pytest.approx([2.62, 3.81])


def test_what_cannot_be_compared_is_said(homes: tuple[Path, Path], tmp_path: Path) -> None:
    for break_it, cause in (
        (lambda: next(homes[1].glob("runs/*/checkpoints/*/manifest.json")).unlink(), "checkpoint"),
        (lambda: next(homes[1].glob("runs/*/events.jsonl")).unlink(), "no history of a run"),
    ):
        break_it()
        done = CliRunner().invoke(app, ["compare", *map(str, homes)])
        assert isinstance(done.exception, UserError) and cause in done.exception.cause
        assert done.exception.fixes


def test_names_are_text() -> None:
    page = comparison_html(curves("<script>x", 10, 1.0, 0.01), curves("b", 10, 1.0, 0.01))
    assert "&lt;script&gt;x" in page and "<script" not in page


@skip_without("browser", "" if browser.PROGRAM else "no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_fits_a_phone(tmp_path: Path, dark: bool) -> None:
    path = tmp_path / "curves.html"
    path.write_text(comparison_html(curves("a", 1000, 1.0, 0.02), curves("b", 500, 2.0, 0.02)))
    with browser.chromium(tmp_path / "profile") as page:
        page.set_view(390, 844, dark=dark)
        page.open(path.as_uri())
        page.wait_for("document.querySelectorAll('polyline').length === 8")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert not page.evaluate(TOO_PALE)
        assert not MIXED_UNITS.search(page.evaluate("document.body.innerText"))
        assert not page.unnamed(("image", "img")) and not page.problems


def test_two_runs_of_one_name_are_told_apart() -> None:
    """The runs differ in one setting; on the page their digests tell them apart."""
    alike, other = curves("mine", 10, 1.0, 0.01), curves("other", 10, 1.0, 0.01)
    assert headings([alike, alike]) == ["mine (first)", "mine (second)"]
    assert headings([alike, other]) == ["mine", "other"]
