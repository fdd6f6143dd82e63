"""What a peer has given, also what a killed process had not written down: its transcript has it."""

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.proof.transcript_file import Transcript, TranscriptLines
from p2p_dtfm.daemon.telemetry.contribution import FILE, Contributions


def contributions_beside(
    transcript: Transcript, spec: RunSpec, layer_count: int, me: str
) -> Contributions:
    """The contributions in the home that has this transcript. Tallies are written once a minute,
    the transcript with each step."""
    path = transcript.path
    found = Contributions(path.parent / FILE, spec, layer_count, me, lambda: transcript.size_bytes)
    counted = found.counted_bytes
    if counted is not None and path.exists() and counted < transcript.size_bytes:
        found.catch_up(TranscriptLines(path, counted).entries(), path.stat().st_mtime)
    elif counted is not None and counted > transcript.size_bytes:
        found.write()  # a power cut took the end: what is added now stands before the old one
    return found
