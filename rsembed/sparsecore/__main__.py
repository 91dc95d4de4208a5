"""Runs a program for jax-tpu-embedding: `python -m rsembed.sparsecore [-m] PROGRAM ARGUMENTS`."""

import os
import runpy
import sys

from rsembed.sparsecore import install_as_jax_tpu_embedding

if __name__ == "__main__":
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    if len(arguments) <= is_module:
        sys.exit(__doc__)
    install_as_jax_tpu_embedding()
    sys.argv = arguments[is_module:]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
