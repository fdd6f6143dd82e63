"""No member computes with more threads than its auditors would use."""

import logging
import os

import pytest

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.join.measuring import _threads
from p2p_dtfm.sim.scenario.files import read_run_spec

MOST = 4 * (os.cpu_count() or 1)


def spec(rate: float) -> RunSpec:
    tiny = read_run_spec("tiny")
    return tiny.model_copy(update={"audit": tiny.audit.model_copy(update={"rate": rate})})


@pytest.mark.parametrize("threads", [1, 3, MOST])
def test_what_others_believe_is_as_set(threads: int) -> None:
    assert _threads(Settings(threads=threads), spec(1.0)) == threads


def test_more_is_cut_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert _threads(Settings(threads=MOST + 1), spec(0.02)) == MOST
    assert f"computes with {MOST} threads, not {MOST + 1}" in caplog.text


def test_without_audits_they_are_the_owners_affair() -> None:
    assert _threads(Settings(threads=MOST + 1), spec(0.0)) == MOST + 1
