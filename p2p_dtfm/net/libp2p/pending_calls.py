"""Around hivemind: answers to calls that nobody waits for any more."""

import asyncio
from typing import Any


class PendingCalls(dict[Any, asyncio.Future[Any]]):
    """hivemind's calls that wait for an answer, without those that already gave up waiting.

    hivemind's reader sets the result of any call it finds here. One that was cancelled in the same
    turn of the loop would raise there, and end the reader and with it all later calls.
    """

    def __contains__(self, call_id: object) -> bool:
        future = self.get(call_id)
        return future is not None and not future.done()
