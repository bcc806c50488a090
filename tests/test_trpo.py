"""TRPO: its linear algebra against dense matrices, finite differences and closed forms, its step from outside."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
from conftest import MODULES, SMALL, run, run_small, scalars

trpo = MODULES["trpo"]
Policy = Callable[[torch.Tensor], Any]
KINDS = pytest.mark.parametrize("discrete", [False, True], ids=["Box", "Discrete"])


def tiny(discrete: bool, seed: int = 0, rows: int = 7) -> tuple[Policy, torch.Tensor]:
    """θ -> π_θ of a small tanh network in float64 for some observations, and a θ."""
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    theta = torch.randn(4 * 4 + 5 * 2 + (0 if discrete else 2), generator=generator, dtype=torch.float64) * 0.7

    def policy(theta: torch.Tensor) -> Any:
        hidden = (obs @ theta[:12].view(3, 4) + theta[12:16]).tanh()
        out = hidden @ theta[16:24].view(4, 2) + theta[24:26]
        return trpo.Categorical(out) if discrete else trpo.Gaussian(out, theta[26:])

    return policy, theta


def distribution(pi: Any) -> Any:
    if isinstance(pi, trpo.Categorical):
        return torch.distributions.Categorical(logits=pi.outputs)
    std = pi.logstd.exp().expand_as(pi.outputs)
    return torch.distributions.Independent(torch.distributions.Normal(pi.outputs, std), 1)


def detached(pi: Any) -> Any:
    return type(pi)(*(x.detach().clone() for x in pi))


def library_kl(old: Any, new: Any) -> torch.Tensor:
    """KL(old‖new) of each row by torch.distributions."""
    return torch.distributions.kl_divergence(distribution(old), distribution(new))


def dense(matvec: Callable[[torch.Tensor], torch.Tensor], n: int) -> torch.Tensor:
    return torch.stack([matvec(row) for row in torch.eye(n, dtype=torch.float64)], 1)


# ------------------------------------------------------------------------------------------------------ Fisher products


@pytest.mark.detail("TRPO-FVP")
@KINDS
def test_products_equal_the_dense_fisher_matrix_of_scores(discrete: bool) -> None:
    """F = E_s E_a[∇log π ∇log πᵀ], the expectation over actions in full: a sum, or Gauss-Hermite quadrature."""
    policy, theta = tiny(discrete)
    pi = policy(theta)
    if discrete:
        actions, weights = torch.eye(2, dtype=torch.float64)[:, None].expand(2, 7, 2), pi.outputs.softmax(-1).T
    else:
        import numpy as np

        x, w = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(8))
        grid = torch.cartesian_prod(x, x)
        actions = pi.outputs + pi.logstd.exp() * grid[:, None]
        weights = (torch.cartesian_prod(w, w).prod(-1) / w.sum() ** 2)[:, None].expand(-1, 7)
    index = actions.argmax(-1) if discrete else actions
    scores = torch.func.jacrev(lambda theta: distribution(policy(theta)).log_prob(index))(theta)
    fisher = (scores.flatten(0, 1).T * weights.flatten()) @ scores.flatten(0, 1) / 7
    products = dense(trpo.fisher_vector_product(policy, theta, 0.0), len(theta))
    assert fisher.abs().max() > 0.1
    torch.testing.assert_close(products, fisher, atol=1e-10, rtol=1e-8)


@pytest.mark.detail("TRPO-FVP")
@KINDS
def test_products_equal_a_finite_difference_hessian_of_the_kl_from_old_to_new(discrete: bool) -> None:
    policy, theta = tiny(discrete)
    old, h, n = policy(theta), 1e-3, len(theta)
    kl = lambda shift: float(library_kl(old, policy(theta + shift)).mean())
    axes = torch.eye(n, dtype=torch.float64) * h
    hessian = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(i + 1):
            a, b = axes[i], axes[j]
            hessian[i, j] = hessian[j, i] = (kl(a + b) - kl(a - b) - kl(b - a) + kl(-a - b)) / (4 * h * h)
    products = dense(trpo.fisher_vector_product(policy, theta, 0.0), n)
    torch.testing.assert_close(products, hessian, atol=2e-5, rtol=1e-4)


@pytest.mark.detail("TRPO-FVP")
@KINDS
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_products_equal_double_backprop_and_forward_mode(discrete: bool, damping: float) -> None:
    policy, theta = tiny(discrete, seed=1)
    old = policy(theta)
    v = torch.randn_like(theta)
    point = theta.clone().requires_grad_()
    kl = library_kl(old, policy(point)).mean()
    (gradient,) = torch.autograd.grad(kl, point, create_graph=True)
    (expected,) = torch.autograd.grad(gradient @ v, point)
    product = trpo.fisher_vector_product(policy, theta, damping)(v)
    torch.testing.assert_close(product, expected + damping * v)
    jv = torch.func.jvp(policy, (theta,), (v,))[1]  # vᵀFv as the weighted square of the change of the distribution
    if discrete:
        p = old.outputs.softmax(-1)
        square = (p * jv.outputs.square()).sum(-1) - (p * jv.outputs).sum(-1).square()
    else:
        square = (jv.outputs / old.logstd.exp()).square().sum(-1) + 2 * jv.logstd.square().sum()
    assert float(v @ product) == pytest.approx(float(square.mean() + damping * v @ v))


@pytest.mark.detail("TRPO-FVP")
@KINDS
def test_products_are_symmetric_and_positive_for_the_real_agent(discrete: bool) -> None:
    torch.manual_seed(0)
    agent, obs = trpo.Agent(5, 3, discrete), torch.randn(64, 5)
    theta = torch.cat([p.detach().flatten() for p in trpo.policy_parameters(agent).values()])
    matvec = trpo.fisher_vector_product(policy_of(agent, obs), theta, 0.0)
    for _ in range(10):
        u, v = torch.randn(2, len(theta))
        assert float(v @ matvec(v)) > 0
        assert float(u @ matvec(v)) == pytest.approx(float(v @ matvec(u)), rel=1e-3, abs=1e-4)
    torch.testing.assert_close(matvec(2 * u - v), 2 * matvec(u) - matvec(v), atol=1e-4, rtol=1e-3)


def policy_of(agent: Any, obs: torch.Tensor) -> Policy:
    return lambda theta: trpo.policy_at(agent, obs, theta)


def step_and_rest(gradient: torch.Tensor, matvec: Callable[[torch.Tensor], torch.Tensor], iters: int) -> Any:
    """The natural step within a KL of 0.01, and what is left of the gradient where it ends."""
    x = trpo.conjugate_gradient(matvec, gradient, iters)
    product = matvec(x)
    return trpo.natural_step(x, product, 0.01), (gradient - product).norm() / gradient.norm()


@pytest.mark.detail("S2")
def test_the_product_of_all_processes_is_the_mean_of_theirs() -> None:
    """Equal shares: what `global_mean` averages is the product over the whole batch."""
    torch.manual_seed(0)
    agent, obs = trpo.Agent(4, 2, False), torch.randn(32, 4)
    theta = torch.cat([p.detach().flatten() for p in trpo.policy_parameters(agent).values()])
    v = torch.randn_like(theta)
    whole, *shares = (trpo.fisher_vector_product(policy_of(agent, x), theta, 0.1)(v) for x in (obs, obs[:16], obs[16:]))
    torch.testing.assert_close(whole, (shares[0] + shares[1]) / 2)


@pytest.mark.detail("24")
def test_the_log_std_is_inside_the_fisher_matrix_with_curvature_2() -> None:
    agent = trpo.Agent(3, 2, False)
    named = trpo.policy_parameters(agent)
    assert any(p is agent.actor_logstd for p in named.values())
    theta = torch.cat([p.detach().flatten() for p in named.values()])
    zero = {name: torch.zeros_like(p) for name, p in named.items()}
    v = torch.cat([x.flatten() for x in (zero | {"actor_logstd": torch.tensor([1.0, 0.0])}).values()])
    product = trpo.fisher_vector_product(policy_of(agent, torch.randn(8, 3)), theta, 0.0)(v)
    torch.testing.assert_close(product, 2 * v)


# --------------------------------------------------------------------------------------------------- conjugate gradient


@pytest.mark.detail("TRPO-CG")
@pytest.mark.parametrize("n", [1, 2, 5, 10])
def test_cg_solves_a_quadratic_in_n_iterations(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    root = torch.randn(n, n, generator=generator, dtype=torch.float64)
    matrix = root @ root.T + torch.eye(n, dtype=torch.float64)
    answer = torch.randn(n, generator=generator, dtype=torch.float64)
    x = trpo.conjugate_gradient(matrix.mv, matrix @ answer, n, 1e-10)
    torch.testing.assert_close(x, answer, atol=1e-6, rtol=0)


@pytest.mark.detail("TRPO-CG")
def test_cg_minimises_the_quadratic_over_growing_krylov_spaces() -> None:
    """After k iterations x is the best point of span{b, Ab, ..., A^(k-1)b}: solved here by least squares."""
    torch.manual_seed(0)
    root = torch.randn(8, 8, dtype=torch.float64)
    matrix, b = root @ root.T + torch.eye(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    for k in range(1, 6):
        basis = torch.linalg.qr(torch.stack([torch.linalg.matrix_power(matrix, i) @ b for i in range(k)], 1))[0]
        best = basis @ torch.linalg.solve(basis.T @ matrix @ basis, basis.T @ b)
        torch.testing.assert_close(trpo.conjugate_gradient(matrix.mv, b, k), best, atol=1e-8, rtol=1e-6)


@pytest.mark.detail("TRPO-CG")
def test_cg_stops_at_its_tolerance_and_at_once_when_there_is_nothing_to_solve() -> None:
    calls: list[torch.Tensor] = []
    scale = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)

    def matvec(v: torch.Tensor) -> torch.Tensor:
        calls.append(v)
        return scale * v

    b = torch.ones(3, dtype=torch.float64)
    x = trpo.conjugate_gradient(matvec, b, 100, 1e-3)
    assert (b - scale * x).norm() <= 1e-3 * b.norm() and len(calls) <= 5
    small = trpo.conjugate_gradient(lambda v: scale * v, 1e-12 * b, 100, 1e-10)
    torch.testing.assert_close(small, 1e-12 / scale, atol=0, rtol=1e-8)  # the tolerance is relative
    assert trpo.conjugate_gradient(lambda v: scale * v, torch.zeros(3, dtype=torch.float64), 10).tolist() == [0, 0, 0]


@pytest.mark.detail("TRPO-CG")
@pytest.mark.detail("TRPO-degenerate")
@pytest.mark.parametrize("curvature", [0.0, -1.0, math.nan])
def test_cg_keeps_what_it_has_when_curvature_is_not_positive(curvature: float) -> None:
    assert trpo.conjugate_gradient(lambda v: curvature * v, torch.ones(3), 10).tolist() == [0, 0, 0]
    scale = torch.tensor([1.0, curvature])
    step, _ = step_and_rest(torch.tensor([2.0, 0.1]), lambda v: scale * v, 10)  # no solution, or no minimum
    assert step.isfinite().all()


# --------------------------------------------------------------------------------------------------------- natural step


@pytest.mark.detail("TRPO-step")
def test_natural_gradient_of_a_gaussian_bandit_is_the_closed_form() -> None:
    """θ = (mean, log std) of one normal action: F = diag(1/σ², 2), so F⁻¹g = (σ² g_μ, g_logσ / 2)."""
    theta = torch.tensor([0.3, -0.6], dtype=torch.float64)
    std = theta[1].exp()
    policy = lambda theta: trpo.Gaussian(theta[:1].expand(50, 1), theta[1:])
    gradient = torch.tensor([0.7, -0.2], dtype=torch.float64)
    natural = torch.stack([std**2 * gradient[0], gradient[1] / 2])
    matvec = trpo.fisher_vector_product(policy, theta, 0.0)
    torch.testing.assert_close(trpo.conjugate_gradient(matvec, gradient, 2), natural)
    step, residual = step_and_rest(gradient, matvec, 2)
    torch.testing.assert_close(step, natural * torch.sqrt(0.02 / (gradient @ natural)))
    assert float(residual) < 1e-9
    kl = library_kl(policy(theta), policy(theta + step)).mean()
    assert float(kl) == pytest.approx(0.01, rel=0.15)  # to second order


@pytest.mark.detail("TRPO-step")
def test_of_all_steps_of_that_length_in_kl_it_gains_most() -> None:
    policy, theta = tiny(False)
    matrix = dense(trpo.fisher_vector_product(policy, theta, 0.1), len(theta))
    torch.manual_seed(0)
    gradient = torch.randn_like(theta)
    step, residual = step_and_rest(gradient, matrix.mv, 60)
    assert float(0.5 * step @ matrix @ step) == pytest.approx(0.01) and float(residual) < 1e-8
    for _ in range(100):
        other = torch.randn_like(theta)
        other *= torch.sqrt(0.02 / (other @ matrix @ other))
        assert gradient @ other < gradient @ step


@pytest.mark.detail("TRPO-degenerate")
@pytest.mark.parametrize(
    "gradient, curvature",
    [(0.0, 1.0), (1.0, 0.0), (1.0, -1.0), (1.0, math.nan), (math.nan, 1.0), (math.inf, 1.0), (1e30, 1.0)],
)
def test_without_a_usable_direction_there_is_no_step(gradient: float, curvature: float) -> None:
    step, _ = step_and_rest(torch.full((4,), gradient), lambda v: curvature * v, 10)
    assert step.tolist() == [0, 0, 0, 0]


# ---------------------------------------------------------------------------------------------------------- line search


def search(surrogates: list[float], kls: list[float], steps: int = 3, decay: float = 0.5) -> tuple[Any, Any, Any]:
    """A line search that meets these values, the first pair at the start: its result, what it tried, and its start."""
    theta, step, tried = torch.tensor([1.0, 0.1]), torch.tensor([1.0, -3.0]), []

    def measure(at: torch.Tensor) -> dict[str, torch.Tensor]:
        tried.append(float((at - theta)[0]))
        i = len(tried) - 1
        return {"policy_loss": -torch.tensor(surrogates[i]), "kl": torch.tensor(kls[i]), "entropy": torch.tensor(7.0)}

    return trpo.line_search(measure, theta, step, 0.01, decay, steps), tried, theta


@pytest.mark.detail("TRPO-search")
def test_line_search_takes_the_first_candidate_that_passes_both_tests() -> None:
    found, tried, theta = search([0.5, 0.9, 0.4, 0.6, 0.8], [0, 0.02, 0.001, 0.01, 0.001])
    assert tried == [0.0, 1.0, 0.5, 0.25] and (found.fraction, found.backtracks) == (0.25, 2)
    assert torch.equal(found.theta, theta + 0.25 * torch.tensor([1.0, -3.0]))
    assert found.improvement == pytest.approx(0.1)
    measured = {name: float(x) for name, x in found.measured.items()}
    assert measured == pytest.approx({"policy_loss": -0.6, "kl": 0.01, "entropy": 7.0})


@pytest.mark.detail("TRPO-search")
@pytest.mark.parametrize(
    "surrogates, kls",
    [
        ([0.5, 0.4, 0.5, 0.3, 0.1], [0.0, 0, 0, 0, 0]),  # no improvement, equal is none
        ([0.5, 0.9, 0.9, 0.9, 0.9], [0.0, 0.0101, 1, 1, 1]),  # outside the trust region
        ([0.5, math.nan, math.inf, -math.inf, math.nan], [0.0, 0, 0, 0, 0]),
        ([0.5, 0.9, 0.9, 0.9, 0.9], [0.0, math.nan, math.inf, math.nan, math.nan]),
        ([math.nan, 0.9, 0.9, 0.9, 0.9], [0.0, 0, 0, 0, 0]),
    ],
)
def test_line_search_returns_the_old_parameters_bit_for_bit_when_none_passes(surrogates: Any, kls: Any) -> None:
    found, tried, theta = search(surrogates, kls)
    assert len(tried) == 5 and (found.fraction, found.backtracks, found.improvement) == (0.0, 3, 0.0)
    assert torch.equal(found.theta, theta) and found.measured["kl"] == 0


# -------------------------------------------------------------------------------------------------------- distributions


@pytest.mark.detail("TRPO-search")
def test_gaussian_kl_by_integration() -> None:
    double = lambda *x: torch.tensor(x, dtype=torch.float64)
    side = lambda mean, std: trpo.Gaussian(double(mean)[None], double(std).log())
    old, new = side(0.3, 0.8), side(-0.5, 1.7)
    x = torch.linspace(-20, 20, 20001, dtype=torch.float64)[:, None]
    log_old, log_new = (pi.log_prob(x) for pi in (old, new))
    assert float(torch.trapezoid(log_old.exp(), x[:, 0])) == pytest.approx(1, abs=1e-9)
    integral = torch.trapezoid(log_old.exp() * (log_old - log_new), x[:, 0])
    assert float(old.kl(new)) == pytest.approx(float(integral), abs=1e-9)
    assert float(old.kl(old)) == 0
    assert float(new.kl(old)) != pytest.approx(float(integral), abs=1e-2)


def acted(agent: Any, obs: torch.Tensor) -> torch.Tensor:
    """Actions [..., A] that training would take for observations [..., D]."""
    with torch.no_grad():
        pi = agent.policy(obs)
    return torch.from_numpy(pi.choose((pi.outputs + pi.noise(*pi.outputs.shape)).numpy())).float()


@pytest.mark.detail("TRPO-search")
def test_categorical_kl_by_hand_and_by_sampling() -> None:
    old = trpo.Categorical(torch.tensor([[0.5, 0.25, 0.25]]).log() + 3)
    new = trpo.Categorical(torch.tensor([[0.25, 0.5, 0.25]]).log() - 1)
    assert float(old.kl(new)) == pytest.approx(0.25 * math.log(2), rel=1e-5)
    agent = trpo.Agent(1, 3, True)
    with torch.no_grad():
        agent.actor[-1].bias += old.outputs[0]
    torch.manual_seed(0)
    actions = acted(agent, torch.zeros(200_000, 1))
    assert actions.mean(0).tolist() == pytest.approx([0.5, 0.25, 0.25], abs=0.005)
    ratio = old.log_prob(actions) - new.log_prob(actions)
    assert float(ratio.mean()) == pytest.approx(0.25 * math.log(2), abs=0.005)
    extreme = trpo.Categorical(torch.tensor([[1000.0, 0.0, -1000.0]]))
    assert float(extreme.kl(extreme)) == 0 and float(extreme.entropy()) == 0


@KINDS
def test_log_prob_kl_entropy_and_samples_agree_with_the_library(discrete: bool) -> None:
    torch.manual_seed(0)
    agent, other = (trpo.Agent(3, 4, discrete) for _ in range(2))
    for parameter in (p for a in (agent, other) for p in a.parameters()):
        nn.init.normal_(parameter, std=0.3)
    obs = torch.randn(6, 3)
    old, new = (detached(a.policy(obs)) for a in (agent, other))
    actions = acted(agent, obs)
    index = actions.argmax(-1) if discrete else actions
    torch.testing.assert_close(new.log_prob(actions), distribution(new).log_prob(index))
    torch.testing.assert_close(old.kl(new), library_kl(old, new))
    torch.testing.assert_close(old.entropy(), distribution(old).entropy().mean())
    mode = torch.from_numpy(old.choose(old.outputs.numpy())).float()
    assert torch.equal(mode, torch.eye(4)[old.outputs.argmax(-1)] if discrete else old.outputs)


@pytest.mark.detail("13")
@pytest.mark.detail("24")
@pytest.mark.detail("26")
def test_the_agent_is_two_tanh_networks_and_one_log_std() -> None:
    """Its layers, what depends on which parameter, and by hand what it computes."""
    torch.manual_seed(0)
    agent = trpo.Agent(5, 2, False)
    for network, outputs in ((agent.actor, 2), (agent.critic, 1)):
        assert [type(layer).__name__ for layer in network] == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
        assert [tuple(p.shape) for p in network.parameters()][::2] == [(64, 5), (64, 64), (outputs, 64)]
    assert agent.actor_logstd.tolist() == [0, 0] and agent.actor_logstd.requires_grad
    assert trpo.Agent(5, 2, True).actor_logstd is None
    obs = torch.randn(9, 5)
    agent.values(obs).sum().backward()
    touched = {name for name, p in agent.named_parameters() if p.grad is not None and bool(p.grad.abs().sum() > 0)}
    assert touched == {name for name, _ in agent.named_parameters() if name.startswith("critic.")}
    agent.zero_grad()
    means, logstd = agent.policy(obs)
    (means.sum() + logstd.sum()).backward()
    touched = {name for name, p in agent.named_parameters() if p.grad is not None and bool(p.grad.abs().sum() > 0)}
    assert touched == {name for name, _ in agent.named_parameters() if not name.startswith("critic.")}
    assert logstd.tolist() == [0, 0]
    x = obs
    for i in (0, 2):
        x = torch.tanh(x @ agent.actor[i].weight.T + agent.actor[i].bias)
    torch.testing.assert_close(means, x @ agent.actor[4].weight.T + agent.actor[4].bias)


# ----------------------------------------------------------------------------------------------------------- the update


def batch(discrete: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """An agent and a batch [T, N, ...] that it might have met."""
    torch.manual_seed(3)
    agent = trpo.Agent(3, 2, discrete)
    obs = torch.randn(64, 2, 3)
    actions = acted(agent, obs)
    advantages = actions[..., 0] * obs[..., 0] + 0.1 * torch.randn(64, 2)
    normal = (advantages - advantages.mean()) / advantages.std()
    return agent, {"obs": obs, "actions": actions, "advantages": normal}


def bits(agent: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in agent.named_parameters()}


def make_args(**changes: Any) -> Any:
    return trpo.Args(**{"num_envs": 2, "num_steps": 64, **changes})


@pytest.mark.detail("TRPO-search")
@pytest.mark.detail("TRPO-surrogate")
@pytest.mark.detail("12")
@KINDS
@pytest.mark.parametrize("subsample", [1, 4])
def test_an_update_improves_the_surrogate_within_the_trust_region(discrete: bool, subsample: int) -> None:
    """Both recomputed from the parameters before and after with torch.distributions; the critic is not touched."""
    args = make_args(fvp_subsample=subsample)
    agent, data = batch(discrete)
    index = data["actions"].argmax(-1) if discrete else data["actions"]
    advantages = data["advantages"]
    before, old = bits(agent), detached(agent.policy(data["obs"]))
    metrics = {k: float(v) for k, v in trpo.update_policy(args, agent, data).items()}
    after, new = bits(agent), detached(agent.policy(data["obs"]))
    kl = float(library_kl(old, new).mean())
    assert 0.001 < kl <= args.max_kl * (1 + 1e-4) and metrics["losses/kl"] == pytest.approx(kl, rel=1e-3)
    logratio = distribution(new).log_prob(index) - distribution(old).log_prob(index)
    gain = float((logratio.exp() * advantages).mean() - advantages.mean())
    assert gain > 0.01 and metrics["trpo/improvement"] == pytest.approx(gain, rel=1e-3)
    assert metrics["trpo/expected_improvement"] == pytest.approx(gain / metrics["trpo/step_fraction"], rel=0.3)
    assert metrics["losses/policy_loss"] == pytest.approx(-float((logratio.exp() * advantages).mean()), rel=1e-3)
    assert metrics["losses/old_approx_kl"] == pytest.approx(-float(logratio.mean()), abs=1e-5)
    assert metrics["losses/entropy"] == pytest.approx(float(distribution(new).entropy().mean()), rel=1e-5)
    assert metrics["trpo/failures"] == 0 and 0 <= metrics["trpo/cg_residual"] < 1 and metrics["trpo/gradient_norm"] > 0
    for name in before:
        assert torch.equal(before[name], after[name]) == name.startswith("critic."), name


@pytest.mark.detail("TRPO-degenerate")
@KINDS
def test_an_update_that_fails_leaves_every_bit_and_is_counted(discrete: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    args = make_args()
    agent, data = batch(discrete)
    before = bits(agent)
    zero = trpo.update_policy(args, agent, data | {"advantages": torch.zeros(64, 2)})
    assert float(zero["trpo/gradient_norm"]) == 0 and zero["trpo/step_fraction"] == 0
    overflow = trpo.update_policy(args, agent, data | {"advantages": 1e30 * data["advantages"]})
    assert overflow["trpo/step_fraction"] == 0
    with monkeypatch.context() as patch:  # a wrong direction: nothing along it improves
        forward = trpo.natural_step
        patch.setattr(trpo, "natural_step", lambda *a: -forward(*a))
        worse = trpo.update_policy(args, agent, data)
    assert worse["trpo/step_fraction"] == 0 and worse["trpo/backtracks"] == 10 and float(worse["losses/kl"]) == 0
    for metrics in (zero, overflow, worse):
        assert not math.isnan(metrics.pop("trpo/gradient_norm"))  # it may be too large a number, and be said so
        assert all(math.isfinite(value) for value in metrics.values())
        assert float(metrics["trpo/improvement"]) == 0
    assert int(agent.failures) == 3 and float(worse["trpo/failures"]) == 3
    for name, p in agent.named_parameters():
        assert torch.equal(p, before[name])


@pytest.mark.detail("TRPO-degenerate")
@KINDS
def test_no_damping_is_no_nan(discrete: bool) -> None:
    """Few rows, many parameters, products only to float32: F is singular, and CG runs on long after it is done."""
    args = make_args(cg_damping=0.0, cg_iters=200)
    agent, data = batch(discrete)
    for _ in range(3):
        metrics = trpo.update_policy(args, agent, {name: x[:2] for name, x in data.items()})
        assert all(math.isfinite(value) for value in metrics.values())
    assert all(p.isfinite().all() for p in agent.parameters())


@pytest.mark.detail("TRPO-FVP")
def test_the_fisher_matrix_of_every_kth_step_and_the_rest_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    args = make_args(fvp_subsample=4)
    agent, data = batch(False)
    obs = data["obs"]
    theta = torch.cat([p.detach().flatten() for p in trpo.policy_parameters(agent).values()])
    expected = trpo.fisher_vector_product(policy_of(agent, obs[::4]), theta, args.cg_damping)(theta)
    whole = trpo.fisher_vector_product(policy_of(agent, obs), theta, args.cg_damping)(theta)
    solve, products = trpo.conjugate_gradient, []

    def watched(matvec: Any, *rest: Any) -> Any:
        products.append(matvec(theta))
        return solve(matvec, *rest)

    monkeypatch.setattr(trpo, "conjugate_gradient", watched)
    trpo.update_policy(args, agent, data)
    torch.testing.assert_close(products[0], expected)
    assert (expected - whole).norm() > 100 * (products[0] - expected).norm() + 1e-4


def test_more_cg_iterations_leave_a_smaller_residual() -> None:
    residuals = []
    for iters in (1, 3, 10):
        metrics = trpo.update_policy(make_args(cg_iters=iters), *batch(False))
        residuals.append(float(metrics["trpo/cg_residual"]))
    assert residuals[0] > 2 * residuals[1] > 4 * residuals[2] > 0


@pytest.mark.detail("TRPO-surrogate")
def test_the_surrogate_by_hand() -> None:
    """Three actions whose probabilities went from 1/4 to 1/2, 1/4 to 1/8 and 1/2 to 3/8: ratios 2, 1/2 and 3/4."""
    old = trpo.Categorical(torch.tensor([0.25, 0.25, 0.5]).log().expand(3, 3) - 2)
    new = trpo.Categorical(torch.tensor([0.5, 0.125, 0.375]).log().expand(3, 3) + 5)  # logits are free of a constant
    data = {"actions": torch.eye(3), "advantages": torch.tensor([3.0, -4.0, 8.0])}
    plain, weighted = (trpo.surrogate(old, new, data, weight) for weight in (0.0, 0.5))
    assert float(plain["policy_loss"]) == pytest.approx(-(6 - 2 + 6) / 3, rel=1e-5)
    entropy = -sum(p * math.log(p) for p in (0.5, 0.125, 0.375))
    assert float(weighted["policy_loss"] - plain["policy_loss"]) == pytest.approx(-0.5 * entropy, rel=1e-5)
    assert float(plain["entropy"]) == pytest.approx(entropy, rel=1e-5)
    kl = 0.25 * math.log(0.25 / 0.5) + 0.25 * math.log(0.25 / 0.125) + 0.5 * math.log(0.5 / 0.375)
    assert float(plain["kl"]) == pytest.approx(kl, rel=1e-5)
    logratio = [math.log(2), math.log(0.5), math.log(0.75)]
    assert float(plain["old_approx_kl"]) == pytest.approx(-sum(logratio) / 3, rel=1e-5)
    assert float(plain["approx_kl"]) == pytest.approx((2 + 0.5 + 0.75 - 3 - sum(logratio)) / 3, rel=1e-5)
    narrow = trpo.Gaussian(torch.zeros(2, 1), torch.zeros(1))
    wide = trpo.Gaussian(torch.zeros(2, 1), torch.tensor([math.log(2.0)]))  # half the density in the middle
    middle = trpo.surrogate(narrow, wide, {"actions": torch.zeros(2, 1), "advantages": torch.tensor([3.0, -4.0])}, 0.0)
    assert float(middle["policy_loss"]) == pytest.approx(-0.5 * (3 - 4) / 2, rel=1e-5)


@pytest.mark.detail("TRPO-surrogate")
def test_the_entropy_weight_is_part_of_the_surrogate() -> None:
    stds = []
    for weight in (0.0, 1.0):
        agent, data = batch(False)
        trpo.update_policy(make_args(ent_coef=weight), agent, data)
        stds.append(float(agent.actor_logstd.detach().mean()))
    assert stds[1] > stds[0] + 0.01


# -------------------------------------------------------------------------------------------------------------- the run


class Update(NamedTuple):
    """What an update of the policy met and left: π before and after, all parameters after, and Â."""

    old: Any
    new: Any
    left: dict[str, torch.Tensor]
    advantages: torch.Tensor


def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: Any) -> tuple[list[Update], Any, Path]:
    """Train inside this process; returns its updates, the agent and the folder."""
    updates: list[Update] = []
    agents: list[Any] = []
    update = trpo.update_policy

    def watched(args: Any, agent: Any, data: dict[str, torch.Tensor]) -> Any:
        agents.append(agent)
        old = detached(agent.policy(data["obs"]))
        metrics = update(args, agent, data)
        updates.append(Update(old, detached(agent.policy(data["obs"])), bits(agent), data["advantages"]))
        return metrics

    monkeypatch.setattr(trpo, "update_policy", watched)
    trpo.train(trpo.parse_args([*map(str, flags), "--run-dir", str(tmp_path)]))
    (folder,) = tmp_path.iterdir()
    return updates, agents[0], folder


PENDULUM = "--env-id Pendulum-v1 --num-envs 2 --num-steps 256 --num-minibatches 8".split()


@pytest.mark.detail("TRPO-search")
@pytest.mark.parametrize("env_id", ["Pendulum-v1", "CartPole-v1"])
def test_kl_recomputed_from_the_parameters_is_within_the_limit_in_every_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env_id: str
) -> None:
    flags = [*PENDULUM, "--env-id", env_id, "--total-timesteps", 512 * 12, "--max-kl", 0.02, "--cg-damping", 0.001]
    updates, agent, folder = train(tmp_path, monkeypatch, *flags)
    double = lambda pi: type(pi)(*(x.double() for x in pi))
    kls = [float(library_kl(double(update.old), double(update.new)).mean()) for update in updates]
    assert len(kls) == 12 and max(kls) <= 0.02 * (1 + 1e-4) and min(kls) > 0
    log = {tag: [value for _, value in events] for tag, events in scalars(folder).items()}
    assert log["losses/kl"] == pytest.approx(kls, rel=1e-2)
    assert sum(fraction > 0 for fraction in log["trpo/step_fraction"]) >= 11 and log["trpo/failures"][-1] <= 1
    tags = "improvement expected_improvement backtracks cg_residual gradient_norm".split()
    assert all(len(log[f"trpo/{tag}"]) == 12 for tag in tags) and min(log["trpo/improvement"]) >= 0
    common = "value_loss policy_loss entropy old_approx_kl approx_kl explained_variance".split()
    assert {f"losses/{tag}" for tag in common} <= set(log)
    assert ("charts/policy_std" in log) == (env_id == "Pendulum-v1")


@pytest.mark.detail("26")
def test_fitting_the_values_leaves_the_policy_as_the_step_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates, agent, folder = train(tmp_path, monkeypatch, *PENDULUM, "--total-timesteps", 512)
    left = updates[0].left
    for name, p in agent.named_parameters():
        assert torch.equal(p, left[name]) != name.startswith("critic."), name
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    moments = [state["exp_avg"] for state in saved["optimizer"]["state"].values()]
    assert sum(x.numel() for x in moments) == sum(p.numel() for p in agent.critic.parameters())


@pytest.mark.detail("7")
def test_advantages_are_normalised_over_the_whole_batch_or_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag, normal in (("--norm-adv", True), ("--no-norm-adv", False)):
        with monkeypatch.context() as patch:
            (update,), *_ = train(tmp_path / flag, patch, *PENDULUM, "--total-timesteps", 512, flag)
        advantages = update.advantages
        is_normal = abs(float(advantages.mean())) < 1e-5 and abs(float(advantages.std()) - 1) < 1e-2
        assert is_normal == normal and advantages.shape == (256, 2)


@pytest.mark.parametrize("env", ["Trunc", "DiscreteAction"])
def test_it_runs_and_evaluates_on_box_and_discrete_actions(tmp_path: Path, env: str) -> None:
    folder = run_small("trpo", "--env-id", f"counting_envs:{env}-v0", cwd=tmp_path)
    log = scalars(folder)
    assert [step for step, _ in log["losses/kl"]] == [128, 256, 384, 512]
    assert {value for _, value in log["charts/episodic_return"]} == {5.0}
    assert ("charts/clipped_actions" in log) == (env == "Trunc")
    played = run("trpo", "--evaluate", folder, "--eval-episodes", 3, "--no-eval-sample", cwd=tmp_path)
    assert "over 3 episodes, most probable actions" in played.stdout, played.stderr


@pytest.mark.parametrize(
    "env", ["DiscreteObs", "DictObs", "TupleObs", "Matrix", "Unbounded", "OneStep", "Zero", "Huge"]
)
def test_it_runs_on_every_kind_of_space_and_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: str) -> None:
    flags = [*SMALL["trpo"], "--env-id", f"counting_envs:{env}-v0"]
    updates, agent, _ = train(tmp_path, monkeypatch, *flags)
    assert len(updates) == 4 and all(p.isfinite().all() for p in agent.parameters())


@pytest.mark.detail("TRPO-degenerate")
def test_bad_numbers_of_the_trust_region_are_refused() -> None:
    for flag in ("max_kl", "cg_iters", "line_search_decay", "fvp_subsample", "update_epochs"):
        with pytest.raises(trpo.UsageError, match=f"--{flag.replace('_', '-')} 0 must be greater than 0"):
            trpo.check_args(make_args(**{flag: 0}))
    for flag, value in (
        ("cg_damping", -0.1),
        ("line_search_steps", -1),
        ("line_search_decay", 1.5),
        ("max_kl", math.nan),
    ):
        with pytest.raises(trpo.UsageError, match=f"--{flag.replace('_', '-')}"):
            trpo.check_args(make_args(**{flag: value}))
    trpo.check_args(make_args(cg_damping=0.0, line_search_steps=0))


def test_spaces_that_it_cannot_take_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import gymnasium as gym

    space = gym.spaces.MultiDiscrete([2, 3])
    make: Any = type(gym.make("counting_envs:Trunc-v0").unwrapped)
    monkeypatch.setattr(trpo.gym, "make", lambda *a, **k: make(action=space))
    with pytest.raises(trpo.UsageError, match="MultiDiscrete.*Discrete spaces and Box spaces of floats"):
        trpo.probe_env(make_args())


@pytest.mark.detail("TRPO-degenerate")
def test_a_policy_that_stays_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A trust region too small for float32 to step in: every iteration says so, the run goes on, nothing is NaN."""
    flags = [*SMALL["trpo"], "--total-timesteps", 256, "--max-kl", 1e-30]
    updates, _, folder = train(tmp_path, monkeypatch, *flags)
    assert capsys.readouterr().out.count("the policy stays as it is") == 2
    assert [value for _, value in scalars(folder)["trpo/failures"]] == [1, 2]
    first, second = (update.left for update in updates)
    assert all(torch.equal(first[name], second[name]) == (not name.startswith("critic.")) for name in first)
