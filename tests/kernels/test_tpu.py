"""Compiles programs for TPUs with the TPU compiler, without a TPU: `make test-tpu`.

The programs are not run.
"""

import json
import os

import pytest

from tests.kernels.cases import run_python
from tests.kernels.compile_one import TOPOLOGIES

KERNELS = ("lookup", "sgd", "adagrad", "row_wise_adagrad", "adam")

pytestmark = pytest.mark.skipif(
    os.environ.get("RSEMBED_TEST_TPU") != "1",
    reason="needs libtpu, as in `make test-tpu`: that the SparseCore kernels compile for TPUs is unproven here",
)

# The TPU compiler reads the chip that it runs on from its environment. Any chip works here.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "RSEMBED_KERNELS": "sparsecore",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
}


@pytest.mark.parametrize("case", [*KERNELS, "tutorial"])
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_compiles_for_sparsecores_without_a_copy_of_the_table(chip, case):
    child = run_python(
        "-m", "tests.kernels.compile_one", chip, case, environment={**os.environ, **ENVIRONMENT}
    )
    assert child.returncode >= 0, (
        f"the compiler crashed with signal {-child.returncode}:\n{child.stderr[-2000:]}"
    )
    assert child.returncode == 0, child.stderr[-4000:]
    actual = json.loads(child.stdout.splitlines()[-1])
    assert actual["sparsecore"] > 0
    # Small donated arrays can add to the aliased bytes, but all tables and slots must be aliased.
    assert actual["aliased_bytes"] >= actual["state_bytes"]
    assert actual["temporary_bytes"] < actual["table_bytes"] / 8
