"""Programs for TPUs that are not here, compiled by their compiler: `make test-tpu`. Nothing is run."""

import json
import os

import pytest

from tests.kernels.cases import run_python
from tests.kernels.compile_one import TOPOLOGIES

KERNELS = ("lookup", "sgd", "adagrad", "row_wise_adagrad", "adam")

pytestmark = pytest.mark.skipif(
    os.environ.get("RSEMBED_TEST_TPU") != "1",
    reason="unproven here: that the SparseCore kernels compile for TPUs; make test-tpu installs libtpu and tries",
)

# The compiler asks its environment for the chip it runs on; there is none, and any answer will do.
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
    # Small arrays that are donated too may come on top; a table or slot may not be missing.
    assert actual["aliased_bytes"] >= actual["state_bytes"]
    assert actual["temporary_bytes"] < actual["table_bytes"] / 8
