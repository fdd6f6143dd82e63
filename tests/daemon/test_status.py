"""The one state of a daemon, as its user reads it."""

from p2p_dtfm.daemon.status import State, Status


def test_who_leaves_is_leaving_until_it_has_left() -> None:
    status = Status()
    status.say(State.TRAINING, "step 1 of 9")
    status.say(State.LEAVING, "hands its layers over")
    status.say(State.TRAINING, "step 2 of 9")  # it trains on until others hold its layers
    assert (status.state, status.reason) == (State.LEAVING, "hands its layers over")
    status.say(State.STOPPED, "left")
    assert status.state is State.STOPPED
