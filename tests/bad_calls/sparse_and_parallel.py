"""Bad calls of the SparseCore functions, and of meshes and processes."""

import jax.numpy as jnp
import numpy as np

from rsembed import parallel
from rsembed.sparsecore import embedding as E
from rsembed.sparsecore import embedding_spec as lr
from rsembed.sparsecore import table_stacking as ts
from tests.bad_calls.sparsecore import (
    IDS,
    EmbeddingSpecRecord,
    auto,
    look_up,
    made,
    run,
    sparse,
    specs,
    trained,
    update,
    variables,
)
from tests.bad_calls.world import mesh

BAD = {
    "auto None": (lambda: ts.auto_stack_tables(None, 1, 1), ValueError, "features: there is no FeatureSpec in it."),
    "auto mem 0": (
        lambda: auto(activation_mem_bytes_limit=0),
        ValueError, "activation_mem_bytes_limit must be in [1, inf), got 0.",
    ),
    "auto mem text": (
        lambda: auto(activation_mem_bytes_limit="1"),
        TypeError, "activation_mem_bytes_limit must be an integer or None, got", "got '1' (str)",
    ),
    "prepare devices None": (
        lambda: E.prepare_feature_specs_for_training([made()], None, 1),
        TypeError, "global_device_count must be an integer, got None (NoneType).",
    ),
    "run weights inf": (
        lambda: run(IDS, np.full((8,2), np.inf)), ValueError, "feature 'f_word': weight inf in sample 0 is not finite.",
    ),
    "run devices text": (lambda: run(devices="1"), TypeError, "global_device_count must be an integer, got '1' (str)."),
    "run cores 0": (lambda: run(num_sc_per_device=0), ValueError, "num_sc_per_device must be in [1, inf), got 0."),
    "run drop text": (
        lambda: run(allow_id_dropping="yes"), TypeError, "allow_id_dropping must be True or False, got 'yes' (str).",
    ),
    "run ids text": (lambda: run("ids"), TypeError, "feature 'f_word': rows, one list of ids for each bag, must be"),
    "sparse float ids": (
        lambda: sparse([[0, 0]], [1.5]), TypeError, "feature 'f_word': ids must be integers, got float64;",
    ),
    "sparse None": (
        lambda: E.preprocess_sparse_dense_matmul_input_from_sparse_tensor(None, None, None, specs(), 1, 1),
        ValueError, "indices must have the tree structure of feature_specs, with", "got NoneType",
    ),
    "look None": (
        lambda: E.sparse_dense_matmul(None, variables(), specs(), global_device_count=1),
        TypeError, "preprocessed_inputs must be of type PreprocessedInput, got", "got None (NoneType)",
    ),
    "look var None": (
        lambda: look_up(tables={"word": None}),
        TypeError, "embedding_variables['word'] must be a list, got None", "got None (NoneType)",
    ),
    "look strategy": (
        lambda: look_up(sharding_strategy="DIV"), ValueError, "unknown sharding strategy 'DIV'; the only one is 'MOD'.",
    ),
    "grad scalar": (
        lambda: update([1.0]),
        TypeError, "feature 'f_word': activation gradients must be an array of", "got 1.0 (float)",
    ),
    "grad limits unknown": (
        lambda: update(embedding_var_limits={"wrod": (0., 1.)}),
        ValueError, "embedding_var_limits must name every stack: got ['wrod'],",
    ),
    "stack grads shape": (
        lambda: E.stack_embedding_gradients([jnp.ones((7,8))], specs()),
        ValueError, "feature 'f_word': activation gradients have shape (7, 8),",
    ),
    "feature_tables missing": (
        lambda: ts.stack_and_shard_feature_tables({}, E.create_proto_from_feature_specs(specs(), 1, 2)),
        ValueError, "feature_tables have no 'word', only [].",
    ),
    "proto devices": (
        lambda: E.create_proto_from_feature_specs(specs(), 0, 2),
        ValueError, "global_device_count must be in [1, inf), got 0.",
    ),
    "record json number": (
        lambda: EmbeddingSpecRecord.from_json("3"),
        ValueError, "the text is no EmbeddingSpecRecord in JSON: 'int' object",
    ),
    "nnx layer call None": (
        lambda: trained()(None),
        TypeError, "the input of a layer, which its prepare_batch makes, must", "got None (NoneType)",
    ),
    "row ids unknown": (
        lambda: lr.get_row_ids_in_stacked_tables(E.create_proto_from_feature_specs(specs(), 1, 2), {"wrod": [1]}),
        ValueError, "no tables ['wrod'] in the record; it has ['word'].",
    ),
    "put ragged": (
        lambda: parallel.put_global({"a": [[1], [1, 2]]}, mesh(2, "shard")),
        ValueError, "put_global: array ['a'][0][0] of shape () does not split",
    ),
    "put masked": (
        lambda: parallel.put_global(np.ma.masked_equal([1, 2], 1), mesh(2, "shard")),
        TypeError, "put_global: array given must be a plain array of the host,",
    ),
}  # fmt: skip
