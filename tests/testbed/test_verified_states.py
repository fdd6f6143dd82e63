"""A run that was trained honestly but for one update, of a step whose end is a checkpoint: all have
sworn to what came of it, and every work of every step is right. `verify` took up each part of the
run from the checkpoint before it, and never looked whether the part before had led there: a model
from anywhere could be put in, and all was said to hold, though each work was drawn."""

from pathlib import Path

import pytest

from p2p_dtfm.core.transcript.checking import Checker, NotTrue
from p2p_dtfm.daemon.proof.from_disk import sample_of
from p2p_dtfm.daemon.proof.sample_again import Judged, works_of
from p2p_dtfm.daemon.proof.transcript_file import FILE_NAME, TranscriptLines
from p2p_dtfm.daemon.trainer import step_loop
from p2p_dtfm.net.contacts.identity import verify
from p2p_dtfm.testbed.virtual.seeds.run import make_run, reference_of, with_audits

STEPS, SAVED = 24, 20
"""The last checkpoint but one is of step 20; the last one is of the end."""


def judged(home: Path, first: int, end: int) -> Judged:
    """All works of these steps, drawn."""
    path = next(home.glob(f"runs/*/{FILE_NAME}"))
    checker = Checker(verify)
    for entry in TranscriptLines(path).entries():
        checker.take(entry)
    assert checker.spec is not None and not checker.gaps
    sample = sample_of(checker.spec, checker.steps, path.parent, None, lambda step, last: None)
    return sample.judge([it for it in works_of(checker) if first <= it[0] < end])


@pytest.mark.parametrize("at", [SAVED, STEPS])
def test_what_stands_in_a_checkpoint_is_what_the_steps_before_it_led_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    honest = step_loop.apply_outcome

    def apply_outcome(spec: object, state: object, reduced: object, step: int, norm: float) -> None:
        honest(spec, state, reduced, step, norm)  # type: ignore[arg-type]
        if step == at - 1:
            state.parameters.mul_(0.5)  # type: ignore[attr-defined]

    run = with_audits(make_run(tmp_path, STEPS))
    with monkeypatch.context() as patches:
        patches.setattr(step_loop, "apply_outcome", apply_outcome)
        home = reference_of(run, tmp_path / "forged").home
    assert judged(home, 0, at - 1).works == at - 1, "all before is honest"
    with pytest.raises(NotTrue, match="another state") as found:
        judged(home, 0, STEPS + 1)
    assert found.value.step == at
    with pytest.raises(NotTrue, match="another state"):
        judged(home, at - 1, at)


def test_an_honest_run_holds_from_each_checkpoint_to_the_next(tmp_path: Path) -> None:
    home = reference_of(with_audits(make_run(tmp_path, STEPS)), tmp_path / "honest").home
    found = judged(home, 0, STEPS + 1)
    assert found.works == STEPS + 1 and not found.unjudged and not found.passed_over
