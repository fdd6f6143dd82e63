"""scikit-learn's handwritten digits as sequences: a token for each place, then the digit.

The 1797 pictures (Alpaydin and Kaynak 1998, the test set of "Optical Recognition of Handwritten
Digits") come with scikit-learn, so nothing is downloaded. Hashes of the pictures decide which of
them are held out, so equal pictures are on one side.
"""

import hashlib
from pathlib import Path

import numpy as np

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.ports.packages import how_to_install
from p2p_dtfm.train.data.manifest import (
    FORMAT_VERSION,
    Manifest,
    Notes,
    TokenizerEntry,
    Totals,
    token_type_for,
)
from p2p_dtfm.train.data.prepare import (
    alone_with,
    finish,
    remove_unused,
    require_ours,
)
from p2p_dtfm.train.data.shard_files import ShardWriter
from p2p_dtfm.train.data.tokenizer import ByteTokenizer

DIGITS = "digits"
PLACES = 64
"""Values of a picture, row by row; each from 0 (paper) to 16."""
_HELD_OUT_ONE_IN = 5
_PICTURES_IN_A_SHARD = 512


def prepare_digits(out: Path) -> Manifest:
    """Make the directory `out`. Raises `UserError`, also where scikit-learn is not installed."""
    pictures = _pictures()
    replaces = require_ours(out)
    tokenizer = ByteTokenizer()
    file = tokenizer.to_bytes()
    token_type = token_type_for(tokenizer.vocabulary)
    shard_tokens = _PICTURES_IN_A_SHARD * (PLACES + 1)
    with alone_with(out, replaces) as store:
        store.remove_temporary_files()
        train = ShardWriter(store, "train", token_type, shard_tokens)
        held_out = ShardWriter(store, "held_out", token_type, shard_tokens)
        try:
            for picture in pictures:
                (held_out if _is_held_out(picture) else train).append(picture)
            train.close()
            held_out.close()
        finally:
            train.abandon()
            held_out.abandon()
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            token_type=token_type,
            tokenizer=TokenizerEntry(store.put_bytes(file), len(file), tokenizer.vocabulary),
            shards=(*train.entries, *held_out.entries),
            totals=Totals(train.tokens, held_out.tokens, len(pictures), pictures.size),
            notes=Notes(DIGITS, "CC-BY-4.0", "sklearn.datasets.load_digits"),
        )
        finish(out, store, manifest, tokenizer, shard_tokens)
        if replaces:
            remove_unused(store, manifest)
    return manifest


def _pictures() -> np.ndarray:
    """The pictures as bytes, [pictures, places + 1]; the last value is the digit."""
    try:
        from sklearn.datasets import load_digits  # large, and only for this
    except ImportError as error:
        raise UserError(
            'data.source = "digits" are pictures that come with scikit-learn, which is not '
            "installed here",
            f"install it where the run is founded: {how_to_install('scikit-learn')}",
        ) from error
    found = load_digits()
    return np.column_stack([found.data, found.target]).astype(np.uint8)


def _is_held_out(picture: np.ndarray) -> bool:
    digest = hashlib.blake2b(picture[:PLACES].tobytes(), digest_size=8, salt=b"held out digits")
    return int.from_bytes(digest.digest(), "little") % _HELD_OUT_ONE_IN == 0
