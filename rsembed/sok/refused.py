"""What SOK and DeepRec publish and this wing has not, and why."""

_VARIABLES = "`embedding_variable` makes tables that all devices share, with `use_hashtable=False` for row numbers"
_LOCALIZED = (
    "A table that lies on one device whole is a placement of the core: `EmbeddingCollection(..., placement='table')`"
)
_TIERS = "rows stay on the devices: `variable.evict()` hands them out, and `assign_rows` brings them back"

NAMES = {
    "init": "use `Init()`",
    "set_comm_tool": "processes are connected by JAX",
    "Variable": f"{_VARIABLES}; `assign_rows` writes rows of your own. {_LOCALIZED}",
    "DistributedVariable": _VARIABLES,
    "LocalizedVariable": _LOCALIZED,
    "DynamicVariable": "use `embedding_variable(name, dimension, rows_per_device=...)`, which also grows or evicts as "
    "`when_full` says",
    "OptimizerWrapper": "every optimizer of `rsembed` steps rows by keys; give it as `optimizer=`",
    "SGD": "use `rsembed.SGDOptimizerSpec`, given as `optimizer=`",
    "lookup_sparse": "use `group_embedding_lookup_sparse`, with combiners; for training `group_embedding_lookup_vjp`",
    "sparse_read_and_evict": "use `variable.evict()`, which hands rows out, and `assign_rows`, which brings them back",
    "all2all_dense_embedding": "use `All2AllDenseEmbedding(..., dynamic_input=True)`",
    "group_lookup": "use `group_embedding_lookup_sparse` with one key a sample",
    "assign": "use `assign_rows(variable, {'keys': keys, 'values': values})`",
    "export": "use `export_rows(variable)`, of all devices at once",
    "incremental_model_dump": "a dump is whole: use `dump(path, variables)`",
    "filter_variables": "use `split_embedding_variable_from_others`",
    "enable_distributed_strategy": "use `Init()`",
    "get_embedding_variable": "use `embedding_variable`",
    "CBFFilter": "counts are exact here: `CounterFilter`, `admission_capacity=` says of how many keys",
    "StorageOption": _TIERS,
    "StorageType": _TIERS,
    "InitializerOption": "the first row of a key follows from the seed, the table's name and the key: `initializer=`",
    "CheckpointOption": "use `rsembed.checkpoint.CheckpointManager`; its checkpoints are whole",
}

ARGUMENTS = {
    "reproducible": "gradients of keys are summed on each device first; for bits that no number of devices changes, "
    "give the core rows by number, and `EmbeddingCollection(..., reproducible='world_size')`",
    "mode": f"all devices share a table. {_LOCALIZED}",
}

OPTION = {
    "ht_type": "there is one kind of hash table",
    "ht_partition_num": "tables are split by device alone",
    "ckpt": NAMES["CheckpointOption"],
    "storage_option": _TIERS,
    "init_option": NAMES["InitializerOption"],
}
