"""The pure functions against independent oracles: explicit sums, closed forms, sampling, finite differences."""

import inspect
import itertools
import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import GAUSSIAN, MODULES, PPO, SCRIPTS
from hypothesis import given, settings
from hypothesis import strategies as st

GAE = [MODULES[name] for name in SCRIPTS]
CLIP = [MODULES["ppo_atari"], MODULES["ppo_continuous"]]


def explicit_gae(rewards, values, next_values, terminations, dones, gamma=0.97, lam=0.9):
    """A_t as the written-out sum of discounted one-step errors up to the end of t's own episode."""
    advantages = np.zeros_like(rewards)
    for n in range(rewards.shape[1]):
        for t in range(len(rewards)):
            weight = 1.0
            for k in range(t, len(rewards)):
                future = 0.0 if terminations[k, n] else gamma * next_values[k, n]
                advantages[t, n] += weight * (rewards[k, n] + future - values[k, n])
                if dones[k, n]:
                    break
                weight *= gamma * lam
    return advantages


def segment(seed, steps=9, envs=3) -> Any:
    rng = np.random.default_rng(seed)
    rewards, values, next_values = rng.normal(size=(3, steps, envs))
    terminations = rng.random((steps, envs)) < 0.2
    truncations = (rng.random((steps, envs)) < 0.2) & ~terminations
    return rewards, values, next_values, terminations, terminations | truncations


def run_gae(module: ModuleType, *data: Any) -> Any:
    """compute_gae on NumPy arrays; the last two arguments are γ and λ."""
    rewards, values, next_values, terminations, dones, gamma, lam = data
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (rewards, values, next_values, terminations, dones)]
    return [x.numpy() for x in module.compute_gae(*tensors, gamma, lam)]


@pytest.mark.detail("5")
@pytest.mark.parametrize("module", GAE, ids=SCRIPTS)
@pytest.mark.parametrize("seed", range(8))
def test_gae_is_the_discounted_sum_within_each_episode(module: ModuleType, seed: int) -> None:
    data = segment(seed)
    advantages, returns = run_gae(module, *data, 0.97, 0.9)
    np.testing.assert_allclose(advantages, explicit_gae(*data), atol=1e-12)
    np.testing.assert_allclose(returns, advantages + data[1], atol=1e-12)


@pytest.mark.detail("5")
@pytest.mark.parametrize("module", GAE, ids=SCRIPTS)
@pytest.mark.parametrize("end", [2, 3, 4], ids=["before the segment's last step", "at it", "never"])
@pytest.mark.parametrize("terminated", [True, False])
def test_gae_at_the_end_of_a_segment(module: ModuleType, end: int, terminated: bool) -> None:
    """λ = 1 and values 0: the advantage is the discounted return, plus γ^k V where an episode was cut, not where it died."""
    rewards = np.array([[1.0], [2.0], [3.0], [4.0]])
    next_values = np.full((4, 1), 10.0)
    done = (np.arange(4) == end)[:, None]
    advantages, _ = run_gae(module, rewards, np.zeros((4, 1)), next_values, done & terminated, done, 0.5, 1.0)
    last = min(end, 3)
    # bootstrapped one-step errors carry γ·V of every step when values are 0, so write the sum out by hand
    expected = sum(0.5**k * (rewards[k, 0] + 5.0 * (not (k == end and terminated))) for k in range(last + 1))
    assert advantages[0, 0] == pytest.approx(expected)


@pytest.mark.detail("5")
@pytest.mark.parametrize("module", GAE, ids=SCRIPTS)
def test_gae_does_not_look_across_a_time_limit(module: ModuleType) -> None:
    rewards, values, next_values, _, _ = segment(0, steps=10, envs=1)
    dones = np.zeros((10, 1), bool)
    dones[4] = dones[9] = True
    before, _ = run_gae(module, rewards, values, next_values, dones & False, dones, 0.99, 0.95)
    rewards[5:] += 100
    after, _ = run_gae(module, rewards, values, next_values, dones & False, dones, 0.99, 0.95)
    np.testing.assert_array_equal(before[:5], after[:5])
    assert (before[5:] != after[5:]).all()


@pytest.mark.detail("5")
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_gae_properties(seed: int, gamma: float, lam: float) -> None:
    module, data = MODULES["ppo_continuous"], segment(seed)
    advantages, _ = run_gae(module, *data, gamma, lam)
    order = np.random.default_rng(seed).permutation(3)
    permuted, _ = run_gae(module, *(x[:, order] for x in data), gamma, lam)
    np.testing.assert_allclose(permuted, advantages[:, order], atol=1e-12)  # environments do not mix
    one_step, _ = run_gae(module, *data, gamma, 0.0)
    rewards, values, next_values, terminations, dones = data
    np.testing.assert_allclose(one_step, rewards + gamma * next_values * ~terminations - values, atol=1e-12)
    all_done, _ = run_gae(module, rewards, values, next_values, terminations, dones | True, gamma, lam)
    np.testing.assert_allclose(all_done, one_step, atol=1e-12)  # nothing to sum beyond one step
    scaled, _ = run_gae(module, *(3 * x for x in data[:3]), *data[3:], gamma, lam)
    np.testing.assert_allclose(scaled, 3 * advantages, atol=1e-9)


@pytest.mark.detail("6")
def test_an_epoch_uses_every_sample_exactly_once_in_a_new_order(ppo: ModuleType) -> None:
    torch.manual_seed(0)
    parts = list(ppo.minibatches(24, 4, 3, torch.device("cpu")))
    assert [len(part) for part in parts] == [6] * 12
    epochs = [torch.cat(parts[i : i + 4]).tolist() for i in (0, 4, 8)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])


@pytest.mark.detail("7")
@given(st.integers(0, 10**6), st.floats(0.1, 100), st.floats(-50, 50))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_normalized_advantages_do_not_depend_on_scale_or_shift(seed: int, scale: float, shift: float) -> None:
    for module in (MODULES[name] for name in ("ppo_atari", *GAUSSIAN)):
        x = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        normal = module.normalize_advantages(x)
        assert float(normal.mean()) == pytest.approx(0, abs=1e-7)
        assert float(normal.square().mean()) == pytest.approx(1, abs=1e-5)
        torch.testing.assert_close(module.normalize_advantages(x * scale + shift), normal, atol=1e-5, rtol=1e-5)
        assert module.normalize_advantages(torch.ones(4)).tolist() == [0, 0, 0, 0]


@pytest.mark.detail("9")
@pytest.mark.parametrize("module", GAE, ids=SCRIPTS)
@pytest.mark.parametrize(
    "new, old, target, clip, expected",
    [
        (1.0, 1.0, 3.0, 0.2, 0.5 * 4.0),  # new = old: both errors are equal
        (2.0, 1.0, 3.0, 0.2, 0.5 * 1.8**2),  # moved towards the target beyond the clip: the clipped error is worse
        (0.0, 1.0, 3.0, 0.2, 0.5 * 9.0),  # moved away: the unclipped error is worse
        (2.0, 1.0, 3.0, None, 0.5 * 1.0),
    ],
)
def test_value_loss_by_hand(module: ModuleType, new, old, target, clip, expected) -> None:
    tensors = [torch.tensor([x, x]) for x in (new, old, target)]
    assert float(module.value_loss(*tensors, clip)) == pytest.approx(expected)


@pytest.mark.detail("9")
@pytest.mark.parametrize("module", CLIP, ids=["ppo_atari", "ppo_continuous"])
def test_clipped_value_has_no_gradient_beyond_the_clip(module: ModuleType) -> None:
    new = torch.tensor([2.0, 1.1], requires_grad=True)
    module.value_loss(new, torch.ones(2), torch.full((2,), 3.0), 0.2).backward()
    assert new.grad is not None and new.grad[0] == 0 and new.grad[1] == pytest.approx(0.5 * (1.1 - 3.0))


@pytest.mark.detail("2")
@pytest.mark.parametrize("gain", [math.sqrt(2), 0.01, 1.0])
def test_layer_init_is_orthogonal_with_its_gain_and_zero_bias(ppo: ModuleType, gain: float) -> None:
    for layer in (torch.nn.Linear(32, 16), torch.nn.Conv2d(4, 8, 3)):
        ppo.layer_init(layer, gain)
        rows = layer.weight.detach().flatten(1)
        torch.testing.assert_close(rows @ rows.T, gain**2 * torch.eye(len(rows)), atol=1e-5, rtol=1e-5)
        assert layer.bias is not None and not layer.bias.any()


@pytest.mark.detail("23")
@pytest.mark.detail("25")
@pytest.mark.parametrize("name", [*GAUSSIAN, "trpo"])
def test_gaussian_logprob_is_the_log_of_the_joint_density(name: str) -> None:
    """One component integrates to 1; two components multiply."""
    logprob = MODULES[name].gaussian_logprob
    grid = torch.linspace(-12, 12, 4801, dtype=torch.float64)[:, None]
    mean, logstd = torch.tensor([0.7], dtype=torch.float64), torch.tensor([0.4], dtype=torch.float64)
    density = logprob(grid, mean, logstd).exp()
    assert float(torch.trapezoid(density, grid[:, 0])) == pytest.approx(1, abs=1e-9)
    assert float(torch.trapezoid(density * grid[:, 0], grid[:, 0])) == pytest.approx(0.7, abs=1e-9)
    variance = torch.trapezoid(density * (grid[:, 0] - 0.7) ** 2, grid[:, 0])
    assert float(variance) == pytest.approx(math.exp(0.8), abs=1e-6)
    means, logstds = torch.randn(5, 3), torch.tensor([-0.5, 0.0, 0.5])
    actions = torch.randn(5, 3)
    parts = sum(logprob(actions[:, i : i + 1], means[:, i : i + 1], logstds[i : i + 1]) for i in range(3))
    torch.testing.assert_close(logprob(actions, means, logstds), parts)


@pytest.mark.detail("PEN-KL")
def test_kl_divergence_by_integration_and_of_independent_components(penalty: ModuleType) -> None:
    def side(mean: list[float], std: list[float]):
        return torch.tensor([mean], dtype=torch.float64), torch.tensor([std], dtype=torch.float64).log()

    old, new = side([0.3], [0.8]), side([-0.5], [1.7])
    x = torch.linspace(-20, 20, 20001, dtype=torch.float64)[:, None]
    log_old, log_new = (penalty.gaussian_logprob(x, *s) for s in (old, new))
    integral = torch.trapezoid(log_old.exp() * (log_old - log_new), x[:, 0])
    assert float(penalty.kl_divergence(old, new)) == pytest.approx(float(integral), abs=1e-9)
    assert float(penalty.kl_divergence(old, old)) == 0
    assert float(penalty.kl_divergence(old, new)) != pytest.approx(float(penalty.kl_divergence(new, old)), abs=1e-2)
    two_old, two_new = side([0.3, 1.0], [0.8, 0.5]), side([-0.5, 2.0], [1.7, 0.6])
    parts = penalty.kl_divergence(old, new) + penalty.kl_divergence(side([1.0], [0.5]), side([2.0], [0.6]))
    torch.testing.assert_close(penalty.kl_divergence(two_old, two_new), parts)


@pytest.mark.detail("PEN-beta")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.floats(1e-4, 1e4), st.floats(0, 1e3), st.floats(1e-6, 10))
def test_beta_moves_against_the_miss_by_a_factor_of_two_within_its_bounds(
    beta: float, kl: float, target: float
) -> None:
    update = MODULES["ppo_penalty"].update_beta
    new = update(beta, kl, target)
    assert 1e-4 <= new <= 1e4 and new / beta <= 2 and beta / new <= 2
    assert (new - beta) * (kl - target) >= 0  # too far raises it, too little lowers it
    assert update(beta, target, target) == beta
    assert update(beta, 2 * target, target) >= new >= update(beta, target / 2, target)


@pytest.mark.parametrize("shift, scale", [(0.0, 1.0), (1e4, 1e-2), (-3.0, 1e3)])
@pytest.mark.detail("28")
def test_normalizer_equals_numpy_on_the_concatenated_stream(gaussian: ModuleType, shift: float, scale: float) -> None:
    rng = np.random.default_rng(0)
    batches = [rng.normal(shift, scale, (n, 3)) for n in (1, 7, 1, 40, 2)]
    stats = gaussian.Normalizer(3)
    stats.count = 0.0  # the prior of mean 0, variance 1 is weighted by 1e-4 rows; without it NumPy must be met exactly
    for batch in batches:
        stats.update(batch)
    everything = np.concatenate(batches)
    assert stats.count == len(everything)
    np.testing.assert_allclose(stats.mean, everything.mean(0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(stats.var, everything.var(0), rtol=1e-6)


@pytest.mark.detail("28")
def test_normalizer_state_survives_and_holds_only_numbers(gaussian: ModuleType) -> None:
    stats, copy = gaussian.Normalizer(2), gaussian.Normalizer(2)
    stats.update(np.random.default_rng(0).normal(size=(9, 2)))
    state = stats.state_dict()
    assert all(isinstance(x, float | list) for x in state.values())
    copy.load_state_dict(state)
    for batch in np.random.default_rng(1).normal(size=(3, 4, 2)):
        stats.update(batch)
        copy.update(batch)
    assert copy.state_dict() == stats.state_dict()


def test_the_scripts_agree_on_what_gae_takes(name: str) -> None:
    expected = "rewards values next_values terminations dones gamma gae_lambda".split()
    assert list(inspect.signature(MODULES[name].compute_gae).parameters) == expected


@pytest.mark.parametrize("name", [*PPO, "trpo"])
def test_health_names_the_metric_and_a_remedy(name: str) -> None:
    health = MODULES[name].health
    fine = {
        "losses/clipfrac": 0.1,
        "losses/approx_kl": 0.01,
        "losses/entropy": 1.0,
        "losses/explained_variance": 0.5,
    }
    assert list(health(fine, True, 0.15)) == []
    for key, bad, flat in [
        ("losses/clipfrac", 0.95, False),
        ("losses/clipfrac", 0.0, True),
        ("losses/approx_kl", 0.5, False),
        ("losses/entropy", 0.001, False),
        ("losses/explained_variance", -0.5, False),
        ("charts/clipped_actions", 0.9, False),
        ("charts/policy_std", 50.0, False),
    ]:
        ((metric, sentence),) = health(fine | {key: bad}, flat, 0.15)
        assert metric == key and key in sentence and f"{bad:.3g}" in sentence
        assert "--" in sentence or "check" in sentence
    assert list(health(fine | {"losses/clipfrac": 0.0}, False, 0.15)) == []
    assert list(health({"losses/explained_variance": math.nan}, True, 0.15)) == []
    assert list(health(fine | {"losses/entropy": -5.0, "charts/policy_std": 0.2}, True, 0.15)) == []


def test_combinations_of_signs_are_complete() -> None:
    """Guards the table in test_lessons.py: three ratio regions times two signs."""
    from test_lessons import TABLE

    assert {(np.sign(a), region) for a, region, *_ in TABLE} == set(
        itertools.product((1, -1), ("below", "in", "above"))
    )
