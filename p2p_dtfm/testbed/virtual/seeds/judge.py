"""What must hold after a seed, and while it is played."""

import asyncio
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2p_dtfm.core.protocol.errors import UNREACHABLE, UserError
from p2p_dtfm.daemon.machine.home import is_full
from p2p_dtfm.daemon.peers.run_source import RunComplete
from p2p_dtfm.testbed.virtual.loop import tasks_here
from p2p_dtfm.testbed.virtual.peer import Ending, Peer
from p2p_dtfm.testbed.virtual.seeds.saved import is_whole, layer_of, layer_of_one, saved_at
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Schedule
from p2p_dtfm.testbed.virtual.swarm import NeverHappened, Swarm

TOLERANCE = 1e-4
STATE_TOLERANCE = 2e-3
"""How far a parameter may be off after the last step: sums are made in other orders, and small
moments divide."""
TASKS_LIMIT = 600
"""The most tasks of one daemon. In a view of fifty each has some hundred."""
UNNOTICED_S = 2.0
"""For so long after a crash, what others tell may still count on the dead peer."""
LEAVES_WITHIN_S = 60.0
LEFTOVERS = ("*.partial*", ".tmp-*", ".fetched-*")
OFFERS = "runs/*/offers/*"


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Reference:
    """What a single process makes of the run."""

    losses: list[float]
    norms: list[float]
    """Gradient norms, by step."""
    held_out: dict[int, float]
    """Held-out losses, by the step before which the model is evaluated."""
    home: Path
    """The home with what that process saved after the last step."""
    is_like_one: bool = True
    """Whether a swarm comes to the same. Otherwise members are compared with one another."""


def failed(peer: Peer) -> BaseException | None:
    """The error that ended a daemon that nobody killed; None if none did."""
    if peer.ended is None or not peer.ended.done() or peer.was_killed or peer.ended.cancelled():
        return None
    return peer.ended.exception()


def starts_again(peer: Peer) -> bool:
    """The daemon ended, and said that it reaches nobody, or that its disk is full. Its owner reads
    that, and starts it again."""
    error = failed(peer)
    return error is not None and _is_for_its_owner(peer, _ending_of(peer, error))


def _ending_of(peer: Peer, error: BaseException) -> Ending:
    return Ending(error, peer.has_run, peer.was_in_a_view())


def _is_for_its_owner(peer: Peer, ending: Ending) -> bool:
    """A full disk, or that nobody can be reached, is a reason not to begin. It may not end a daemon
    that takes part."""
    error = ending.error
    if isinstance(error, OSError):
        return is_full(error) and not ending.has_run and peer.disk.refused > 0
    if isinstance(error, RunComplete) or not isinstance(error, UserError):
        return False
    return error.exit_code == UNREACHABLE and not ending.was_in_a_view


def require_bounds(swarm: Swarm, liars: Collection[str] = ()) -> None:
    """Checks bounds of queues and tasks of those that do not lie, at any time. Raises `Broken`."""
    counts: dict[str, int] = {}
    for task in swarm.loop.tasks():
        if task.process is not None and task.process.peer_name not in liars:
            name = task.process.name
            counts[name] = counts.get(name, 0) + (not task.process.is_dead)
    for name, count in counts.items():
        if count > TASKS_LIMIT:
            raise Broken(f"{name} has {count} tasks")
    for host in swarm.network.hosts.values():
        if host.process.peer_name in liars:
            continue
        for ends in host.open.values():
            for end in ends:
                if end.unread_bytes > end.unread_limit_bytes:
                    raise Broken(f"{host.process.name}: {end.unread_bytes} bytes unread")


@dataclass(frozen=True)
class _Commit:
    """A commit, as a peer told of it."""

    peer: Peer
    event: dict[str, Any]
    at_s: float
    step: int
    safe: int
    """How many steps were safe by then."""
    view: str
    """The view's snapshot: a founder that founds anew numbers its views from one on."""
    entered_s: float
    """When this peer came to that view."""
    member_count: int


def require_safe_steps_stay(
    peers: Sequence[Peer], crashes_s: Sequence[float] = (), has_sleepers: bool = False
) -> None:
    """Nobody computes a step again that a peer has told to be safe. Safe means from the crash of
    any one peer, so only two of `crashes_s` since it was told excuse a repeat. Only the teller can
    break this, or a peer that entered another view since. What a peer hears of before that, others
    have computed, and it may tell of several steps at once. A peer alone in its view tells of its
    disk. Peers that are let in after that, and go on when it crashes, have not got that (seed
    800096). Nor have those that sleep while half of the members or fewer go on: once awake they are
    the larger part, whose view counts (990777). Raises `Broken`."""
    commits = [commit for peer in peers for commit in _commits_of(peer)]
    most = max((commit.member_count for commit in commits), default=0)
    least = most // 2 + 1 if has_sleepers else 2
    told = [commit for commit in commits if commit.member_count >= least]
    for commit in commits:
        before = [at_s for at_s in crashes_s if at_s <= commit.at_s]
        since_s = sorted(before)[-2] + UNNOTICED_S if len(before) > 1 else -math.inf
        for word in told:
            if commit.step >= word.safe or not since_s < word.at_s < commit.at_s:
                continue
            is_later = commit.view != word.view and commit.entered_s > word.at_s
            if word.peer is commit.peer or is_later:
                raise Broken(
                    f"{commit.peer.name}: step {commit.step} again at {commit.at_s:.2f} s, with "
                    f"{word.safe} safe ones at {word.at_s:.2f} s by {word.peer.name}"
                )


def _commits_of(peer: Peer) -> Iterator[_Commit]:
    """The peer's commits in views, in their order."""
    views: dict[int, dict[str, Any]] = {}
    for event in peer.events():
        if event["event"] == "view":
            views[event["view"]] = event
        elif event["event"] == "step" and event["view"] in views:
            view = views[event["view"]]
            yield _Commit(
                peer,
                event,
                event["at_s"],
                event["step"],
                event["safe_step"] or 0,
                view["snapshot"],
                view["at_s"],
                len(view["members"]),
            )


def check(
    peers: Sequence[Peer],
    reference: Reference,
    crashes_s: Sequence[float],
    schedule: Schedule,
    own_steps: int,
    liars: Sequence[Peer] = (),
) -> None:
    """`own_steps` is how many steps are like those of a single process. Steps after a committed lie
    are not. `liars` are judged elsewhere, but they alone may have seen some steps. Raises
    `Broken`."""
    seen = {e["step"] for peer in liars for e in peer.events() if e["event"] == "step"}
    if schedule.has_only_crashes:
        require_safe_steps_stay(peers, crashes_s, schedule.has_sleepers)
    for peer in peers:
        _require_no_failure(peer)
        seen |= _require_outcomes(peer, reference, own_steps)
    if missing := set(range(len(reference.losses))) - seen:
        raise Broken(f"nobody has told of the steps {sorted(missing)}")
    _require_evaluations([*peers, *liars], reference)
    require_told_alike(peers)


def _require_evaluations(peers: Sequence[Peer], reference: Reference) -> None:
    """Somebody has told the held-out loss of each step before which the model is evaluated."""
    if missing := set(reference.held_out) - _evaluated(peers):
        raise Broken(f"nobody has told of a held-out loss of the steps {sorted(missing)}")


def has_last_evaluation(peers: Sequence[Peer], steps: int) -> bool:
    """Whether somebody has told the held-out loss after the last step."""
    return steps in _evaluated(peers)


def _evaluated(peers: Sequence[Peer]) -> set[int]:
    events = (event for peer in peers for event in peer.events() if event["event"] == "step")
    return {event["step"] for event in events if event["held_out_loss"] is not None}


def require_ends_elsewhere(peer: Peer, layer_count: int) -> None:
    """A peer that a private run does not name has neither end of the model. Raises `Broken`."""
    if ends := {0, layer_count - 1} & peer.layers():
        raise Broken(f"{peer.name} is not named, and has the layers {sorted(ends)}")


def _require_no_failure(peer: Peer) -> None:
    endings = list(peer.past_endings)
    if (error := failed(peer)) is not None:
        endings.append(_ending_of(peer, error))
    for ending in endings:
        is_known = isinstance(ending.error, RunComplete) or _is_for_its_owner(peer, ending)
        if not is_known:
            raise Broken(f"{peer.name} failed: {ending.error!r}") from ending.error
    if failures := peer.failures():
        raise Broken(f"{peer.name}: {failures[0]}")


def _require_outcomes(peer: Peer, reference: Reference, own_steps: int) -> set[int]:
    """Compares each outcome that the peer told, also of steps computed again. Returns which
    steps."""
    seen = set()
    for event in peer.events():
        if event["event"] != "step":
            continue
        step = event["step"]
        seen.add(step)
        if step > own_steps or (step == own_steps and step < len(reference.losses)):
            continue
        is_trained = step < len(reference.losses)
        if not reference.is_like_one:
            _require_numbers(peer, event, is_trained)
            continue
        expected = {
            "loss": reference.losses[step] if is_trained else None,
            "gradient_norm": reference.norms[step] if is_trained else None,
            "held_out_loss": reference.held_out.get(step),
        }
        for name, value in expected.items():
            found = event[name]
            if value is None or (found is None and name == "held_out_loss"):
                continue
            if found is None or not math.isclose(found, value, rel_tol=TOLERANCE):
                raise Broken(f"{peer.name}, step {step}: {name} {found}, not {value}")
    return seen & set(range(len(reference.losses)))


def _require_numbers(peer: Peer, event: dict[str, Any], is_trained: bool) -> None:
    for name in ("loss", "gradient_norm") if is_trained else ():
        if event[name] is None or not math.isfinite(event[name]):
            raise Broken(f"{peer.name}, step {event['step']}: {name} {event[name]}")


def require_told_alike(peers: Sequence[Peer]) -> None:
    """Members of one view tell the same of each step, bit for bit. Raises `Broken`."""
    told: dict[tuple[str, int, str], tuple[float, str]] = {}
    for peer in peers:
        for commit in _commits_of(peer):
            for name in ("loss", "gradient_norm", "held_out_loss"):
                if (value := commit.event.get(name)) is None:
                    continue
                key = commit.view, commit.step, name
                other, who = told.setdefault(key, (value, peer.name))
                if value != other:
                    raise Broken(
                        f"step {commit.step} in one view: {name} {other} at {who}, {value} at "
                        f"{peer.name}"
                    )


def require_states(peers: Sequence[Peer], reference: Reference) -> None:
    """The saved last step is what a single process saved. If a single process comes to something
    else, it is the same at all peers, bit for bit. Raises `Broken`."""
    steps = len(reference.losses)
    if not reference.is_like_one:
        _require_alike(peers, steps)
        return
    compared: set[tuple[int, str]] = set()
    whole = 0
    for peer in peers:
        for checkpoint in saved_at(peer, steps):
            whole += is_whole(checkpoint)
            for name, file in checkpoint.manifest.layers.items():
                if (int(name), file.digest) in compared:
                    continue
                compared.add((int(name), file.digest))
                found = layer_of(checkpoint, int(name))
                right = layer_of_one(reference.home, steps, int(name))
                if found is None or right is None:
                    raise Broken(f"{peer.name}: the file of layer {name} is not what was written")
                apart = float((found.parameters - right.parameters).abs().max())
                if apart > STATE_TOLERANCE:
                    raise Broken(f"{peer.name}: layer {name} of the last step is {apart} off")
    if not whole:
        raise Broken("nobody has saved the whole model of the last step")


def _require_alike(peers: Sequence[Peer], steps: int) -> None:
    digests: dict[int, dict[str, str]] = {}
    whole = 0
    for peer in peers:
        for checkpoint in saved_at(peer, steps):
            whole += is_whole(checkpoint)
            for name, file in checkpoint.manifest.layers.items():
                digests.setdefault(int(name), {})[file.digest] = peer.name
    for layer, holders in sorted(digests.items()):
        if len(holders) > 1:
            raise Broken(f"layer {layer} of the last step is not the same at {holders.values()}")
    if not whole:
        raise Broken("nobody has saved the whole model of the last step")
    told = [
        {e["step"]: e["held_out_loss"] for e in peer.events() if e["event"] == "step"}
        for peer in peers
    ]
    last = {each[steps] for each in told if each.get(steps) is not None}
    first = [each[0] for each in told if each.get(0) is not None]
    if len(last) != 1 or not first or not all(loss < min(first) for loss in last):
        raise Broken(f"held-out losses: {first} at first, {sorted(last)} in the end")


async def require_clean_ends(swarm: Swarm, peers: Sequence[Peer]) -> None:
    """Peers leave when they are asked to, and neither task nor file stays behind. Raises
    `Broken`."""
    for peer in swarm.peers:
        failed(peer)  # takes its error, also a liar's, which is not judged here
    if untaken := swarm.loop.untaken():
        raise Broken(f"raised, and nobody was told: {untaken[0]}")
    for peer in peers:
        if peer.is_running:
            swarm.end(peer)
    try:
        await swarm.until(
            lambda: not any(peer.is_running for peer in peers),
            "they leave when they are asked to",
            LEAVES_WITHIN_S,
        )
    except NeverHappened as error:
        raise Broken(str(error)) from error
    await asyncio.sleep(1.0)
    for peer in peers:
        _require_no_failure(peer)
        if left := _tasks_left(peer):
            raise Broken(f"{peer.name} has ended, and these of its tasks have not: {left}")
        if files := _files_left(peer):
            raise Broken(f"{peer.name} has left behind {[path.name for path in files]}")


def _files_left(peer: Peer) -> list[Path]:
    """Files that the peer should have removed: leftovers, if it was never killed. Offered states it
    should have removed even if an earlier life was killed: a daemon that takes part again removes
    them first."""
    kinds = () if peer.was_ever_killed else LEFTOVERS
    files = [path for kind in kinds for path in peer.home.rglob(kind)]
    took_part = peer.takes_part and not peer.was_killed
    return [*files, *(peer.home.glob(OFFERS) if took_part else ())]


def _tasks_left(peer: Peer) -> list[str]:
    if peer.process is None:  # its joining was left out
        return []
    return [task.waits_at() for task in tasks_here() if task.process is peer.process]
