"""Modules that jax-tpu-embedding publishes and this wing has not, and why."""

_CHECKPOINTS = "other items in files than here; `rsembed.checkpoint` keeps logical tables, which any topology restores"

NAMES = {
    "auto_pipelining": "takes a traced step apart by its TPU primitives; give the three parts of yours to "
    "`rsembed.sparsecore.pipelining.step`",
    "constants": "padding is `rsembed.kernels.contract.NO_ROW`, the same number",
    "custom_optimizer_lowering": "a program for TPUs; every rule here is a function of JAX, see `CustomOptimizerSpec`",
    "embedding_spec_pb2": "`EmbeddingSpecRecord` is written as JSON, with the published field names",
    "input_preprocessing": "a slow reference for one table; what its aliases name, arrays and ragged rows, is taken by "
    "`rsembed.sparsecore.embedding.preprocess_sparse_dense_matmul_input`",
    "primitives": "TPU custom calls; `sparse_dense_matmul` and its gradient run on every backend",
}

NAMES_OF_NNX = {"checkpoint_utils": _CHECKPOINTS, "offline_converter": _CHECKPOINTS}
