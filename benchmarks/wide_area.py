"""A wide-area network between network namespaces of this machine, by `wanem`."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path


class Missing(Exception):
    """What the real network needs is not here."""


@contextlib.contextmanager
def wide_area(
    source: Path | None, folder: Path, matrix: str, count: int, mtu: int
) -> Iterator[None]:
    """Namespaces wan0 .. with the links of `matrix` between them. Raises `Missing`."""
    if source is None or not source.is_file():
        raise Missing("no wanem.c: give --wanem PATH or set P2P_DTFM_WANEM")
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        raise Missing("network namespaces need root and /dev/net/tun")
    for tool in ("gcc", "ip"):
        if shutil.which(tool) is None:
            raise Missing(f"{tool} is not installed")
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    if any(line.startswith("wan") for line in names.stdout.splitlines()):
        raise Missing("namespaces called wan... exist: another wanem runs here")
    program, links = folder / "wanem", folder / "matrix"
    subprocess.run(["gcc", "-O2", "-w", "-o", str(program), str(source)], check=True)
    links.write_text(matrix)
    process = subprocess.Popen(
        [str(program), str(links), str(mtu)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != f"ready {count}":
            raise Missing("wanem could not make its network: " + process.communicate()[1][-300:])
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
