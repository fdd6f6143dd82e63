"""Text to samples: tokenizers, preparing, shards by content hash, and the dataset."""

from p2p_dtfm.train.data.blob_store import (
    BLOB_LIMIT_BYTES,
    BLOBS_NAME,
    BlobStore,
    blobs_in,
    file_digest,
    is_digest,
)
from p2p_dtfm.train.data.corpus import (
    STANDARD_LIBRARY,
    prepare_standard_library,
    standard_library_paths,
)
from p2p_dtfm.train.data.dataset import Dataset, ShardMissing
from p2p_dtfm.train.data.digits import DIGITS, prepare_digits
from p2p_dtfm.train.data.first_reading import Progress
from p2p_dtfm.train.data.manifest import Manifest, ShardEntry, load_manifest, parse_manifest
from p2p_dtfm.train.data.prepare import PreparedData, open_prepared, prepare
from p2p_dtfm.train.data.quality.choosing import Wish
from p2p_dtfm.train.data.saved_data_sets import stated_licence
from p2p_dtfm.train.data.shard_files import ShardDamaged, ShardUnreadable
from p2p_dtfm.train.data.text_files import Skipped
from p2p_dtfm.train.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    as_stated,
    load_tokenizer,
    require_tokenizer_of,
    tokenizer_from_bytes,
)

__all__ = [
    "BLOBS_NAME",
    "BLOB_LIMIT_BYTES",
    "DIGITS",
    "STANDARD_LIBRARY",
    "BlobStore",
    "ByteTokenizer",
    "Dataset",
    "Manifest",
    "PreparedData",
    "Progress",
    "ShardDamaged",
    "ShardEntry",
    "ShardMissing",
    "ShardUnreadable",
    "Skipped",
    "Tokenizer",
    "Wish",
    "as_stated",
    "blobs_in",
    "file_digest",
    "is_digest",
    "load_manifest",
    "load_tokenizer",
    "open_prepared",
    "parse_manifest",
    "prepare",
    "prepare_digits",
    "prepare_standard_library",
    "require_tokenizer_of",
    "standard_library_paths",
    "stated_licence",
    "tokenizer_from_bytes",
]
