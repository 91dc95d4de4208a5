"""Plots of id distributions, tables, input buffers and training runs.

The first argument of every `plot_…` function is the data. Every `plot_…` function draws only on
`ax`, or on a new figure if `ax` is None, and returns the `Axes`. Most `plot_…` functions pass
further keyword arguments to the matplotlib function that draws the data. Functions that compute the
numbers to plot, such as `limit_costs`, are in the modules of the package.
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
