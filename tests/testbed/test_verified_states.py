"""A run was trained honestly but for one update, of a step whose end is a checkpoint. All have
sworn to its result, and every work of every step is right. `verify` began each part of the run at
the checkpoint before it, and never looked whether the part before had led there. Any model could be
put in, and all was said to hold, though each work was drawn. Here it is the last checkpoint;
`test_verified_gaps.py` has one on the way, and an honest run."""

from pathlib import Path

import pytest

from p2p_dtfm.core.transcript.checking import Checker, NotTrue
from p2p_dtfm.daemon.proof.from_disk import sample_of
from p2p_dtfm.daemon.proof.sample_again import Judged, works_of
from p2p_dtfm.daemon.proof.transcript_file import FILE_NAME, TranscriptLines
from p2p_dtfm.daemon.trainer import step_loop
from p2p_dtfm.net.contacts.identity import verify
from p2p_dtfm.testbed.virtual.seeds.run import make_run, reference_of, with_audits

STEPS = 24


def judged(home: Path, first: int, end: int) -> Judged:
    """The verdict on all works of these steps, each drawn."""
    path = next(home.glob(f"runs/*/{FILE_NAME}"))
    checker = Checker(verify)
    for entry in TranscriptLines(path).entries():
        checker.take(entry)
    assert checker.spec is not None and not checker.gaps
    sample = sample_of(checker.spec, checker.steps, path.parent, None, lambda step, last: None)
    return sample.judge([it for it in works_of(checker) if first <= it[0] < end])


def test_what_stands_in_the_last_checkpoint_is_what_the_steps_before_it_led_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = step_loop.apply_outcome

    def apply_outcome(spec: object, state: object, reduced: object, step: int, norm: float) -> None:
        honest(spec, state, reduced, step, norm)  # type: ignore[arg-type]
        if step == STEPS - 1:
            state.parameters.mul_(0.5)  # type: ignore[attr-defined]

    run = with_audits(make_run(tmp_path, STEPS))
    with monkeypatch.context() as patches:
        patches.setattr(step_loop, "apply_outcome", apply_outcome)
        home = reference_of(run, tmp_path / "forged").home
    assert judged(home, 0, STEPS - 1).works == STEPS - 1, "all before is honest"
    with pytest.raises(NotTrue, match="another state") as found:
        judged(home, 0, STEPS + 1)
    assert found.value.step == STEPS
    with pytest.raises(NotTrue, match="another state"):
        judged(home, STEPS - 1, STEPS)
