"""The lines of a transcript: the run, each view that took over, each step that was committed.

A line is the base64 of an entry's canonical MessagePack. So a file that was cut off in the middle
of a line loses that line alone. Statements stand there as their makers signed them. Nothing that
the writer alone says is believed.
"""

import base64
import binascii

import msgspec

from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Snapshot

FORMAT = 2
AUDITED_FORMAT = 3
"""The format of runs with audits. Before it, claims had no losses told to the stage before the
head, and no norms. Judged by what is due now, their signers would have signed what cannot be true.
"""
ENTRY_LIMIT_BYTES = 64 << 20


def format_of(spec: RunSpec) -> int:
    return AUDITED_FORMAT if spec.audit.rate else FORMAT


class Began(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="began"):
    """The first line. `run_spec`: canonical bytes, whose digest names the run."""

    format: int
    run_spec: bytes


class TookOver(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="view"):
    """From `step` on the view is in force. Earlier commits of that step and later ones are given
    up."""

    snapshot: Snapshot
    plan: Plan | NoPlan
    certificate: Certificate
    step: int


class Committed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="step"):
    """The Prepared of all stage-holders of the view in force, by which a step committed."""

    signed: tuple[Signed, ...]


Entry = Began | TookOver | Committed


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    entry: Entry


def line_of(entry: Entry) -> str:
    """The entry's line, without the end of the line."""
    return base64.b64encode(encode(_Line(entry))).decode("ascii")


def entry_of(line: bytes) -> Entry:
    """The entry of a line. Raises `PeerFault` for a line that has none."""
    try:
        payload = base64.b64decode(line.strip(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PeerFault(f"a line that is no entry: {error}") from error
    return decode(payload, _Line, ENTRY_LIMIT_BYTES).entry
