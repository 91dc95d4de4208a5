"""A pytest plugin that serves calls as a GPU would, on a machine without one: a dry run of the suite for a card.

    XLA_FLAGS=--xla_force_host_platform_device_count=1 python -m pytest -p tests.kernels.as_on_gpu ...

There is one device, no native kernel, and GPU kernels run in Pallas' interpreter.
"""


def pytest_sessionstart() -> None:
    from rsembed.kernels import gpu, native  # by now the hook that checks shapes is in place

    gpu.unavailable_because = lambda: None
    native.unavailable_because = lambda: "a dry run for a GPU"
