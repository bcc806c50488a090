"""Worked examples of the lessons on PPO that this project makes real."""

import math
from types import ModuleType

import pytest
import torch
from conftest import MODULES

CLIP = [MODULES["ppo_atari"], MODULES["ppo_continuous"]]
clip_scripts = pytest.mark.parametrize("module", CLIP, ids=["ppo_atari", "ppo_continuous"])

# sign and size of the advantage, ratio region, ratio, objective min(r·A, clip(r)·A), gradient with respect to r
TABLE = [
    (+2.0, "below", 0.5, 1.0, 2.0),  # a good action became rare: pulled back up
    (+2.0, "in", 1.1, 2.2, 2.0),
    (+2.0, "above", 1.5, 2.4, 0.0),  # overshoot is not rewarded
    (-2.0, "above", 1.5, -3.0, -2.0),  # a bad action became likely: pushed back down
    (-2.0, "in", 0.9, -1.8, -2.0),
    (-2.0, "below", 0.5, -1.6, 0.0),  # over-suppression is not rewarded
]


def objective(module: ModuleType, ratio: float, advantage: float, clip: float = 0.2) -> tuple[float, float]:
    """L^CLIP of one sample and its derivative with respect to the ratio."""
    logratio = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss = module.clipped_surrogate_loss(logratio, torch.tensor([advantage], dtype=torch.float64), clip)
    loss.backward()
    assert logratio.grad is not None
    return -float(loss.detach()), -float(logratio.grad[0]) / ratio  # d/dr = d/dlog r · 1/r


@pytest.mark.detail("8")
@clip_scripts
@pytest.mark.parametrize("advantage, region, ratio, value, gradient", TABLE)
def test_six_rows_of_signs_and_ratio_regions(module: ModuleType, advantage, region, ratio, value, gradient) -> None:
    assert objective(module, ratio, advantage) == (pytest.approx(value), pytest.approx(gradient))


@pytest.mark.detail("8")
@clip_scripts
def test_problem_1(module: ModuleType) -> None:
    ratio = 0.60 / 0.40
    assert objective(module, ratio, +2.0) == (pytest.approx(2.4), 0.0)
    assert objective(module, ratio, -2.0) == (pytest.approx(-3.0), pytest.approx(-2.0))


@pytest.mark.detail("8")
@clip_scripts
def test_four_cases_with_clip_02_and_advantage_2(module: ModuleType) -> None:
    values = [objective(module, r, a)[0] for r, a in ((1.3, 2.0), (0.7, 2.0), (1.3, -2.0), (0.7, -2.0))]
    assert values == pytest.approx([2.4, 1.4, -2.6, -1.6])
    active = [objective(module, r, a)[1] != 0 for r, a in ((1.3, 2.0), (0.7, 2.0), (1.3, -2.0), (0.7, -2.0))]
    assert active == [False, True, True, False]


@pytest.mark.detail("8")
@clip_scripts
def test_the_objective_is_a_lower_bound_of_the_surrogate(module: ModuleType) -> None:
    torch.manual_seed(0)
    logratio, advantages = torch.randn(1000), torch.randn(1000)
    for i in range(0, 1000, 50):
        clipped = -module.clipped_surrogate_loss(logratio[i : i + 1], advantages[i : i + 1], 0.2)
        assert float(clipped) <= float(logratio[i].exp() * advantages[i]) + 1e-6


@pytest.mark.detail("8")
@pytest.mark.parametrize("name", ["ppo_atari", "ppo_continuous", "ppo_penalty"])
def test_at_the_old_policy_the_gradient_is_the_vanilla_policy_gradient(name: str) -> None:
    """d/dθ E[r·A] at θ_old = E[d/dθ log π(a|s)·A], for a softmax policy with autograd-free derivatives."""
    module = MODULES[name]
    torch.manual_seed(0)
    theta = torch.randn(4, dtype=torch.float64, requires_grad=True)
    actions, advantages = torch.randint(4, (50,)), torch.randn(50, dtype=torch.float64)
    logprobs = theta.log_softmax(0)[actions]
    logratio = logprobs - logprobs.detach()
    if name == "ppo_penalty":  # KL is at its minimum 0 there, so that it adds nothing
        loss = module.penalized_surrogate_loss(logratio, advantages, torch.zeros(50), torch.tensor(1.0))
    else:
        loss = module.clipped_surrogate_loss(logratio, advantages, 0.2)
    (gradient,) = torch.autograd.grad(-loss, theta)
    probabilities = theta.detach().softmax(0)
    score = torch.eye(4, dtype=torch.float64)[actions] - probabilities  # d log softmax_a / dθ
    torch.testing.assert_close(gradient, (score * advantages[:, None]).mean(0))


@pytest.mark.detail("PEN-beta")
def test_problem_2_the_rule_for_beta(penalty: ModuleType) -> None:
    """Target 6: above 9 β doubles, below 4 it halves, between them it stays."""
    new = {kl: penalty.update_beta(0.1, kl, 6.0) for kl in (10.0, 9.1, 8.9, 8.0, 4.1, 3.9)}
    assert new == pytest.approx({10.0: 0.2, 9.1: 0.2, 8.9: 0.1, 8.0: 0.1, 4.1: 0.1, 3.9: 0.05})


@pytest.mark.detail("PEN-loss")
def test_penalized_objective_by_hand(penalty: ModuleType) -> None:
    """Eq. 8 with β = 3: mean of 1.5·2 - 3·0.1 and 0.5·(-2) - 3·0.2 is 0.55, and its gradient in β is -mean KL."""
    logratio, advantages = torch.tensor([1.5, 0.5]).log(), torch.tensor([2.0, -2.0])
    beta = torch.tensor(3.0, requires_grad=True)
    loss = penalty.penalized_surrogate_loss(logratio, advantages, torch.tensor([0.1, 0.2]), beta)
    assert float(loss.detach()) == pytest.approx(-0.55)
    loss.backward()
    assert beta.grad is not None and float(beta.grad) == pytest.approx(0.15)
