"""Reports on ids, and feedback-directed optimisation of limits and buffer sizes."""

from rsembed.fdo import client
from rsembed.fdo.client import (
    CSVFileFDOClient as CSVFileFDOClient,
    FDOClient as FDOClient,
    MemoryFDOClient as MemoryFDOClient,
    NPZFileFDOClient as NPZFileFDOClient,
)
from rsembed.fdo.report import IdFigures as IdFigures, IdReport as IdReport, describe as describe
from rsembed.fdo.statistics import (
    LimitsPolicy as LimitsPolicy,
    SparseDenseMatmulInputStats as SparseDenseMatmulInputStats,
    limits_from_statistics as limits_from_statistics,
)

# Programs for jax-tpu-embedding import the clients from modules `file_fdo_client` and
# `csv_file_fdo_client`.
file_fdo_client = client
csv_file_fdo_client = client
