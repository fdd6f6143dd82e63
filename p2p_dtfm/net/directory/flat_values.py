"""Values of the directory as msgpack, in which a stranger cannot nest what it likes.

hivemind reads a dictionary within a dictionary by calling its reader from within its reader. Each
level takes 40 KB of the C stack. So 3 KB of nested dictionaries end a process before Python can
count them. This program's nodes write bytes, and dictionaries of bytes.
"""

from typing import Any

import msgpack  # type: ignore[import-untyped]

from p2p_dtfm.net.hivemind_parts import DictionaryDHTValue, MSGPackSerializer

ENTRIES_LIMIT = 1024
"""The most entries of a dictionary. A shard holds at most 900 (`validator`)."""
_DICTIONARY = 0x50
"""hivemind's number for a dictionary."""


class FlatSerializer(MSGPackSerializer):  # type: ignore[misc]
    """Writes as hivemind's own serializer does. Reads its dictionaries, and nothing within them but
    bytes."""

    @classmethod
    def loads(cls, buf: bytes) -> object:
        """Read a value. Raises `ValueError` for any kind that is not allowed."""
        value: object = msgpack.unpackb(buf, ext_hook=_dictionary, raw=False)
        return value


def _dictionary(code: int, body: bytes) -> DictionaryDHTValue:
    if code != _DICTIONARY:
        raise ValueError(f"a value of the unknown kind {code}")
    content: Any = msgpack.unpackb(body, ext_hook=_refuse, raw=False)
    if not isinstance(content, list) or len(content) != 3 or not isinstance(content[2], list):
        raise ValueError("a dictionary that is none")
    if len(content[2]) > ENTRIES_LIMIT:
        raise ValueError(f"a dictionary of {len(content[2])} entries")
    found = DictionaryDHTValue()
    with found.freeze():  # keep expired entries: they were written, too
        for entry in content[2]:
            if not _is_entry(entry):
                raise ValueError("a dictionary with something else than bytes")
            found.store(*entry)
    return found


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 3:
        return False
    subkey, value, expires_s = entry
    return isinstance(subkey, bytes) and isinstance(value, bytes) and isinstance(expires_s, float)


def _refuse(code: int, body: bytes) -> object:
    raise ValueError("a dictionary within a dictionary")
