"""A package that is not part of Twinfer: it adds an op, replaces an implementation, and replaces
a stage.
"""

CALLS = []


def register():
    """The entry point: called once, before the first plan is made."""
    from twinfer.ops import define, implement, set_default
    from twinfer.shared.models.spec import Attention
    from twinfer.shared.models.stages import attention_stage, replace_stage

    @define(activations=("x",))
    def doubled(xp, x: "Array"):  # noqa: F821
        """2 x."""
        return x + x

    for framework in ("jax", "torch"):
        implement("rms_norm", provider="sample", framework=framework)(make_rms_norm(framework))
        set_default("rms_norm", framework, "sample")

    def sample_attention(ops, *args):
        CALLS.append("attention")
        return attention_stage(ops, *args)

    replace_stage(Attention, sample_attention)


def make_rms_norm(framework):
    """An implementation with the op's schema that counts its calls."""
    from twinfer.ops.namespaces import namespace
    from twinfer.ops.reference.dense import rms_norm as reference

    def rms_norm(x: "Array", weight: "Array", eps: "float"):  # noqa: F821
        CALLS.append("rms_norm")
        return reference(namespace(framework), x, weight, eps)

    return rms_norm
