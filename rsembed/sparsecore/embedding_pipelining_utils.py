"""Pipelined training: lookup and update run concurrently with the dense step of another batch.

Training on `n` batches takes `n + 2` cycles. Cycle `i` has three stages. The lookup stage runs
after the update stage. The dense stage of a cycle does not depend on the other two stages of the
cycle, so the compiler can run the dense stage concurrently with them:

```
update    update of the tables with the gradients of batch i - 2
lookup    activations of batch i, from the updated tables
dense     forward and backward pass of batch i - 1, with the activations of the previous cycle
```

When batch `i` is looked up, exactly one update is missing, the update for batch `i - 1`. If batches
`i - 1` and `i` read the same row, batch `i` reads the row without the update for batch `i - 1`. A
row that batch `i - 1` does not read is up to date, unless the optimizer changes all rows in every
step. A sequential training loop that delays every update by one batch computes the same values.

Cycles 0 and 1 have no gradients for the update stage. The update stage of cycles 0 and 1 runs on a
batch without ids, so no row and no optimizer state changes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import NoneType
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, PyTree

from rsembed.collection.devices import Devices
from rsembed.sparsecore.layout import Nested, Scalar
from rsembed.sparsecore.mesh_lookup import ShardedTables
from rsembed.sparsecore.preprocessing import PreprocessedInput
from rsembed.sparsecore.variables import Activations, EmbeddingVariables, Variables
from rsembed.specs import FeatureSpec, tables_of

SparseInputs: TypeAlias = PyTree
"""Preprocessed ids of a batch."""
DenseInputs: TypeAlias = PyTree
"""Inputs of the dense stage, such as labels."""
TrainState: TypeAlias = PyTree
"""State of the dense stage: parameters and optimizer state."""
Aux: TypeAlias = PyTree
"""Auxiliary output of a stage.

The lookup stage passes its auxiliary output to the dense stage, and the dense stage to the update
stage. `step` returns the auxiliary output of the update stage.
"""
Output: TypeAlias = PyTree
"""Output of the dense stage for the user, such as the loss."""


class CurrentStepInput(NamedTuple):
    """Data of batch `i` in cycle `i`: ids for the lookup, and dense inputs for the next cycle."""

    sparse_inputs: SparseInputs
    dense_inputs: DenseInputs


class LastStepInput(NamedTuple):
    """Data of batch `i - 1` in cycle `i`: dense-stage inputs, and ids for the next update."""

    sparse_inputs: SparseInputs
    embedding_activations: Activations
    dense_inputs: DenseInputs
    sc_fwd_aux: Aux


class StepBeforeLastStepInput(NamedTuple):
    """Data of batch `i - 2` in cycle `i`: ids and gradients for the update."""

    sparse_inputs: SparseInputs
    embedding_gradients: Activations
    tc_aux: Aux


class PipelineState(NamedTuple):
    """State that a cycle passes to the next cycle.

    Attributes:
      pipeline_step: index of the cycle, from 0, as an int32 array. In a tree of shardings,
        `pipeline_step` is None, so the compiler chooses how the cycle index is sharded.
      last_step_inputs: batch that the previous cycle looked up, with its activations.
      step_before_last_step_inputs: batch that was looked up two cycles ago (`i - 2` in cycle `i`),
        with the gradients of its activations.
      placeholder_output: zeros with the structure and shapes of the dense stage's output, for
        cycles without a dense stage.
      placeholder_tc_aux: zeros with the structure and shapes of the auxiliary output that the dense
        stage passes to the update.
    """

    pipeline_step: PyTree
    last_step_inputs: LastStepInput
    step_before_last_step_inputs: StepBeforeLastStepInput
    placeholder_output: Output
    placeholder_tc_aux: Aux


ScFwdStageFun = Callable[[SparseInputs, Variables], tuple[Activations, Aux]]
"""Lookup stage: `(sparse_inputs, embedding_variables) -> (activations, aux of the lookup)`."""
TcStageFun = Callable[
    [Activations, DenseInputs, TrainState, Aux], tuple[Activations, Output, TrainState, Aux]
]
"""Dense stage: trains the dense part of the model on one batch.

The arguments are `(embedding_activations, dense_inputs, train_state, sc_fwd_aux)`, and the results
are `(activation gradients, output, new train state, aux for the update stage)`.
"""
ScBwdStageFun = Callable[..., tuple[Variables, Aux]]
"""Update stage: updates the tables with the gradients of one batch.

The arguments are `(sparse_inputs, embedding_gradients, embedding_variables, tc_aux)`, and the
results are `(new variables, aux)`. An update stage with a parameter named `step` gets the index,
from 0, of the batch that the gradients belong to. In the first two cycles, which have no gradients,
`step` is negative.
"""


def get_pipeline_train_steps(num_steps: int) -> int:
    """Number of cycles for `num_steps` batches: two more, to fill and drain the pipeline."""
    return num_steps + 2


def is_output_valid(pipeline_step: int, num_steps: int) -> bool:
    """Whether cycle `pipeline_step` runs the dense stage, on batch `pipeline_step - 1`."""
    return 1 <= pipeline_step <= num_steps


def get_initial_state(
    pipeline_input: CurrentStepInput,
    tc_train_state: TrainState,
    embedding_variables: Variables,
    sc_fwd_function: ScFwdStageFun,
    tc_function: TcStageFun,
    dense_input_sharding: Sharding | None = None,
    sparse_input_sharding: Sharding | None = None,
) -> PipelineState:
    """The pipeline state before cycle 0: zeros, with the shapes of the states of later cycles.

    Id buffers of zeros represent batches without ids.

    Args:
      pipeline_input: any batch, used only for its shapes and dtypes.
      tc_train_state: state of the dense stage.
      embedding_variables: tables and optimizer slots of all stacks, by stack name.
      sc_fwd_function: lookup stage, a `ScFwdStageFun`.
      tc_function: dense stage, a `TcStageFun`.
      dense_input_sharding: sharding of dense inputs, by default the sharding of a `jnp.zeros`
        array.
      sparse_input_sharding: sharding of sparse inputs, activations and gradients of activations, by
        default the sharding of a `jnp.zeros` array.
    """
    shapes = jax.eval_shape(lambda tree: tree, pipeline_input)
    activations, sc_fwd_aux = jax.eval_shape(
        sc_fwd_function, shapes.sparse_inputs, embedding_variables
    )
    gradients, output, _, tc_aux = jax.eval_shape(
        tc_function, activations, shapes.dense_inputs, tc_train_state, sc_fwd_aux
    )
    sparse = functools.partial(_zeros, sharding=sparse_input_sharding)
    # Every leaf of the state is a new array, because `jit` cannot donate the same buffer twice.
    return PipelineState(
        pipeline_step=jnp.zeros((), jnp.int32),
        last_step_inputs=LastStepInput(
            sparse_inputs=sparse(shapes.sparse_inputs),
            embedding_activations=sparse(activations),
            dense_inputs=_zeros(shapes.dense_inputs, dense_input_sharding),
            sc_fwd_aux=_zeros(sc_fwd_aux),
        ),
        step_before_last_step_inputs=StepBeforeLastStepInput(
            sparse_inputs=sparse(shapes.sparse_inputs),
            embedding_gradients=sparse(gradients),
            tc_aux=_zeros(tc_aux),
        ),
        placeholder_output=_zeros(output),
        placeholder_tc_aux=_zeros(tc_aux),
    )


def _zeros(tree: PyTree, sharding: Sharding | None = None) -> PyTree:
    def zeros(leaf: jax.ShapeDtypeStruct) -> Array:
        is_cut = sharding is not None and leaf.ndim > 0
        return jnp.zeros(leaf.shape, leaf.dtype, device=sharding if is_cut else None)

    return jax.tree.map(zeros, tree)


def get_pipeline_state_sharding(
    pipeline_state_cls: type[PipelineState],
    dense_input_sharding: Sharding,
    sparse_input_sharding: Sharding,
    pipeline_output_sharding: PyTree,
    tc_aux_sharding: PyTree,
) -> PipelineState:
    """Shardings of a pipeline state, for `jit`.

    Activations and their gradients are sharded like dense inputs.

    Args:
      pipeline_state_cls: `PipelineState`.
      dense_input_sharding: sharding of dense inputs.
      sparse_input_sharding: sharding of preprocessed ids.
      pipeline_output_sharding: sharding of the dense stage's output.
      tc_aux_sharding: sharding of the auxiliary output that the dense stage passes to the update
        stage.
    """
    return pipeline_state_cls(
        pipeline_step=None,
        last_step_inputs=LastStepInput(
            sparse_inputs=sparse_input_sharding,
            embedding_activations=dense_input_sharding,
            dense_inputs=dense_input_sharding,
            sc_fwd_aux=dense_input_sharding,
        ),
        step_before_last_step_inputs=StepBeforeLastStepInput(
            sparse_inputs=sparse_input_sharding,
            embedding_gradients=dense_input_sharding,
            tc_aux=tc_aux_sharding,
        ),
        placeholder_output=pipeline_output_sharding,
        placeholder_tc_aux=tc_aux_sharding,
    )


def step(
    pipeline_input: CurrentStepInput,
    tc_train_state: TrainState,
    embedding_variables: Variables,
    pipeline_state: PipelineState,
    sc_fwd_function: ScFwdStageFun,
    tc_function: TcStageFun,
    sc_bwd_function: ScBwdStageFun,
    *,
    fake_tc_step: bool | Array,
) -> tuple[Output, Aux, TrainState, Variables, PipelineState]:
    """Runs one cycle.

    Call `step` inside `jax.jit`, and donate the train state, the variables and the pipeline state.

    Args:
      pipeline_input: batch `i`, or in the last two cycles zeros with the shapes of a batch.
      tc_train_state: state of the dense stage.
      embedding_variables: tables and optimizer slots of all stacks, by stack name.
      pipeline_state: state from the previous cycle, or from `get_initial_state`.
      sc_fwd_function: lookup stage, a `ScFwdStageFun`.
      tc_function: dense stage, a `TcStageFun`.
      sc_bwd_function: update stage, a `ScBwdStageFun`.
      fake_tc_step: whether the dense stage is skipped: `not is_output_valid(i, n)`. If
        `fake_tc_step` is a Python bool, `jit` compiles a program with the dense stage and another
        program without the dense stage. If `fake_tc_step` is traced, `jit` compiles one program
        that may skip the dense stage.

    Returns:
      The output of the dense stage (for batch `i - 1`, or zeros if the dense stage is skipped), the
      auxiliary output of the update stage, the train state, the variables, and the pipeline state
      for the next cycle.
    """
    last = pipeline_state.last_step_inputs
    before = pipeline_state.step_before_last_step_inputs
    takes_step = "step" in inspect.signature(sc_bwd_function).parameters
    options = {"step": pipeline_state.pipeline_step - 2} if takes_step else {}
    embedding_variables, sc_bwd_aux = sc_bwd_function(
        before.sparse_inputs,
        before.embedding_gradients,
        embedding_variables,
        before.tc_aux,
        **options,
    )
    activations, sc_fwd_aux = sc_fwd_function(pipeline_input.sparse_inputs, embedding_variables)
    inputs = (last.embedding_activations, last.dense_inputs, tc_train_state, last.sc_fwd_aux)

    def skipped() -> tuple[Activations, Output, TrainState, Aux]:
        return (
            jax.tree.map(jnp.zeros_like, before.embedding_gradients),
            pipeline_state.placeholder_output,
            tc_train_state,
            pipeline_state.placeholder_tc_aux,
        )

    if isinstance(fake_tc_step, bool):
        dense = skipped() if fake_tc_step else tc_function(*inputs)
    else:
        dense = jax.lax.cond(fake_tc_step, skipped, lambda: tc_function(*inputs))
    gradients, output, tc_train_state, tc_aux = dense
    looked_up = LastStepInput(
        pipeline_input.sparse_inputs, activations, pipeline_input.dense_inputs, sc_fwd_aux
    )
    state = pipeline_state._replace(
        pipeline_step=pipeline_state.pipeline_step + 1,
        last_step_inputs=looked_up,
        step_before_last_step_inputs=StepBeforeLastStepInput(last.sparse_inputs, gradients, tc_aux),
    )
    return output, sc_bwd_aux, tc_train_state, embedding_variables, state


def get_default_sc_fwd_function(
    feature_specs: Nested[FeatureSpec], global_mesh: Mesh
) -> ScFwdStageFun:
    """Lookup stage for all features on a mesh, with None as auxiliary output.

    Args:
      feature_specs: specs of all features, with their tables already assigned to stacks.
      global_mesh: mesh of the devices. Tables and batch are split over all its axes.
    """
    tables = ShardedTables(feature_specs=feature_specs, devices=Devices.of(global_mesh, None))

    def look_up(
        sparse_inputs: SparseInputs, embedding_variables: Variables
    ) -> tuple[Activations, None]:
        return tables.look_up(embedding_variables, sparse_inputs), None

    return look_up


def get_default_sc_bwd_function(
    feature_specs: Nested[FeatureSpec], global_mesh: Mesh
) -> ScBwdStageFun:
    """Update stage for all tables on a mesh, with None as auxiliary output.

    For the arguments see `get_default_sc_fwd_function`. The returned update stage has a keyword
    argument `step`, the index of the batch that the gradients belong to.
    `embedding_pipelining_utils.step` passes the argument `step` to the update stage.
    """
    tables = ShardedTables(feature_specs=feature_specs, devices=Devices.of(global_mesh, None))
    moves_all_rows = any(
        table.optimizer.moves_all_rows for table in tables_of(feature_specs).values()
    )

    def update(
        sparse_inputs: SparseInputs,
        embedding_gradients: Activations,
        embedding_variables: Variables,
        tc_aux: Aux = None,
        *,
        step: Scalar,
    ) -> tuple[Variables, None]:
        del tc_aux
        number = jnp.maximum(jnp.asarray(step, jnp.float32), 0.0)

        def stepped(variables: Variables) -> Variables:
            return tables.update(embedding_gradients, variables, number, sparse_inputs)

        # Without `moves_all_rows`, a batch without ids changes no row.
        if not moves_all_rows:
            return stepped(embedding_variables), None
        new_variables = jax.lax.cond(
            step >= 0, stepped, lambda variables: variables, embedding_variables
        )
        return new_variables, None

    return update


NestedArray = Nested[jax.Array]
NestedFeatureSpecs = Nested[FeatureSpec]
NestedEmbeddingVariables = Nested[EmbeddingVariables]
DefaultSparseInputs = PreprocessedInput
DefaultEmbeddingActivations = DefaultEmbeddingGradients = jax.Array | None
DefaultScFwdAux = DefaultTcAux = DefaultScBwdAux = NoneType
