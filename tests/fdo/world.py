"""Statistics of one stack, as preprocessing counts them."""

import numpy as np

from rsembed.fdo import SparseDenseMatmulInputStats


def stats(max_ids, max_unique=(1, 1), required=(8, 8), dropped=0, stack="t"):
    counts = (max_ids, max_unique, required, dropped)
    return SparseDenseMatmulInputStats(*({stack: np.asarray(values)} for values in counts))
