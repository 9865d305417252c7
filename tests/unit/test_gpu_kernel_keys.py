"""Keys of kernels in Triton's cache on disk."""

import pytest

pytest.importorskip("triton")


def test_keys_do_not_depend_on_which_kernel_came_first(forget_keys):
    """Else a start compiles again what the one before has left on disk."""
    from twinfer.gpu.kernel_keys import settle_keys, settle_own_keys

    settled = []
    for backwards in (False, True):
        found = forget_keys()
        for name in sorted(found, reverse=backwards):
            settle_keys(found[name])
        settled.append({name: each.cache_key for name, each in found.items()})
    assert len(settled[0]) > 150
    assert settled[0] == settled[1]
    found = forget_keys()
    settle_own_keys()
    assert all(each.hash for each in found.values())
    assert settled[0] == {name: each.cache_key for name, each in found.items()}
