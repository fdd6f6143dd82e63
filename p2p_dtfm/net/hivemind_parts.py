"""The one place that imports hivemind, and only the two parts of it that are used.

`import hivemind` would also load its averaging, mixture of experts and optimizer. Its packages
`utils` and `dht` load torch for processes of their own: 264 MB that a bootstrap node has no use
for. So these packages are entered without running their `__init__`, and given the few names that
their modules take from them, unless they are imported already.
"""

import importlib
import importlib.util
import logging
import os
import sys

_NAMES_OF_UTILS = {
    "logging": ("get_logger",),
    "serializer": ("MSGPackSerializer", "SerializerBase"),
    "timed_storage": ("get_dht_time",),
}


def _enter_package_only(name: str, names: dict[str, tuple[str, ...]] | None = None) -> None:
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, package)
    for module, taken in (names or {}).items():
        source = importlib.import_module(f"{name}.{module}")
        for item in taken:
            setattr(package, item, getattr(source, item))


# By default p2pd and hivemind say more at INFO than a person wants to read. The variable still
# decides.
os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
_enter_package_only("hivemind")
_enter_package_only("hivemind.utils", _NAMES_OF_UTILS)
_enter_package_only("hivemind.dht")

from hivemind.dht import node as dht_node  # noqa: E402
from hivemind.dht.node import DHTNode  # noqa: E402
from hivemind.dht.protocol import DHTProtocol  # noqa: E402
from hivemind.dht.protocol import ValidationError as DHTRefusal  # noqa: E402
from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue  # noqa: E402
from hivemind.dht.validation import DHTRecord, RecordValidatorBase  # noqa: E402
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings import utils as p2pd_wire  # noqa: E402
from hivemind.proto import dht_pb2, p2pd_pb2  # noqa: E402
from hivemind.utils import MSGPackSerializer, get_dht_time  # noqa: E402
from hivemind.utils.logging import use_hivemind_log_handler  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr  # noqa: E402

__all__ = [
    "DHTID",
    "P2P",
    "DHTLocalStorage",
    "DHTNode",
    "DHTProtocol",
    "DHTRecord",
    "DHTRefusal",
    "DictionaryDHTValue",
    "MSGPackSerializer",
    "Multiaddr",
    "P2PDaemonError",
    "P2PHandlerError",
    "PeerID",
    "RecordValidatorBase",
    "dht_node",
    "dht_pb2",
    "get_dht_time",
    "p2pd_pb2",
    "p2pd_wire",
]

# Stderr is ours: hivemind's lines go through the root logger like everybody else's.
use_hivemind_log_handler("nowhere")
logging.addLevelName(logging.WARNING, "WARNING")
logging.getLogger("hivemind").setLevel(os.environ["HIVEMIND_LOGLEVEL"].upper())
