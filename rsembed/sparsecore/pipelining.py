"""Pipelined training under a shorter name than the published `rsembed.sparsecore.embedding_pipelining_utils`."""

from rsembed.sparsecore.embedding_pipelining_utils import *  # noqa: F403  (all of its names)
