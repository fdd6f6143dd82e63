"""Bugs of peers that are not woken or not asked, and of what never ends."""

import asyncio
from typing import Any

from p2p_dtfm.core.consensus.actions import Verdict, refused
from p2p_dtfm.core.consensus.parts.meeting import Meeting
from p2p_dtfm.daemon.machine.life import Life
from p2p_dtfm.daemon.node.coming_and_going.departure import Departure
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.state_transfer.following.replaying import Replaying
from p2p_dtfm.daemon.step.pipeline.microbatches import Microbatches
from p2p_dtfm.daemon.trainer.followers import Followers
from p2p_dtfm.daemon.trainer.place import PlaceInView
from p2p_dtfm.daemon.trainer.step_loop import StepLoop
from p2p_dtfm.daemon.trainer.trainer import Trainer
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from p2p_dtfm.daemon.trainer.view_mail import ViewMail
from p2p_dtfm.testbed.virtual.patches import Patches
from p2p_dtfm.testbed.virtual.planted.bug import Planted
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import (
    LATE_WORDS,
    MOMENTS,
    PARTINGS,
    QUICK_STORMS,
)

FOR_EVER_S = 1e9


def _gives_no_states_while_it_waits(patches: Patches) -> None:
    async def offer_states(place: Any) -> None:
        if not place._tools.status.facts.get("waits_for"):
            await offered(place)

    offered = patches.put(PlaceInView, "offer_states", offer_states)


def _sides_stay_apart(patches: Patches) -> None:
    """A peer that hears of a view that counts more than its own does not go over."""

    def goes_over(meeting: Any, view: Any, message: Any) -> Verdict:
        return refused("planted")

    patches.put(Meeting, "_goes_over", goes_over)


def _new_holder_sleeps(patches: Patches) -> None:
    def changed(followers: Any) -> None:
        followers._outlet.states_changed()
        followers._progressed.set()

    patches.put(Followers, "_changed", changed)


def _active_wakes_nobody(patches: Patches) -> None:
    patches.nothing(Trainer, "wake")


class _NeverCleared(asyncio.Event):
    def clear(self) -> None:
        """Does nothing: once done, always done."""


def _done_is_done(patches: Patches) -> None:
    def made(trainer: Any, *args: Any) -> None:
        make(trainer, *args)
        trainer.done = _NeverCleared()

    make = patches.put(Trainer, "__init__", made)


def _over_is_not_looked_at(patches: Patches) -> None:
    """A peer does not see that its view is over, from the end of one step until the next is under
    way. One look on the way would show it."""
    beginning: list[Any] = []

    async def one_step(loop: Any, *args: Any) -> None:
        beginning.append(loop._state)
        try:
            await right_step(loop, *args)
        finally:
            if loop._state in beginning:
                beginning.remove(loop._state)

    async def compute(loop: Any, view: Any, running: Any) -> Any:
        beginning.remove(loop._state)
        if not loop._state.is_over(view):
            return await right_compute(loop, view, running)
        return await running

    def is_over(state: Any, view: Any) -> bool:
        return state not in beginning and right(state, view)

    right_step = patches.put(StepLoop, "_one_step", one_step)
    right_compute = patches.put(StepLoop, "_compute", compute)
    right = patches.put(TrainerState, "is_over", is_over)


def _early_prepared_is_lost(patches: Patches) -> None:
    patches.nothing(ViewMail, "keep_early")


def _last_kept_is_not_sent(patches: Patches) -> None:
    """A stage that stays does not send what it kept of a repeated step, and its neighbour has
    lost."""

    async def send_kept(microbatches: Any, step: int, replay: Any) -> None:
        send, waiting = microbatches._boundary.send, list[Any]()
        microbatches._boundary.send = lambda *frame: waiting.append(frame)
        try:
            await right(microbatches, step, replay)
        finally:
            microbatches._boundary.send = send
        for frame in waiting[:-1]:
            send(*frame)

    right = patches.put(Microbatches, "_send_kept", send_kept)


def _stop_wakes_nobody(patches: Patches) -> None:
    def stop_step(trainer: Any) -> None:
        trainer._state.stopped = True
        trainer._followers.stop_guarding()
        trainer.cuts.stop()

    patches.put(Trainer, "stop_step", stop_step)


def _tasks_outlive_the_daemon(patches: Patches) -> None:
    patches.nothing(Life, "cancel_tasks")


def _leaving_never_ends(patches: Patches) -> None:
    async def end(departure: Any) -> None:
        await asyncio.sleep(FOR_EVER_S)

    patches.put(Departure, "end", end)


def _failures_of_parts_are_swallowed(patches: Patches) -> None:
    patches.nothing(TrainerState, "_ended")
    patches.put(Replaying, "_check_stall", _raise)


def _raise(replaying: Any) -> None:
    raise RuntimeError("planted")


def _failed_delivery_ends_its_worker(patches: Patches) -> None:
    async def try_to_deliver(messenger: Any, peer_id: str, message: Any) -> None:
        if peer_id in messenger._silent:
            raise RuntimeError("planted")
        await right(messenger, peer_id, message)

    right = patches.put(Messenger, "_try_to_deliver", try_to_deliver)


WAITING = (
    Planted("sides-stay", "a divided swarm stays so", _sides_stay_apart, PARTINGS),
    Planted(
        "prepared-gives-nothing",
        "who waits for the others' Prepared gives no states",
        _gives_no_states_while_it_waits,
        MOMENTS,
    ),
    Planted(
        "new-holder-sleeps",
        "a guardian that has become holder is not woken when its layers are here",
        _new_holder_sleeps,
    ),
    Planted(
        "active-wakes-nobody",
        "a step that waits for Active alone stays",
        _active_wakes_nobody,
        QUICK_STORMS,
    ),
    Planted("done-is-done", "whoever was done does not train again", _done_is_done, MOMENTS),
    Planted(
        "over-not-looked-at",
        "who begins a step while a view ends waits in it",
        _over_is_not_looked_at,
    ),
    Planted(
        "early-prepared",
        "Prepared before the takeover is lost",
        _early_prepared_is_lost,
        LATE_WORDS,
    ),
    Planted(
        "last-kept-unsent",
        "of what is kept of a step, and a neighbour has lost, the last is not sent again",
        _last_kept_is_not_sent,
        MOMENTS,
    ),
    Planted("stop-wakes-nobody", "a failure stops no step under way", _stop_wakes_nobody),
    Planted("tasks-stay", "tasks outlive their daemon", _tasks_outlive_the_daemon),
    Planted("leaving-never-ends", "who leaves stays", _leaving_never_ends),
    Planted(
        "part-fails-silently",
        "a part of the trainer ends, and nobody hears of it",
        _failures_of_parts_are_swallowed,
        MOMENTS,
    ),
    Planted(
        "worker-fails",
        "a delivery that fails ends its worker",
        _failed_delivery_ends_its_worker,
        MOMENTS,
    ),
)
