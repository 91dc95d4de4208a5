"""`rsembed.sparsecore.pipelining` under its published name, with the types of its default stages."""

from types import NoneType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsembed.sparsecore.layout import Nested
from rsembed.sparsecore.pipelining import CurrentStepInput as CurrentStepInput
from rsembed.sparsecore.pipelining import LastStepInput as LastStepInput
from rsembed.sparsecore.pipelining import PipelineState as PipelineState
from rsembed.sparsecore.pipelining import ScBwdStageFun as ScBwdStageFun
from rsembed.sparsecore.pipelining import ScFwdStageFun as ScFwdStageFun
from rsembed.sparsecore.pipelining import StepBeforeLastStepInput as StepBeforeLastStepInput
from rsembed.sparsecore.pipelining import TcStageFun as TcStageFun
from rsembed.sparsecore.pipelining import get_default_sc_bwd_function as get_default_sc_bwd_function
from rsembed.sparsecore.pipelining import get_default_sc_fwd_function as get_default_sc_fwd_function
from rsembed.sparsecore.pipelining import get_initial_state as get_initial_state
from rsembed.sparsecore.pipelining import get_pipeline_state_sharding as get_pipeline_state_sharding
from rsembed.sparsecore.pipelining import get_pipeline_train_steps as get_pipeline_train_steps
from rsembed.sparsecore.pipelining import is_output_valid as is_output_valid
from rsembed.sparsecore.pipelining import step as step
from rsembed.sparsecore.preprocessing import PreprocessedInput
from rsembed.sparsecore.variables import EmbeddingVariables
from rsembed.specs import FeatureSpec

NestedArray = Nested[jax.Array]
NestedFeatureSpecs = Nested[FeatureSpec]
NestedEmbeddingVariables = Nested[EmbeddingVariables]
DefaultSparseInputs = PreprocessedInput
DefaultEmbeddingActivations = DefaultEmbeddingGradients = jax.Array | None
DefaultScFwdAux = DefaultTcAux = DefaultScBwdAux = NoneType


def _safe_copy(value: Any) -> Any:
    return jnp.copy(value) if isinstance(value, jax.Array | np.ndarray) else value
