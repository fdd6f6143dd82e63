"""Who trains a run: the initial peers are asked first, then those that the directory names.

A bootstrap node trains nothing, but through it the directory can be read, and members of a run say
there that they are present.
"""

import asyncio
import time
from collections.abc import Callable

from p2p_dtfm.core.errors import UserError
from p2p_dtfm.daemon.courier import Courier
from p2p_dtfm.daemon.run_source import ask_welcome
from p2p_dtfm.daemon.search import Search
from p2p_dtfm.daemon.wire import Welcome
from p2p_dtfm.net.directory import Directory
from p2p_dtfm.net.errors import Unreachable

LOOK_FOR_S = 30.0
"""A founder is present in the directory only once it has measured its device."""
LOOK_AGAIN_S = 2.0
DIGEST_CHARACTERS = 64

Found = tuple[str, Welcome]
"""Who answered, and its answer."""


async def find_run(
    courier: Courier,
    directory: Directory,
    search: Search,
    initial_peers: list[str],
    own: tuple[str, ...],
    run_digest: str,
    say: Callable[[str], None],
) -> Found:
    """Find a member of the run (of any run, if `run_digest` is empty). Raises `UserError`."""
    try:
        return await ask_welcome(courier, initial_peers, own, run_digest)
    except UserError as error:
        if len(run_digest) != DIGEST_CHARACTERS:
            raise _with_hint(error) from error
        refused = error
    say(f"looks in the directory for members of run {run_digest[:16]}")
    # who trains another run has told so: then most likely the digest is mistyped
    patience_s = LOOK_FOR_S if refused.exit_code == 6 else 0.0
    end_s = time.monotonic() + patience_s
    while True:
        found = await search.look_in_directory(run_digest)
        if found is not None:
            return found.peer_id, found.welcome
        if time.monotonic() > end_s:
            raise await _nobody(directory, run_digest, refused)
        await asyncio.sleep(LOOK_AGAIN_S)


def _with_hint(error: UserError) -> UserError:
    if error.exit_code != 6:
        return error
    hint = (
        "if the address is of a bootstrap node, name the run with --run-digest and all "
        f"{DIGEST_CHARACTERS} digits: its founder printed them"
    )
    return UserError(error.cause, (*error.fixes, hint), error.exit_code)


async def _nobody(directory: Directory, run_digest: str, refused: UserError) -> UserError:
    try:
        is_known = await directory.fetch_run(run_digest) is not None
    except Unreachable:
        is_known = False
    what = "is known there, but none of its members is" if is_known else "and its members are not"
    return UserError(
        f"{refused.cause}; run {run_digest[:16]} {what} in the directory",
        (
            "ask whoever invited you whether the run is still trained, and for its whole digest",
            "join through the address of a member instead",
        ),
        exit_code=refused.exit_code,
    )
