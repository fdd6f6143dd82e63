"""Who listens to what daemons in virtual time log: nobody else hears of it meanwhile."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def listening(handler: logging.Handler, level: int) -> Iterator[None]:
    """The daemons' log goes to `handler`, from `level` on, and is as before afterwards."""
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
