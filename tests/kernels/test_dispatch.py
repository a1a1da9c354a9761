"""An op runs the first implementation of its platform's order that can; a named one runs or fails."""

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import dispatch
from kernels_pallas.blocks import cut_rows
from kernels_pallas.dispatch import Op


def _doubled(x):
    return 2 * x


def _even(x):
    if x.shape[0] % 2:
        raise NotImplementedError(f"an even size is needed, got {x.shape[0]}.")
    return x + x


def _never(x):
    raise NotImplementedError("there is no such unit here.")


def _broken(x):
    raise ValueError("broken")


OP = Op(
    "double",
    {"never": _never, "even": _even, "plain": _doubled, "broken": _broken},
    order={"cpu": ("never", "even", "plain"), "gpu": ("never", "even"), "tpu": ("broken", "plain")},
)


def on(platform):
    device = jax.sharding.AbstractDevice(device_kind="some", num_cores=None, platform=platform)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def test_the_first_that_can_is_taken():
    assert OP(None, jnp.ones(3)).tolist() == [2, 2, 2]
    assert OP(None, jnp.ones(2)).tolist() == [2, 2]


def test_one_that_was_named_never_falls_back():
    assert OP("plain", jnp.ones(2)).tolist() == [2, 2]
    with pytest.raises(NotImplementedError, match="an even size is needed, got 3"):
        OP("even", jnp.ones(3))
    with pytest.raises(
        ValueError, match="double: unknown implementation 'odd'; there are never, even, plain"
    ):
        OP("odd", jnp.ones(3))


def test_where_none_can_every_reason_is_given():
    with on("cuda"), pytest.raises(NotImplementedError, match=r"for gpu .* never: there is .* even: an even"):
        OP(None, jnp.ones(3))


def test_another_error_is_not_a_reason_to_try_the_next():
    with on("tpu"), pytest.raises(ValueError, match="broken"):
        OP(None, jnp.ones(3))


def test_the_platform_is_that_of_the_device_that_is_traced_for():
    assert dispatch.current_platform() == jax.default_backend()
    for platform, name in (("cuda", "gpu"), ("rocm", "gpu"), ("tpu", "tpu")):
        with on(platform):
            assert dispatch.current_platform() == name


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_every_op_explains_itself_without_running(platform):
    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    moves = shape(2, dtype=jnp.int32)
    blocks = cut_rows([3], 4)
    keys = shape(1, 4, 1, 8)
    for op, args in (
        ("slot_copy", ([shape(5, 2, 8, 8), shape(5, 3)], moves, moves)),
        (
            "ssm_scan",
            ("mamba2", keys, keys, shape(1, 4, 2, 8), shape(1, 4, 2), None, shape(1, 2, 8, 8), blocks),
        ),
    ):
        found = dispatch.explain(op, *args, platform=platform)
        assert found.taken is not None
        assert str(found).splitlines()[0] == f"{op} on {platform}: {found.taken}"


def test_an_explanation_refuses_what_is_unknown():
    with pytest.raises(ValueError, match="no op 'double'"):
        dispatch.explain("double")
    with pytest.raises(ValueError, match="slot_copy: unknown platform 'npu'; there are cpu, gpu, tpu"):
        dispatch.explain("slot_copy", platform="npu")
