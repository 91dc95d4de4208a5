"""Preprocessed batches, for tests of pictures of buffers."""

from rsembed.sparsecore import embedding, embedding_spec


def preprocessed(ids, num_cores, limit):
    """The preprocessed batch for a table of 100 rows, and the statistics of the batch."""
    table = embedding_spec.TableSpec(
        "t", 100, 4, max_ids_per_partition=limit, max_unique_ids_per_partition=512
    )
    spec = embedding_spec.FeatureSpec("f", table, input_shape=(len(ids), 1))
    embedding.prepare_feature_specs_for_training(spec, 1, num_cores)
    return embedding.preprocess_sparse_dense_matmul_input(
        ids, None, spec, 1, 1, num_sc_per_device=num_cores, allow_id_dropping=True
    )
