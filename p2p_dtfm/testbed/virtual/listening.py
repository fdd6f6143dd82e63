"""Hears what daemons in virtual time log. Meanwhile their log goes nowhere else."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def listening(handler: logging.Handler, level: int) -> Iterator[None]:
    """Sends the daemons' log from `level` on to `handler`, and restores the logger afterwards."""
    log = logging.getLogger("p2p_dtfm")
    before = log.level, log.propagate
    log.setLevel(level)
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]
