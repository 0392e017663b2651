"""GradientClipper with every rule: measuring, clipping, counting and resuming."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_opt.core.numerics.norms import GradientStep, collect_gradients, measure_norms
from lightning_opt.gradients.clipping.gradient_clipper import (
    RULES,
    ClipTally,
    GradientClipper,
    resolve_rule,
)
from lightning_opt.gradients.clipping.norm_rules import (
    Clip,
    ClippingRule,
    FixedNorm,
    Robust,
    State,
    ZClip,
)
from lightning_opt.gradients.clipping.tensor_rules import FixedValue, PerParameter, UnitWise
from tests.gradients.cases import (
    ALL_RULES,
    Net,
    both_paths,
    every_rule,
    set_gradients,
    statistics_of,
    through_a_file,
)
from tests.gradients.references import lognormal_norms
from tests.helpers.models import assert_same_state
from tests.helpers.syncs import take_device_path

NAN, INF = math.nan, math.inf


def flat_gradient(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def steps_of(
    clipper: GradientClipper, net: nn.Module, norms: list[tuple[int, float]]
) -> Iterator[Tensor]:
    """Clip one step for each (seed, norm), and yield its clipped gradient."""
    for seed, norm in norms:
        set_gradients(net, norm, seed)
        clipper.clip()
        yield flat_gradient(net).clone()


def fresh() -> Net:
    torch.manual_seed(0)
    return Net()


def run(
    make: Any, norms: list[tuple[int, float]], state: dict[str, Any] | None = None, kind: str = ""
) -> tuple[list[Tensor], dict[str, Any]]:
    net = fresh()
    with pytest.MonkeyPatch.context() as patch:
        if kind == "device":
            take_device_path(patch)
        clipper = GradientClipper(net, make())
        if state is not None:
            clipper.load_state_dict(state)
        return list(steps_of(clipper, net, norms)), clipper.state_dict()


NORMS = list(enumerate(lognormal_norms(50, seed=7)))


# --- every rule -----------------------------------------------------------------------------------


@every_rule
def test_nonfinite_gradient_is_unchanged_and_enters_no_statistic(make: Any, path: str) -> None:
    clean = NORMS[:30]
    expected, state = run(make, clean)
    steps = list(clean)
    for place, fault in ((0, NAN), (1, INF), (9, -INF), (20, NAN), (34, INF)):
        steps.insert(place, (100 + place, fault))
    gradients, after = run(make, steps)

    assert statistics_of(after["rule"]) == statistics_of(state["rule"])
    assert (after["nonfinite"], after["clipped"]) == (5, state["clipped"])
    remaining = iter(expected)
    for (seed, norm), gradient in zip(steps, gradients, strict=True):
        if math.isfinite(norm):
            assert torch.equal(gradient, next(remaining))
        else:
            net = fresh()
            set_gradients(net, norm, seed)
            torch.testing.assert_close(gradient, flat_gradient(net), rtol=0, atol=0, equal_nan=True)


@both_paths
@every_rule
def test_resumed_run_is_bit_exact_on_the_same_kind_of_device(make: Any, path: str) -> None:
    """On another kind it is equal up to rounding."""
    steps, counts = [*NORMS[:20], (99, NAN), *NORMS[20:40]], ("steps", "nonfinite", "clipped")
    expected, final = run(make, steps, kind=path)
    begun = {cut: run(make, steps[:cut], kind=path) for cut in (2, 33)}
    for cut, kind in product(begun, ("host", "device")):
        rounding = 0.0 if kind == path else 1e-12
        first, state = begun[cut]
        saved = through_a_file(state)
        second, resumed = run(make, steps[cut:], saved, kind=kind)
        assert_same_state(saved, through_a_file(state))
        for ours, theirs in zip(first + second, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=rounding, atol=0.0, equal_nan=True)
        assert [resumed[key] for key in counts] == pytest.approx(
            [final[key] for key in counts], rel=rounding, abs=0.0
        )
        if not rounding:
            assert statistics_of(resumed["rule"]) == statistics_of(final["rule"])


@every_rule
def test_loss_scale_does_not_change_clipping(make: Any, path: str) -> None:
    """With a fused optimizer the gradients still contain the scale."""
    factor = 2.0**16
    plain, scaled, rule = fresh(), fresh(), make()
    names = {p: name for net in (plain, scaled) for name, p in net.named_parameters()}
    tallies = ClipTally(rule), ClipTally(rule)
    for seed, norm in [*NORMS[:20], (99, NAN), *NORMS[20:]]:
        for net, by, tally in zip((plain, scaled), (1.0, factor), tallies, strict=True):
            set_gradients(net, norm, seed)
            for parameter in net.parameters():
                parameter.grad.mul_(by)
            gradients = collect_gradients(net.parameters())
            scale = torch.tensor(by) if path == "device" and by != 1.0 else by
            norms = measure_norms(gradients, grad_scale=scale)
            tally.apply(rule, GradientStep(gradients, norms, scale, names))
        torch.testing.assert_close(
            flat_gradient(scaled) / factor,
            flat_gradient(plain),
            rtol=1e-12 if path == "host" else 1e-7,  # the scale of a loss scaler is float32
            atol=0.0,
            equal_nan=True,
        )
    assert tallies[0].read() == pytest.approx(tallies[1].read(), rel=1e-6, nan_ok=True)


HUGE = {
    **ALL_RULES,
    "robust": Robust,  # the settings of ALL_RULES would accept the new level
    "unit_wise": lambda: UnitWise(exclude=None),
}


@pytest.mark.parametrize("make", HUGE.values(), ids=list(HUGE))
def test_gradient_whose_square_overflows_float32_is_clipped(make: Any) -> None:
    """A finite 2e19 has an L2 norm that overflows in float32."""
    net = fresh().float()
    clipper = GradientClipper(net, make())
    for _ in steps_of(clipper, net, NORMS):
        pass
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 2e19)
    clipper.clip()
    left = flat_gradient(net).double()
    assert left.isfinite().all()
    assert 1e-6 < left.norm() < 100.0
    assert (left > 0.0).all()
    assert clipper.state_dict()["nonfinite"] == 0


# --- against torch --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fixed_norm_equals_torch(dtype: torch.dtype, path: str) -> None:
    ours, theirs = fresh().to(dtype), fresh().to(dtype)
    # torch divides by the norm and 1e-6, and so ends that much below the bound.
    exact = {"rtol": 1e-2 if dtype is torch.bfloat16 else 1e-6 + 1e-6 / 0.7, "atol": 0.0}
    for norm in (0.0, 0.2, 1.0, 7.0, 1e6):
        set_gradients(ours, norm, seed=3)
        set_gradients(theirs, norm, seed=3)
        total = GradientClipper(ours, FixedNorm(0.7)).clip()["norm"]
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.7)
        torch.testing.assert_close(float(total), expected.item(), **exact)
        torch.testing.assert_close(flat_gradient(ours), flat_gradient(theirs), **exact)


# --- complex gradients, and bfloat16 as the default dtype -----------------------------------------


class Filter(nn.Module):
    """Complex weights, as in a Fourier operator, and real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.full((2, 3), 0.5 + 0.5j, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.ones(3))
        self.filter.grad = torch.full((2, 3), 3 - 4j, dtype=torch.complex64)
        self.gain.grad = torch.ones(3)


def test_fixed_value_clamps_real_and_imaginary_parts(path: str) -> None:
    model = Filter()
    GradientClipper(model, FixedValue(2.0)).clip()
    assert model.filter.grad is not None
    assert model.filter.grad.tolist() == [[2 - 2j] * 3] * 2


@pytest.mark.parametrize("rule", [FixedNorm(1.0), PerParameter(), UnitWise(0.1, exclude=None)])
def test_complex_gradients_keep_their_phase(path: str, rule: ClippingRule) -> None:
    model = Filter()
    clipper = GradientClipper(model, rule)
    assert float(clipper.clip()["norm"]) == pytest.approx((6 * 25 + 3) ** 0.5)
    gradient = model.filter.grad
    assert gradient is not None
    torch.testing.assert_close(gradient.angle(), torch.full((2, 3), 3 - 4j).angle())
    if isinstance(rule, UnitWise):  # a row of three of modulus 0.7
        assert gradient[0].abs().norm().item() == pytest.approx(0.1 * 1.5**0.5)


@pytest.fixture
def _bfloat16_by_default() -> Iterator[None]:
    """As Lightning sets it under manual optimisation and ``bf16-true``."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_bfloat16_by_default")
@pytest.mark.parametrize("rule", [FixedNorm(0.1), FixedValue(0.1)])
def test_counts_do_not_use_the_default_dtype(path: str, rule: ClippingRule) -> None:
    model = nn.Linear(3, 2)
    clipper = GradientClipper(model, rule)
    for _ in range(300):  # bfloat16 cannot count beyond 256
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        clipper.clip()
    assert clipper.state_dict()["clipped"] == 300.0


# --- the clipper ----------------------------------------------------------------------------------


def test_clipped_share_excludes_nonfinite_steps(path: str) -> None:
    net = fresh()
    clipper = GradientClipper(net, FixedNorm(1.0))
    list(steps_of(clipper, net, [(0, 2.0), (1, NAN), (2, 0.5), (3, 0.5), (4, INF), (5, 0.25)]))
    read = clipper._tally.read()
    assert read["fraction"] == 0.25
    assert read["nonfinite"] == 2.0
    assert read["norm"] == pytest.approx(0.25)
    assert read["threshold"] == 1.0
    assert read["coefficient"] == 1.0


class Measures(ClippingRule):
    """Clips nothing."""

    def clip(self, step: GradientStep, state: State) -> Clip:
        return Clip()


def test_rule_may_return_an_empty_clip(path: str) -> None:
    net = fresh()
    clipper = GradientClipper(net, Measures())
    list(steps_of(clipper, net, [(0, 2.0), (1, NAN), (2, 0.5)]))
    assert clipper._tally.read() == {"norm": pytest.approx(0.5), "fraction": 0.0, "nonfinite": 1.0}


def test_parameters_of_another_module_raise() -> None:
    with pytest.raises(ValueError, match="must be one of the module's"):
        GradientClipper(fresh(), "robust", nn.Linear(2, 2).parameters())


def test_rules_by_name() -> None:
    for name, kind in RULES.items():
        assert type(resolve_rule(name)) is kind
    rule = ZClip(z=3.0)
    assert resolve_rule(rule) is rule
    wrong: list[Any] = ["robst", None, 1.0, Robust, True]
    for value in wrong:
        with pytest.raises(ValueError, match=r"rule must be one of .*'robust'"):
            resolve_rule(value)
    assert {type(make()) for make in ALL_RULES.values()} == set(RULES.values())
