"""Starts runs with several processes, and exchanges rows between devices and their owners."""

from rsembed.parallel.runtime import init as init
from rsembed.parallel.runtime import launch as launch
from rsembed.parallel.runtime import make_mesh as make_mesh
from rsembed.parallel.runtime import preempted as preempted
