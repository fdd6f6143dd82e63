"""The processes of one kind in a benchmark. Each prints a JSON object a line, and is told lines."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

END_S = 20.0


class PeerProcesses:
    """So many processes of `benchmarks.MODULE NUMBER FOLDER`, with one thread each.

    They end when their standard input does, which is at the end of the context at the latest.
    """

    def __init__(
        self, module: str, count: int, folder: Path, arguments: tuple[str, ...] = ()
    ) -> None:
        program = (sys.executable, "-m", f"benchmarks.{module}")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                [*program, str(number), str(folder), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for number in range(count)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def tell(self, line: str, number: int | None = None) -> None:
        """Write a line to one process, or to all."""
        for process in self._processes if number is None else [self._processes[number]]:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def hear(self, number: int) -> dict[str, Any]:
        """Wait for the next object of one process. Raises `SystemExit` if it has ended."""
        stdout = self._processes[number].stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith("{"):
                heard: dict[str, Any] = json.loads(line)
                return heard
        raise SystemExit("a peer ended early; see above")

    def hear_all(self) -> list[dict[str, Any]]:
        return [self.hear(number) for number in range(len(self._processes))]

    def introduce(self) -> None:
        """Hear an address of each process, and tell all of them all addresses."""
        self.tell(json.dumps([heard["address"] for heard in self.hear_all()]))

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
