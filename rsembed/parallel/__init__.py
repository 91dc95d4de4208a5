"""Work over a mesh of devices: exchanging rows and vectors with the devices that own them."""

from rsembed.parallel.runtime import init as init
from rsembed.parallel.runtime import launch as launch
from rsembed.parallel.runtime import make_mesh as make_mesh
from rsembed.parallel.runtime import preempted as preempted
