"""The daemon in the foreground."""

import asyncio
import logging

from p2p_dtfm.cli.logs import set_up_logging
from p2p_dtfm.core.errors import UserError
from p2p_dtfm.daemon.resident import Resident
from p2p_dtfm.daemon.settings import Settings


def run_daemon(settings: Settings) -> int:
    """Run until the end; the exit code. What nobody foresaw is logged whole, with exit code 1."""
    set_up_logging(settings.log)
    try:
        return asyncio.run(Resident(settings).run())
    except UserError:
        raise
    except KeyboardInterrupt:
        return 130
    except Exception:  # the daemon's last resort: say what happened, and end with code 1
        logging.getLogger("p2p_dtfm").exception("this is a bug; please report it with this text")
        return 1
