"""Checkpoints of any pytree. Files are checksummed, and tables are stored by name in id order."""

from rsembed.checkpoint.files import load as load
from rsembed.checkpoint.files import load_collection as load_collection
from rsembed.checkpoint.files import manifest as manifest
from rsembed.checkpoint.files import save as save
from rsembed.checkpoint.files import save_collection as save_collection
from rsembed.checkpoint.files import verify as verify
from rsembed.checkpoint.manager import CheckpointManager as CheckpointManager
from rsembed.checkpoint.states import CorruptCheckpointError as CorruptCheckpointError
