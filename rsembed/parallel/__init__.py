"""Work over a mesh of devices: exchanging rows and vectors with the devices that own them."""

from rsembed.parallel.agreement import Agreement as Agreement
from rsembed.parallel.launch import launch as launch
from rsembed.parallel.rounds import Answers as Answers
from rsembed.parallel.rounds import Asking as Asking
from rsembed.parallel.rounds import Question as Question
from rsembed.parallel.rounds import Wanted as Wanted
from rsembed.parallel.rounds import ask as ask
from rsembed.parallel.rounds import default_capacity as default_capacity
from rsembed.parallel.rounds import distinct as distinct
from rsembed.parallel.rounds import together as together
from rsembed.parallel.runtime import init as init
from rsembed.parallel.runtime import make_mesh as make_mesh
from rsembed.parallel.runtime import preempted as preempted
from rsembed.parallel.runtime import put_global as put_global
