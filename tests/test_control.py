"""Environments and rollouts of the three scripts for control, TRPO among them, against books kept by hand; at the end
what all scripts do in training."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MODULES, PPO, scalars

PLAYING = [*PPO, "trpo"]


def envs(module: ModuleType, name: str = "Trunc", num_envs: int = 2, **changes: Any) -> Any:
    env = module.NormalizedEnvs(module.Args(env_id=f"counting_envs:{name}-v0", **changes), num_envs)
    env.reset(1)
    return env


def as_they_are(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics that stay at mean 0 and variance 1, so that what is stored is what the environment said."""
    monkeypatch.setattr(module.Normalizer, "merge", lambda *_: None)


def steps_of(env: Any, change: Callable[[np.ndarray, tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """Put `change(action, result)` between the first environment and what steps it."""
    inner = env.envs.envs[0].unwrapped
    step = inner.step
    inner.step = lambda action: change(action, step(action))


@pytest.mark.detail("1")
def test_every_environment_gets_its_own_action(control: ModuleType) -> None:
    env = envs(control, "Unbounded", 3)
    received: dict[int, Any] = {}
    for i, wrapped in enumerate(env.envs.envs):

        def keep(action: Any, i: int = i, step: Any = wrapped.unwrapped.step) -> Any:
            received[i] = action
            return step(action)

        wrapped.unwrapped.step = keep
    actions = np.arange(6, dtype=np.float32).reshape(3, 2)
    env.step(actions)
    assert [received[i].tolist() for i in range(3)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.detail("1")
@pytest.mark.detail("5")
@pytest.mark.parametrize("name, death", [("Trunc", 0), ("Term", 1), ("Both", 1)])
def test_outcomes_and_new_starts_out_of_phase(control, monkeypatch, name: str, death: int) -> None:
    """Episodes of 5 and of 3: each step's outcome counts on, what is acted on next starts again at 0 after an end."""
    as_they_are(control, monkeypatch)
    env = envs(control, name)
    env.envs.envs[1].unwrapped.end = 3
    for t in range(1, 16):
        rows, finished = env.step(np.zeros((2, 1), np.float32))
        outcome, start = [(t - 1) % end + 1 for end in (5, 3)], [t % end for end in (5, 3)]
        assert env.final_obs[:, 0].tolist() == outcome and env.obs[:, 0].tolist() == start
        assert rows[1].tolist() == [death * (s == 0) for s in start]
        assert rows[2].tolist() == [(1 - death) * (s == 0) for s in start]
        assert finished == [(i, float(end), end) for i, end in enumerate((5, 3)) if start[i] == 0]


@pytest.mark.detail("27")
def test_the_executed_action_is_the_nearest_allowed_one(control: ModuleType) -> None:
    env = envs(control, "Box05", 1)
    seen: list[np.ndarray] = []

    def keep(action: np.ndarray, result: tuple[Any, ...]) -> tuple[Any, ...]:
        seen.append(np.array(action))
        return result

    steps_of(env, keep)
    sent = np.array([[-3.0, 7.0], [2.5, 0.5], [5.0, 0.0]], np.float32)
    for row in sent:
        env.step(row[None])
    assert [x.tolist() for x in seen] == [[0, 5], [2.5, 0.5], [5, 0]] and sent[0].tolist() == [-3, 7]


@pytest.mark.detail("28")
@pytest.mark.detail("29")
def test_observations_are_standard_scores_of_everything_seen_so_far(control: ModuleType) -> None:
    """A random walk that starts far away, by NumPy on the whole stream after each step; outliers end at ±10."""
    env = envs(control, "Long", 1)
    rng, raw = np.random.default_rng(0), [np.array(env.envs.envs[0].unwrapped.buffer, float)]
    fresh = rng.normal([50, -3, 0], [4, 0.1, 20], (40, 3)).astype(np.float32)
    queue = iter(fresh)
    steps_of(env, lambda action, result: (next(queue), *result[1:]))
    for t in range(40):
        env.step(np.zeros((1, 1), np.float32))
        raw.append(fresh[t].astype(float))
        if t > 3:
            stream = np.array(raw)
            scores = (stream[-1] - stream.mean(0)) / stream.std(0)
            np.testing.assert_allclose(env.final_obs[0], scores, rtol=2e-2, atol=2e-2)
            assert env.obs.dtype == np.float32
    mean, std = np.mean(raw, 0), np.std(raw, 0)
    for k in (9.5, -9.5, 10.5, -10.5, 1e6, -1e6):
        env.obs_stats.merge = lambda *_: None  # frozen here
        np.testing.assert_allclose(env.normalize((mean + k * std)[None])[0], np.clip(k, -10, 10), rtol=1e-2)


@pytest.mark.detail("30")
@pytest.mark.detail("31")
@pytest.mark.parametrize("name", ["Trunc", "Term"])
def test_rewards_are_scaled_by_the_spread_of_discounted_returns(control: ModuleType, name: str) -> None:
    """Rewards of both signs around 3 in two environments out of phase; every return since its own episode's start."""
    env = envs(control, name, gamma=0.8)
    env.envs.envs[1].unwrapped.end = 3
    rng, paid = np.random.default_rng(0), np.zeros(2)
    for i, wrapped in enumerate(env.envs.envs):
        step = wrapped.unwrapped.step

        def pay(action: Any, i: int = i, step: Any = step) -> Any:
            obs, _, *rest = step(action)
            paid[i] = rng.normal(3, 5)
            return obs, paid[i], *rest

        wrapped.unwrapped.step = pay
    history: list[list[float]] = [[], []]
    returns: list[float] = []
    for t in range(1, 41):
        rows, finished = env.step(np.zeros((2, 1), np.float32))
        for i, end in enumerate((5, 3)):
            history[i].append(paid[i])
            returns.append(sum(0.8**k * r for k, r in enumerate(reversed(history[i]))))
            history[i] = [] if t % end == 0 else history[i]
        if t > 5:
            np.testing.assert_allclose(rows[0], paid / np.std(returns), rtol=1e-3)
            assert (np.sign(rows[0]) == np.sign(paid)).all()
    env.return_stats.merge = lambda *_: None
    env.return_stats.var = np.array(1.0)
    for wrapped, reward in zip(env.envs.envs, (9.5, -9.5), strict=True):
        wrapped.unwrapped.step = lambda action, reward=reward: (np.zeros(3, np.float32), reward, False, False, {})
    assert env.step(np.zeros((2, 1), np.float32))[0][0].tolist() == pytest.approx([9.5, -9.5])
    for wrapped, reward in zip(env.envs.envs, (11.0, -11.0), strict=True):
        wrapped.unwrapped.step = lambda action, reward=reward: (np.zeros(3, np.float32), reward, False, False, {})
    assert env.step(np.zeros((2, 1), np.float32))[0][0].tolist() == [10, -10]


# ------------------------------------------------------------------------------------------------------------- training


def rollouts(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Observations and actions of what train learns from, whole batches of one minibatch, and old log-probabilities."""
    name = "update_policy" if module.__name__ == "trpo" else "ppo_loss"
    original, seen = getattr(module, name), []

    def spy(args: Any, agent: Any, obs: torch.Tensor, actions: torch.Tensor, *rest: torch.Tensor) -> Any:
        with torch.no_grad():
            means = agent(obs)[0].flatten(0, -2).clone()
        seen.append({"obs": obs.flatten(0, -2).clone(), "actions": actions.flatten(0, -2).clone(), "means": means})
        return original(args, agent, obs, actions, *rest)

    monkeypatch.setattr(module, name, spy)
    return seen


def one_batch(module: ModuleType, small_args: Any, **changes: Any) -> Any:
    args = small_args(module, num_minibatches=1, update_epochs=1, learning_rate=0.0)
    return type(args)(**(vars(args) | changes))


@pytest.mark.detail("1")
def test_a_segment_goes_on_where_the_last_one_ended(control, small_args, monkeypatch) -> None:
    """Episodes of 5 in segments of 7, from one environment: the counter in the rows runs on across segments."""
    as_they_are(control, monkeypatch)
    seen = rollouts(control, monkeypatch)
    control.train(one_batch(control, small_args, num_envs=1, num_steps=7, total_timesteps=28, checkpoint_every=0))
    counters = [sorted(batch["obs"][:, 0].tolist()) for batch in seen]
    assert counters == [sorted(float(t % 5) for t in range(i, i + 7)) for i in range(0, 28, 7)]


@pytest.mark.detail("24")
@pytest.mark.detail("27")
def test_stored_actions_are_raw_samples_with_the_learned_spread(control, small_args, monkeypatch) -> None:
    """A policy with std e^-1 and e^0.5 in a box of [0, 5]: what is stored has that spread around the means."""
    make = control.Agent

    def spread(*args: Any, **kwargs: Any) -> Any:
        agent = make(*args, **kwargs)
        agent.actor_logstd.data[:] = torch.tensor([-1.0, 0.5])
        return agent

    monkeypatch.setattr(control, "Agent", spread)
    seen = rollouts(control, monkeypatch)
    args = one_batch(
        control, small_args, env_id="counting_envs:Box05-v0", num_envs=4, num_steps=1000, total_timesteps=4000
    )
    control.train(args)
    noise = seen[0]["actions"] - seen[0]["means"]
    assert noise.mean(0).tolist() == pytest.approx([0, 0], abs=0.1)
    assert noise.std(0).tolist() == pytest.approx([0.3679, 1.6487], rel=0.06)
    assert abs(float(torch.corrcoef(noise.T)[0, 1])) < 0.08
    assert 0.4 < float((seen[0]["actions"] < 0).float().mean()) < 0.6


@pytest.mark.detail("5")
def test_targets_bootstrap_from_the_true_last_observation_in_training(control, small_args, monkeypatch) -> None:
    """V of a step's successor is the critic's value of what the step led to, never of the next episode's start."""
    as_they_are(control, monkeypatch)
    agents: list[Any] = []
    outcomes: list[np.ndarray] = []
    inputs: list[Any] = []
    make, gae, step = control.Agent, control.compute_gae, control.NormalizedEnvs.step

    def made(*args: Any, **kwargs: Any) -> Any:
        agents.append(make(*args, **kwargs))
        return agents[-1]

    def asked(*args: Any) -> Any:
        inputs.append([x.clone() for x in args[:5]])
        return gae(*args)

    def watched(self: Any, actions: np.ndarray) -> Any:
        result = step(self, actions)
        outcomes.append(self.final_obs.copy())
        return result

    monkeypatch.setattr(control, "Agent", made)
    monkeypatch.setattr(control, "compute_gae", asked)
    monkeypatch.setattr(control.NormalizedEnvs, "step", watched)
    for name, bootstrap in (("Trunc", True), ("Trunc", False), ("Term", True), ("Both", True)):
        args = one_batch(
            control, small_args, env_id=f"counting_envs:{name}-v0", total_timesteps=128, bootstrap_truncated=bootstrap
        )
        control.train(args)
        rewards, _, next_values, ends, dones = inputs[-1]
        led_to = torch.from_numpy(np.stack(outcomes[-64:]))
        expected = (led_to[..., 0] == 5).float()
        assert torch.equal(dones, expected)
        assert torch.equal(ends, expected if name != "Trunc" or not bootstrap else torch.zeros_like(expected))
        torch.testing.assert_close(next_values, agents[-1].critic(led_to)[..., 0].detach())


@pytest.mark.detail("3")
@pytest.mark.parametrize("name", PLAYING)
def test_the_first_step_of_adam_by_hand(name: str, small_args, monkeypatch) -> None:
    """After one gradient g both moments are g and g²: the step is lr·g / (|g| + 1e-5), whatever else is the same."""
    module = MODULES[name]
    moved: list[tuple[torch.Tensor, torch.Tensor]] = []
    step = torch.optim.Adam.step

    def watched(self: Any, *rest: Any) -> Any:
        parts = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in parts]
        gradients = torch.cat([p.grad.reshape(-1) for p in parts])
        result = step(self, *rest)
        if not moved:
            change = torch.cat([(p.detach() - b).reshape(-1) for p, b in zip(parts, before, strict=True)])
            moved.append((gradients.clone(), change))
        return result

    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    args = small_args(module, num_minibatches=1, update_epochs=1, learning_rate=0.1, total_timesteps=128)
    module.train(args)
    ((gradient, change),) = moved
    small = (gradient.abs() > 1e-7) & (gradient.abs() < 1e-3)
    assert small.sum() > 20
    gradient, change = gradient[small].double(), change[small].double()
    torch.testing.assert_close(change, -0.1 * gradient / (gradient.abs() + 1e-5), atol=1e-5, rtol=1e-3)


@pytest.mark.detail("12")
@pytest.mark.parametrize("name", PLAYING)
def test_logged_metrics_by_numpy(name: str, small_args, monkeypatch) -> None:
    """Explained variance of the values before the epochs; in PPO every loss as the mean over all minibatches."""
    module = MODULES[name]
    gae, loss = module.compute_gae, getattr(module, "ppo_loss", None)
    inputs: list[tuple[np.ndarray, np.ndarray]] = []
    minibatches: list[list[float]] = []

    def asked(*args: Any) -> Any:
        result = gae(*args)
        inputs.append((args[1].numpy().copy(), result[1].numpy().copy()))
        return result

    def lost(*args: Any) -> Any:
        result = loss(*args)  # type: ignore[misc]
        minibatches.append(result[1].tolist())
        return result

    monkeypatch.setattr(module, "compute_gae", asked)
    args = small_args(module, total_timesteps=128, learning_rate=0.01)
    if loss:
        monkeypatch.setattr(module, "ppo_loss", lost)
    module.train(args)
    (folder,) = Path(args.run_dir).iterdir()
    logged = {tag: events[0][1] for tag, events in scalars(folder).items()}
    ((values, returns),) = inputs
    explained = 1 - np.var(returns - values) / np.var(returns)
    assert logged["losses/explained_variance"] == pytest.approx(explained, rel=1e-3, abs=1e-3)
    assert abs(explained - 0.5) > 0.05  # otherwise what is explained could be what is left
    if loss:
        assert len(minibatches) >= 4
        means = np.mean(minibatches, 0)
        assert [logged[tag] for tag in module.STATS] == pytest.approx(means.tolist(), rel=1e-3, abs=1e-5)
        assert np.abs(np.array(minibatches[-1]) - means).max() > 1e-3


@pytest.mark.detail("S3")
@pytest.mark.parametrize(
    "first, second, steps",
    [
        ([0.0] * 4, [0.0145] * 4, 4),  # within 1.5 times the target
        ([9.0] * 4, [0.0145] * 4, 4),  # the first estimate does not matter
        ([0.0] * 4, [0.001, 0.001, 0.0155, 0.0], 2),  # nor does the mean so far: this minibatch's own decides
        ([0.0] * 4, [0.0155] * 4, 0),
    ],
)
def test_what_is_told_to_the_early_stop(ppo, small_args, monkeypatch, first: Any, second: Any, steps: int) -> None:
    """A target of 0.01 and four minibatches whose estimates of KL are put into the loop's hands."""
    original, taken = ppo.ppo_loss, list[Any]()
    told = iter([*zip(first, second, strict=True)] + [(0.0, 0.0)] * 99)
    keys = [ppo.STATS.index(f"losses/{key}") for key in ("old_approx_kl", "approx_kl")]

    def tell(*args: Any) -> Any:
        loss, stats = original(*args)
        stats[keys] = torch.tensor(next(told))
        return loss, stats

    def count(self: Any, *rest: Any) -> Any:
        taken.append(self)
        return step(self, *rest)

    step = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", count)
    monkeypatch.setattr(ppo, "ppo_loss", tell)
    ppo.train(small_args(ppo, total_timesteps=128, target_kl=0.01, update_epochs=1, num_minibatches=4))
    assert len(taken) == steps


@pytest.mark.detail("11")
def test_only_gradients_that_are_too_long_are_shortened_and_none_is_turned(ppo, small_args, monkeypatch) -> None:
    """The first gradient of the same run under three limits: as it is, with half of its norm, and again as it is."""
    seen: list[torch.Tensor] = []
    first: list[torch.Tensor] = []
    step = torch.optim.Adam.step

    def keep(self: Any, *rest: Any) -> Any:
        parts = [p.grad for group in self.param_groups for p in group["params"]]
        seen.append(torch.cat([g.detach().reshape(-1).clone() for g in parts]))
        return step(self, *rest)

    monkeypatch.setattr(torch.optim.Adam, "step", keep)
    for factor in (None, 0.5, 2.0):
        seen.clear()
        limit = factor * float(first[0].norm()) if factor else 1e6
        ppo.train(small_args(ppo, total_timesteps=128, update_epochs=1, max_grad_norm=limit))
        first.append(seen[0])
    whole, half, again = first
    assert float(half.norm()) == pytest.approx(0.5 * float(whole.norm()), rel=1e-3)
    torch.testing.assert_close(half, 0.5 * whole, atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(again, whole)


@pytest.mark.detail("R31")
def test_the_logged_gold_is_the_judge_s_and_not_the_reward_model_s(small_args, monkeypatch) -> None:
    """A judge that says 0.125 of every answer: so do training and evaluation, while the reward model says other things."""
    rlhf = MODULES["rlhf_ppo_gpt2"]
    monkeypatch.setattr(rlhf.Task, "gold", lambda self, responses: torch.full((len(responses.tokens),), 0.125))
    args = small_args(rlhf, eval_every=1)
    rlhf.train(args)
    (folder,) = Path(args.run_dir).iterdir()
    logged = scalars(folder)
    for gold, proxy in (("charts/gold", "charts/proxy"), ("eval/gold", "eval/proxy")):
        assert {value for _, value in logged[gold]} == {0.125} and 0.125 not in {value for _, value in logged[proxy]}
