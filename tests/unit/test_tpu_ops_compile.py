"""Every op with a plain implementation in JAX, compiled by libtpu for a chip that nobody has to own:
what XLA does not have on a TPU is found here. None runs. libtpu is loaded once and for all in a
process, so that they are compiled in one of their own, which is this file run as a script.
"""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")


def main(dtype):
    """As a script: by op, "" or why its last case does not compile, as JSON."""
    import jax

    from twinfer.ops import REGISTRY, resolve
    from twinfer.ops.bindings.jax import bind
    from twinfer.ops.cases import load_all
    from twinfer.ops.testing import TESTING, ci_cases
    from twinfer.tpu.compile_options import options_for
    from twinfer.tpu.platforms import leave_out_libtpu, topology
    from twinfer.tpu.sharding import make_mesh, on

    leave_out_libtpu()
    load_all()
    mesh = make_mesh(topology("v6e:1x1").devices, 1)
    ops, found = bind(resolve("jax", enable=("none",))), {}

    def refusal(op):
        *_, last = ci_cases(TESTING[op], dtype)
        given = last.arguments
        arrays = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on(mesh))
            for name, x in given.items()
            if hasattr(x, "shape")
        }
        fixed = {name: x for name, x in given.items() if name not in arrays}
        lowered = jax.jit(lambda **of: getattr(ops, op)(**of, **fixed)).lower(**arrays)
        try:
            lowered.compile(compiler_options=options_for("tpu"))
        except Exception as error:  # the compiler raises several kinds
            return f"{type(error).__name__}: {error}"[:500]
        return ""

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        for op in REGISTRY:
            if op.name in TESTING and dtype in TESTING[op.name].dtypes:
                found[op.name] = refusal(op.name)
    print(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_op_compiles_for_a_tpu(dtype):
    command = [sys.executable, __file__, dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, cwd="/")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {op: why for op, why in found.items() if why} == {}
    assert {"linear", "paged_attention", "moe_experts", "linear_fp8"} <= set(found)


if __name__ == "__main__":
    main(sys.argv[1])
