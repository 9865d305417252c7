"""What several tests of kernels need."""

import pytest


@pytest.fixture
def kernels(device):
    """The room of the kernels, where they run in this process."""
    pytest.importorskip("triton")
    from twinfer.gpu.kernels import launch
    from twinfer.gpu.precision import pin_precision

    if not launch.supported() or (device == "cpu") != launch.INTERPRETED:
        pytest.skip("run by test_in_the_interpreter, in a process of its own")
    # As every worker does, for its process: where a kernel hands over to cuBLAS, that keeps to
    # float32 too.
    pin_precision()
    return launch
