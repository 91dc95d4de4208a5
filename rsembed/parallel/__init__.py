"""Work over a mesh of devices: exchanging rows and vectors with the devices that own them."""

from rsembed.parallel.agreement import Agreement as Agreement
from rsembed.parallel.exchange import Answers as Answers
from rsembed.parallel.exchange import Asking as Asking
from rsembed.parallel.exchange import Question as Question
from rsembed.parallel.exchange import Wanted as Wanted
from rsembed.parallel.exchange import ask as ask
from rsembed.parallel.exchange import default_capacity as default_capacity
from rsembed.parallel.exchange import distinct as distinct
from rsembed.parallel.exchange import together as together
from rsembed.parallel.launch import launch as launch
from rsembed.parallel.runtime import init as init
from rsembed.parallel.runtime import make_mesh as make_mesh
from rsembed.parallel.runtime import preempted as preempted
from rsembed.parallel.runtime import put_global as put_global
