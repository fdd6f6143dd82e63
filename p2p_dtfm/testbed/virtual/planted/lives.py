"""Bugs of peers that come and go, and in what a daemon owes the others while it lives."""

import asyncio
from typing import Any

from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.liveness.liveness import Liveness
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.node.background.heartbeats import Heartbeats
from p2p_dtfm.daemon.node.coming_and_going.entry import Entry
from p2p_dtfm.daemon.node.resident import Resident
from p2p_dtfm.daemon.state_transfer.checkpoints.checkpoints import Checkpoints
from p2p_dtfm.daemon.state_transfer.donor import Donor
from p2p_dtfm.daemon.state_transfer.offers import Offers
from p2p_dtfm.daemon.step.mailbox import Mailbox
from p2p_dtfm.daemon.trainer import trainer
from p2p_dtfm.testbed.virtual.patches import Patches
from p2p_dtfm.testbed.virtual.planted.bug import Planted
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import (
    ABSENCES,
    CROWDS,
    DUMB,
    LATE_WORDS,
    MOMENTS,
)

FOR_EVER_S = 1e9
FULL_FROM = 20
"""Members: more than any seed has but those of crowds."""


def _who_cannot_show_the_end_is_asked(patches: Patches) -> None:
    def is_at_end(entry: Any, member: str, known: Any) -> bool:
        before, entry._complete = entry._complete, None
        right(entry, member, known)
        shown, entry._complete = entry._complete, entry._complete or before
        return shown is not None

    right = patches.put(Entry, "_is_at_end", is_at_end)


def _founds_once(patches: Patches) -> None:
    async def nothing(entry: Any) -> None:
        """Does nothing, whatever became of its joining."""

    patches.put(Entry, "_join_if_nothing_comes_of_it", nothing)


def _looks_for_nobody(patches: Patches) -> None:
    async def find_others(entry: Any, pause_s: float) -> bool:
        return False

    patches.put(Entry, "_find_others", find_others)


def _home_stays_locked(patches: Patches) -> None:
    """A daemon that starts again in this home is told that one runs there."""

    def release(home: Any) -> None:
        _KEPT.append(home)

    patches.put(Home, "release", release)


_KEPT: list[Any] = []


def _hours_do_not_end(patches: Patches) -> None:
    """Hours no longer end for a daemon that takes part. One that begins outside of them still
    waits."""

    async def watch_hours(resident: Any, daemon: Any) -> None:
        """Does nothing."""

    patches.put(Resident, "_watch_hours", watch_hours)


def _nobody_is_missed(patches: Patches) -> None:
    patches.put(Liveness, "tick", lambda liveness, now_ns: ())


def _heart_does_not_beat(patches: Patches) -> None:
    patches.put(Liveness, "due_heartbeats", lambda liveness, now_ns: ())


def _models_stay_in_pieces(patches: Patches) -> None:
    patches.nothing(Checkpoints, "_complete_later")


def _offers_are_gone_at_once(patches: Patches) -> None:
    def put(offers: Any, payload: memoryview, *others: Any) -> str:
        blob = str(right(offers, payload, *others))
        offers.remove(blob)
        return blob

    right = patches.put(Offers, "put", put)


def _leavers_do_not_hand_over(patches: Patches) -> None:
    """A peer that still fetches from the leaver loses its only donor."""

    async def drain(donor: Any, deadline_s: float = 0.0) -> None:
        donor.close()

    patches.put(Donor, "drain", drain)


def _commits_are_not_passed_on(patches: Patches) -> None:
    patches.nothing(Donor, "committed")


def _arrivals_wake_nobody(patches: Patches) -> None:
    def put(mailbox: Any, *args: Any) -> None:
        waited_for, mailbox._arrived = mailbox._arrived, asyncio.Event()
        try:
            right(mailbox, *args)
        finally:
            mailbox._arrived = waited_for

    right = patches.put(Mailbox, "put", put)


def _each_beat_leaves_a_task(patches: Patches) -> None:
    def beat(heartbeats: Any, now_ns: int) -> None:
        asyncio.ensure_future(asyncio.sleep(FOR_EVER_S))  # noqa: RUF006 - it is the bug
        right(heartbeats, now_ns)

    right = patches.put(Heartbeats, "_beat", beat)


def _no_more_are_let_in(patches: Patches) -> None:
    """Members of a view that is full enough let nobody else in."""

    def named_newcomers(state: Any, planned: bool) -> tuple[Any, ...]:
        room = max(0, FULL_FROM - len(state.members)) if state.members else None
        named: tuple[Any, ...] = right(state, planned)
        return named[:room]

    right = patches.put(AgreementState, "named_newcomers", named_newcomers)


def _spares_do_not_say_why(patches: Patches) -> None:
    patches.put(trainer, "spare_in_short", lambda *args: "")


LIVES = (
    Planted(
        "end-not-shown",
        "who says that the run is complete and cannot show it is asked for ever",
        _who_cannot_show_the_end_is_asked,
    ),
    Planted(
        "founds-once", "a founder whom others have left waits for ever", _founds_once, ABSENCES
    ),
    Planted("looks-for-nobody", "who knows nobody any more does not look", _looks_for_nobody, DUMB),
    Planted("home-stays-locked", "a daemon that has ended keeps its home", _home_stays_locked),
    Planted("hours-do-not-end", "who takes part does so outside its hours", _hours_do_not_end),
    Planted("nobody-is-missed", "silence makes nobody suspect", _nobody_is_missed, LATE_WORDS),
    Planted("no-heartbeats", "nobody says that it lives", _heart_does_not_beat),
    Planted("in-pieces", "nobody fetches the layers of others", _models_stay_in_pieces),
    Planted("offers-gone", "offered states are gone at once", _offers_are_gone_at_once, MOMENTS),
    Planted("no-handing-over", "who leaves does not wait to be read", _leavers_do_not_hand_over),
    Planted(
        "commits-unsaid",
        "followers do not hear of commits",
        _commits_are_not_passed_on,
        MOMENTS,
    ),
    Planted("arrivals-unheard", "an activation wakes nobody", _arrivals_wake_nobody),
    Planted("task-a-beat", "each beat leaves a task behind", _each_beat_leaves_a_task),
    Planted("house-full", "of a crowd some are never let in", _no_more_are_let_in, CROWDS),
    Planted("spare-untold", "spares do not say why they are", _spares_do_not_say_why, CROWDS),
)
