"""Pictures of ids, tables, buffers and training.

Every `plot_…` function takes the data first, and `ax=`, the axes to draw on. With None, the
function creates a figure. The function draws nowhere else, passes further keyword arguments to its
main artist, and returns the `Axes`. Functions that compute the numbers of some pictures are in the
modules below.
"""

from rsembed.plot.buffers import (
    explore as explore,
    plot_buffer as plot_buffer,
    plot_limit_choice as plot_limit_choice,
)
from rsembed.plot.distributions import (
    plot_coverage as plot_coverage,
    plot_id_frequency as plot_id_frequency,
    plot_shard_load as plot_shard_load,
    plot_stack_bytes as plot_stack_bytes,
    plot_stack_treemap as plot_stack_treemap,
)
from rsembed.plot.drawing import COLOURS as COLOURS, MUTED as MUTED
from rsembed.plot.pictures import (
    plot_against_bytes as plot_against_bytes,
    plot_limits as plot_limits,
    plot_loss as plot_loss,
    plot_loss_against_state as plot_loss_against_state,
    plot_miss_ratio as plot_miss_ratio,
    plot_roofline as plot_roofline,
    plot_row_path as plot_row_path,
)
