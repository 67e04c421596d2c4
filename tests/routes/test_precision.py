"""ml.precision: TF32 where it was asked for, and a sentence where there is none."""

import mlx.core as mx
import pytest
from conftest import KINDS, Numbers, bits, pair
from cuda_recorder import recording

import mlx_lattice as ml
from mlx_lattice import availability, devices
from mlx_lattice.backends.cuda import thresholds as cuda_thresholds
from mlx_lattice.problem import PASSES, Problem
from mlx_lattice.routes import launch, measure

FACTS = {"c_in": 64, "c_out": 96, "n_in": 5000, "edges": 50000}
SORTED = "sorted_implicit_gemm"


def problem(pass_, precision, dtype="float32") -> Problem:
    return getattr(Problem, pass_)(**FACTS, dtype=dtype, precision=precision)


@pytest.fixture(autouse=True)
def _nothing_asked(monkeypatch):
    monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_PRECISION", None)


@pytest.mark.parametrize("chip", ("h200", "a100"))
@pytest.mark.parametrize("pass_", PASSES)
def test_the_plan_says_how_float32_is_multiplied(pass_, chip):
    exact = ml.select(problem(pass_, "float32"), device=chip)
    rounded = ml.select(problem(pass_, "tf32"), device=chip)
    assert dict(exact.parameters)["products"] == "three TF32"
    assert dict(rounded.parameters)["products"] == "TF32"
    assert exact.precision is None and rounded.precision is None
    assert (exact.plan.tolerance, rounded.plan.tolerance) == (1e-5, 2e-3)
    assert exact.plan.gpu != rounded.plan.gpu
    said = str(ml.explain(problem(pass_, "tf32"), device=chip, pass_=pass_))
    assert "products TF32" in said and "(tf32 allowed)" in said


@pytest.mark.parametrize(
    "chip, dtype, only, why",
    (
        ("h200", "float16", SORTED, "features are float16, not float32"),
        ("cpu", "float32", None, "cpu has no such products, CUDA has"),
        ("m5-max", "float32", None, "metal has no such products, CUDA has"),
        ("h200", "float32", "explicit_gemm", "MLX_ENABLE_TF32 decides"),
        ("h200", "float32", "relation_traversal", "does not run on tensor cores"),
    ),
)
def test_what_it_does_not_change_is_said(chip, dtype, only, why):
    asked = ml.explain(problem("forward", "tf32", dtype), device=chip, only=only)
    assert why in asked.choice.precision and asked.choice.precision in str(asked)
    without = ml.explain(problem("forward", "float32", dtype), device=chip, only=only)
    assert without.choice.precision is None
    assert asked.choice.parameters == without.choice.parameters
    assert asked.choice.plan.tolerance == without.choice.plan.tolerance


def test_blocks_and_the_environment(monkeypatch):
    relation = pair(KINDS[0])[0]
    n, seen = Numbers(relation, 4, 4, 1, "float32"), []

    def asked() -> str:
        with launch.observe(seen.append):
            ml.conv(n.x, n.w, relation)
        return seen[-1].problem.precision

    assert asked() == "float32"
    with ml.precision("tf32"):
        assert asked() == "tf32"
        with ml.precision("float32"):
            assert asked() == "float32"
    monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_PRECISION", "tf32")
    ml.settings.note_change()  # the environment is read at import
    assert asked() == "tf32"
    with ml.precision("float32"):
        assert asked() == "float32"
    monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_PRECISION", "half")
    ml.settings.note_change()
    with pytest.raises(ValueError, match="MLX_LATTICE_PRECISION must be 'float32' or"):
        asked()
    with pytest.raises(ValueError, match="precision must be 'float32' or 'tf32'; got"):
        ml.precision("bf16").__enter__()
    with pytest.raises(ValueError, match="precision must be one of"):
        problem("forward", "bf16")


def test_gradients_inherit_it_from_the_forward_pass():
    relation = pair(KINDS[0])[0]
    n, seen = Numbers(relation, 4, 6, 1, "float32"), []

    def energy(x, w):
        with ml.precision("tf32"):
            return (ml.conv(x, w, relation) ** 2).sum()

    def second(x, w):
        return mx.grad(energy)(x, w).sum()

    with launch.observe(seen.append):
        mx.grad(energy, argnums=(0, 1))(n.x, n.w)
        first = len(seen)
        mx.grad(second, argnums=(0, 1))(n.x, n.w)
        mx.jvp(energy, [n.x, n.w], [n.x, n.w])
        mx.vmap(lambda x: ml.conv(x, n.w, relation))(mx.stack([n.x, n.x]))
    plain = [each for each in seen if each.problem.precision == "float32"]
    assert {each.problem.pass_ for each in seen[:first]} == set(PASSES)
    assert len(seen) - len(plain) > first and len(plain) in (2, 3)  # those of vmap


def test_nothing_changes_where_there_is_no_tf32():
    relation = pair(KINDS[0])[0]
    n = Numbers(relation, 16, 16, 1, "float16")
    y = ml.conv(n.x, n.w, relation)
    with ml.precision("tf32"):
        assert bits(ml.conv(n.x, n.w, relation)) == bits(y)


def test_measured_choices_are_kept_apart():
    keys = {
        measure.key(problem("forward", precision), devices.PROFILES["h200"])
        for precision in ("float32", "tf32")
    }
    assert len(keys) == 2


@pytest.mark.skipif(
    not availability.has_extension(), reason="relations need the extension"
)
@pytest.mark.parametrize("precision, parts", (("float32", 2), ("tf32", 1)))
def test_weights_are_prepared_for_hopper(precision, parts, monkeypatch):
    monkeypatch.setattr(cuda_thresholds, "FLOAT_ELEMENTS", 0)
    relation = pair(KINDS[0], "surface", 300)[0]
    n = Numbers(relation, 9, 40, 1, "float32")
    only = ml.routes.only(f"forward={SORTED}")
    with recording("h200") as launches, ml.precision(precision), only:
        y = ml.conv(n.x, n.w, relation)
        launches.clear()
        ml.conv(n.x, n.w, relation)
        names = [each.name for each in launches]
    assert y.shape == (relation.n_out, 40)
    # Between them nine channels are filled up with zeros.
    assert [name.split("_")[1] for name in names[:3]] == ["tf32", "join", "sorted"]
    assert launches[0].shapes == ((parts * 27, 40, 12),)


@pytest.mark.parametrize("layout", ("mlx", "kernel_major"))
@pytest.mark.parametrize("rows", (100, 2000, 120_000))
@pytest.mark.parametrize("pass_", PASSES[:2])
def test_one_product_prepares_weights_that_have_to_be_turned(pass_, rows, layout):
    facts = FACTS | {"n_in": rows, "edges": 10 * rows, "layout": layout}
    asked = getattr(Problem, pass_)(**facts, dtype="float32", precision="tf32")
    plan = ml.select(asked, device="h200").plan
    turned = (pass_ == "input_grad") == (layout == "mlx")
    prepared = turned and rows > 100
    assert plan.weights == ("prepared once" if prepared else "")
    # Few rows are not worth preparing weights: mma.sync takes them as they are.
    assert plan.variant == ("wide" if prepared or not turned else "mma")


@pytest.mark.parametrize(
    "channels, edges, side",
    [
        ((64, 64), 1_000_000, 64),
        ((64, 64), 2_000_000, 64),
        ((32, 48), 2_000_000, 64),
        ((96, 96), 4_000, 96),  # 64 and 128 would take 128
        ((80, 90), 2_000_000, 96),
        ((192, 192), 8_000, 64),
        ((192, 192), 2_000_000, 96),
        ((128, 128), 8_000, 64),
        ((128, 128), 20_000, 64),
        ((128, 128), 100_000, 128),
        ((256, 256), 20_000, 128),
        ((128, 256), 2_000_000, 128),
    ],
)
def test_weight_gradients_of_one_product_take_tiles_that_channels_and_work_fill(
    channels, edges, side
):
    c_in, c_out = channels

    def plan(precision):
        facts = dict(c_in=c_in, c_out=c_out, n_in=edges // 10, edges=edges)
        asked = Problem.weight_grad(**facts, dtype="float32", precision=precision)
        return ml.select(asked, device="h200").plan

    chosen = plan("tf32")
    assert (chosen.variant, chosen.tile) == ("mma", (side, side))
    blocks = 1 if side == 128 else 3 if side == 64 and edges > 1 << 16 else 2
    assert chosen.gpu.blocks_per_multiprocessor == blocks
    assert plan("float32").tile != (96, 96)
