"""What several tests of the core begin with."""

import pytest

from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.recovery.view import View
from tests.core.liars import swarm


@pytest.fixture(scope="module")
def three() -> AgreementState:
    """The state of `a`, in a view with `b` and `c`; each test copies it."""
    return swarm(["a", "b", "c"]).peers["a"].agreement._state


@pytest.fixture(scope="module")
def four() -> View:
    view = swarm(["a", "b", "c", "d"]).peers["a"].view
    assert view is not None
    return view
