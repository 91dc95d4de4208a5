"""What FBGEMM's training module publishes and this wing has not, and why."""

_STREAMING = "changed rows are not streamed; `state_dict` and `rsembed.checkpoint` copy tables"
_INPUT_RECORDING = "inputs are not recorded; keep the arrays that you pass"
_BUFFERS = "a description of torch buffers; here every state is an array, see `state_bytes` and `get_optimizer_buffer`"
_INSIDE = "part of the inside of the original"
_MEMBERS = "members are given as themselves, by name or by value"
_SIZES = "sizes of states are told by the tables that have them, see `state_bytes`"
_TORCH_TYPES = "element types are those of JAX; `rsembed.tbe.records.dtype_of` tells them"
_NEW_ARRAYS = "results are new arrays, of the batch that they belong to"
_ZERO_COLLISION = "ids are rows here; `rsembed.Hashed` gives rows to keys"

NAMES = {
    "AsyncSeriesTimer": "steps are measured by `stats_reporter_config`, which needs no timers of streams",
    "CacheState": _BUFFERS,
    "DEFAULT_ASSOC": "the number of rows in a set of a cache is the default `num_ways` of "
    "`rsembed.caching.SetAssociativeCache`",
    "DoesNotHavePrefix": "raised by `get_states`, which is not here",
    "FeatureGate": "no behaviour is switched by a gate",
    "FeatureGateName": "no behaviour is switched by a gate",
    "INT8_EMB_ROW_DIM_OFFSET": "see `PARAMETER_BYTES` of `rsembed.tbe.quantized_rows`, the same number",
    "MAX_PREFETCH_DEPTH": "`prefetch` says so when too many batches wait",
    "PrefetchedInfo": _INSIDE,
    "RESParams": _STREAMING,
    "SplitState": _BUFFERS,
    "TBEInfo": _INPUT_RECORDING,
    "TBEInputInfo": _INPUT_RECORDING,
    "TBEInputMultiplexer": _INPUT_RECORDING,
    "TBEInputMultiplexerConfig": _INPUT_RECORDING,
    "TBEStatsReporter": "`TBEStatsReporterConfig(report=function)` hands all figures of a step to a function",
    "UVMCacheStatsIndex": "`get_uvm_cache_stats` returns `rsembed.caching.CacheCounts`, whose fields have these places",
    "apply_split_helper": _INSIDE,
    "check_allocated_vbe_output": _NEW_ARRAYS,
    "compute_writeback_indices_dispatch": _INSIDE,
    "construct_cache_state": _BUFFERS,
    "construct_split_state": _BUFFERS,
    "generate_vbe_metadata": "`batch_size_per_feature_per_rank` is read by the call itself",
    "get_available_compute_device": "`jax.default_backend()` tells",
    "get_bounds_check_version_for_platform": "there is one bounds check for all platforms",
    "load_torch_module": "nothing is loaded from torch",
    "load_torch_module_bc": "nothing is loaded from torch",
    "writeback_gradient": "`UserEnabledConfigDefinition(use_writeback_bwd_prehook=True)` does it",
}

METHODS = {
    "log": "events go to `logging.getLogger('rsembed')`",
    "get_table_name_for_logging": "`table_names` are in all messages",
    "get_prefetch_passes": "`multipass_prefetch_config` is read by `prefetch` itself",
    "get_states": "five torch buffers per state; take `split_optimizer_states` or `get_optimizer_buffer`",
    "get_all_states": "five torch buffers per state; take `split_optimizer_states` or `state_dict`",
    "writeback_hook": "`UserEnabledConfigDefinition(use_writeback_bwd_prehook=True)` does it",
    "ema_inplace": "training steps do it, when `emainplace_mode` says so",
    "ensemble_and_swap": "training steps do it, when `ensemble_mode` says so",
    "should_log": "`TBEStatsReporterConfig(interval=...)` says when",
    "prepare_inputs": "calls check their input themselves",
    "raw_embedding_stream": _STREAMING,
}

ARGUMENTS = {
    "tbe_input_multiplexer_config": _INPUT_RECORDING,
    "embedding_shard_info": "`mesh` and `placement` say which devices share a table, and how",
    "enable_raw_embedding_streaming": _STREAMING,
    "res_params": _STREAMING,
    "is_qr_tbe": "split an id into quotient and remainder before the lookup, as two features",
    "preallocated_host_buffers": "tables on the host are allocated by the module; `storage_folder` keeps them in files",
}

CALL_ARGUMENTS = {
    "hash_zch_identities": _ZERO_COLLISION,
    "hash_zch_runtime_meta": _ZERO_COLLISION,
    "vbe_output": _NEW_ARRAYS,
    "vbe_output_offsets": _NEW_ARRAYS,
}

LOCAL_CACHE = {"use_local_cache": "counts are those since the last reset, and kept in one place"}

OF_EMBEDDING_LOCATION = dict.fromkeys(("str_values", "from_str", "from_device_and_clf"), _MEMBERS)
OF_COMPUTE_DEVICE = {"get_available": "`jax.default_backend()` tells"}
OF_POOLING_MODE = dict.fromkeys(("do_pooling", "from_str"), _MEMBERS)
OF_SPARSE_TYPE = dict.fromkeys(("from_int", "as_int", "default_config"), _MEMBERS) | dict.fromkeys(
    ("from_dtype", "as_dtype", "bit_rate", "align_size", "is_float"), _TORCH_TYPES
)
OF_OPTIM_TYPE = dict.fromkeys(
    ("state_names", "state_size_table", "state_size_nbytes", "byte_offsets_along_row", "empty_states"), _SIZES
) | {"ssd_state_splits": "there are no tables on SSD but those of `storage_folder`, which keep states beside rows"}
OF_REPORTER_CONFIG = {"create_reporter": "the module makes it"}
