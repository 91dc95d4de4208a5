"""Reports on ids, and feedback-directed optimisation: limits from the statistics of earlier batches."""

from rsembed.fdo import client
from rsembed.fdo.client import CSVFileFDOClient as CSVFileFDOClient
from rsembed.fdo.client import FDOClient as FDOClient
from rsembed.fdo.client import MemoryFDOClient as MemoryFDOClient
from rsembed.fdo.client import NPZFileFDOClient as NPZFileFDOClient
from rsembed.fdo.report import IdFigures as IdFigures
from rsembed.fdo.report import IdReport as IdReport
from rsembed.fdo.report import describe as describe
from rsembed.fdo.statistics import LimitsPolicy as LimitsPolicy
from rsembed.fdo.statistics import SparseDenseMatmulInputStats as SparseDenseMatmulInputStats
from rsembed.fdo.statistics import limits_from_statistics as limits_from_statistics

# jax-tpu-embedding has each client in a module of this name.
file_fdo_client = client
csv_file_fdo_client = client
