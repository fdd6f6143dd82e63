"""`p2p-dtfm chaos --lie`: each kind of lie comes to what the design promises of it. No honest
member is barred or called a liar."""

import json

import pytest

from p2p_dtfm.testbed.lies.kinds import KINDS
from tests.e2e.helpers import Program, run_program


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_one_lies(kind: str) -> None:
    done = run_program("chaos", "--lie", kind, "--json", deadline_s=900)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"], report
    promise = KINDS[kind].promise
    (liar,) = report["caught_after"]
    assert report["barred"] in ([liar], [liar] * promise.barred)
    assert (report["caught_after"][liar] is not None) or promise.within is None
    assert report["max_loss_difference"] <= 1e-4 or promise.spoils


@pytest.mark.nightly
@pytest.mark.parametrize("arguments", [("flip", "--rate", "0.2"), ("confess",)])
def test_what_one_did_before_it_was_found_is_undone(arguments: tuple[str, ...]) -> None:
    """Audits find this liar with a certainty of 99%; otherwise nobody might be drawn for it in
    twenty lying steps."""
    done = run_program("chaos", "--lie", *arguments, "--undo", "20", "--json", deadline_s=900)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"], report
    assert report["is_undone"] and 20 <= report["undone_steps"] <= report["undo_limit"]
    assert report["max_loss_difference"] <= 1e-4


@pytest.mark.nightly
def test_two_of_eight_lie_together_and_little() -> None:
    done = run_program("chaos", "--lie", "scale:0.01", "--peers", "8", "--json", deadline_s=900)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"], report
    assert report["barred"] == ["peer-6", "peer-7"]


def test_what_cannot_be_played_is_refused_with_its_reason(program: Program) -> None:
    for arguments, reason in (
        (("--lie", "fibs"), "there is no lie of the kind fibs"),
        (("--lie", "flip", "--peers", "3"), "--lie flip is played by at least 4 daemons"),
        (("--lie", "edge-in", "--peers", "5"), "--lie edge-in is played by at least 6 daemons"),
        (("--lie", "flip", "--liars", "2"), "2 liars of 4 daemons are not fewer than half"),
        (("--lie", "flip", "--storm"), "--lie does not go with --storm"),
        (("--lie", "flip", "--seed", "3"), "--lie does not go with --seed"),
        (("--lie", "zeros:0.1"), "--lie zeros has no strength"),
        (("--lie", "flip:much"), "the strength of --lie flip:much is none"),
        (("--apart",), "--apart is for a lie"),
        (("--rate", "0.1"), "--rate is for a lie"),
        (("--undo", "20"), "--undo is for a lie"),
        (("--lie", "flip", "--run", "gpt2-small-homes"), "cannot have audits: audit.rate needs"),
    ):
        code, _, said = program("chaos", *arguments)
        assert code == 2 and reason in said, said
