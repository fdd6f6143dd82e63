"""The key of direct lines never lies on a disk, which may be full, or keep what a kill left."""

import os
import socket
import tempfile
from pathlib import Path

import pytest

from p2p_dtfm.net.contacts.identity import identity_of_seed
from p2p_dtfm.net.direct.trust import Trust


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there are no files in memory")
def test_a_full_folder_for_temporary_files_keeps_no_direct_line_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each start of a member all certificates are loaded anew. Where that folder was full no
    line came about any more, and who was killed meanwhile left its key there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    trust = Trust(identity_of_seed(bytes(32)), "00" * 32)
    near, far = socket.socketpair()
    with near, far, trust.wrap(near, is_server=True) as secured:
        assert secured.context.cert_store_stats() == {"x509": 0, "crl": 0, "x509_ca": 0}
