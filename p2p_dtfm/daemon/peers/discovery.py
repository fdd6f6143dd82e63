"""Finds members that train a run: the initial peers are asked first, then those that the directory
names.

A bootstrap node trains nothing. But through it the directory can be read, where members of a run
say that they are present.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from p2p_dtfm.core.protocol.errors import UNREACHABLE, UserError
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.run_source import (
    AnotherRun,
    OtherProtocol,
    ask_welcome,
    ask_welcome_shortly,
)
from p2p_dtfm.daemon.peers.wire import Welcome
from p2p_dtfm.net.directory.port import DirectoryPort
from p2p_dtfm.net.directory.values import Presence
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.ports import chance, now

LOOK_FOR_S = 30.0
"""A founder is present in the directory only once it has measured its device."""
LOOK_AGAIN_S = 2.0
ASKED_AT_ONCE_LIMIT = 16
ASKED_LIMIT = 64
ANSWER_DEADLINE_S = 4.0
DIGEST_CHARACTERS = 64
STAGES = 3
HEAD_START_S = 1.0
"""The head start of each way to read the directory before the next one, which is to be believed
less."""
NODES_LIMIT = 16
WELCOME_ALONE_S = 3.0
"""After so long without a welcome, the directory is read as well, where the run is named."""

Value = TypeVar("Value")
Answer = tuple[str, Welcome]
"""The peer that answered, and its answer."""


async def find_run(
    messenger: Messenger,
    directory: DirectoryPort,
    initial_peers: list[str],
    own: tuple[str, ...],
    run_digest: str,
    say: Callable[[str], None],
    is_known: Callable[[str], bool],
) -> Answer:
    """Find a member of the run (of any run, if `run_digest` is empty). `is_known`: whether a peer
    is no stranger. What a known peer says decides what to do where nobody is found. Raises
    `UserError`."""
    asking = asyncio.create_task(ask_welcome(messenger, initial_peers, own, run_digest))
    is_whole = len(run_digest) == DIGEST_CHARACTERS
    try:
        # an initial peer that says nothing must not keep this peer from looking elsewhere
        await asyncio.wait({asking}, timeout=WELCOME_ALONE_S if is_whole else None)
        if asking.done() and (not is_whole or asking.exception() is None):
            return asking.result()
        say(f"looks in the directory for members of run {run_digest[:16]}")
        return await _look(messenger, directory, initial_peers, own, run_digest, asking)
    except UserError as error:
        if not is_whole:
            raise _with_hint(error) from error
        raise await _nobody(messenger, directory, run_digest, error, is_known) from error
    finally:
        asking.cancel()


async def _look(
    messenger: Messenger,
    directory: DirectoryPort,
    initial_peers: list[str],
    own: tuple[str, ...],
    run_digest: str,
    asking: asyncio.Task[Answer],
) -> Answer:
    """Look in the directory, while the initial peers are still asked. Raises `UserError`."""
    began_s = now.monotonic_s()

    async def hear_of_it() -> Answer | None:
        with contextlib.suppress(UserError):
            return await asyncio.shield(asking)
        return None

    while True:
        ways = [hear_of_it(), ask_present(messenger, directory, initial_peers, own, run_digest)]
        found = await first_found(ways, None)
        if found is not None:
            return found
        try:
            return asking.result()
        except UserError as refused:
            # an initial peer has said that it trains another run: most likely the digest is
            # mistyped
            patience_s = LOOK_FOR_S if refused.exit_code == UNREACHABLE else 0.0
            if now.monotonic_s() > began_s + patience_s:
                raise
        await asyncio.sleep(LOOK_AGAIN_S)


async def ask_present(
    messenger: Messenger,
    directory: DirectoryPort,
    initial_peers: list[str],
    own: tuple[str, ...],
    run_digest: str,
) -> Answer | None:
    """Ask some of the peers that the directory names; None if none of them trains the run now.

    Peers that have brought their presence to an initial peer are asked first. Any node that answers
    may invent the others, by thousands. So nodes are read one by one, and some peers of each are
    asked.
    """
    asked: set[str] = {messenger.me}

    async def read(stage: int) -> list[list[Presence]]:
        if stage == 0:
            return await directory.present_by_node(initial_peers, run_digest)
        if stage == 1:
            nodes = chance.sample(directory.nodes, min(len(directory.nodes), NODES_LIMIT))
            return await directory.present_by_node(nodes, run_digest)
        return [await directory.present_peers(run_digest)]

    async def ask(stage: int) -> Answer | None:
        await asyncio.sleep(stage * HEAD_START_S)
        try:
            by_node = await read(stage)
        except Unreachable:
            return None
        chosen = _in_turn(by_node, asked)
        asked.update(peer.peer_id for peer in chosen)
        return await _first_answer(messenger, chosen, stage == 0, own, run_digest)

    return await first_found([ask(stage) for stage in range(STAGES)], None)


def _in_turn(by_node: list[list[Presence]], asked: set[str]) -> list[Presence]:
    """Draw some of the peers that each node names, one of each node after the other."""
    new = [[peer for peer in node if peer.peer_id not in asked] for node in by_node]
    drawn = [chance.sample(node, min(len(node), ASKED_LIMIT)) for node in new]
    turns = zip_longest(*sorted(drawn, key=len))
    chosen = {peer.peer_id: peer for turn in turns for peer in turn if peer is not None}
    return list(chosen.values())[:ASKED_LIMIT]


async def _first_answer(
    messenger: Messenger,
    peers: list[Presence],
    were_there: bool,
    own: tuple[str, ...],
    run_digest: str,
) -> Answer | None:
    """Ask several peers at once. The first good answer counts."""
    turns = asyncio.Semaphore(ASKED_AT_ONCE_LIMIT)

    async def ask(peer: Presence) -> Answer | None:
        async with turns:
            with contextlib.suppress(Unreachable, AnotherRun):
                await messenger.look_up(peer.peer_id, peer.addresses, were_there)
                answer = await ask_welcome_shortly(
                    messenger, peer.peer_id, own, run_digest, ANSWER_DEADLINE_S
                )
                return answer if answer is not None and answer[1].lets_in else None
        return None

    return await first_found([ask(peer) for peer in peers], None)


async def first_found(
    ways: Sequence[Coroutine[Any, Any, Value | None]], limit_s: float | None
) -> Value | None:
    """The first result that is not None. The other ways are cancelled."""
    tasks = {asyncio.create_task(way) for way in ways}
    waiting = set(tasks)
    loop = asyncio.get_running_loop()
    end_s = None if limit_s is None else loop.time() + limit_s
    try:
        while waiting:
            left_s = None if end_s is None else max(0.0, end_s - loop.time())
            done, waiting = await asyncio.wait(
                waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                return None
            for task in done:
                if (found := task.result()) is not None:
                    return found
        return None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _with_hint(error: UserError) -> UserError:
    if error.exit_code != UNREACHABLE or isinstance(error, OtherProtocol):
        return error
    hint = (
        "if the address is of a bootstrap node, name the run with --run-digest and all "
        f"{DIGEST_CHARACTERS} digits: its founder printed them"
    )
    return UserError(error.cause, (*error.fixes, hint), error.exit_code)


async def _nobody(
    messenger: Messenger,
    directory: DirectoryPort,
    run_digest: str,
    refused: UserError,
    is_known: Callable[[str], bool],
) -> UserError:
    """The error where nobody was found. If a known peer trains the run in another version, the
    error says that. What strangers say comes last."""
    passed_over = messenger.passed_over.items()
    unlike = {peer: why for peer, why in passed_over if isinstance(why, OtherProtocol)}
    for peer_id, known in unlike.items():
        if is_known(peer_id):
            return known.to_keep()
    try:
        is_there = await directory.fetch_run(run_digest) is not None
    except Unreachable:
        is_there = False
    what = "is known there, but none of its members is" if is_there else "and its members are not"
    return UserError(
        f"{refused.cause}; run {run_digest[:16]} {what} in the directory",
        (
            "ask whoever invited you whether the run is still trained, and for its whole digest",
            "join through the address of a member instead",
            *(f"or {it.fixes[0]}: so {it.cause}" for it in [*unlike.values()][:1]),
        ),
        exit_code=refused.exit_code,
    )
