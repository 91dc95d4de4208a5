"""Saves and loads checkpoints of any pytree.

Every file of a checkpoint has a checksum. Embedding tables are stored by name, with rows in id
order.
"""

from rsembed.checkpoint.files import (
    load as load,
    load_collection as load_collection,
    manifest as manifest,
    save as save,
    save_collection as save_collection,
    verify as verify,
)
from rsembed.checkpoint.manager import CheckpointManager as CheckpointManager
from rsembed.checkpoint.states import CorruptCheckpointError as CorruptCheckpointError
