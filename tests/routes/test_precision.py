"""ml.precision: TF32 where it was asked for, and a sentence where there is none."""

import mlx.core as mx
import pytest
from conftest import KINDS, Numbers, pair

import mlx_lattice as ml
from mlx_lattice.problem import PASSES, Problem
from mlx_lattice.routes import launch

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
