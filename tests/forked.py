"""The program, forked from a process that has loaded what it runs. Each fork saves two seconds of
processor time, which is most of the cost of many tests."""

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from p2p_dtfm.testbed.nursery import NURSERY, ForkedProcess


def start_program(
    arguments: Sequence[str | Path],
    output: IO[bytes],
    errors: IO[bytes],
    environment: Mapping[str, str] | None = None,
) -> ForkedProcess:
    """Start `python -m p2p_dtfm arguments...`, to which nobody types anything."""
    given = list(map(str, arguments))
    process = NURSERY.start("p2p_dtfm", given, output, errors, environment=environment)
    assert process.stdin is not None
    process.stdin.close()
    return process


def run_to_its_end(
    arguments: Sequence[str | Path],
    deadline_s: float,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the same to its end. Raises `subprocess.TimeoutExpired` once the program has been killed
    for that."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start_program(arguments, output, errors, environment)
        try:
            code = process.wait(deadline_s)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
        told = []
        for file in (output, errors):
            file.seek(0)
            told.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(list(map(str, arguments)), code, *told)
