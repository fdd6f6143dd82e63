"""Entries in what nodes of the directory answer. An answer may hold anything: whatever is no entry
of its kind is left out."""

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.net.directory.facts import Facts, open_facts
from p2p_dtfm.net.directory.flat_values import FlatSerializer
from p2p_dtfm.net.directory.sealed import Seal
from p2p_dtfm.net.directory.values import (
    SHARDS,
    VALUE_LIMIT_BYTES,
    Presence,
    open_presence,
    open_run,
    presence_key,
)
from p2p_dtfm.net.hivemind_parts import DictionaryDHTValue

Opened = TypeVar("Opened")

log = logging.getLogger("p2p_dtfm.net.directory.directory")  # the directory reads them


def presences_in(
    values: Iterable[object], run_digest: str, seal: Seal | None
) -> dict[str, Presence]:
    """Presences in a run, by peer id. In a run by invitation they are sealed."""
    present = {}
    for value in values:
        for entry in entries_of(value):
            if seal is not None:
                presence = _try_unseal(seal, entry, run_digest)
            else:
                presence = _try_open(entry, open_presence, "presence")
            if presence is not None and presence.run_digest == run_digest:
                present[presence.peer_id] = presence
    return present


def facts_in(values: Iterable[object], run_digest: str) -> dict[str, Facts]:
    """Facts of members of a run, by peer id."""
    found: dict[str, Facts] = {}
    for value in values:
        facts = _try_open(value, open_facts, "facts")
        if facts is not None and facts.record.run_digest == run_digest:
            found[facts.record.peer_id] = facts
    return found


def run_in(values: Iterable[object], run_digest: str) -> Signed | None:
    """The run spec of that name, if it is among them."""
    for value in values:
        if isinstance(value, bytes):
            try:
                signed = decode(value, Signed, VALUE_LIMIT_BYTES)
                open_run(signed, run_digest)
            except PeerFault as fault:
                log.warning("run spec in the directory: %s", fault)
                continue
            return signed
    return None


def entries_of(value: object) -> list[object]:
    """The entries of a dictionary, whether decoded or as a node holds it."""
    if isinstance(value, dict):
        return [entry.value for entry in value.values()]
    if not isinstance(value, DictionaryDHTValue):
        return []
    with contextlib.suppress(Exception):  # msgpack may raise anything for a stranger's bytes
        return [FlatSerializer.loads(entry.value) for _, entry in value.items()]
    return []


def _try_open(value: object, opened: Callable[[Signed], Opened], what: str) -> Opened | None:
    if not isinstance(value, bytes):
        return None
    try:
        return opened(decode(value, Signed, VALUE_LIMIT_BYTES))
    except PeerFault as fault:
        log.debug("%s in the directory: %s", what, fault)
        return None


def _try_unseal(seal: Seal, value: object, run_digest: str) -> Presence | None:
    """Open a sealed presence, whichever shard it stands in: the presence itself says which."""
    if not isinstance(value, bytes):
        return None
    for shard in range(SHARDS):
        with contextlib.suppress(PeerFault):
            return open_presence(seal.open(presence_key(run_digest, shard), value))
    return None
