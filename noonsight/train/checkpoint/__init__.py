"""Checkpoints: one folder per kept state, complete or absent, never half.

    checkpoints/step_00000120/            arrays of all ranks, in the safetensors format
        part_00000_of_00002_f7.safetensors    what rank 0 held, written under fence token 7
        part_00001_of_00002_f7.safetensors
        manifest.json                         written last: who finds it finds a whole checkpoint

The manifest says where every slice of every array lies and what its checksum is, so any device of any mesh reads just
the slices it needs. Restore trusts nothing: names are parsed strictly, checksums are verified, and where checkpoints
exist but none verifies it raises, because starting again from random weights is the one answer that must never be given
(Marin, issue #8684). The state carries no loader position; the step number is enough. Format and manifest: contract 8.
"""

from noonsight.train.checkpoint.reading import Found, NoValidCheckpoint, arrays, newest, restore, verify
from noonsight.train.checkpoint.saving import NonFiniteState, Saver, to_host, write
from noonsight.train.checkpoint.storage import (
    MANIFEST,
    StorageRefused,
    folder,
    folders,
    read_manifest,
    relabel,
    remove,
    require_space,
    root_of,
    writable,
)

__all__ = [
    "MANIFEST",
    "Found",
    "NoValidCheckpoint",
    "NonFiniteState",
    "Saver",
    "StorageRefused",
    "arrays",
    "folder",
    "folders",
    "newest",
    "read_manifest",
    "relabel",
    "remove",
    "require_space",
    "restore",
    "root_of",
    "to_host",
    "verify",
    "writable",
    "write",
]
