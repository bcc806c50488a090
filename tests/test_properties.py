"""The pure functions by what must hold of them: other ways to the same number, scale, shift, order, limiting cases."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from conftest import GAUSSIAN, MODULES, PPO, SCRIPTS
from hypothesis import given, settings
from hypothesis import strategies as st

VECTORS = [*GAUSSIAN, "trpo"]  # observations and actions are vectors
PLAYING = [*PPO, "trpo"]
CLIP = ["ppo_atari", "ppo_continuous"]
few = settings(max_examples=8, deadline=None, derandomize=True)
seeds = st.integers(0, 10**6)
playing = pytest.mark.parametrize("name", PLAYING)
vectors = pytest.mark.parametrize("name", VECTORS)
tensor = torch.tensor


def having(function: str) -> pytest.MarkDecorator:
    """Every script with a function of this name."""
    return pytest.mark.parametrize("name", [name for name in SCRIPTS if hasattr(MODULES[name], function)])


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------------------------- advantages


def episodes(seed: int, steps: int = 10, envs: int = 3) -> dict[str, torch.Tensor]:
    """A segment in which V of a step's successor is V of the next row, but at an episode end a number of its own."""
    rng = np.random.default_rng(seed)
    rewards, values, ends = (torch.from_numpy(x) for x in rng.normal(size=(3, steps, envs)))
    kind = torch.from_numpy(rng.integers(0, 6, (steps, envs)))  # 0 dies, 1 is cut, others go on
    dones, terminations = (kind < 2).double(), (kind == 0).double()
    after = torch.cat([values[1:], ends[:1]])
    next_values = torch.where(dones > 0, ends, after)
    return dict(rewards=rewards, values=values, next_values=next_values, terminations=terminations, dones=dones)


def mixed_returns(data: dict[str, torch.Tensor], gamma: float, lam: float) -> torch.Tensor:
    """The other definition of GAE: the mean, with weights (1 - λ)λ^(n-1), of the n-step advantages, the longest of
    which (to the end of the episode or of the segment) has the weight that remains."""
    steps, envs = data["rewards"].shape
    advantages = torch.zeros(steps, envs, dtype=torch.float64)
    for i in range(envs):
        rewards, values, following, died, done = (data[k][:, i].tolist() for k in data)
        for t in range(steps):
            last = next((k for k in range(t, steps) if done[k]), steps - 1)
            for n in range(1, last - t + 2):
                end = t + n - 1
                bootstrap = 0.0 if died[end] else gamma**n * following[end]
                n_step = sum(gamma**k * rewards[t + k] for k in range(n)) + bootstrap - values[t]
                advantages[t, i] += (lam ** (n - 1) if end == last else (1 - lam) * lam ** (n - 1)) * n_step
    return advantages


@pytest.mark.detail("5")
@having("compute_gae")
@few
@given(seeds, st.floats(0.1, 1), st.floats(0, 1))
def test_gae_is_the_weighted_mean_of_n_step_advantages(name: str, seed: int, gamma: float, lam: float) -> None:
    data = episodes(seed)
    advantages, returns = MODULES[name].compute_gae(*data.values(), gamma, lam)
    torch.testing.assert_close(advantages, mixed_returns(data, gamma, lam))
    torch.testing.assert_close(returns - advantages, data["values"])


@pytest.mark.detail("5")
@having("compute_gae")
@few
@given(seeds, st.floats(0, 1), st.floats(-5, 5))
def test_gae_in_its_limits(name: str, seed: int, lam: float, shift: float) -> None:
    gae, data = MODULES[name].compute_gae, episodes(seed)
    rewards, values, following, died, done = data.values()
    none, every = torch.zeros_like(done), torch.ones_like(done)
    # without a future there is the reward alone
    torch.testing.assert_close(gae(*data.values(), 0.0, lam)[0], rewards - values)
    torch.testing.assert_close(gae(rewards, values, following, every, every, 0.9, lam)[1], rewards)
    # λ = 1 and no end: the target is the discounted return of the whole rest, whatever the values within it are
    rest = torch.stack([sum(0.9 ** (k - t) * rewards[k] for k in range(t, 10)) for t in range(10)])  # type: ignore[misc]
    rest += torch.stack([0.9 ** (10 - t) * following[-1] for t in range(10)])
    chained = torch.cat([values[1:], following[-1:]])
    torch.testing.assert_close(gae(rewards, values, chained, none, none, 0.9, 1.0)[1], rest)
    # γ = 1 and no death: values that are all too high by the same amount change no advantage, and every target
    plain, shifted = (gae(rewards, values + s, following + s, none, done, 1.0, lam) for s in (0.0, shift))
    torch.testing.assert_close(shifted[0], plain[0])
    torch.testing.assert_close(shifted[1], plain[1] + shift)


@pytest.mark.detail("5")
@having("compute_gae")
@few
@given(seeds)
def test_gae_keeps_environments_and_episodes_apart(name: str, seed: int) -> None:
    gae, data = MODULES[name].compute_gae, episodes(seed)
    whole = gae(*data.values(), 0.97, 0.9)[0]
    order = torch.randperm(3, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(gae(*(x[:, order] for x in data.values()), 0.97, 0.9)[0], whole[:, order])
    for i in range(3):
        cuts = [0, *(t + 1 for t in range(10) if data["dones"][t, i]), 10]
        for first, last in zip(cuts, cuts[1:], strict=False):  # each episode alone has the advantages that it has here
            alone = gae(*(x[first:last, i : i + 1] for x in data.values()), 0.97, 0.9)[0] if first < last else None
            assert alone is None or torch.equal(alone, whole[first:last, i : i + 1])


@pytest.mark.detail("7")
@having("normalize_advantages")
@few
@given(seeds, st.floats(0.1, 100), st.floats(-50, 50))
def test_normalised_advantages_are_standard_scores(name: str, seed: int, scale: float, shift: float) -> None:
    normalize, x = MODULES[name].normalize_advantages, draw(seed, 40)
    normal = normalize(x)
    np.testing.assert_allclose(normal.numpy(), (x.numpy() - np.mean(x.numpy())) / np.std(x.numpy()), atol=1e-6)
    torch.testing.assert_close(normalize(scale * x + shift), normal, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(normalize(-x), -normal)
    constant = normalize(torch.full((8,), shift, dtype=torch.float64))
    torch.testing.assert_close(constant, torch.zeros_like(constant), atol=1e-5, rtol=0)  # and not NaN


@pytest.mark.detail("6")
@having("minibatches")
@few
@given(seeds, st.integers(1, 6), st.integers(1, 8))
def test_minibatches_partition_the_samples(name: str, seed: int, count: int, length: int) -> None:
    torch.manual_seed(seed)
    size = 4 * count * length
    parts = list(MODULES[name].minibatches(size, count, 3, torch.device("cpu")))
    assert [len(part) for part in parts] == [size // count] * 3 * count
    epochs = [torch.cat(parts[i * count : (i + 1) * count]) for i in range(3)]
    assert all(torch.equal(epoch.sort()[0], torch.arange(size)) for epoch in epochs)
    if size >= 16:  # two orders agree by chance once in 16! times
        assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[1], epochs[2])
        assert not any(torch.equal(epoch, torch.arange(size)) for epoch in epochs)


# --------------------------------------------------------------------------------------------------------------- losses


@pytest.mark.detail("8")
@having("clipped_surrogate_loss")
@few
@given(seeds, st.floats(0.05, 0.5), st.floats(0.1, 10))
def test_the_clipped_surrogate_is_flat_where_it_should_be(name: str, seed: int, clip: float, scale: float) -> None:
    """Per sample and by its slope: the derivative in the ratio is A inside and on the way back, 0 beyond."""
    loss = MODULES[name].clipped_surrogate_loss
    logratio, advantages = 0.5 * draw(seed, 60), draw(seed + 1, 60)
    point = logratio.clone().requires_grad_()
    (slope,) = torch.autograd.grad(-60 * loss(point, advantages, clip), point)
    for lr, a, s in zip(logratio.tolist(), advantages.tolist(), slope.tolist(), strict=True):
        ratio = math.exp(lr)
        beyond = ratio > 1 + clip if a > 0 else ratio < 1 - clip
        assert s == (0 if beyond else pytest.approx(ratio * a))
    torch.testing.assert_close(loss(logratio, scale * advantages, clip), scale * loss(logratio, advantages, clip))
    assert float(loss(torch.zeros(60), advantages, clip)) == pytest.approx(-float(advantages.mean()))


@pytest.mark.detail("9")
@having("value_loss")
@few
@given(seeds, st.floats(0.1, 1), st.floats(-10, 10), st.floats(0.5, 4))
def test_the_value_loss_by_scale_shift_and_limits(
    name: str, seed: int, clip: float, shift: float, scale: float
) -> None:
    loss, triple = MODULES[name].value_loss, draw(seed, 3, 50)
    new, old, target = triple
    plain, clipped = loss(*triple, None), loss(*triple, clip)
    assert float(plain) == pytest.approx(0.5 * float(np.square(new.numpy() - target.numpy()).mean()))
    torch.testing.assert_close(loss(*(triple + shift), clip), clipped)
    torch.testing.assert_close(loss(*(scale * triple), scale * clip), scale**2 * clipped)
    torch.testing.assert_close(loss(*-triple, clip), clipped)
    torch.testing.assert_close(loss(*triple, 1e9), plain)
    assert float(clipped) > float(plain)  # the worse of two errors
    # a value that has jumped onto its target still pays for what lies beyond the clip
    beyond = ((target - old).abs() - clip).relu()
    assert float(loss(target, old, target, clip)) == pytest.approx(0.5 * float(beyond.square().mean()))


# -------------------------------------------------------------------------------------------------------- distributions


@pytest.mark.detail("23")
@pytest.mark.detail("25")
@vectors
@few
@given(seeds, st.floats(0.2, 5), st.floats(-3, 3))
def test_the_gaussian_density_moves_and_stretches(name: str, seed: int, scale: float, shift: float) -> None:
    logprob = MODULES[name].gaussian_logprob
    actions, means = draw(seed, 2, 6, 3)
    logstd = 0.5 * draw(seed + 1, 3)
    plain = logprob(actions, means, logstd)
    torch.testing.assert_close(logprob(actions + shift, means + shift, logstd), plain)
    stretched = logprob(scale * actions, scale * means, logstd + math.log(scale))
    torch.testing.assert_close(stretched, plain - 3 * math.log(scale))  # the volume of three components
    torch.testing.assert_close(logprob(*(x.flip(-1) for x in (actions, means, logstd))), plain)
    covariance = np.diag(np.exp(2 * logstd.numpy()))
    for row in range(6):  # the density of a vector: determinant and inverse of the covariance matrix
        off = (actions - means)[row].numpy()
        exponent = off @ np.linalg.inv(covariance) @ off
        assert float(plain[row]) == pytest.approx(-0.5 * (exponent + np.linalg.slogdet(2 * np.pi * covariance)[1]))


@pytest.mark.detail("PEN-KL")
@few
@given(seeds, st.floats(0.2, 5), st.floats(-3, 3))
def test_the_kl_of_the_penalty_by_invariance_and_by_matrices(seed: int, scale: float, shift: float) -> None:
    kl = MODULES["ppo_penalty"].kl_divergence
    old, new = ((draw(seed + i, 5, 3), 0.5 * draw(seed + 10 + i, 3)) for i in (0, 1))
    plain = kl(old, new)
    assert (plain > 0).all() and kl(old, old).tolist() == [0] * 5
    moved = [(scale * means + shift, logstd + math.log(scale)) for means, logstd in (old, new)]
    torch.testing.assert_close(kl(*moved), plain)  # no unit of measurement is in it
    torch.testing.assert_close(kl(*((means.flip(-1), logstd.flip(-1)) for means, logstd in (old, new))), plain)
    a, b = (np.diag(np.exp(2 * logstd.numpy())) for _, logstd in (old, new))
    for row in range(5):
        off, inverse = (new[0] - old[0])[row].numpy(), np.linalg.inv(b)
        trace, log_ratio = np.trace(inverse @ a), np.linalg.slogdet(b)[1] - np.linalg.slogdet(a)[1]
        assert float(plain[row]) == pytest.approx(0.5 * (trace + off @ inverse @ off - 3 + log_ratio))


@pytest.mark.detail("PEN-KL")
def test_the_kl_of_the_penalty_by_a_large_sample_of_the_old_policy() -> None:
    """E_old[log π_old - log π]: the mean over samples of the first argument, not of the second."""
    old, new = (tensor([[0.5, -1.0]]), tensor([0.1, -0.4])), (tensor([[0.0, -0.5]]), tensor([-0.3, 0.2]))
    normals = [torch.distributions.Normal(means, logstd.exp()) for means, logstd in (old, new)]
    torch.manual_seed(0)
    actions = normals[0].sample((400_000,))[:, 0]
    gap = (normals[0].log_prob(actions) - normals[1].log_prob(actions)).sum(-1)
    error = float(gap.std()) / 400_000**0.5
    assert float(MODULES["ppo_penalty"].kl_divergence(old, new)) == pytest.approx(float(gap.mean()), abs=4 * error)


@pytest.mark.detail("PEN-beta")
@pytest.mark.parametrize(
    "beta, kl, target, expected",
    [
        (2.0, 0.0299, 0.045, 1.0),  # a target of 0.045 lets KL be from 0.03 to 0.0675
        (2.0, 0.0301, 0.045, 2.0),
        (2.0, 0.0674, 0.045, 2.0),
        (2.0, 0.0676, 0.045, 4.0),
        (1.5e-4, 0.0, 1.0, 1e-4),
        (1e-4, 0.0, 1.0, 1e-4),
        (6e3, 9.0, 1.0, 1e4),
        (1e4, 9.0, 1.0, 1e4),
        (0.0, 9.0, 1.0, 0.0),  # no penalty stays none
        (0.0, 0.0, 1.0, 0.0),
    ],
)
def test_beta_by_hand(beta: float, kl: float, target: float, expected: float) -> None:
    assert MODULES["ppo_penalty"].update_beta(beta, kl, target) == pytest.approx(expected)


@pytest.mark.detail("PEN-beta")
@few
@given(st.floats(1e-2, 10), st.floats(1e-2, 1))
def test_beta_brings_a_policy_that_answers_to_it_to_the_target(stiffness: float, target: float) -> None:
    """A KL of stiffness / β: from either side β ends, and stays, where KL is within a factor of 1.5 of the target."""
    update = MODULES["ppo_penalty"].update_beta
    for beta in (1e-2, 1e2):
        for _ in range(30):
            beta = update(beta, stiffness / beta, target)
        assert target / 1.51 <= stiffness / beta <= 1.51 * target


@pytest.mark.detail("28")
@vectors
@few
@given(seeds, st.floats(-100, 100), st.floats(0.1, 10))
def test_the_normaliser_does_not_care_how_rows_come(name: str, seed: int, shift: float, scale: float) -> None:
    rows = shift + scale * np.random.default_rng(seed).normal(size=(24, 2))
    means, variances = [], []
    for order in (rows, rows[::-1]):
        for parts in (1, 4, 24):
            stats = MODULES[name].Normalizer(2)
            for part in np.split(order, parts):
                stats.update(part)
            means.append(stats.mean)
            variances.append(stats.var)
    np.testing.assert_allclose(means, np.tile(rows.mean(0), (6, 1)), rtol=1e-4, atol=1e-4 * scale)
    # the prior weighs 1e-4 rows at 0, so that a far-off mean adds its square times 1e-4 / 24
    prior = np.square(rows.mean(0)) * 1e-4 / 24
    np.testing.assert_allclose(variances, np.tile(rows.var(0) + prior, (6, 1)), rtol=1e-3)


# ------------------------------------------------------------------------------------------------- initialisation, loss


@pytest.mark.detail("2")
@having("layer_init")
def test_layers_keep_lengths_up_to_their_gain(name: str) -> None:
    """An orthogonal layer turns and scales: √2 where nothing is said, otherwise the gain; it adds nothing."""
    torch.manual_seed(0)
    init = MODULES[name].layer_init
    for options, gain in (({}, math.sqrt(2)), ({"gain": 0.01}, 0.01), ({"gain": 1.0}, 1.0)):
        layer = init(torch.nn.Linear(24, 24), **options)
        x = torch.randn(50, 24)
        torch.testing.assert_close(layer(x).norm(dim=1), gain * x.norm(dim=1), atol=1e-5, rtol=1e-5)
        assert not layer(torch.zeros(1, 24)).any()


@pytest.mark.detail("2")
@playing
def test_heads_and_hidden_layers_have_their_gains(name: str) -> None:
    """Largest singular value of each layer; hidden ones √2, the policy's last 0.01, the value's last 1."""
    module = MODULES[name]
    torch.manual_seed(0)
    agent = {"ppo_atari": lambda: module.Agent(6), "trpo": lambda: module.Agent(5, 2, False)}.get(
        name, lambda: module.Agent(5, 2)
    )()
    layers = [m for m in agent.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)]
    gains = [float(torch.linalg.matrix_norm(m.weight.detach().flatten(1), 2)) for m in layers]
    root = math.sqrt(2)
    expected = [root] * 4 + [0.01, 1] if name == "ppo_atari" else [root, root, 0.01, root, root, 1]
    assert gains == pytest.approx(expected, rel=1e-3)
    assert not any(m.bias.any() for m in layers if m.bias is not None)


def build(name: str) -> tuple[Any, Any, torch.Tensor, torch.Tensor, Any, tuple[torch.Tensor, ...]]:
    """(module, agent, obs, actions, log density of actions, what ppo_loss takes beside) of a PPO script, 12 rows."""
    module = MODULES[name]
    torch.manual_seed(0)
    if name == "ppo_atari":
        agent = module.Agent(4)
        obs, actions = torch.randint(0, 256, (12, 4, 84, 84), dtype=torch.uint8), torch.randint(4, (12,))
        with torch.no_grad():
            policy: Any = torch.distributions.Categorical(probs=torch.softmax(agent(obs)[0].logits, -1))
        return module, agent, obs, actions, policy.log_prob(actions), ()
    agent, obs, actions = module.Agent(3, 2), torch.randn(12, 3), torch.randn(12, 2)
    with torch.no_grad():
        means = agent(obs)[0]
    density = torch.distributions.Normal(means, 1.0).log_prob(actions).sum(-1)
    extra = (means, torch.zeros(12, 2)) if name == "ppo_penalty" else ()
    return module, agent, obs, actions, density, extra


@pytest.mark.detail("12")
@pytest.mark.parametrize("name", PPO)
def test_debug_variables_of_known_ratios(name: str) -> None:
    """Ratios around the clip range: the fraction counts |r - 1| > ε, not |log r|; the KLs are those of the ratios."""
    module, agent, obs, actions, density, extra = build(name)
    ratios = tensor([0.79, 0.81, 0.815, 1.19, 1.21, 1.25] * 2)
    zeros = torch.zeros(12)
    args = module.Args(**({"clip_coef": 0.2} if name in CLIP else {}))
    _, stats = module.ppo_loss(args, agent, obs, actions, density - ratios.log(), zeros, zeros, zeros, *extra)
    seen = dict(zip(module.STATS, stats.tolist(), strict=True))
    mean_log = math.log(0.79 * 0.81 * 0.815 * 1.19 * 1.21 * 1.25) / 6
    assert seen["losses/old_approx_kl"] == pytest.approx(-mean_log, abs=1e-6)
    assert seen["losses/approx_kl"] == pytest.approx(6.065 / 6 - 1 - mean_log, abs=1e-6)
    if name in CLIP:
        assert seen["losses/clipfrac"] == pytest.approx(0.5)
    assert seen["losses/policy_loss"] == pytest.approx(0, abs=1e-7)
    entropy = math.log(4) if name == "ppo_atari" else 2 * 1.4189385
    assert seen["losses/entropy"] == pytest.approx(entropy, abs=1e-2)


@pytest.mark.detail("12")
@pytest.mark.parametrize("name", PPO)
def test_the_estimate_of_kl_is_never_negative_and_half_the_square_of_a_small_step(name: str) -> None:
    module, agent, obs, actions, density, extra = build(name)
    zeros = torch.zeros(12)
    key = module.STATS.index("losses/approx_kl")

    def seen(logratio: torch.Tensor) -> float:
        _, stats = module.ppo_loss(module.Args(), agent, obs, actions, density - logratio, zeros, zeros, zeros, *extra)
        return float(stats[key].detach())

    small, large = 1e-2 * draw(1, 12).float(), 2 * draw(1, 12).float().abs()
    assert seen(zeros) == pytest.approx(0, abs=3e-7)
    assert seen(small) == pytest.approx(0.5 * float(small.square().mean()), rel=0.03)
    assert seen(large) > 0.5 and seen(-large) > 0.5


@pytest.mark.detail("10")
@pytest.mark.parametrize("name", PPO)
def test_the_loss_is_linear_in_its_coefficients_with_the_right_signs(name: str) -> None:
    """More value loss is worse by its weight, more entropy is better by its own."""
    module, agent, obs, actions, density, extra = build(name)
    advantages, returns, values = draw(2, 3, 12).float()

    def loss(**weights: float) -> tuple[float, dict[str, float]]:
        args = module.Args(**{"vf_coef": 0.0, "ent_coef": 0.0, **weights})
        result, stats = module.ppo_loss(args, agent, obs, actions, density, advantages, returns, values, *extra)
        return float(result.detach()), dict(zip(module.STATS, stats.tolist(), strict=True))

    base, stats = loss()
    assert base == pytest.approx(-float(advantages.mean()), abs=1e-5)
    assert stats["losses/policy_loss"] == pytest.approx(base, abs=1e-6)
    assert stats["losses/value_loss"] > 0.1 and stats["losses/entropy"] > 0.1
    assert loss(vf_coef=3.0)[0] - base == pytest.approx(3 * stats["losses/value_loss"], rel=1e-4)
    assert loss(ent_coef=2.0)[0] - base == pytest.approx(-2 * stats["losses/entropy"], rel=1e-4)


@pytest.mark.detail("PEN-loss")
def test_the_penalty_pulls_the_policy_back_to_the_old_one() -> None:
    """Advantages 0: all that is left is β·KL(old‖new), whose value is the library's and whose slope is β times as steep."""
    module, agent, obs, actions, density, _ = build("ppo_penalty")
    agent.actor_logstd.data[:] = tensor([-0.3, 0.4])
    old_means, old_logstd = torch.randn(12, 2), tensor([0.2, -0.5]).expand(12, 2)
    zeros, args = torch.zeros(12), module.Args(vf_coef=0.0)
    with torch.no_grad():
        new = torch.distributions.Normal(agent(obs)[0], agent.actor_logstd.exp())
    kl = torch.distributions.kl_divergence(torch.distributions.Normal(old_means, old_logstd.exp()), new).sum(-1).mean()
    for beta in (0.0, 1.0, 7.0):
        agent.beta.fill_(beta)
        loss, _ = module.ppo_loss(args, agent, obs, actions, density, zeros, zeros, zeros, old_means, old_logstd)
        assert float(loss.detach()) == pytest.approx(beta * float(kl), rel=1e-5, abs=1e-6)


@pytest.mark.detail("S2")
@having("average_gradients")
def test_gradients_become_the_mean_with_another_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process, played by a stand-in for the sum over processes, brings gradients of 4: g becomes (g + 4) / 2."""
    module = MODULES[name]
    monkeypatch.setattr(module, "WORLD", 2)
    monkeypatch.setattr(module.dist, "all_reduce", lambda x, *_: x.add_(2.0))  # its half of 4
    network = torch.nn.Linear(3, 2)
    unused = torch.nn.Parameter(torch.zeros(5))
    network.register_parameter("unused", unused)
    network(torch.randn(4, 3)).square().sum().backward()
    before = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    module.average_gradients(network)
    after = [p.grad for p in network.parameters() if p.grad is not None]
    assert len(after) == len(before) == 2 and unused.grad is None
    for mine, mean in zip(before, after, strict=True):
        torch.testing.assert_close(mean, (mine + 4) / 2)
    assert float(module.global_mean(torch.tensor(6.0))) == 5


@pytest.mark.detail("R1")
def test_a_response_is_read_with_its_prompt_and_without_padding() -> None:
    tokens, real = tensor([[9, 5, 6, 7], [3, 4, 8, 9]]), tensor([[False, True, True, True], [True, True, True, False]])
    responses = MODULES["rlhf_ppo_gpt2"].Responses(tokens, real, 2, tensor([True, True]))
    assert responses.texts() == [[5, 6, 7], [3, 4, 8]]
