"""The documents do what they say: their code runs, their links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


ENGINE_BINDINGS = """
import jax

from twinfer.tpu.binding import bind_on
from twinfer.tpu.sharding import make_mesh


@implement("scaled_relu", provider="raw", framework="torch", opaque=True)
def scaled_relu_raw(x: Array, scale: float) -> Array:
    return scaled_relu_clamp(x, scale)


@implement("scaled_relu", provider="over", framework="torch", inplace=True)
def scaled_relu_over(x: Array, scale: float) -> Array:
    return x.copy_(scaled_relu_clamp(x, scale))


(case,) = cases("float32")
x = from_numpy(case.arguments["x"]).to(device)
for provider in ("native", "clamp", "raw", "over"):
    plan = resolve("torch", {"scaled_relu": (provider,)})
    for road in ({}, {"compiling": True}, {"wrap": True}):
        torch._dynamo.reset()  # what it compiles below is one piece of code, over and over
        ops = torch_binding.bind(plan, **road)
        calls = [lambda x: ops.scaled_relu(x, 0.3)]
        # Inductor's road but for the code: no graph breaks, and results on fake tensors.
        if not (provider == "over" and road == {"wrap": True}):  # AOTAutograd does not take a donated argument
            calls.append(torch.compile(calls[0], fullgraph=True, backend="aot_eager"))
        for call in calls:
            out = to_numpy(call(x.clone()))
            assert judge("scaled_relu", case.arguments, [out]).passed, (provider, road)
ops = bind_on(resolve("jax"), make_mesh(jax.devices()[:1], 1))
out = jax.jit(lambda x: ops.scaled_relu(x, scale=0.3))(jnp.asarray(case.arguments["x"]))
assert judge("scaled_relu", case.arguments, [np.asarray(out)]).passed
print("bound by the engines on", x.device.type)
"""


@pytest.mark.slow
def test_adding_an_op_works_when_followed_literally(tmp_path, device):
    """In both engines, and through all their bindings: plain, opaque, in place, and as
    operators. On a GPU too.
    """
    blocks = python_blocks("adding-an-op.md")
    program = tmp_path / "new_op.py"
    program.write_text("\n\n".join([*blocks, ENGINE_BINDINGS]))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    *judged, plan, on_jax, on_torch, bound = done.stdout.splitlines()
    assert len(judged) == 6
    assert plan.startswith("plan hash ")
    assert on_jax == "jax runs native chosen by native"
    assert on_torch == "torch runs clamp chosen by default"
    assert bound == f"bound by the engines on {device}"


FAMILY_OF_THE_PAGE = """
import sys
import types

from twinfer.shared.models import families

module = types.ModuleType("twinfer.shared.models.families.phi3")
module.__package__ = families.__name__
exec(compile({source!r}, "adding-a-model.md", "exec"), module.__dict__)
sys.modules[module.__name__] = module
families.FAMILIES.clear()
families.FAMILIES |= {line}
assert families.family_of("Phi3ForCausalLM") is module.FAMILY
"""


@pytest.mark.slow
def test_adding_a_model_works_when_followed_literally(tmp_path):
    """The family of the page, and no other, runs in both engines as in transformers. It is that
    of the repository.
    """
    source, line, check = python_blocks("adding-a-model.md")
    families = ROOT / "shared" / "models" / "families"
    assert source == (families / "phi3.py").read_text()
    assert len(source.splitlines()) <= 40
    assert line.strip("{}\n") in (families / "__init__.py").read_text()
    program = tmp_path / "new_family.py"
    program.write_text(FAMILY_OF_THE_PAGE.format(source=source, line=line.strip()) + check)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["torch True", "jax True"]


def python_blocks(name):
    """The Python code of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL)


def test_links_and_paths_resolve():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "check_docs.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
