"""What holds for every test: CPU devices, strict arrays, no network, few threads, reproducible examples.

Settings travel as environment variables so that a test that needs no framework loads none, and so that processes
started by a test inherit them. All are defaults: set the variable outside to override one.
"""

import os

import pytest
from hypothesis import settings

for _name, _value in {
    "JAX_PLATFORMS": "cpu",
    # A promotion or broadcast that nobody wrote down is a bug that only shows as a slow program or a wrong number.
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "TF_CPP_MIN_LOG_LEVEL": "2",  # XLA: warnings of the C++ side that a CPU run always prints
    # Tensors are tiny: a second thread gains nothing, and waits for a core that another process may hold.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None)  # pytest --hypothesis-profile=explore
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda", "tpu"), help="where the end-to-end tests run")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") != "cpu":
        os.environ.pop("JAX_PLATFORMS", None)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device of the end-to-end tests."""
    return str(request.config.getoption("--device"))
