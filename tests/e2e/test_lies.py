"""`p2p-dtfm chaos --lie`: of the lies that are played none stays, and no honest one is barred."""

import json

import pytest

from p2p_dtfm.testbed.lies.kinds import KINDS
from tests.e2e.helpers import run_program


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_one_of_four_lies(kind: str) -> None:
    done = run_program("chaos", "--lie", kind, "--json", deadline_s=380)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"], report
    assert report["caught_after"] == {"peer-3": 1} or kind == "accuse", report
    assert report["barred"] == ["peer-3"] and not report["false_bars"]
    assert report["max_loss_difference"] <= 1e-4


def test_what_cannot_be_played_is_refused_with_its_reason() -> None:
    for arguments, reason in (
        (("--lie", "fibs"), "there is no lie of the kind fibs"),
        (("--lie", "flip", "--peers", "3"), "a quarter of 3 daemons is none"),
        (("--lie", "flip", "--storm"), "--lie does not go with --storm"),
        (("--lie", "flip", "--seed", "3"), "--lie does not go with --seed"),
        (("--lie", "zeros", "--strength", "0.1"), "--lie zeros has no strength"),
        (("--strength", "0.1"), "--strength is for a lie"),
        (("--rate", "0.1"), "--rate is for a lie"),
        (("--lie", "flip", "--run", "gpt2-small-homes"), "cannot have audits: audit.rate needs"),
    ):
        done = run_program("chaos", *arguments)
        assert done.returncode == 2 and reason in done.stderr, done.stderr
