"""The API of NVIDIA's Sparse Operation Kit: model-parallel tables that get rows for new keys."""

from rsembed.keys import Keys as Keys
from rsembed.keys import split_keys as split_keys
from rsembed.sok import optimizers as optimizers
from rsembed.sok.dump import assign_rows as assign_rows
from rsembed.sok.dump import dump as dump
from rsembed.sok.dump import export_rows as export_rows
from rsembed.sok.dump import load as load
from rsembed.sok.groups import EmbeddingColumn as EmbeddingColumn
from rsembed.sok.groups import embedding_column as embedding_column
from rsembed.sok.groups import group_embedding_column_scope as group_embedding_column_scope
from rsembed.sok.groups import group_embedding_lookup_sparse as group_embedding_lookup_sparse
from rsembed.sok.groups import group_embedding_lookup_vjp as group_embedding_lookup_vjp
from rsembed.sok.groups import input_layer as input_layer
from rsembed.sok.groups import input_layer_vjp as input_layer_vjp
from rsembed.sok.layers import All2AllDenseEmbedding as All2AllDenseEmbedding
from rsembed.sok.layers import DistributedEmbedding as DistributedEmbedding
from rsembed.sok.lookups import StepOnce as StepOnce
from rsembed.sok.variables import Context as Context
from rsembed.sok.variables import CounterFilter as CounterFilter
from rsembed.sok.variables import EmbeddingVariable as EmbeddingVariable
from rsembed.sok.variables import EmbeddingVariableOption as EmbeddingVariableOption
from rsembed.sok.variables import GlobalStepEvict as GlobalStepEvict
from rsembed.sok.variables import Init as Init
from rsembed.sok.variables import L2WeightEvict as L2WeightEvict
from rsembed.sok.variables import embedding_variable as embedding_variable
from rsembed.sok.variables import (
    split_embedding_variable_from_others as split_embedding_variable_from_others,
)
