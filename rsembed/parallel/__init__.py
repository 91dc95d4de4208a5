"""Work over a mesh of devices: exchanging rows and vectors with the devices that own them."""

from rsembed.parallel.exchange import Routes as Routes
from rsembed.parallel.exchange import plan_routes as plan_routes
from rsembed.parallel.exchange import send as send
from rsembed.parallel.exchange import send_back as send_back
