"""Logs go to stderr: for people on a terminal, JSON lines otherwise."""

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

from p2p_dtfm.cli.terminal.plain import harmless_lines


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time_s": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _Human(logging.Formatter):
    """`named` puts names in place of peers' ids."""

    def __init__(self, named: Callable[[str], str]) -> None:
        super().__init__()
        self._named = named

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        mark = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        text = f"{clock} {mark}{self._named(record.getMessage())}"
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return harmless_lines(text)


def set_up_logging(form: str, named: Callable[[str], str] = str) -> "logging.StreamHandler[TextIO]":
    """Send logs to stderr: on a terminal for people, with names in place of peers' ids; JSON lines
    otherwise. Returns the handler that writes them."""
    human = form == "human" or (form == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Human(named) if human else _JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("p2p_dtfm").setLevel(logging.INFO)
    return handler
