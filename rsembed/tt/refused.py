"""What FBTT-Embedding publishes and this wing has not, and why."""

_COUNTS = "counts and places of cached rows are told by `cache_reports`, and saved by `state_dict`"

NAMES = {
    "BufferList": "a list of torch buffers; `state_dict` has all arrays by name",
    "TTLookupFunction": "gradients are those of JAX, or of `vjp` of the module",
    "tt_matrix_to_full": "use `full_weight(spec, cores)`, with a `TTSpec` of the factors and ranks",
}

ATTRIBUTES = {
    "L": "use `strides` of each of `specs`",
    "hashtbl": _COUNTS,
    "cache_freq": _COUNTS,
    "cache_state": _COUNTS,
    "cache_optimizer_state": "the state of cached rows lies with them, in `caches`, and is saved by `state_dict`",
    "warmup": "`cache_reports` tells how many rows are cached; before the first `cache_populate` there are none",
}
