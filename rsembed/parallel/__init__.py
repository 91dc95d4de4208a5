"""Starts runs with several processes, and exchanges rows between the devices of a mesh."""

from rsembed.parallel.runtime import (
    init as init,
    launch as launch,
    make_mesh as make_mesh,
    preempted as preempted,
)
