"""Keys of kernels in Triton's cache on disk."""

import subprocess
import sys
from types import ModuleType

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


def test_a_module_that_another_thread_imports(monkeypatch):
    """Its names become more while they are looked through."""
    from twinfer.gpu import kernel_keys

    class Slow:
        @property
        def __class__(self):
            setattr(module, f"name_{len(vars(module))}", None)
            return Slow

    module = ModuleType(f"{kernel_keys.__package__}.imported_now")
    module.slow, module.another = Slow(), None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kernel_keys.settle_own_keys()


def test_kernels_that_are_imported_late_have_their_keys_too():
    """A start that finds code on disk imports some as it launches them."""
    code = """
import sys
from twinfer.gpu import kernels
from twinfer.gpu.kernel_keys import settle_own_keys
late = f"{kernels.__name__}.tile_kernel"
before = late in sys.modules
settle_own_keys()
print(before, bool(sys.modules[late].tile_kernel.hash))
"""
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["False", "True"]
