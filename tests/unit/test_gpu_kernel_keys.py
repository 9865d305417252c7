"""Keys of kernels in Triton's cache on disk."""

import sys

import pytest

jit = pytest.importorskip("triton.runtime.jit")


@pytest.fixture
def functions():
    """All functions of Triton that the torch worker has, without digests."""
    from twinfer.gpu import kernels, step_kernels  # noqa: F401
    from twinfer.gpu.kernels import launch

    if launch.INTERPRETED:
        pytest.skip("the interpreter has taken the compiler's place")
    found = {}
    for name in [name for name in sys.modules if name.startswith("twinfer.gpu.")]:
        for each in vars(sys.modules[name]).values():
            if isinstance(each, jit.JITFunction):
                found[each.fn.__module__, each.fn.__qualname__] = each

    def forgotten():
        for each in found.values():
            each.hash, each.used_global_vals = None, {}
        return found

    return forgotten


def test_keys_do_not_depend_on_which_kernel_came_first(functions):
    """Else a start compiles again what the one before has left on disk."""
    from twinfer.gpu.kernel_keys import settle_keys, settle_own_keys

    settled = []
    for backwards in (False, True):
        found = functions()
        for name in sorted(found, reverse=backwards):
            settle_keys(found[name])
        settled.append({name: each.cache_key for name, each in found.items()})
    assert len(settled[0]) > 150
    assert settled[0] == settled[1]
    found = functions()
    settle_own_keys()
    assert all(each.hash for each in found.values())
    assert settled[0] == {name: each.cache_key for name, each in found.items()}
