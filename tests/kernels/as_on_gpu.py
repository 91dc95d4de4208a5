"""A pytest plugin that runs the tests as on a GPU, on a machine without one.

    XLA_FLAGS=--xla_force_host_platform_device_count=1 python -m pytest -p tests.kernels.as_on_gpu

There is one device and there are no native kernels. The GPU kernels run in Pallas' interpreter.
"""


def pytest_sessionstart() -> None:
    # This import must come after jaxtyping's import hook is installed, which checks shapes.
    from rsembed.kernels import gpu, native

    gpu.unavailable_because = lambda: None
    native.unavailable_because = lambda: "a dry run for a GPU"
