"""The pure functions, networks and statistics against independent oracles: explicit sums, closed forms, the library's
distributions, integrals; and what must hold whatever the numbers are."""

import inspect
import itertools
import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BOXES, CHOICES, CONTROL, ENVS, GAUSSIAN, MODULES, PPO, SCRIPTS, of_rows
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

CLIP = ["ppo_atari", "ppo_continuous", *CHOICES]
few = settings(max_examples=8, deadline=None, derandomize=True, report_multiple_bugs=False)
seeds = st.integers(0, 10**6)
every_control = pytest.mark.parametrize("name", CONTROL)
every_box = pytest.mark.parametrize("name", BOXES)
every_env = pytest.mark.parametrize("name", ENVS)
every_ppo = pytest.mark.parametrize("name", PPO)
every_clip = pytest.mark.parametrize("name", CLIP)
tensor = torch.tensor


def having(function: str) -> pytest.MarkDecorator:
    """Every script with a function of this name."""
    return pytest.mark.parametrize("name", [name for name in SCRIPTS if hasattr(MODULES[name], function)])


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def new_agent(name: str, obs_dim: int = 5, action_dim: int = 2) -> Any:
    """An untrained agent of a script, with weights that depend on nothing else."""
    torch.manual_seed(0)
    module = MODULES[name]
    if name == "ppo_atari":
        return module.Agent(action_dim)
    if name in CHOICES:
        return module.Agent(obs_dim, spaces.Discrete(action_dim))
    if "discrete" in inspect.signature(module.Agent).parameters:
        return module.Agent(obs_dim, action_dim, discrete=False)
    return module.Agent(obs_dim, action_dim)


# ----------------------------------------------------------------------------------------------------------- advantages


def episodes(seed: int, steps: int = 10, envs: int = 3) -> dict[str, torch.Tensor]:
    """A segment in which V of a step's successor is V of the next row, but at an episode end a number of its own."""
    rng = np.random.default_rng(seed)
    rewards, values, ends = (torch.from_numpy(x) for x in rng.normal(size=(3, steps, envs)))
    kind = torch.from_numpy(rng.integers(0, 6, (steps, envs)))  # 0 dies, 1 is cut, others go on
    dones = (kind < 2).double()
    terminations = (kind == 0).double()
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
    """Deaths and cuts at random places, the segment's last step among them; the target is the value more."""
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
    rest = torch.zeros_like(rewards)
    for t in range(10):
        rest[t] = 0.9 ** (10 - t) * following[-1]
        for k in range(t, 10):
            rest[t] += 0.9 ** (k - t) * rewards[k]
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
        for first, last in itertools.pairwise(cuts):  # each episode alone has the advantages that it has here
            if first < last:
                alone = gae(*(x[first:last, i : i + 1] for x in data.values()), 0.97, 0.9)[0]
                assert torch.equal(alone, whole[first:last, i : i + 1])


@having("compute_gae")
def test_the_scripts_agree_on_what_gae_takes(name: str) -> None:
    expected = "rewards values next_values terminations dones gamma gae_lambda".split()
    assert list(inspect.signature(MODULES[name].compute_gae).parameters) == expected


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
    assert normalize(torch.ones(4)).tolist() == [0, 0, 0, 0]
    assert normalize(torch.full((640,), 1000.1)).abs().max() < 0.01  # whose float32 mean is another number
    assert normalize(1e-8 * tensor([1.0, -1.0])).tolist() == pytest.approx([0.5, -0.5])  # where 1e-8 is the spread


@pytest.mark.detail("6")
@having("minibatches")
@few
@given(seeds, st.integers(1, 6), st.integers(1, 8))
def test_minibatches_partition_the_samples_in_a_new_order_each_epoch(
    name: str, seed: int, count: int, length: int
) -> None:
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


# sign and size of the advantage, ratio region, ratio, objective min(r·A, clip(r)·A), gradient with respect to r
TABLE = [
    (+2.0, "below", 0.5, 1.0, 2.0),  # a good action became rare: pulled back up
    (+2.0, "in", 1.1, 2.2, 2.0),
    (+2.0, "above", 1.5, 2.4, 0.0),  # overshoot is not rewarded
    (-2.0, "above", 1.5, -3.0, -2.0),  # a bad action became likely: pushed back down
    (-2.0, "in", 0.9, -1.8, -2.0),
    (-2.0, "below", 0.5, -1.6, 0.0),  # over-suppression is not rewarded
]


@pytest.mark.detail("8")
@every_clip
@pytest.mark.parametrize("advantage, region, ratio, value, gradient", TABLE)
def test_six_rows_of_signs_and_ratio_regions(name: str, advantage, region, ratio, value, gradient) -> None:
    """L^CLIP of one sample and its derivative with respect to the ratio."""
    logratio = tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss = MODULES[name].clipped_surrogate_loss(logratio, tensor([advantage], dtype=torch.float64), 0.2)
    loss.backward()
    assert -float(loss.detach()) == pytest.approx(value)
    assert logratio.grad is not None
    assert -float(logratio.grad[0]) / ratio == pytest.approx(gradient)  # d/dr = d/dlog r · 1/r


def test_the_table_of_signs_and_regions_is_complete() -> None:
    assert {(np.sign(a), region) for a, region, *_ in TABLE} == {*itertools.product((1, -1), ("below", "in", "above"))}


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
    assert float(loss(logratio, advantages, clip)) >= -float((logratio.exp() * advantages).mean())  # a lower bound


@pytest.mark.detail("8")
@every_ppo
def test_at_the_old_policy_the_gradient_is_the_vanilla_policy_gradient(name: str) -> None:
    """d/dθ E[r·A] at θ_old = E[d/dθ log π(a|s)·A], for a softmax policy with autograd-free derivatives."""
    module = MODULES[name]
    torch.manual_seed(0)
    theta = torch.randn(4, dtype=torch.float64, requires_grad=True)
    actions, advantages = torch.randint(4, (50,)), torch.randn(50, dtype=torch.float64)
    logprobs = theta.log_softmax(0)[actions]
    logratio = logprobs - logprobs.detach()
    if name == "ppo_penalty":  # KL is at its minimum 0 there, so that it adds nothing
        loss = module.penalized_surrogate_loss(logratio, advantages, torch.zeros(50), tensor(1.0))
    else:
        loss = module.clipped_surrogate_loss(logratio, advantages, 0.2)
    (gradient,) = torch.autograd.grad(-loss, theta)
    probabilities = theta.detach().softmax(0)
    score = torch.eye(4, dtype=torch.float64)[actions] - probabilities  # d log softmax_a / dθ
    torch.testing.assert_close(gradient, (score * advantages[:, None]).mean(0))


def clips_values(name: str) -> bool:
    loss = getattr(MODULES[name], "value_loss", None)
    return loss is not None and "old_values" in inspect.signature(loss).parameters


CLIPS_VALUES = [name for name in SCRIPTS if clips_values(name)]


@pytest.mark.detail("9")
@pytest.mark.parametrize("name", CLIPS_VALUES)
@pytest.mark.parametrize(
    "new, old, target, clip, expected",
    [
        (1.0, 1.0, 3.0, 0.2, 0.5 * 4.0),  # new = old: both errors are equal
        (2.0, 1.0, 3.0, 0.2, 0.5 * 1.8**2),  # moved towards the target beyond the clip: the clipped error is worse
        (0.0, 1.0, 3.0, 0.2, 0.5 * 9.0),  # moved away: the unclipped error is worse
        (2.0, 1.0, 3.0, None, 0.5 * 1.0),
    ],
)
def test_value_loss_by_hand(name: str, new, old, target, clip, expected) -> None:
    tensors = [tensor([x, x]) for x in (new, old, target)]
    assert float(MODULES[name].value_loss(*tensors, clip)) == pytest.approx(expected)


@pytest.mark.detail("9")
@pytest.mark.parametrize("name", CLIPS_VALUES)
def test_clipped_value_has_no_gradient_beyond_the_clip(name: str) -> None:
    new = tensor([2.0, 1.1], requires_grad=True)
    MODULES[name].value_loss(new, torch.ones(2), torch.full((2,), 3.0), 0.2).backward()
    assert new.grad is not None and new.grad[0] == 0 and new.grad[1] == pytest.approx(0.5 * (1.1 - 3.0))


@pytest.mark.detail("9")
@pytest.mark.parametrize("name", CLIPS_VALUES)
@few
@given(seeds, st.floats(0.1, 1), st.floats(-10, 10), st.floats(0.5, 4))
def test_the_clipped_value_loss_by_scale_shift_and_limits(
    name: str, seed: int, clip: float, shift: float, scale: float
) -> None:
    loss, triple = MODULES[name].value_loss, draw(seed, 3, 50)
    new, old, target = triple
    plain, clipped = loss(*triple, None), loss(*triple, clip)
    torch.testing.assert_close(loss(*(triple + shift), clip), clipped)
    torch.testing.assert_close(loss(*(scale * triple), scale * clip), scale**2 * clipped)
    torch.testing.assert_close(loss(*-triple, clip), clipped)
    torch.testing.assert_close(loss(*triple, 1e9), plain)
    assert float(clipped) > float(plain)  # the worse of two errors
    # a value that has jumped onto its target still pays for what lies beyond the clip
    beyond = ((target - old).abs() - clip).relu()
    assert float(loss(target, old, target, clip)) == pytest.approx(0.5 * float(beyond.square().mean()))


@pytest.mark.detail("9")
@having("value_loss")
def test_the_plain_value_loss_is_half_the_mean_square(name: str) -> None:
    new, old, target = draw(0, 3, 50)
    arguments = (new, old, target, None) if clips_values(name) else (new, target)
    expected = 0.5 * np.square(new.numpy() - target.numpy()).mean()
    assert float(MODULES[name].value_loss(*arguments)) == pytest.approx(float(expected))


# -------------------------------------------------------------------------------------------- the loss of a minibatch


def minibatch(name: str, size: int = 16) -> tuple[Any, dict[str, torch.Tensor], Any, torch.Tensor]:
    """(agent, batch of ppo_loss, the policy's distribution by the library, the values); returns and values random."""
    agent = new_agent(name, 3, 4 if name == "ppo_atari" else 2)
    if name == "ppo_atari":
        agent.actor.weight.data *= 100
        obs = torch.randint(0, 256, (size, 4, 84, 84), dtype=torch.uint8)
        policy, values = agent(obs)
        distribution: Any = torch.distributions.Categorical(logits=policy.logits.detach())
        extra: dict[str, torch.Tensor] = {}
    elif name in CHOICES:
        (agent.actor if name == "ppo_lstm" else agent.actor[-1]).weight.data *= 100
        obs = torch.randn(size, 3)
        logits, values = of_rows(agent, obs)
        distribution = torch.distributions.Independent(torch.distributions.Categorical(logits=logits.detach()), 1)
        extra = {"masks": torch.ones(size, 1, 2, dtype=torch.bool)}
    else:
        agent.actor_logstd.data[:] = tensor([-0.3, 0.2])
        obs = torch.randn(size, 3)
        means, values = agent(obs)
        normal = torch.distributions.Normal(means.detach(), agent.actor_logstd.detach().exp())
        distribution = torch.distributions.Independent(normal, 1)
        extra = {"means": means.detach() + 0.1, "logstd": torch.zeros(size, 2)} if name == "ppo_penalty" else {}
    actions = distribution.sample()
    batch = {"obs": obs, "actions": actions, "logprobs": distribution.log_prob(actions) + 0.3 * torch.randn(size)}
    batch |= dict(zip(("advantages", "returns", "values"), torch.randn(3, size), strict=True)) | extra
    return agent, batch, distribution, values.detach()


def as_given(name: str, agent: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch as ppo_loss takes it: for a memory, sequences of one row each."""
    if name != "ppo_lstm":
        return batch
    size = len(batch["obs"])
    state = agent.initial_state.expand(-1, size, -1)
    return {key: x[None] for key, x in batch.items()} | {"starts": torch.ones(1, size).bool(), "state": state}


@pytest.mark.detail("7")
@pytest.mark.detail("9")
@pytest.mark.detail("10")
@pytest.mark.detail("12")
@pytest.mark.detail("PEN-loss")
@every_ppo
@pytest.mark.parametrize("switch", ["norm_adv", "clip_vloss", "none"])
def test_the_loss_and_its_debug_variables_by_distributions(name: str, switch: str) -> None:
    """Against torch.distributions and sums written out, at a policy that has moved; `switch` is off."""
    module = MODULES[name]
    agent, batch, distribution, values = minibatch(name)
    size = len(values)
    options: dict[str, Any] = {"ent_coef": 0.3, "vf_coef": 0.7} | ({"clip_coef": 0.2} if name in CLIP else {})
    if hasattr(module.Args, switch):
        options[switch] = False
    loss, stats = module.ppo_loss(module.Args(**options), agent, as_given(name, agent, batch))

    a = batch["advantages"].double().numpy()
    if switch != "norm_adv":
        a = (a - a.mean()) / a.std()
    ratios = (distribution.log_prob(batch["actions"]) - batch["logprobs"]).exp().tolist()
    new, old, target = (x.double().numpy() for x in (values, batch["values"], batch["returns"]))
    squares = (new - target) ** 2
    expected: dict[str, float] = {}
    if name == "ppo_penalty":
        old_policy = torch.distributions.Normal(batch["means"], batch["logstd"].exp())
        kl = torch.distributions.kl_divergence(old_policy, distribution.base_dist).sum(-1).tolist()
        terms = [r * x - float(agent.beta) * k for r, x, k in zip(ratios, a, kl, strict=True)]
        expected |= {"losses/kl": sum(kl) / size, "losses/beta": float(agent.beta)}
    else:
        terms = [min(r * x, min(max(r, 0.8), 1.2) * x) for r, x in zip(ratios, a, strict=True)]
        if switch != "clip_vloss":
            squares = np.maximum(squares, (old + np.clip(new - old, -0.2, 0.2) - target) ** 2)
        expected["losses/clipfrac"] = sum(abs(r - 1) > 0.2 for r in ratios) / size
    expected |= {
        "losses/value_loss": 0.5 * squares.mean(),
        "losses/policy_loss": -sum(terms) / size,
        "losses/entropy": float(distribution.entropy().mean()),
        "losses/old_approx_kl": sum(-math.log(r) for r in ratios) / size,
        "losses/approx_kl": sum(r - 1 - math.log(r) for r in ratios) / size,
    }
    assert stats.keys() == expected.keys()
    for tag, value in expected.items():
        assert float(stats[tag]) == pytest.approx(value, rel=1e-4, abs=1e-5), tag
        assert not stats[tag].requires_grad
    total = expected["losses/policy_loss"] + 0.7 * expected["losses/value_loss"] - 0.3 * expected["losses/entropy"]
    assert float(loss.detach()) == pytest.approx(total, rel=1e-4)


@pytest.mark.detail("12")
@every_ppo
def test_debug_variables_of_known_ratios(name: str) -> None:
    """Ratios around the clip range: the fraction counts |r - 1| > ε, not |log r|; the KLs are those of the ratios."""
    agent, batch, distribution, _ = minibatch(name, 12)
    ratios = tensor([0.79, 0.81, 0.815, 1.19, 1.21, 1.25] * 2)
    module = MODULES[name]
    args = module.Args(**({"clip_coef": 0.2} if name in CLIP else {}))
    density = distribution.log_prob(batch["actions"])
    _, stats = module.ppo_loss(args, agent, as_given(name, agent, batch | {"logprobs": density - ratios.log()}))
    mean_log = math.log(0.79 * 0.81 * 0.815 * 1.19 * 1.21 * 1.25) / 6
    assert float(stats["losses/old_approx_kl"]) == pytest.approx(-mean_log, abs=1e-6)
    assert float(stats["losses/approx_kl"]) == pytest.approx(6.065 / 6 - 1 - mean_log, abs=1e-6)
    if name in CLIP:
        assert float(stats["losses/clipfrac"]) == pytest.approx(0.5)
    _, stats = module.ppo_loss(args, agent, as_given(name, agent, batch | {"logprobs": density}))
    assert float(stats["losses/approx_kl"]) == pytest.approx(0, abs=3e-7)
    if name in CLIP:  # an ε of 0 clips nothing that has not moved
        policy, _ = of_rows(agent, batch["obs"])
        if name == "ppo_atari":
            own = policy.log_prob(batch["actions"])
        elif name in CHOICES:
            own, _ = module.masked_categorical(policy, batch["masks"], batch["actions"])
        else:
            own = module.gaussian_logprob(batch["actions"], policy, agent.actor_logstd)
        _, stats = module.ppo_loss(
            module.Args(clip_coef=0.0), agent, as_given(name, agent, batch | {"logprobs": own.detach()})
        )
        assert float(stats["losses/clipfrac"]) == 0


@pytest.mark.slow
@every_ppo
def test_the_compiled_loss_has_the_eager_gradient(name: str) -> None:
    module = MODULES[name]
    agent, batch, _, _ = minibatch(name, 8)
    gradients = []
    for function in (module.ppo_loss, torch.compile(module.ppo_loss)):
        agent.zero_grad()
        loss, stats = function(module.Args(ent_coef=0.01), agent, as_given(name, agent, batch))
        loss.backward()
        gradients.append((torch.cat([p.grad.reshape(-1) for p in agent.parameters() if p.grad is not None]), stats))
    (eager, eager_stats), (compiled, compiled_stats) = gradients
    assert float((compiled - eager).norm() / eager.norm()) < 1e-5
    torch.testing.assert_close(dict(compiled_stats), eager_stats, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------- the penalty


@pytest.mark.detail("PEN-loss")
def test_penalized_objective_by_hand(penalty: ModuleType) -> None:
    """Eq. 8 with β = 3: mean of 1.5·2 - 3·0.1 and 0.5·(-2) - 3·0.2 is 0.55, and its gradient in β is -mean KL."""
    logratio, advantages = tensor([1.5, 0.5]).log(), tensor([2.0, -2.0])
    beta = tensor(3.0, requires_grad=True)
    loss = penalty.penalized_surrogate_loss(logratio, advantages, tensor([0.1, 0.2]), beta)
    assert float(loss.detach()) == pytest.approx(-0.55)
    loss.backward()
    assert beta.grad is not None and float(beta.grad) == pytest.approx(0.15)


@pytest.mark.detail("PEN-loss")
def test_the_penalty_pulls_the_policy_back_to_the_old_one(penalty: ModuleType) -> None:
    """Advantages 0: all that is left is β·KL(old‖new), whose value is the library's; its slope is β times as steep."""
    agent, batch, distribution, _ = minibatch("ppo_penalty")
    batch |= {"advantages": torch.zeros(16), "logstd": tensor([0.2, -0.5]).expand(16, 2)}
    old = torch.distributions.Normal(batch["means"], batch["logstd"].exp())
    kl = float(torch.distributions.kl_divergence(old, distribution.base_dist).sum(-1).mean())
    slopes = {}
    for beta in (0.0, 1.0, 7.0):
        agent.beta.fill_(beta)
        loss, _ = penalty.ppo_loss(penalty.Args(vf_coef=0.0), agent, batch)
        assert float(loss.detach()) == pytest.approx(beta * kl, rel=1e-5, abs=1e-6)
        (slopes[beta],) = torch.autograd.grad(loss, agent.actor_logstd)
    torch.testing.assert_close(slopes[7.0], 7 * slopes[1.0])
    assert slopes[1.0].abs().min() > 1e-3


@pytest.mark.detail("PEN-KL")
def test_kl_divergence_by_integration(penalty: ModuleType) -> None:
    def side(mean: float, std: float) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor([[mean]], dtype=torch.float64), tensor([[std]], dtype=torch.float64).log()

    old, new = side(0.3, 0.8), side(-0.5, 1.7)
    x = torch.linspace(-20, 20, 20001, dtype=torch.float64)[:, None]
    log_old, log_new = (torch.distributions.Normal(m[0], s[0].exp()).log_prob(x)[:, 0] for m, s in (old, new))
    integral = torch.trapezoid(log_old.exp() * (log_old - log_new), x[:, 0])
    assert float(penalty.kl_divergence(old, new)) == pytest.approx(float(integral), abs=1e-9)
    assert float(penalty.kl_divergence(old, new)) != pytest.approx(float(penalty.kl_divergence(new, old)), abs=1e-2)


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
    a, b = (np.diag(np.exp(2 * logstd.numpy())) for _, logstd in (old, new))
    for row in range(5):
        off, inverse = (new[0] - old[0])[row].numpy(), np.linalg.inv(b)
        trace, log_ratio = np.trace(inverse @ a), np.linalg.slogdet(b)[1] - np.linalg.slogdet(a)[1]
        assert float(plain[row]) == pytest.approx(0.5 * (trace + off @ inverse @ off - 3 + log_ratio))


@pytest.mark.detail("PEN-beta")
@pytest.mark.parametrize(
    "beta, kl, target, expected",
    [
        (2.0, 0.0299, 0.045, 1.0),  # a target of 0.045 lets KL be from 0.03 to 0.0675
        (2.0, 0.0301, 0.045, 2.0),
        (2.0, 1.0, 1.5, 2.0),  # both ends are within
        (2.0, 3.0, 2.0, 2.0),
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
def test_beta_by_hand(penalty: ModuleType, beta: float, kl: float, target: float, expected: float) -> None:
    assert penalty.update_beta(beta, kl, target) == pytest.approx(expected)


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


# -------------------------------------------------------------------------------------------- distribution and networks


@pytest.mark.detail("23")
@pytest.mark.detail("25")
@every_box
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
    covariance = np.diag(np.exp(2 * logstd.numpy()))
    for row in range(6):  # the density of a vector: determinant and inverse of the covariance matrix
        off = (actions - means)[row].numpy()
        exponent = off @ np.linalg.inv(covariance) @ off
        assert float(plain[row]) == pytest.approx(-0.5 * (exponent + np.linalg.slogdet(2 * np.pi * covariance)[1]))


@pytest.mark.detail("23")
@every_box
def test_the_gaussian_density_integrates_to_1(name: str) -> None:
    grid = torch.linspace(-12, 12, 4801, dtype=torch.float64)[:, None]
    mean, logstd = tensor([0.7], dtype=torch.float64), tensor([0.4], dtype=torch.float64)
    density = MODULES[name].gaussian_logprob(grid, mean, logstd).exp()
    assert float(torch.trapezoid(density, grid[:, 0])) == pytest.approx(1, abs=1e-9)
    assert float(torch.trapezoid(density * grid[:, 0], grid[:, 0])) == pytest.approx(0.7, abs=1e-9)


@pytest.mark.detail("2")
@having("layer_init")
@pytest.mark.parametrize("options, gain", [({}, math.sqrt(2)), ({"gain": 0.01}, 0.01), ({"gain": 1.0}, 1.0)])
def test_layer_init_is_orthogonal_with_its_gain_and_zero_bias(name: str, options: Any, gain: float) -> None:
    for layer in (torch.nn.Linear(32, 16), torch.nn.Conv2d(4, 8, 3)):
        assert MODULES[name].layer_init(layer, **options) is layer
        rows = layer.weight.detach().flatten(1)
        torch.testing.assert_close(rows @ rows.T, gain**2 * torch.eye(len(rows)), atol=1e-5, rtol=1e-5)
        assert layer.bias is not None and not layer.bias.any()


@pytest.mark.detail("2")
@every_control
def test_heads_and_hidden_layers_have_their_gains(name: str) -> None:
    """Largest singular value of each layer; hidden ones √2, the policy's last 0.01, the value's last 1."""
    layers = [m for m in new_agent(name).modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)]
    gains = [float(torch.linalg.matrix_norm(m.weight.detach().flatten(1), 2)) for m in layers]
    root = math.sqrt(2)
    expected = {"ppo_atari": [root] * 4 + [0.01, 1], "ppo_lstm": [0.01, 1]}.get(name, [root, root, 0.01, root, root, 1])
    assert gains == pytest.approx(expected, rel=1e-3)
    assert not any(m.bias.any() for m in layers if m.bias is not None)


@pytest.mark.detail("13")
@pytest.mark.detail("24")
@pytest.mark.detail("26")
@pytest.mark.parametrize("name", GAUSSIAN)
def test_policy_and_value_have_networks_of_their_own_and_the_noise_is_one_parameter(name: str) -> None:
    agent = new_agent(name, 5, 2)
    for network, outputs in ((agent.actor_mean, 2), (agent.critic, 1)):
        assert [type(layer).__name__ for layer in network] == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
        shapes = [tuple(layer.weight.shape) for layer in network if isinstance(layer, torch.nn.Linear)]
        assert shapes == [(64, 5), (64, 64), (outputs, 64)]
    agent(torch.randn(3, 5))[1].sum().backward()
    assert all(p.grad is None for p in agent.actor_mean.parameters())
    assert all(p.grad is not None for p in agent.critic.parameters())
    agent(torch.randn(3, 5))[0].sum().backward()
    assert all(p.grad is not None for p in agent.actor_mean.parameters())
    assert agent.actor_logstd.shape == (2,) and not agent.actor_logstd.any() and agent.actor_logstd.requires_grad


@every_box
def test_the_policy_in_numpy_is_the_agent_whatever_its_layers_are(name: str) -> None:
    """By NumPy where the network is what that can do, and by the agent itself where it is not."""
    nn = torch.nn
    obs = np.random.default_rng(1).standard_normal((7, 5), np.float32)
    attribute = "actor" if name == "trpo" else "actor_mean"
    networks: dict[str, tuple[Any, bool]] = {
        "as it is": (getattr(new_agent(name, 5, 3), attribute), True),
        "deeper": (nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), True),
        "shallow": (nn.Sequential(nn.Linear(5, 3)), True),
        "ReLU": (nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 3)), False),
        "other shapes": (nn.Sequential(nn.Linear(5, 8), nn.GLU(), nn.Linear(4, 3)), False),
        "norm": (nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3)), False),
        "bounded": (nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3), nn.Tanh()), False),
    }
    for what, (network, fast) in networks.items():
        agent = new_agent(name, 5, 3)
        setattr(agent, attribute, network)
        with torch.no_grad():
            for p in network.parameters():
                p.add_(0.3 * torch.randn_like(p))
        policy = MODULES[name].in_numpy(agent, 5)
        means = policy(obs)
        assert means.dtype == np.float32 and means.shape == (7, 3)
        expected = network(torch.from_numpy(obs)).detach().numpy()
        np.testing.assert_allclose(means, expected, rtol=1e-5, atol=1e-5, err_msg=what)
        assert (policy.__name__ == "by_numpy") == fast, what


# ------------------------------------------------------------------------------------------- statistics, processes, log


@pytest.mark.detail("28")
@every_env
@pytest.mark.parametrize("shift, scale", [(0.0, 1.0), (1e3, 1e-1), (-3.0, 1e3)])
def test_running_statistics_are_those_of_the_whole_stream(name: str, shift: float, scale: float) -> None:
    """By NumPy on all rows, however they are cut into batches; a little of mean 0 and variance 1 is there before."""
    rows = np.random.default_rng(0).normal(shift, scale, (51, 3))
    seen = []
    for cuts in ([], [1, 8, 9, 49], range(1, 51)):
        stats = MODULES[name].RunningMeanStd(3)
        for batch in np.split(rows, list(cuts)):
            stats.update(batch)
        seen.append(np.array(stats.mean_and_std()))
    prior = np.square(rows.mean(0)) * 1e-4 / 51  # what 1e-4 rows at 0 add to the variance
    for mean, std in seen:
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-5, atol=1e-5 * scale)
        np.testing.assert_allclose(std, np.sqrt(rows.var(0) + prior), rtol=1e-4)
    fresh = MODULES[name].RunningMeanStd(3)
    assert fresh.mean_and_std()[0].tolist() == [0, 0, 0]
    np.testing.assert_allclose(fresh.mean_and_std()[1], 1)
    fresh.update(np.zeros((10**5, 3)))
    np.testing.assert_allclose(fresh.mean_and_std()[1], math.sqrt(1e-4 / 1e5 + 1e-8))  # never 0


@pytest.mark.detail("28")
@pytest.mark.detail("29")
@every_env
def test_what_is_normalised_is_a_standard_score_within_10(name: str) -> None:
    rows = np.random.default_rng(0).normal([50, -3, 0], [4, 0.1, 20], (400, 3))
    stats = MODULES[name].RunningMeanStd(3)
    stats.update(rows)
    for k in (0.5, 9.5, -9.5, 10.5, -10.5, 1e6, -1e6):
        scores = stats.normalize((rows.mean(0) + k * rows.std(0))[None])
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores[0], np.clip([k] * 3, -10, 10), rtol=1e-2)


@pytest.mark.detail("28")
@every_env
def test_statistics_go_on_from_what_was_saved(name: str, tmp_path: Any) -> None:
    make = MODULES[name].RunningMeanStd
    stats, copy = make(2), make(2)
    first, second = np.random.default_rng(0).normal(3, 2, size=(2, 9, 2))
    stats.update(first)
    torch.save(stats.state_dict(), tmp_path / "stats.pt")
    copy.load_state_dict(torch.load(tmp_path / "stats.pt", weights_only=True))
    for some in (stats, copy):
        some.update(second)
    np.testing.assert_array_equal(copy.mean_and_std(), stats.mean_and_std())
    np.testing.assert_allclose(copy.mean_and_std()[0], np.mean([*first, *second], 0), rtol=1e-3)


@pytest.mark.detail("S2")
@every_env
def test_statistics_of_several_processes_are_those_of_all_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, one after the other in this one: shared twice, each row counts once in both."""
    module = MODULES[name]
    rows = np.random.default_rng(0).normal(3, 2, (2, 2, 20, 3))  # round, process
    mine, other = module.RunningMeanStd(3), module.RunningMeanStd(3)
    for number in range(2):
        mine.update(rows[number, 0])
        other.update(rows[number, 1])
        news = [(stats.state - stats.shared).clone() for stats in (mine, other)]
        monkeypatch.setattr(module.dist, "all_reduce", lambda x, news=news: x.copy_(news[0] + news[1]))
        mine.share()
        other.share()
        stream = rows[: number + 1].reshape(-1, 3)
        for stats in (mine, other):
            mean, std = stats.mean_and_std()
            np.testing.assert_allclose(mean, stream.mean(0), rtol=1e-4)
            np.testing.assert_allclose(std, stream.std(0), rtol=1e-4)
            assert stats.sums[0] == pytest.approx([len(stream)] * 3, rel=1e-5)


@pytest.mark.detail("S2")
@having("average_gradients")
def test_gradients_become_the_mean_with_another_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process, a stand-in for the sum over processes, brings gradients of 4: g becomes (g + 4) / 2."""
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
    for own, mean in zip(before, after, strict=True):
        torch.testing.assert_close(mean, (own + 4) / 2)
    assert float(module.global_mean(tensor(6.0))) == 5


@pytest.mark.parametrize("name", [name for name in CONTROL if hasattr(MODULES[name], "HEALTHY")])
def test_the_table_of_health_has_ranges_and_remedies(name: str) -> None:
    metrics = [metric for metric, *_ in MODULES[name].HEALTHY]
    assert len(set(metrics)) == len(metrics) and "losses/explained_variance" in metrics
    for _, low, high, meaning in MODULES[name].HEALTHY:
        assert low < high and ("--" in meaning or "check" in meaning)


@pytest.mark.detail("R1")
def test_a_response_is_read_with_its_prompt_and_without_padding() -> None:
    tokens, real = tensor([[9, 5, 6, 7], [3, 4, 8, 9]]), tensor([[False, True, True, True], [True, True, True, False]])
    responses = MODULES["rlhf_ppo_gpt2"].Responses(tokens, real, 2, tensor([True, True]))
    assert responses.texts() == [[5, 6, 7], [3, 4, 8]]
