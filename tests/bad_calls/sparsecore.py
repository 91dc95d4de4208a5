"""Bad calls of the SparseCore wing: stacks, preprocessing, lookups, updates, layers, pipelines."""

from functools import cache, partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from rsembed.sparsecore import embedding, embedding_spec, table_stacking
from rsembed.sparsecore.linen import embed as linen_embed
from rsembed.sparsecore.nnx import embed
from tests.bad_calls.world import KEY, mesh

IDS = np.arange(16).reshape(8, 2)
environment = partial(mock.patch.dict, "os.environ")


def made(name="word", batch=8, rows=32, **fields):
    table = embedding_spec.TableSpec(
        **{"name": name, "vocabulary_size": rows, "embedding_dim": 8} | fields
    )
    return embedding_spec.FeatureSpec(name=f"f_{name}", table_spec=table, input_shape=(batch, 2))


def placed(*features, devices=1, cores=2):
    features = list(features) or [made()]
    embedding.prepare_feature_specs_for_training(features, devices, cores)
    return features


def auto_stacked(devices, cores, rotation):
    features = [made("a"), made("b")]
    table_stacking.auto_stack_tables(features, devices, cores, rotation)
    return features


@cache
def specs():
    return placed()


def run(ids=IDS, weights=None, *, features=None, local=1, devices=1, **options):
    weights = None if weights is None else [weights]
    return embedding.preprocess_sparse_dense_matmul_input(
        [ids], weights, features or specs(), local, devices, **options
    )


def new_reader(name="f_word", batch=8):
    """A new feature of a table that already has its place in a stack."""
    return embedding_spec.FeatureSpec(
        name=name, table_spec=specs()[0].table_spec, input_shape=(batch, 2)
    )


@cache
def processed():
    return run()[0]


TABLES = {"word": embedding.EmbeddingVariables(np.zeros((32, 8), np.float32), ())}
GRADIENTS = [np.ones((8, 8), np.float32)]


def look_up(inputs=None, tables=TABLES, features=None, **options):
    options = {"global_device_count": 1} | options
    inputs = inputs or processed()
    features = features or specs()
    return jax.eval_shape(
        lambda: embedding.sparse_dense_matmul(inputs, tables, features, **options)
    )


def update(gradients=GRADIENTS, **options):
    arguments = processed(), TABLES, specs()
    return jax.eval_shape(
        lambda: embedding.sparse_dense_matmul_grad(gradients, *arguments, **options)
    )


def stack(names=("a", "b"), features=None, devices=1, cores=1, **options):
    features = features or [made("a"), made("b")]
    return table_stacking.stack_tables(features, names, devices, cores, **options)


def stack_in_turn(*calls):
    """Four features, after calls of `stack` with these options, one after the other."""
    features = [made(name) for name in "abcd"]
    for options in calls:
        stack(features=features, **options)
    return features


def for_two_devices(run_it):
    """Calls `run_it` with a lookup function for two devices and with its inputs."""
    features = placed(devices=2)
    inputs, _ = run(features=features, local=2, devices=2)
    return run_it(partial(look_up, features=features, global_device_count=2), inputs)


def _step_of_whole_rows_of_two_dims():
    rule = embedding_spec.RowWiseAdagradOptimizerSpec(0.5)
    features = [made("a", optimizer=rule), made("b", optimizer=rule, embedding_dim=16)]
    stack(features=features)
    inputs, _ = embedding.preprocess_sparse_dense_matmul_input([IDS, IDS], None, features, 1, 1)
    tables = {"a_b": embedding.EmbeddingVariables(jnp.zeros((64, 16)), (jnp.zeros((64, 1)),))}
    return embedding.sparse_dense_matmul_grad(
        [jnp.ones((8, 8)), jnp.ones((8, 16))], inputs, tables, features
    )


def _of_two_devices(inputs):
    return jax.tree.map(lambda array: np.concatenate([array, array]), inputs)


def _step_of_halves():
    features = placed(made(dtype="bfloat16", stochastic_rounding=True))
    tables = {"word": embedding.EmbeddingVariables(jnp.zeros((32, 8), "bfloat16"), ())}
    return embedding.sparse_dense_matmul_grad(
        [jnp.ones((8, 8))], run(features=features)[0], tables, features
    )


def auto(*sizes, **options):
    return table_stacking.auto_stack_tables([made("a"), made("b")], *(sizes or (1, 1)), **options)


def sharding(*axes, devices=1):
    return NamedSharding(mesh(devices, "x"), P(*axes))


def init(tables=None, where=None, cores=None):
    if tables is None:
        tables = embedding.get_table_specs(specs())
    where = where or sharding("x", None)
    return embedding.init_embedding_variables(KEY(0), tables, where, cores)


def linen(**options):
    return linen_embed.SparseCoreEmbed(specs(), "x", mesh(1, "x"), **options)


def layer(**options):
    return embed.SparseCoreEmbed(
        specs(), **{"sharding_axis": "x", "mesh": mesh(1, "x"), "rngs": nnx.Rngs(0)} | options
    )


def sparse(indices, values, shape=(8, 4), **options):
    trees = [[np.asarray(part)] for part in (indices, values, shape)]
    return embedding.preprocess_sparse_dense_matmul_input_from_sparse_tensor(
        *trees, specs(), 1, 1, **options
    )


BAD = """
# Placing tables
auto(0, 1) => ValueError: global_device_count ... [1, inf) ... 0
embedding.prepare_feature_specs_for_training(embedding_spec.FeatureSpec(name="f", table_spec=made().table_spec), 1, 1)
    => ValueError: feature 'f': declare the global batch
placed(made(combiner="none")) => ValueError: table 'word': combiner 'none' ... 'sum'
run(features=placed(made(batch=7))) => ValueError: feature 'f_word' ... 7 samples ... 2
placed(made(batch=2**27)) => ValueError: stack 'word' has 134217728 samples per device, above the limit of 67108863
stack(["a", "x"]) => ValueError: 'x' ... 'a', 'b'
stack(["a", "a"]) => ValueError: stack 'a_a': Table a is repeated in group ['a', 'a']
stack([]) => ValueError: no feature reads tables [] ... 'a'
stack(features=[made("a"), made("b", optimizer=embedding_spec.AdamOptimizerSpec())])
    => ValueError: optimizer ... 'a' ... 'b'
stack(features=[made("a"), made("b", embedding_dim=16)], fail_on_excess_padding=True)
    => ValueError: stack 'a_b' ... adds
stack(features=[made("a"), made("b"), made("c")], stack_name="c")
    => ValueError: stack name 'c' ... table 'c'; choose another stack_name
stack_in_turn({"names": ["a", "b"], "stack_name": "x"}, {"names": ["c", "d"], "stack_name": "x"})
    => ValueError: stack name 'x' ... already used
stack(stack_to_max_ids_per_partition=lambda *_: None) => TypeError: stack 'a_b' ... integer ... None
stack(stack_to_max_ids_per_partition=lambda *_: 0) => ValueError: limit of ids ... [1, inf)
stack_in_turn({"devices": 2, "cores": 2}, {"names": ["c", "d"], "devices": 2, "cores": 4})
    => ValueError: table 'a' ... another number of shards: 4, not 8 (devices times cores
stack_in_turn({"names": ["b", "c"]}, {"names": ["a", "c"]}) => ValueError: Table c is already stacked, in 'b_c'
run(features=placed(made(suggested_coo_buffer_size_per_device=5000))) => ValueError: 5000 ... above 1024
placed(made(storage=rs.tt.TensorTrain((4,))))
    => NotImplementedError: table 'word' ... storage=TensorTrain ... EmbeddingCollection
placed(*specs(), new_reader("g")) => ValueError: feature 'g' does not lie where stack 'word' has room for it
placed(new_reader(batch=4)) => ValueError: stack 'word' was placed for 8 samples, but features ['f_word'] have 4
run(IDS[:4], features=[new_reader(batch=4)]) => ValueError: placed for 8 samples, but features ['f_word'] have 4
embedding.stack_embedding_gradients([jnp.ones((4, 8))], [new_reader(batch=4)], 2, 1)
    => ValueError: placed for 8 samples, but features ['f_word'] have 4
# Another number of shards than the placed one
placed(*specs(), cores=8) => ValueError: table 'word' was laid out for another number of shards: 2, not 8
init(cores=8) => ValueError: another number of shards: 2, not 8
init(where=sharding("x", None, devices=4), cores=2) => ValueError: another number of shards: 2, not 8
init(where=sharding("x", None, devices=4)) => ValueError: another number of shards: 2, not
run(num_sc_per_device=4) => ValueError: table 'word' ... another number of shards: 2, not 4
run(local=2, devices=2, num_sc_per_device=2) => ValueError: another number of shards: 2, not 4
run(num_sc_per_device=8, enable_minibatching=True) => ValueError: another number of shards: 2, not 8
sparse([[0, 0]], [1], num_sc_per_device=8) => ValueError: another number of shards: 2, not 8
embedding.eval_preprocess_sparse_dense_matmul_input_shape(specs(), 1, 1, num_sc_per_device=8)
    => ValueError: another number of shards: 2, not 8
embedding.compute_coo_buffer_size_per_device(specs(), 2, 4) => ValueError: another number of shards: 2, not 8
embedding.create_proto_from_feature_specs(specs(), 1, 8) => ValueError: another number of shards: 2, not 8
table_stacking.stack_and_shard_tables([specs()[0].table_spec], {"word": np.zeros((32, 8))}, 8)
    => ValueError: another number of shards: 2, not 8
table_stacking.unshard_and_unstack_tables([specs()[0].table_spec], {"word": np.zeros((8, 4, 8))}, 8)
    => ValueError: another number of shards: 2, not 8
embedding.unstack_embedding_activations({"word": jnp.ones((8, 8))}, specs(), 1, 8)
    => ValueError: another number of shards: 2, not 8
embedding.stack_embedding_gradients([jnp.ones((8, 8))], specs(), 8, 1)
    => ValueError: another number of shards: 2, not 8
layer(num_sc_per_device=8) => ValueError: another number of shards: 2, not 8
linen(num_sc_per_device=8).init(KEY(0), processed()) => ValueError: another number of shards: 2, not 8
linen().apply({"params": {}}, [jnp.ones((8, 8))], processed(), method="apply_gradient")
    => ValueError: the layer has no parameters here
linen(num_sc_per_device=8).prepare_batch([IDS]) => ValueError: another number of shards: 2, not 8
run(features=[made()]) => ValueError: table 'word' ... no place in a stack
# Preprocessing
embedding.preprocess_sparse_dense_matmul_input({"f": IDS}, None, specs(), 1, 1)
    => ValueError: features ... tree structure
run(np.ma.masked_equal(IDS, 1)) => TypeError: feature 'f_word' ... masked array ... filled(-1)
run([np.ma.masked_equal([1, 2], 1)] * 8) => TypeError: feature 'f_word' ... masked array
run(np.zeros(8, int)) => ValueError: feature 'f_word' ... 1 dimensions ... reshape
run(np.zeros((8, 1, 1), int)) => ValueError: feature 'f_word': a dense input is ... got 3 dimensions
run(IDS + 17) => ValueError: feature 'f_word': id 32 in sample 7 ... table 'word' ... vocabulary_size=32
run(rs.Bags(np.arange(9), np.arange(9))) => ValueError: feature 'f_word' ... offset is 8 ... 9 ids
run([[2**70, 1]] * 8) => TypeError: feature 'f_word' ... fit 64 bits ... hash
run([["a", "b"]] * 8) => TypeError: feature 'f_word' ... integers
run(list(range(8))) => TypeError: feature 'f_word': row 0 must be a flat list
run(np.zeros((9, 2), int)) => ValueError: feature 'f_word' ... 9 samples ... batch of 8
run(rs.Bags.from_dense(np.where(IDS == 13, -1, IDS))) => ValueError: id -1 in sample 6 ... hash ... or leave out -1
run(IDS, np.full((8, 2), "a")) => TypeError: feature 'f_word' ... weights ... numbers ... <U1
run(rs.Bags(np.arange(6), np.asarray([0, 9]))) => ValueError: feature 'f_word' ... offset is 9 ... 6 ids
run(rs.Bags.from_lists(IDS.tolist(), np.ones((8, 2)).tolist()), np.ones(16))
    => ValueError: feature 'f_word': weights of Bags belong inside them
run(IDS, np.full((8, 2), NAN)) => ValueError: feature 'f_word': weight nan in sample 0
run(IDS, np.ones((8, 1))) => ValueError: feature 'f_word' ... (8, 1) ... (8, 2)
run(local=2) => ValueError: local_device_count=2 ... global_device_count=1
run(local="1") => TypeError: local_device_count ... integer ... '1'
run(2 * (IDS % 2), features=placed(made(max_ids_per_partition=3)))
    => ValueError: stack 'word' ... max_ids_per_partition=3, but core 0 has 8
run(features=placed(made(max_unique_ids_per_partition=1))) => ValueError: word ... max_unique_ids_per_partition=1
run(features=placed(made(suggested_coo_buffer_size_per_device=8)))
    => ValueError: stack 'word': 8 entries do not fit the buffer of 16 places per device, 32 are needed; raise ... to 32
run(enable_minibatching=True, all_reduce_interface="mpi") => TypeError: all_reduce_interface ... AllReduce ... 'mpi'
sparse([[0, 0, 0]], [1]) => ValueError: feature 'f_word': indices ... [nnz, 2] ... (1, 3)
sparse([[0.5, 0]], [1]) => TypeError: feature 'f_word': indices ... integers ... float64
sparse([[8, 0]], [1]) => ValueError: feature 'f_word': sample id 8
# Variables
init(where=sharding()) => ValueError: global_sharding ... the format ('x', None)
init(tables={"a": stack_in_turn({"cores": 2})[0].table_spec}) => ValueError: stack 'a_b' has 64 rows ... have 32
init(tables=embedding.get_table_specs(placed(made(initializer=lambda: jnp.zeros((32, 8))))))
    => TypeError: table 'word': ... initializer(key, (32, 8)) ... Write it as `lambda key, shape: ...`
layer(rngs=None) => ValueError: needs rngs ... nnx.Rngs(0)
layer(sharding_axis="y") => ValueError: 'y' ... axes of the mesh
layer(sharding_axis=("x", "y"), mesh=None) => ValueError: ('x', 'y') needs a mesh
# Lookup and update
look_up(tables={}) => ValueError: no stack 'word' ... feature_specs
look_up(tables=jnp.zeros((32, 8))) => TypeError: embedding_variables ... a mapping ... (32, 8)
look_up(tables={"word": embedding.EmbeddingVariables(jnp.zeros((16, 8)), ())})
    => ValueError: stack 'word' ... (16, 8) ... (32, 8)
for_two_devices(lambda lookup, inputs: jax.shard_map(lookup, check_vma=False, in_specs=P("x"), out_specs=P("x"),
    mesh=jax.sharding.Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("x", "y")))(inputs))
    => ValueError: shard_map has the axes ... name it with axis_name=
_step_of_whole_rows_of_two_dims() => ValueError: 'rowwise_adagrad' works on whole rows ... 'a': 8, 'b': 16
for_two_devices(lambda lookup, inputs: lookup(jax.tree.map(lambda array: array[: array.size // 2], inputs)))
    => ValueError: inside jax.shard_map
look_up(_of_two_devices(processed())) => ValueError: 32 row pointers, expected 16 ... without shard_map
look_up(features=placed(made("user"))) => ValueError: preprocessed for stacks ['word'] ... ['user']
look_up(num_sc_per_device=4) => ValueError: another number of shards: 2, not 4
look_up(enable_minibatching=True) => ValueError: enable_minibatching is false, expected true
look_up(run(enable_minibatching=True)[0])
    => ValueError: preprocessed for other specs: enable_minibatching is true, expected false
look_up(_of_two_devices(run(enable_minibatching=True)[0]), enable_minibatching=True)
    => ValueError: num_minibatches has 2 numbers, one per device
rs.sparsecore.embedding_pipelining_utils.get_default_sc_bwd_function(
    specs(), mesh(1, "x"))(None, None, None) => TypeError: missing 1 required keyword-only argument: 'step'
_step_of_halves() => ValueError: needs a new key every step
update({"f": jnp.ones((8, 8))}) => ValueError: activation gradients ... tree structure
update([jnp.ones((4, 8))], global_device_count=1) => ValueError: feature 'f_word' ... (4, 8) ... (8, 8)
update([jnp.ones((8, 8), int)]) => TypeError: feature 'f_word' ... gradients ... floats ... int32
update({"word": jnp.ones((16, 8))}, perform_stacking=False)
    => ValueError: stack 'word': activations ... (16, 8), expected (8, 8) on each of 1 devices
update({"word": jnp.ones((8, 8), int)}, perform_stacking=False) => TypeError: stack 'word' ... floats
update(embedding_var_limits={"word": (NAN, None)}) => ValueError: embedding_var_limits['word'][0] ... got nan
update(embedding_var_limits={"word": (2, 1)}) => ValueError: minimum 2 ... maximum 1
update(embedding_var_limits={"word": 1.0}) => TypeError: embedding_var_limits['word'] must be (a number ... 1.0
embedding.unstack_embedding_activations({"word": jnp.ones((4, 8))}, specs(), 1) => ValueError: word ... (4, 8)
embedding.unstack_embedding_activations({}, specs(), 1) => ValueError: activations ... 'word'
# Tables by name
table_stacking.stack_and_shard_tables([specs()[0].table_spec], {"word": np.ones((16, 8))}, 2)
    => ValueError: table 'word' ... 16 rows ... vocabulary_size=32
table_stacking.unshard_and_unstack_tables([specs()[0].table_spec], {"word": np.ones((2, 8, 8))}, 2)
    => ValueError: stack 'word' ... (2, 8, 8) ... 32 rows on 2 shards
table_stacking.stack_and_shard_tables([specs()[0].table_spec], {"word": np.full((32, 8), NAN)}, 2)
    => ValueError: table 'word': nan in row 0 is not finite
table_stacking.stack_and_shard_tables([specs()[0].table_spec], {}, 2)
    => ValueError: tables ... tree structure of feature_specs
table_stacking.unshard_and_unstack_tables([specs()[0].table_spec], {}, 2) => ValueError: stacked_tables ... 'word'
rs.sparsecore.utils.shard_emb_table(np.zeros((10, 2)), 2, 2) => ValueError: 10 rows ... 4 shards ... 12
rs.sparsecore.utils.unshard_emb_table(np.zeros((3, 3, 2)), 2) => ValueError: (3, 3, 2) ... 3 devices with 2 cores
embedding.get_optimizer_class(99) => ValueError: optimizer code 99
embedding.proto_to_optimizer_spec(embedding.optimizer_spec_to_proto(embedding_spec.AdagradOptimizerSpec(specs)))
    => ValueError: optimizer 'adagrad' has a function as its learning rate, 'specs'
embedding.proto_to_optimizer_spec(embedding.optimizer_spec_to_proto(
    embedding_spec.CustomOptimizerSpec(0.1, lambda g, w, lr: w, short_name_str="mine")))
    => ValueError: optimizer 'mine' has a function as its rule
embedding_spec.get_row_ids_in_stacked_table(
    embedding.create_proto_from_feature_specs(specs(), 1).stacked_table_specs[0],
    embedding.create_proto_from_feature_specs(placed(made(rows=64)), 1).stacked_table_specs[0].table_specs[0], [0])
    => ValueError: table 'word', as it is recorded, is none of stack 'word'
embed.SparseCoreEmbed(
    placed(devices=2), "x", mesh(2, "x"), nnx.Rngs(0)).apply_gradient([jnp.ones((7, 8))], processed())
    => ValueError: the gradient of feature [0] has shape (7, 8), whose first axis 2 devices cannot split
embedding.get_optimizer_type("adam") => TypeError: optimizer_class ... str
embedding_spec.EmbeddingSpecRecord.from_json("{") => ValueError: EmbeddingSpecRecord ... JSON
auto(no_such_argument=None) => TypeError: no_such_argument
embedding.get_all_reduce_interface(no_such_argument=None) => TypeError: no_such_argument
sparse([[0, 0]], [1], no_such_argument=None) => TypeError: no_such_argument
embedding.prepare_feature_specs_for_training([made()], None, 1)
    => TypeError: global_device_count must be an integer, got None (NoneType).
run(IDS, np.where(IDS == 13, -np.inf, 1), features=placed(made(combiner="sqrtn")))
    => ValueError: feature 'f_word': weight -inf in sample 6 is not finite; clean the weights.
environment(SPARSECORE_INPUT_PREPROCESSING_THREADS="many")(run)()
    => ValueError: SPARSECORE_INPUT_PREPROCESSING_THREADS must be a number of at least 1, such as 4, got 'many'
environment(SPARSECORE_INPUT_PREPROCESSING_THREADS="0")(run)() => ValueError: a number of at least 1 ... got '0'
environment(RSEMBED_CORES_PER_DEVICE="many")(auto)(1, None)
    => ValueError: RSEMBED_CORES_PER_DEVICE must be a number of at least 1, such as 4, got 'many'
table_stacking.compute_table_to_setting_in_stack("s", ["t"], 8, {"u": 32}, 4, 3)
    => ValueError: table_to_padded_vocab_size have no 't'
run(devices="1") => TypeError: global_device_count must be an integer, got '1' (str).
run(num_sc_per_device=0) => ValueError: num_sc_per_device must be in [1, inf), got 0.
run(allow_id_dropping="yes") => TypeError: allow_id_dropping must be True or False, got 'yes' (str).
run("ids") => TypeError: feature 'f_word': rows, one list of ids for each bag, must be
sparse([[0, 0]], [1.5]) => TypeError: feature 'f_word': ids must be integers, got float64;
embedding.preprocess_sparse_dense_matmul_input_from_sparse_tensor(None, None, None, specs(), 1, 1)
    => ValueError: indices must have the tree structure of feature_specs, with ... got NoneType
embedding.sparse_dense_matmul(None, TABLES, specs(), global_device_count=1)
    => TypeError: preprocessed_inputs must be of type PreprocessedInput, got None (NoneType)
look_up(tables={"word": None}) => TypeError: embedding_variables['word'] must be a list, got None (NoneType)
look_up(sharding_strategy="DIV") => ValueError: unknown sharding strategy 'DIV'; the only one is 'MOD'.
update([1.0]) => TypeError: feature 'f_word': activation gradients must be an array of ... got 1.0 (float)
update(embedding_var_limits={"wrod": (0., 1.)}) => ValueError: embedding_var_limits must name every stack: got ['wrod'],
embedding.stack_embedding_gradients([jnp.ones((7,8))], specs())
    => ValueError: feature 'f_word': activation gradients have shape (7, 8),
table_stacking.stack_and_shard_feature_tables({}, embedding.create_proto_from_feature_specs(specs(), 1, 2))
    => ValueError: feature_tables have no 'word', only [].
embedding.create_proto_from_feature_specs(specs(), 0, 2) => ValueError: global_device_count must be in [1, inf), got 0.
embedding_spec.EmbeddingSpecRecord.from_json("3")
    => ValueError: the text is no EmbeddingSpecRecord in JSON: 'int' object
layer().prepare_batch([IDS], allow_dropping=True) => TypeError: allow_dropping
layer()(None) => TypeError: the input of a layer, which its prepare_batch makes, must ... got None (NoneType)
embedding_spec.get_row_ids_in_stacked_tables(embedding.create_proto_from_feature_specs(specs(), 1, 2), {"wrod": [1]})
    => ValueError: no tables ['wrod'] in the record; it has ['word'].
embedding_spec.get_row_ids_in_stacked_tables(embedding.create_proto_from_feature_specs(specs(), 1, 2), {"word": [32]})
    => ValueError: table 'word': id 32 is outside its vocabulary of 32
"""

ACCEPTED = """
run(IDS.tolist())[0] => processed()
run([tuple(row) for row in IDS])[0] => processed()
run(IDS.astype(object))[0] => processed()
run(np.array([*IDS, IDS[0, :1]], object)[:-1])[0] => processed()
run(np.array([*IDS.astype(np.uint64), IDS[0, :1]], object)[:-1])[0] => processed()
run(IDS.astype(np.uint64))[0] => processed()
run(local=np.int64(1), devices=np.int32(1), num_sc_per_device=np.int64(2))[0] => processed()
run(features=placed(devices=np.int64(1), cores=np.int32(2)))[0] => processed()
embedding.create_proto_from_feature_specs(specs(), np.int64(1), np.int64(2)).to_json()
    => embedding.create_proto_from_feature_specs(specs(), 1, 2).to_json()
embedding.create_proto_from_feature_specs(auto_stacked(np.int64(1), np.int64(2), np.int64(1)), 1, 2).to_json()
    => embedding.create_proto_from_feature_specs(auto_stacked(1, 2, 1), 1, 2).to_json()
run(IDS.astype(np.uint8))[0] => processed()
run(jnp.asarray(IDS))[0] => processed()
run(IDS, np.ones((8, 2), int))[0] => run(IDS, np.ones((8, 2)))[0]
stack(("a", "b")) => stack(["a", "b"])
layer().prepare_batch([IDS], allow_id_dropping=True, sharding_strategy="mod")[0] => layer().prepare_batch([IDS])[0]
embedding.get_all_reduce_interface(["localhost"], 5000, host_id=0, host_count=1)(0, IDS > 3) => IDS > 3
rs.sparsecore.utils.embedding_table_format(mesh(2, "x"), P("x", None)) => sharding("x", None, devices=2)
rs.sparsecore.utils.embedding_table_format_with_sharding(sharding("x", None)) => sharding("x", None)
"""
