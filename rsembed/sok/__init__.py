"""The API of NVIDIA's Sparse Operation Kit: model-parallel tables that get rows for new keys."""

from rsembed.keys import Keys as Keys, split_keys as split_keys
from rsembed.sok import optimizers as optimizers
from rsembed.sok.dump import (
    assign_rows as assign_rows,
    dump as dump,
    export_rows as export_rows,
    load as load,
)
from rsembed.sok.groups import (
    EmbeddingColumn as EmbeddingColumn,
    embedding_column as embedding_column,
    group_embedding_column_scope as group_embedding_column_scope,
    group_embedding_lookup_sparse as group_embedding_lookup_sparse,
    group_embedding_lookup_vjp as group_embedding_lookup_vjp,
    input_layer as input_layer,
    input_layer_vjp as input_layer_vjp,
)
from rsembed.sok.layers import (
    All2AllDenseEmbedding as All2AllDenseEmbedding,
    DistributedEmbedding as DistributedEmbedding,
)
from rsembed.sok.lookups import StepOnce as StepOnce
from rsembed.sok.variables import (
    Context as Context,
    CounterFilter as CounterFilter,
    EmbeddingVariable as EmbeddingVariable,
    EmbeddingVariableOption as EmbeddingVariableOption,
    GlobalStepEvict as GlobalStepEvict,
    Init as Init,
    L2WeightEvict as L2WeightEvict,
    embedding_variable as embedding_variable,
    split_embedding_variable_from_others as split_embedding_variable_from_others,
)
