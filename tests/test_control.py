"""Environments, rollouts and updates of the scripts for control, against books kept by hand; the edits that people make
to a copy of a script; at the end what all scripts do in training."""

import dataclasses
import importlib.util
import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import BOXES, BUDGET, CHOICES, CONTROL, ENVS, GAUSSIAN, MODULES, ROOT, TEXTS, counting, scalars
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

every_control = pytest.mark.parametrize("name", CONTROL)
every_box = pytest.mark.parametrize("name", BOXES)
every_env = pytest.mark.parametrize("name", ENVS)
NORMALIZED = dict.fromkeys(CHOICES, {"norm_obs": True, "norm_reward": True})  # which the others always do
ONE_BATCH = {"num_minibatches": 1, "update_epochs": 1, "total_timesteps": 128}  # one iteration, one step of Adam
FEW_ROWS = ONE_BATCH | {"num_steps": 16, "total_timesteps": 32}  # where frames need no more


def four_minibatches(name: str) -> dict[str, int]:
    """Of those 32 rows; where minibatches are of whole environments there are four of these."""
    whole = {"num_envs": 4, "num_steps": 8} if name == "ppo_lstm" else {}
    return FEW_ROWS | whole | {"num_minibatches": 4}


def envs(module: ModuleType, kind: str = "Trunc", num_envs: int = 2, **changes: Any) -> Any:
    own = {"env_id": counting(module.__name__, kind)} | NORMALIZED.get(module.__name__, {})
    env = module.NormalizedEnvs(module.Args(**own | changes), num_envs)
    env.reset(1)
    return env


def zeros(env: Any) -> np.ndarray:
    if hasattr(env, "masks"):
        return np.zeros((len(env.lengths), 1), int)
    return np.zeros((len(env.lengths), env.action_dim), np.float32)


def as_they_are(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics that stay at mean 0 and variance 1, so that what is stored is what the environment said."""
    monkeypatch.setattr(module.RunningMeanStd, "update", lambda *_: None)


def each_step(env: Any, change: Callable[[int, Any, Any], Any]) -> None:
    """Put `change(index, action, result)` between each environment and what steps it."""
    for i, wrapped in enumerate(env.envs.envs):

        def step(action: Any, i: int = i, inner: Any = wrapped.unwrapped.step) -> Any:
            return change(i, action, inner(action))

        wrapped.unwrapped.step = step


def watch(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, keep: Any = None) -> list[Any]:
    """Record what `keep` makes of the arguments and the result of every call of owner.name."""
    original, calls = getattr(owner, name), []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls.append(keep(args, result) if keep else result)
        return result

    monkeypatch.setattr(owner, name, wrapper)
    return calls


def batch_of(args: Any, _: Any) -> dict[str, torch.Tensor]:
    """Copies of what ppo_loss or update_policy was given, as rows."""
    batch = {name: x.detach().clone() for name, x in args[2].items() if name != "state"}  # which is of no row
    lead = batch["advantages"].ndim
    return {name: x.flatten(0, lead - 1) for name, x in batch.items()}


def stats_of(_: Any, result: Any) -> dict[str, float]:
    return {tag: float(value) for tag, value in result[1].items()}


def gradient_of(optimizer: Any) -> torch.Tensor:
    parts = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return torch.cat([part.detach().reshape(-1).clone() for part in parts])


def copies(args: Any, result: Any) -> Any:
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in args], [x.clone() for x in result]


def batches(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Record what the policy of a script learns from (and in the penalty script, what its KL is measured on)."""
    return watch(monkeypatch, module, "update_policy" if module.__name__ == "trpo" else "ppo_loss", batch_of)


def learned_from(module: ModuleType, seen: list[Any]) -> list[Any]:
    """The batches of runs with one minibatch an iteration, without those that the penalty script measures on."""
    return seen[::2] if module.__name__ == "ppo_penalty" else seen


def playing(module: ModuleType) -> Any:
    return module.AtariGames if module.__name__ == "ppo_atari" else module.NormalizedEnvs


def folder(args: Any) -> Path:
    """The run folder that was made last."""
    return max(Path(args.run_dir).iterdir(), key=lambda path: path.stat().st_mtime_ns)


def logged(args: Any, tag: str) -> list[float]:
    return [value for _, value in scalars(folder(args)).get(tag, [])]


# --------------------------------------------------------------------------------------------------------- environments


@pytest.mark.detail("1")
@every_box
def test_every_environment_gets_its_own_action(name: str) -> None:
    env = envs(MODULES[name], "Unbounded", 3)
    received: dict[int, Any] = {}

    def keep(i: int, action: Any, result: Any) -> Any:
        received[i] = action.tolist()
        return result

    each_step(env, keep)
    env.step(np.arange(6, dtype=np.float32).reshape(3, 2))
    assert received == {0: [0, 1], 1: [2, 3], 2: [4, 5]}


@pytest.mark.detail("1")
@pytest.mark.detail("5")
@every_env
@pytest.mark.parametrize("kind, death", [("Trunc", False), ("Term", True), ("Both", True)])
def test_outcomes_new_starts_and_scores_out_of_phase(name: str, monkeypatch, kind: str, death: bool) -> None:
    """Episodes of 5 and of 3: each step's outcome counts on, what is acted on next starts again at 0 after an end."""
    as_they_are(MODULES[name], monkeypatch)
    env = envs(MODULES[name], kind)
    env.envs.envs[1].unwrapped.end = 3
    for wrapped in env.envs.envs:
        wrapped.unwrapped.reward = "step"
    for t in range(1, 16):
        acted_on = env.obs.copy()
        next_obs, _, terminations, truncations, ended = env.step(zeros(env))
        outcome, start = [(t - 1) % end + 1 for end in (5, 3)], [t % end for end in (5, 3)]
        assert next_obs[:, 0].tolist() == outcome and env.obs[:, 0].tolist() == start
        assert next_obs[:, 1:].tolist() == acted_on[:, 1:].tolist()  # of the same episode, whose buffer is used again
        over = [s == 0 for s in start]
        assert terminations.tolist() == [o and death for o in over]
        assert truncations.tolist() == [o and not death for o in over]
        assert (env.obs[:, 1:] != next_obs[:, 1:]).all(1).tolist() == over
        assert ended == [(i, end * (end + 1) / 2, end) for i, end in enumerate((5, 3)) if over[i]]
        assert all(e.env == e[0] and e.score == e[1] and e.length == e[2] for e in ended)


@pytest.mark.detail("27")
@every_box
@pytest.mark.parametrize("kind", ["Box05", "HalfOpen", "Unbounded", "Matrix", "Scalar", "Float64", "Trunc"])
def test_every_box_gets_the_nearest_action_within_it(name: str, kind: str) -> None:
    """The environment asserts its bounds, shape and type; far-off actions arrive clipped, others as they are."""
    env = envs(MODULES[name], kind, 1)
    received: list[np.ndarray] = []

    def keep(_: int, action: Any, result: Any) -> Any:
        received.append(np.array(action))
        return result

    each_step(env, keep)
    space = env.envs.envs[0].unwrapped.action_space
    for value in (-100.0, 0.25, 100.0):
        actions = zeros(env) + np.float32(value)
        env.step(actions)
        assert (actions == np.float32(value)).all()  # what is stored stays raw
        np.testing.assert_allclose(received[-1], np.clip(np.full(space.shape, value), space.low, space.high))


@pytest.mark.detail("28")
@pytest.mark.detail("29")
@every_env
def test_observations_are_standard_scores_of_everything_seen_so_far(name: str) -> None:
    """By NumPy on all that the environments said: first ones, outcomes, the final one of an episode as any other."""
    env = envs(MODULES[name])
    raw = [np.array(wrapped.unwrapped.buffer, float) for wrapped in env.envs.envs]
    rng = np.random.default_rng(0)

    def walk(i: int, action: Any, result: Any) -> Any:
        raw.append(rng.normal([50, -3, 0], [4, 0.1, 20]).astype(np.float32).astype(float))
        return np.array(raw[-1], np.float32), *result[1:]

    each_step(env, walk)
    for t in range(1, 24):
        next_obs, *_, ended = env.step(zeros(env))
        stream = np.array(raw)
        if t > 3:
            np.testing.assert_allclose(
                next_obs, ((stream[-2:] - stream.mean(0)) / stream.std(0)).clip(-10, 10), rtol=2e-2, atol=2e-2
            )
        assert env.obs.dtype == next_obs.dtype == np.float32
        raw += [np.array(env.envs.envs[e.env].unwrapped.buffer, float) for e in ended]  # the new starts
    assert len(raw) == 2 * (1 + 23 + 4)
    mean, std = env.obs_stats.mean_and_std()
    np.testing.assert_allclose(mean, np.mean(raw, 0), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(std, np.std(raw, 0), rtol=1e-3)


@pytest.mark.detail("30")
@pytest.mark.detail("31")
@every_env
@pytest.mark.parametrize("kind", ["Trunc", "Term"])
def test_rewards_are_scaled_by_the_spread_of_discounted_returns(name: str, monkeypatch, kind: str) -> None:
    """Rewards of both signs around 3 in two environments out of phase; every return since its own episode's start."""
    env = envs(MODULES[name], kind, gamma=0.8)
    env.envs.envs[1].unwrapped.end = 3
    rng, paid = np.random.default_rng(0), np.zeros(2)

    def pay(i: int, action: Any, result: Any) -> Any:
        if paid[i] < 100:
            paid[i] = rng.normal(3, 5)
        return result[0], paid[i], *result[2:]

    each_step(env, pay)
    history: list[list[float]] = [[], []]
    returns: list[float] = []
    for t in range(1, 41):
        _, scaled_rewards, *_ = env.step(zeros(env))
        for i, end in enumerate((5, 3)):
            history[i].append(paid[i])
            returns.append(sum(0.8**k * r for k, r in enumerate(reversed(history[i]))))
            history[i] = [] if t % end == 0 else history[i]
        if t > 5:
            np.testing.assert_allclose(scaled_rewards, paid / np.std(returns), rtol=1e-3)
    as_they_are(MODULES[name], monkeypatch)
    env = envs(MODULES[name], kind)
    for reward in (9.5, 11.0):
        for wrapped, sign in zip(env.envs.envs, (1, -1), strict=True):
            wrapped.unwrapped.reward = sign * reward
        assert env.step(zeros(env))[1].tolist() == pytest.approx([min(reward, 10), -min(reward, 10)])


@every_env
def test_info_of_the_environments_is_at_hand(name: str) -> None:
    """Of the first observation after reset and after an end; what came with the end itself is in `final_info`."""
    env = envs(MODULES[name])
    assert env.info["t"].tolist() == [0, 0]
    env.envs.envs[1].unwrapped.end = 3
    for t in range(1, 6):
        env.step(zeros(env))
        assert env.info["t"].tolist() == [t % 5, t % 3]
        if t in (3, 5):
            assert env.info["final_info"]["t"][int(t == 3)] == t


@every_env
@pytest.mark.parametrize("kind, size", [("DiscreteObs", 5), ("DictObs", 5), ("TupleObs", 4), ("FloatImageObs", 3072)])
def test_structured_observations_are_flattened(name: str, kind: str, size: int) -> None:
    env = envs(MODULES[name], kind, 1)
    assert env.obs.shape == (1, size) and env.obs.dtype == np.float32 and env.obs_dim == size
    if kind == "DiscreteObs":
        raw_obs, _ = env.envs.reset()
        assert sorted(raw_obs[0].tolist()) == [0, 0, 0, 0, 1]


@every_box
@pytest.mark.parametrize(
    "kind, words",
    [
        ("ImageObs", "only Atari's script"),
        ("FlatImageObs", "only Atari's script"),
        ("SequenceAction", "Box"),
        ("IntegerBox", "Box spaces of floats"),
        ("WrongShape", r"observes \(4,\), not"),
        ("VectorReward", "no scalar reward"),
        ("OldStep", "not of Gymnasium 1: .*expected 5, got 4"),
        ("OldReset", "not of Gymnasium 1: .*expected 2"),
    ],
)
def test_spaces_that_cannot_work_are_refused(name: str, kind: str, words: str) -> None:
    with pytest.raises(MODULES[name].UsageError, match=words) as caught:
        envs(MODULES[name], kind)
    assert "--env-id" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", GAUSSIAN)
def test_discrete_actions_are_for_trpo(name: str) -> None:
    with pytest.raises(MODULES[name].UsageError, match=r"Box spaces of floats, trpo\.py"):
        envs(MODULES[name], "DiscreteAction")


@every_box
def test_actions_far_beyond_those_of_a_new_policy_are_said(name: str, capsys) -> None:
    for kind, said in (("WideBox", True), ("Box05", False), ("Unbounded", False)):
        envs(MODULES[name], kind)
        assert ("gymnasium.wrappers.RescaleAction" in capsys.readouterr().out) == said, kind


@pytest.mark.parametrize(
    "kind, every, shares", [("Trunc", 1, [4 / 64] * 3), ("Hundred", 2, [64 / 128, 28 / 128, 64 / 128])]
)
def test_steps_of_episodes_that_a_checkpoint_cuts_are_counted(
    control, small_args, monkeypatch, kind: str, every: int, shares: list[float]
) -> None:
    logged = []
    end = control.Run.end_iteration

    def end_iteration(run: Any, metrics: dict[str, Any]) -> None:
        logged.append(metrics["charts/cut_steps"])
        end(run, metrics)

    monkeypatch.setattr(control.Run, "end_iteration", end_iteration)
    env_id = counting(control.__name__, kind)
    control.train(small_args(control, env_id=env_id, total_timesteps=384, checkpoint_every=every))
    assert logged == pytest.approx(shares)


@every_env
@pytest.mark.parametrize(
    "env_id, word",
    [("no_such_module:Trunc-v0", "no_such_module"), ("counting_envs:Trunk-v0", "Trunk"), ("HalfCheeta-v5", "Cheetah")],
)
def test_a_module_and_an_id_misspelt_are_told_apart(name: str, env_id: str, word: str) -> None:
    module = MODULES[name]
    with pytest.raises((ModuleNotFoundError, gym.error.Error), match=word):
        module.NormalizedEnvs(module.Args(env_id=env_id), 1)


def test_an_old_gymnasium_is_named(monkeypatch) -> None:
    monkeypatch.delattr(gym.vector, "AutoresetMode")
    for name in ENVS:
        with pytest.raises(MODULES[name].UsageError, match="pip install gymnasium"):
            MODULES[name].NormalizedEnvs(MODULES[name].Args(), 1)


@every_box
def test_a_constructor_need_not_know_render_modes(name: str) -> None:
    env = envs(MODULES[name], "Plain", 1)
    assert env.step(zeros(env))[0].shape == (1, 3)


@every_env
def test_seeds_decide_everything_and_environments_differ(name: str, monkeypatch) -> None:
    as_they_are(MODULES[name], monkeypatch)
    env = envs(MODULES[name], num_envs=4)
    draws: list[list[float]] = []
    for seed in (1, 100, 1):
        env.reset(seed)
        draws.append(env.obs[:, 2].tolist())
        assert env.obs[:, 1].tolist() == [1] * 4  # new environments, which remember nothing
    assert draws[0] == draws[2] and len({*draws[0], *draws[1]}) == 8


@every_env
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_environments_that_draw_from_the_global_generator_depend_on_the_seed_alone(name: str, kind: str) -> None:
    env = envs(MODULES[name], "GlobalDraw", 4, vectorization=kind)
    draws = []
    for seed, iteration in ((1, 0), (2, 0), (1, 1), (1, 0)):
        env.reset(MODULES[name].reseed(seed, iteration))
        draws.append(env.envs.reset()[0][:, 2].tolist())
        assert len(set(draws[-1])) == (4 if kind == "sync" else 1)  # workers begin as copies
    env.envs.close()
    *different, again = draws
    assert again == draws[0] and len(set(map(tuple, different))) == 3


@every_box
def test_vectorization_does_not_change_the_numbers(name: str) -> None:
    module = MODULES[name]
    both: list[Any] = []
    for kind in ("sync", "async"):
        env = module.NormalizedEnvs(module.Args(env_id="Pendulum-v1", vectorization=kind), 2)
        env.reset(3)
        rng = np.random.default_rng(0)
        out: list[Any] = []
        for _ in range(210):
            next_obs, rewards, terminations, truncations, ended = env.step(rng.normal(size=(2, 1)).astype(np.float32))
            out += [next_obs, env.obs.copy(), rewards, terminations, truncations, np.array(ended)]
        env.envs.close()
        both.append(out)
    for a, b in zip(*both, strict=True):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------------------------------------------------- rollouts


@pytest.mark.detail("1")
@every_env
def test_a_segment_goes_on_where_the_last_one_ended(name: str, small_args, monkeypatch) -> None:
    """Episodes of 5 in segments of 7, from one environment: the counter in the rows runs on across segments."""
    module = MODULES[name]
    as_they_are(module, monkeypatch)
    seen = batches(module, monkeypatch)
    short = {"num_envs": 1, "num_steps": 7, "total_timesteps": 28, "checkpoint_every": 0}
    module.train(small_args(module, **ONE_BATCH | short))
    counters = [sorted(batch["obs"][:, 0].tolist()) for batch in learned_from(module, seen)]
    assert counters == [sorted(float(t % 5) for t in range(i, i + 7)) for i in range(0, 28, 7)]


@pytest.mark.detail("6")
@every_control
def test_each_row_pairs_what_belongs_to_one_step(name: str, small_args, monkeypatch) -> None:
    """In every minibatch obs, action, logprob, value, advantage and return of a row are those of one step of one
    environment, told apart by its return; an epoch has each step once. Step size 0, so that the policy stays."""
    module = MODULES[name]
    acted_on: list[Any] = []
    original = playing(module).step

    def step(self: Any, actions: np.ndarray) -> Any:
        acted_on.append((self.obs.copy(), actions.copy()))
        return original(self, actions)

    monkeypatch.setattr(playing(module), "step", step)
    agents = watch(monkeypatch, module, "Agent")
    gae = watch(monkeypatch, module, "compute_gae", copies)
    seen = batches(module, monkeypatch)
    fits = watch(monkeypatch, module, "value_loss", lambda args, result: (args[0].detach().clone(), args[-1]))
    args = small_args(module, **four_minibatches(name) | {"learning_rate": 0.0, "norm_adv": False})
    module.train(args)
    ((_, values, *_), (advantages, returns)) = gae[0]
    assert len(returns.unique()) == returns.numel() == 32
    truth = {"values": values, "advantages": advantages, "returns": returns}
    for key, recorded in zip(("obs", "actions"), zip(*acted_on[-args.num_steps :], strict=True), strict=True):
        truth[key] = torch.from_numpy(np.stack(recorded))
    truth = {key: x.flatten(0, 1) for key, x in truth.items()}
    step_of = lambda some: (some[:, None] == truth["returns"]).int().argmax(1)
    used: list[int] = []
    for batch in seen[: 1 if name == "trpo" else 4]:
        index = step_of(batch["returns"])
        used += index.tolist()
        for key, x in truth.items():
            torch.testing.assert_close(batch[key], x[index].to(batch[key].dtype), atol=1e-5, rtol=1e-5)
        if name not in ("trpo", "ppo_lstm"):  # one scores the actions itself, of the other test_updates.py knows
            with torch.no_grad():
                policy, _ = agents[0](batch["obs"])
                if name in GAUSSIAN:
                    policy = Independent(Normal(policy, agents[0].actor_logstd.exp()), 1)
                if name == "ppo_discrete":
                    policy = Independent(Categorical(logits=policy), 1)
                expected = policy.log_prob(batch["actions"])
            torch.testing.assert_close(batch["logprobs"], expected, atol=1e-4, rtol=1e-4)
    assert sorted(used) == list(range(32))
    if name == "trpo":  # whose value network is fitted by itself
        index = [step_of(returns) for _, returns in fits]
        assert sorted(torch.cat(index).tolist()) == list(range(32))
        for (new_values, _), rows in zip(fits, index, strict=True):
            torch.testing.assert_close(new_values, truth["values"][rows], atol=1e-5, rtol=1e-5)


@pytest.mark.detail("24")
@pytest.mark.detail("27")
@every_box
def test_stored_actions_are_raw_samples_with_the_learned_spread(name: str, small_args, monkeypatch) -> None:
    """A policy with std e^-1 and e^0.5 in a box of [0, 5]: what is stored has that spread around means near 0, so that
    half of it lies outside the box, and is logged as that."""
    module = MODULES[name]
    make = module.Agent

    def spread(*args: Any, **kwargs: Any) -> Any:
        agent = make(*args, **kwargs)
        agent.actor_logstd.data[:] = torch.tensor([-1.0, 0.5])
        return agent

    monkeypatch.setattr(module, "Agent", spread)
    seen = batches(module, monkeypatch)
    many = {"env_id": "counting_envs:Box05-v0", "num_envs": 4, "num_steps": 1000, "total_timesteps": 4000}
    args = small_args(module, **ONE_BATCH | many)
    module.train(args)
    actions = seen[0]["actions"]
    assert actions.mean(0).tolist() == pytest.approx([0, 0], abs=0.1)
    assert actions.std(0).tolist() == pytest.approx([0.3679, 1.6487], rel=0.06)
    assert abs(float(torch.corrcoef(actions.T)[0, 1])) < 0.08
    outside = float(((actions < 0) | (actions > 5)).float().mean())
    assert 0.4 < outside < 0.6
    assert logged(args, "charts/clipped_actions")[0] == pytest.approx(outside, abs=1e-4)


def values_of(agent: Any, before: torch.Tensor, led_to: torch.Tensor) -> torch.Tensor:
    """V of what each step led to [T, N]; an LSTM sees it after all that came before it in the segment."""
    if not hasattr(agent, "lstms"):
        return agent.critic(led_to)[..., 0].detach()
    state = agent.initial_state.expand(-1, led_to.shape[1], -1)
    values = []
    for t in range(len(led_to)):
        obs = torch.cat([before[: t + 1], led_to[t : t + 1]])
        starts = obs[..., 0] == 0
        values.append(agent(obs, starts, state)[1][-1].detach())
    return torch.stack(values)


@pytest.mark.detail("5")
@pytest.mark.detail("LSTM-b")
@pytest.mark.detail("LSTM-c")
@every_env
@pytest.mark.parametrize(
    "kind, bootstrap, dies",
    [("Trunc", True, False), ("Trunc", False, True), ("Term", True, True), ("Both", True, True)],
)
def test_targets_bootstrap_from_the_true_last_observation(
    name: str, small_args, monkeypatch, kind: str, bootstrap: bool, dies: bool
) -> None:
    """V of a step's successor is the critic's value of what the step led to, never of the next episode's start; the
    target of the last step of an episode (λ = 0) is 1 + γV if it was cut, and 1 if it died."""
    module = MODULES[name]
    as_they_are(module, monkeypatch)
    agents = watch(monkeypatch, module, "Agent")
    gae = watch(monkeypatch, module, "compute_gae", copies)
    starts = watch(monkeypatch, module.NormalizedEnvs, "reset", lambda args, _: args[0].obs.copy())
    steps = watch(monkeypatch, module.NormalizedEnvs, "step", lambda args, out: (out[0].copy(), args[0].obs.copy()))
    changes = {"env_id": counting(name, kind), "bootstrap_truncated": bootstrap}
    module.train(small_args(module, **ONE_BATCH | changes | {"learning_rate": 0.0, "gae_lambda": 0.0}))
    ((_, _, next_values, ends, dones, *_), (_, returns)) = gae[0]
    outcomes, next_obs = zip(*steps, strict=True)
    led_to = torch.from_numpy(np.stack(outcomes))
    before = torch.from_numpy(np.stack([*starts, *next_obs[:-1]]))
    over = led_to[..., 0] == 5
    assert torch.equal(dones, over.float()) and torch.equal(ends, dones * dies)
    torch.testing.assert_close(next_values, values_of(agents[0], before, led_to))
    future = next_values[over]
    assert future.abs().min() > 1e-3
    torch.testing.assert_close(returns[over], 1 + 0.99 * future * (not dies))


@pytest.mark.detail("5")
@pytest.mark.detail("19")
@pytest.mark.parametrize("name", ["ppo_atari"])
def test_atari_targets_bootstrap_a_cut_game(name: str, small_args, monkeypatch) -> None:
    """A frame cap of 40: every tenth step is cut, its next value is that of the true last frames; rewards by sign."""
    atari = MODULES[name]
    gae = watch(monkeypatch, atari, "compute_gae", copies)
    finals = watch(monkeypatch, atari.AtariGames, "step", lambda args, result: args[0].next_obs.copy())
    agents = watch(monkeypatch, atari, "Agent")
    step, counter = atari.AtariGames.step, iter(range(10**6))

    def stretched(self: Any, actions: np.ndarray) -> Any:
        rewards, *rest = step(self, actions)
        return rewards * 0 + (next(counter) % 3 - 1) * 25.0, *rest

    monkeypatch.setattr(atari.AtariGames, "step", stretched)
    atari.train(small_args(atari, max_episode_frames=40, learning_rate=0.0, total_timesteps=128))
    rewards, values, next_values, ends, dones = gae[0][0][:5]
    assert set(rewards.unique().tolist()) == {-1.0, 0.0, 1.0}
    cut = dones[:, 0].nonzero()[:, 0].tolist()
    assert cut == [9, 19, 29, 39, 49, 59] and not ends.any()
    with torch.no_grad():
        true = agents[0](torch.from_numpy(np.stack([finals[t][0] for t in cut])))[1]
    torch.testing.assert_close(next_values[cut, 0], true, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(next_values[cut[:-1], 0], values[[t + 1 for t in cut[:-1]], 0], atol=1e-4)
    kept = [t for t in range(63) if t not in cut]
    torch.testing.assert_close(next_values[kept], values[[t + 1 for t in kept]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["ppo_atari"])
def test_scores_logged_are_those_of_whole_games(name: str, small_args, monkeypatch) -> None:
    """What the emulators pay, neither clipped nor cut by a life, is summed here from game to game: each game is logged
    once, in the step that ends it, with its sum and its length."""
    atari = MODULES[name]
    make, heard, lives = atari.make_game, [], set()
    steps = watch(monkeypatch, atari.AtariGames, "step", lambda *_: None)

    def make_game(*args: Any, **view: Any) -> Any:
        game, said = make(*args, **view), []
        recv = game.recv

        def keep() -> Any:
            result = recv()
            _, (reward,), (over,), (cut,), info = result
            said.append((len(steps), float(reward), bool(over or cut)))
            lives.add(int(info["lives"][0]))
            return result

        game.recv = keep
        heard.append(said)
        return game

    monkeypatch.setattr(atari, "make_game", make_game)
    monkeypatch.setattr(atari, "act", lambda agent, obs: (torch.randint(18, (3,)), torch.zeros(3), torch.zeros(3)))
    monkeypatch.setattr(atari, "minibatches", lambda *_: iter([torch.arange(2)]))
    many = {"env_id": "Berzerk", "num_envs": 3, "num_steps": 100, "num_minibatches": 1, "total_timesteps": 1200}
    args = small_args(atari, max_episode_frames=700, checkpoint_every=0, **many)
    atari.train(args)
    expected = []
    for i, said in enumerate(heard):
        score = 0.0
        begin = 0
        for t, reward, ends in said:
            score += reward
            if ends:
                expected.append((3 * t + i + 1, score, t + 1 - begin))
                score, begin = 0.0, t + 1
    expected.sort()
    shown = scalars(folder(args))
    assert shown["charts/episodic_return"] == [(step, score) for step, score, _ in expected]
    assert shown["charts/episodic_length"] == [(step, length) for step, _, length in expected]
    steps_of, scores, lengths = map(set, zip(*expected, strict=True))
    assert lives >= {1, 2, 3} and len(expected) > 4 and len(steps_of) > 3 and len(scores) > 2 and min(lengths) < 175


@pytest.mark.parametrize("name", ["ppo_atari"])
def test_frames_are_stored_in_bytes_and_a_rollout_is_small(name: str, small_args, monkeypatch) -> None:
    atari = MODULES[name]
    seen = batches(atari, monkeypatch)
    atari.train(small_args(atari, **FEW_ROWS))
    assert seen[0]["obs"].dtype == torch.uint8
    default = atari.Args()
    assert default.num_steps * default.num_envs * seen[0]["obs"][0].nbytes < 40e6


# -------------------------------------------------------------------------------------------------------------- updates


@pytest.mark.detail("3")
@pytest.mark.detail("10")
@every_control
def test_one_adam_holds_what_it_trains_and_its_first_step_is_right_by_hand(name: str, small_args, monkeypatch) -> None:
    """After one gradient g both moments are g and g²: the step is lr·g / (|g| + 1e-5). TRPO's holds the critic."""
    module = MODULES[name]
    moved: list[Any] = []
    step = torch.optim.Adam.step

    def watched(self: Any, *rest: Any) -> Any:
        parts = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in parts]
        assert all(p.grad is not None for p in parts), "a weight has no part in the loss"
        assert self.defaults["fused"], "each step takes longer"
        gradients = torch.cat([p.grad.reshape(-1) for p in parts])
        result = step(self, *rest)
        change = torch.cat([(p.detach() - b).reshape(-1) for p, b in zip(parts, before, strict=True)])
        moved.append((parts, gradients, change))
        return result

    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    agents = watch(monkeypatch, module, "Agent")
    module.train(small_args(module, **FEW_ROWS | {"learning_rate": 0.1}))
    ((parts, gradient, change),) = moved
    trained = agents[0].critic if name == "trpo" else agents[0]
    assert [id(p) for p in parts] == [id(p) for p in trained.parameters()]
    small = (gradient.abs() > 1e-7) & (gradient.abs() < 1e-3)
    assert small.sum() > 20
    gradient, change = gradient[small].double(), change[small].double()
    torch.testing.assert_close(change, -0.1 * gradient / (gradient.abs() + 1e-5), atol=1e-5, rtol=1e-3)


@pytest.mark.detail("4")
@pytest.mark.parametrize("anneal", [True, False])
def test_the_learning_rate_falls_linearly(ppo, small_args, monkeypatch, anneal: bool) -> None:
    """As logged, and as Adam has it when it steps."""
    used = watch(monkeypatch, torch.optim.Adam, "step", lambda args, result: args[0].param_groups[0]["lr"])
    args = small_args(ppo, **FEW_ROWS | {"anneal_lr": anneal, "learning_rate": 0.004, "total_timesteps": 128})
    ppo.train(args)
    expected = [0.004, 0.003, 0.002, 0.001] if anneal else [0.004] * 4
    assert logged(args, "charts/learning_rate") == pytest.approx(expected) and used == pytest.approx(expected)


@every_control
def test_each_step_takes_the_gradient_of_its_own_minibatch_alone(name: str, small_args, monkeypatch) -> None:
    """What came before is forgotten: as torch.autograd.grad gives it, which adds to nothing."""
    module = MODULES[name]
    agents = watch(monkeypatch, module, "Agent")

    def own_gradient(_: Any, result: Any) -> torch.Tensor | None:
        loss = result if name == "trpo" else result[0]
        trained = agents[0].critic if name == "trpo" else agents[0]
        parts = torch.autograd.grad(loss, list(trained.parameters()), retain_graph=True)
        return torch.cat([part.reshape(-1) for part in parts])

    given = watch(monkeypatch, module, "value_loss" if name == "trpo" else "ppo_loss", own_gradient)
    taken = watch(monkeypatch, torch.optim.Adam, "step", lambda args, _: gradient_of(args[0]))
    free = {} if name == "trpo" else {"max_grad_norm": 1e6}
    module.train(small_args(module, **four_minibatches(name) | free | {"update_epochs": 2}))
    assert len(taken) == 8
    for own, used in zip(given, taken, strict=False):
        torch.testing.assert_close(used, own, atol=1e-6, rtol=1e-4)
    assert (taken[0] - taken[1]).norm() > 1e-2 * taken[0].norm()


@pytest.mark.detail("11")
def test_only_gradients_that_are_too_long_are_shortened_and_none_is_turned(ppo, small_args, monkeypatch) -> None:
    """The first gradient of the same run under three limits: as it is, with half of its norm, and again as it is."""
    taken = watch(monkeypatch, torch.optim.Adam, "step", lambda args, _: gradient_of(args[0]))
    first: list[torch.Tensor] = []
    for factor in (None, 0.5, 2.0):
        taken.clear()
        limit = factor * float(first[0].norm()) if factor else 1e6
        ppo.train(small_args(ppo, **FEW_ROWS, ent_coef=0.1, max_grad_norm=limit))
        first.append(taken[0])
    whole, half, again = first
    torch.testing.assert_close(half, 0.5 * whole, atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(again, whole)


@pytest.mark.detail("6")
@pytest.mark.detail("7")
@pytest.mark.parametrize("norm_adv", [True, False])
def test_minibatches_cover_the_batch_and_are_normalised_one_by_one(ppo, small_args, monkeypatch, norm_adv) -> None:
    surrogate = "penalized_surrogate_loss" if ppo.__name__ == "ppo_penalty" else "clipped_surrogate_loss"
    used = watch(monkeypatch, ppo, surrogate, lambda args, result: args[1].detach().clone())
    gae = watch(monkeypatch, ppo, "compute_gae", copies)
    seen = batches(ppo, monkeypatch)
    ppo.train(small_args(ppo, **four_minibatches(ppo.__name__) | {"update_epochs": 2, "norm_adv": norm_adv}))
    advantages, returns = (x.flatten().sort()[0] for x in gae[0][1])
    for epoch in (slice(0, 4), slice(4, 8)):
        torch.testing.assert_close(torch.cat([batch["returns"] for batch in seen[epoch]]).sort()[0], returns)
        if not norm_adv:
            torch.testing.assert_close(torch.cat(used[epoch]).flatten().sort()[0], advantages)
    for own in used[:8] if norm_adv else ():
        assert own.numel() == 8
        assert float(own.mean()) == pytest.approx(0, abs=1e-5)
        assert float(own.std(correction=0)) == pytest.approx(1, abs=0.01)


@pytest.mark.detail("S3")
@pytest.mark.parametrize(
    "first, second, steps",
    [
        ([0.0] * 4, [0.015] * 4, 4),  # within 1.5 times the target
        ([9.0] * 4, [0.0149] * 4, 4),  # the first estimate does not matter
        ([0.0] * 4, [0.001, 0.001, 0.0151, 0.0], 2),  # nor does the mean so far: this minibatch's own decides
        ([0.0] * 4, [0.0151] * 4, 0),
    ],
)
def test_epochs_end_before_the_step_that_goes_on(
    ppo, small_args, monkeypatch, first: Any, second: Any, steps: int
) -> None:
    """A target of 0.01 and four minibatches whose estimates of KL are put into the loop's hands."""
    original = ppo.ppo_loss
    told = iter([*zip(first, second, strict=True)] + [(0.0, 0.0)] * 99)

    def tell(*args: Any) -> Any:
        loss, stats = original(*args)
        old, new = next(told)
        return loss, stats | {"losses/old_approx_kl": torch.tensor(old), "losses/approx_kl": torch.tensor(new)}

    taken = watch(monkeypatch, torch.optim.Adam, "step")
    monkeypatch.setattr(ppo, "ppo_loss", tell)
    args = small_args(ppo, **four_minibatches(ppo.__name__) | {"target_kl": 0.01})
    ppo.train(args)
    assert len(taken) == steps
    assert logged(args, "charts/minibatches") == [min(steps + 1, 4)]  # looked at


@pytest.mark.detail("12")
@every_control
def test_logged_metrics_by_numpy(name: str, small_args, monkeypatch) -> None:
    """Explained variance of the values before the epochs; every loss as the mean over all minibatches."""
    module = MODULES[name]
    gae = watch(monkeypatch, module, "compute_gae", copies)
    loss = lambda _, result: {"losses/value_loss": float(result.detach())}
    owner, keep = ("value_loss", loss) if name == "trpo" else ("ppo_loss", stats_of)
    looked_at = watch(monkeypatch, module, owner, keep)
    args = small_args(module, total_timesteps=128, learning_rate=0.01)
    module.train(args)
    ((_, values, *_), (_, returns)) = gae[0]
    explained = 1 - np.var((returns - values).numpy()) / np.var(returns.numpy())
    assert logged(args, "losses/explained_variance")[0] == pytest.approx(explained, rel=1e-3, abs=1e-3)
    assert abs(explained - 0.5) > 0.05  # otherwise what is explained could be what is left
    minibatches = looked_at[: args.num_minibatches * args.update_epochs]
    if name != "trpo":
        assert logged(args, "charts/minibatches") == [len(minibatches)]
    moved = 0.0
    for tag in minibatches[0].keys() - {"losses/kl"}:  # which is that of the whole batch after the epochs
        mean = np.mean([stats[tag] for stats in minibatches])
        assert logged(args, tag)[0] == pytest.approx(mean, rel=1e-3, abs=1e-5), tag
        moved = max(moved, abs(minibatches[-1][tag] - mean))
    assert moved > 1e-3


@pytest.mark.detail("27")
def test_before_the_first_update_the_ratio_is_1(ppo, small_args, monkeypatch) -> None:
    """The raw action is scored, as it was drawn: half of it is outside the box of an environment for vectors."""
    looked_at = watch(monkeypatch, ppo, "ppo_loss", stats_of)
    kind = "MultiAction" if ppo.__name__ in CHOICES else "Box05"
    own = {} if ppo.__name__ == "ppo_atari" else {"env_id": f"counting_envs:{kind}-v0"}
    ppo.train(small_args(ppo, **FEW_ROWS | own | {"update_epochs": 2, "learning_rate": 0.01, "max_grad_norm": 1e3}))
    kinds = ("losses/old_approx_kl", "losses/approx_kl")
    assert all(abs(looked_at[0][kind]) < 1e-5 < 1e-4 < abs(looked_at[1][kind]) for kind in kinds)


def test_bf16_changes_no_more_than_rounding(ppo, small_args, monkeypatch) -> None:
    """The first minibatch of the first iteration: same frames or states, same policy up to rounding."""
    looked_at = watch(monkeypatch, ppo, "ppo_loss", stats_of)
    first = []
    for bf16 in (False, True):
        looked_at.clear()
        ppo.train(small_args(ppo, **FEW_ROWS, bf16=bf16))
        first.append(looked_at[0])
    plain, rounded = first
    assert plain != rounded
    assert rounded["losses/entropy"] == pytest.approx(plain["losses/entropy"], rel=0.01)
    assert rounded["losses/value_loss"] == pytest.approx(plain["losses/value_loss"], rel=0.05)
    assert abs(rounded["losses/approx_kl"]) < 0.02  # the ratio is 1 up to bfloat16 before any update


# ---------------------------------------------------------------------------------------------------------- the penalty


@pytest.mark.detail("PEN-old")
@pytest.mark.detail("PEN-beta")
def test_the_old_policy_stays_and_the_kl_to_it_moves_beta(penalty, small_args, monkeypatch) -> None:
    """In every epoch each row comes with the mean and log std that drew its action; the KL of all rows after all
    epochs, recomputed with torch.distributions, is what update_beta is told, once, and what is logged."""
    seen = batches(penalty, monkeypatch)
    agents = watch(monkeypatch, penalty, "Agent")
    betas = watch(monkeypatch, penalty, "update_beta", lambda args, result: (*args, result))
    far = {"learning_rate": 0.1, "update_epochs": 5, "max_grad_norm": 1e3, "beta": 3.0, "kl_target": 0.02}
    args = small_args(penalty, **ONE_BATCH | far)
    penalty.train(args)
    assert len(seen) >= 5
    for batch in seen:
        assert not batch["logstd"].any() and batch["logstd"].shape == batch["means"].shape
        torch.testing.assert_close(Normal(batch["means"], 1.0).log_prob(batch["actions"]).sum(-1), batch["logprobs"])
    assert len(betas) == 1, "β is to move once an iteration"
    (agent,), ((beta, kl, target, new_beta),) = agents, betas
    assert agent.actor_logstd.abs().min() > 1e-3  # the new log std has moved, the old one has not
    with torch.no_grad():
        new = Normal(agent(seen[0]["obs"])[0], agent.actor_logstd.exp())
    old = Normal(seen[0]["means"], seen[0]["logstd"].exp())
    expected, reverse = (float(kl_divergence(*pair).sum(-1).mean()) for pair in ((old, new), (new, old)))
    assert expected > 0.01 and abs(reverse / expected - 1) > 0.02  # far enough to tell them apart
    assert kl == pytest.approx(expected, rel=1e-3) and (beta, target) == (3.0, 0.02)
    assert logged(args, "losses/kl")[0] == pytest.approx(expected, rel=1e-3)
    assert logged(args, "losses/beta") == [3.0] and float(agent.beta) == pytest.approx(new_beta)


@pytest.mark.detail("PEN-beta")
@pytest.mark.parametrize(
    "adaptive, target, expected",
    [(True, 1e3, [2.0, 1.0, 0.5, 0.25]), (True, 1e-9, [2.0, 4.0, 8.0, 16.0]), (False, 1e3, [2.0] * 4)],
)
def test_beta_changes_between_iterations_and_only_if_it_may(
    penalty, small_args, monkeypatch, adaptive: bool, target: float, expected: list[float]
) -> None:
    """A target never reached, or always: half or double of β in each iteration, the same for its minibatches."""
    used = watch(monkeypatch, penalty, "penalized_surrogate_loss", lambda args, result: float(args[3]))
    args = small_args(penalty, beta=2.0, kl_target=target, adaptive_beta=adaptive)
    penalty.train(args)
    looked_at = len(used) // 4
    assert looked_at >= 8 and used == [beta for beta in expected for _ in range(looked_at)]
    assert logged(args, "losses/beta") == expected


# ----------------------------------------------------------------------------------------------------- odd numbers, log


@every_control
def test_weights_that_are_not_finite_are_never_saved(name: str, small_args, monkeypatch) -> None:
    """A last step that spoils them comes after the last loss; what was saved before it stays."""
    module = MODULES[name]

    def spoil(args: Any, _: Any) -> None:
        if len(steps) == 1:
            args[0].param_groups[0]["params"][-1].data.fill_(math.inf)

    steps = watch(monkeypatch, torch.optim.Adam, "step", spoil)
    args = small_args(module, **FEW_ROWS | {"total_timesteps": 64, "checkpoint_every": 1, "save_model": True})
    with pytest.raises(module.RunError, match="not finite after iteration 2, which is not saved"):
        module.train(args)
    (path,) = folder(args).glob("*.pt*")
    state = torch.load(path, weights_only=True)
    assert state["iteration"] == 1 and all(x.isfinite().all() for x in state["agent"].values())


@every_env
@pytest.mark.parametrize("kind, score", [("Zero", 0.0), ("OneStep", 1.0), ("Huge", 5e30)])
def test_odd_rewards_do_not_poison_the_run(name: str, small_args, kind: str, score: float, recwarn: Any) -> None:
    module = MODULES[name]
    metrics = module.train(small_args(module, env_id=counting(name, kind)))
    assert all(math.isfinite(v) for k, v in metrics.items() if k != "losses/explained_variance")
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]
    assert metrics["episodic_return"] == pytest.approx(score)


@every_env
def test_an_episode_longer_than_a_rollout_is_credited_when_it_ends(name: str, small_args) -> None:
    module = MODULES[name]
    long = {"env_id": counting(name, "Hundred"), "total_timesteps": 192, "checkpoint_every": 0}
    args = small_args(module, **FEW_ROWS | long)
    assert math.isnan(module.train(args)["episodic_return"]) and not logged(args, "charts/episodic_return")
    args = dataclasses.replace(args, total_timesteps=224)
    assert module.train(args)["episodic_return"] == 100 and logged(args, "charts/episodic_return") == [100] * 2


@every_env
@pytest.mark.parametrize("kind", ["Trunc", "Term"])
def test_every_episode_is_logged_once_also_when_several_end_in_one_step(name: str, small_args, kind: str) -> None:
    many = {"num_envs": 4, "num_steps": 32, "checkpoint_every": 0}
    args = small_args(MODULES[name], env_id=counting(name, kind), **many)
    MODULES[name].train(args)
    steps, scores = zip(*scalars(folder(args))["charts/episodic_return"], strict=True)
    assert len(scores) == 4 * (128 // 5) and set(scores) == {5.0}
    assert logged(args, "charts/episodic_length") == [5.0] * len(scores)
    assert list(steps) == sorted(set(steps))
    assert steps[:8] == (17, 18, 19, 20, 37, 38, 39, 40)  # the fifth step of four environments, then the tenth


# ------------------------------------------------------------------------------------------------- edits of one's own


def edited(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *edits: tuple[str, str]) -> ModuleType:
    """A copy of the script as a module, in which each first text is replaced by the second wherever it occurs."""
    source = (ROOT / f"{name}.py").read_text()
    for old, new in edits:
        assert old in source, f"{name}.py has no {old!r}"
        source = source.replace(old, new)
    path = tmp_path / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


HIDDEN = "        layer_init(nn.Linear(64, 64)),\n        nn.Tanh(),\n"
NETWORKS = {  # what is replaced by what, and what shows it
    "ReLU": ("nn.Tanh()", "nn.ReLU()", "ReLU"),
    "a third hidden layer": (HIDDEN, 2 * HIDDEN, "(6): Linear"),
    "layer norm": (HIDDEN, HIDDEN + "        nn.LayerNorm(64),\n", "LayerNorm"),
}


@every_box
@pytest.mark.parametrize("what", NETWORKS)
@pytest.mark.parametrize("env_id", ["counting_envs:Trunc-v0", "Pendulum-v1"])
def test_another_network_trains_and_acts_as_it_is(
    name: str, small_args, tmp_path: Path, monkeypatch, what: str, env_id: str
) -> None:
    """What the rollout acts by is what the network says, to the end of the run and in the saved policy."""
    old, new, shown = NETWORKS[what]
    module = edited(name, tmp_path, monkeypatch, (old, new))
    acting: list[Any] = []
    make = module.in_numpy

    def acts(agent: Any, obs_dim: int) -> Any:
        policy = make(agent, obs_dim)
        obs = np.random.default_rng(0).standard_normal((9, obs_dim), np.float32)
        network = agent.actor if name == "trpo" else agent.actor_mean
        acting.append((policy(obs), network(torch.from_numpy(obs)).detach().numpy(), repr(network)))
        return policy

    monkeypatch.setattr(module, "in_numpy", acts)
    args = small_args(module, env_id=env_id, learning_rate=0.01)
    module.train(args)
    assert len(acting) == 4
    for means, expected, _ in acting:
        np.testing.assert_allclose(means, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(acting[-1][0] - acting[0][0]).max() > 1e-3  # it has learned
    assert shown in acting[0][2]
    module.load_policy(str(folder(args)))


@every_control
def test_the_optimiser_s_lines_are_those_of_the_textbook(name: str) -> None:
    source = (ROOT / f"{name}.py").read_text()
    whose = "agent.critic.parameters()" if name == "trpo" else "agent.parameters()"
    assert f"optimizer = torch.optim.Adam({whose}, args.learning_rate" in source
    lines = [line.strip() for line in source.splitlines()]
    begin = lines.index("optimizer.zero_grad()")
    assert lines[begin + 1] == "loss.backward()" and "optimizer.step()" in lines[begin:]
    if name != "trpo":
        assert "nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)" in source


@every_control
def test_a_metric_of_one_s_own_that_is_nan_once_does_not_end_the_run(
    name: str, small_args, tmp_path: Path, monkeypatch
) -> None:
    end = "        run.end_iteration(metrics)\n"
    own = '        metrics["charts/own"] = float("nan") if iteration == 1 else iteration * 1.0\n'
    module = edited(name, tmp_path, monkeypatch, (end, own + end))
    args = small_args(module, num_steps=16, total_timesteps=128, checkpoint_every=1)
    module.train(args)
    values = logged(args, "charts/own")
    assert values[0] == 0 and math.isnan(values[1]) and values[2:] == [2, 3]


@every_env
def test_a_reward_of_one_s_own_sees_the_true_successor_at_episode_ends(
    name: str, small_args, tmp_path: Path, monkeypatch
) -> None:
    """The step that the observation counts: 1 + 2 + 3 + 4 + 5 an episode, where the next one's start would give 10."""
    place = "        # A reward of your own belongs here"
    own = "        rewards = raw_next_obs[:, 0].astype(np.float64)\n"
    module = edited(name, tmp_path, monkeypatch, (place, own + place))
    args = small_args(module)
    assert module.train(args)["episodic_return"] == 15
    assert set(logged(args, "charts/episodic_return")) == {15.0}


# -------------------------------------------------------------------------------------------------- all scripts alike


class Types(TorchDispatchMode):
    """The types of all tensors that come out of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        outputs = out if isinstance(out, tuple | list) else [out]
        self.seen |= {x.dtype for x in outputs if isinstance(x, torch.Tensor) and x.device.type != "meta"}
        return out


def unwatched(function: Any) -> Any:
    def call(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return call


def test_no_float64_reaches_the_device(name: str, small_args, monkeypatch) -> None:
    """Which Apple's GPUs do not have; the simulator's observations and the statistics are of that type."""
    module = MODULES[name]
    changes: dict[str, Any] = {"total_timesteps": 128}
    if name in TEXTS:
        changes = {"batch_size": 16, "total_episodes": 16, "sft_size": 32, "num_pairs": 20, "fit_batch_size": 16}
    else:  # figures and statistics stay on the CPU
        monkeypatch.setattr(module.Run, "end_iteration", unwatched(module.Run.end_iteration))
    if name in BOXES:
        changes["env_id"] = "Pendulum-v1"
    if name in ENVS:
        monkeypatch.setattr(module.RunningMeanStd, "__init__", unwatched(module.RunningMeanStd.__init__))
    with Types() as types:
        module.train(small_args(module, **changes))
    assert torch.float32 in types.seen and torch.float64 not in types.seen


def test_one_sample_is_a_batch(name: str, small_args, recwarn: Any) -> None:
    """Explained variance does not exist then, and says so without a warning."""
    module = MODULES[name]
    small = {"batch_size": 1, "response_length": 1, "total_episodes": 4} if name in TEXTS else {}
    small |= {} if name == "dpo_gpt2" else {"num_minibatches": 1}
    if name == "grpo_gpt2":
        small |= {"batch_size": 2, "group_size": 2}  # the smallest group
    args = small_args(
        module, **{"num_envs": 1, "num_steps": 1, "total_timesteps": 4} if name in CONTROL else {}, **small
    )
    assert math.isfinite(module.train(args)["losses/policy_loss"])
    assert not [w for w in recwarn if "degrees of freedom" in str(w.message)]


def begun(module: Any, args: Any) -> Any:
    """A run of two weights, without anything that trains them."""
    network = torch.nn.Linear(1, 1)
    parts = {"agent": network, "optimizer": torch.optim.Adam(network.parameters())}
    if module.__name__ not in TEXTS:
        return module.Run(args, **parts)
    run = module.Run(args, torch.device("cpu"), None)
    run.begin(**parts)
    return run


SHOWN = {"charts/proxy", "charts/beta", "charts/episodic_return", "kl/ref"}  # what the bar says
SHOWN |= {"losses/policy_loss", "rewards/accuracy", "rewards/margin", "charts/dead_groups"}


@pytest.mark.parametrize("side", ["below", "above"])
def test_each_metric_out_of_its_healthy_range_is_said_once_and_not_in_the_beginning(
    name: str, small_args, capsys, side: str
) -> None:
    """One after the other leaves its range for good, the first in iteration 9; none is spoken of before the 11th."""
    module = MODULES[name]
    args = small_args(module, checkpoint_every=0, **{BUDGET[name].removeprefix("--").replace("-", "_"): 128 * 99})
    run = begun(module, args)
    run.start_time = time.time() - 1000
    run.first = 2  # as if the run had gone on from there
    others = dict.fromkeys(SHOWN, 0.0)
    expected = []
    for iteration in range(1, 13 + len(module.HEALTHY)):
        metrics = dict(others)
        for row, (tag, low, high, meaning) in enumerate(module.HEALTHY):
            margin = 0.04 * max(1, high - low)
            bound, outwards = (low, -margin) if side == "below" else (high, margin)
            outside = bound + outwards
            exact = float(np.float32(bound)) == bound  # then the bound itself is within
            inside = bound if exact else bound - outwards / 2
            metrics[tag] = outside if iteration >= 9 + row else inside
            if iteration == max(11, 9 + row):
                expected.append(f"step {128 * iteration:,}: {tag} is {outside:.3g}: {meaning}")
        run.end_iteration(metrics)
        assert run.metrics["charts/SPS"] == pytest.approx((iteration - 2) * 128 / 1000, rel=0.05)
    run.close()
    meanings = [meaning for *_, meaning in module.HEALTHY]
    said = [line for line in capsys.readouterr().out.splitlines() if any(meaning in line for meaning in meanings)]
    assert said == expected and len(said) == len(meanings)


def test_scores_are_those_of_the_last_100_and_a_folder_in_use_is_not_waited_for(name: str, small_args) -> None:
    module = MODULES[name]
    run = begun(module, small_args(module, checkpoint_every=0))
    run.scores.extend(range(300))
    assert list(run.scores) == list(range(200, 300)) and run.lock.timeout == 0
    run.metrics = {}
    assert name in TEXTS or run.finish() == {"episodic_return": 249.5}
    run.close()


def test_the_log_on_disk_has_all_that_a_checkpoint_has(name: str, small_args, monkeypatch) -> None:
    """However slow the disk is: a run that goes on logs what follows its checkpoint, so the rest would be lost."""
    module = MODULES[name]
    write, save = RecordWriter.write, torch.save
    on_disk: list[set[str]] = []

    def write_slowly(self: Any, event: bytes) -> None:
        time.sleep(0.02)
        write(self, event)

    def look_and_save(state: Any, path: Path) -> None:
        on_disk.append(set(scalars(path.parent)))
        save(state, path)

    monkeypatch.setattr(RecordWriter, "write", write_slowly)
    monkeypatch.setattr(torch, "save", look_and_save)
    run = begun(module, small_args(module, checkpoint_every=1))
    tags = {tag for tag, *_ in module.HEALTHY} | SHOWN
    run.end_iteration(dict.fromkeys(sorted(tags), 0.5))
    run.close()
    assert on_disk[-1] == tags | {"charts/learning_rate", "charts/SPS"}


def test_a_seed_restarts_every_generator(name: str, monkeypatch) -> None:
    """From the seed, the iteration and the rank, each of which matters, and nothing else."""
    module = MODULES[name]
    drawn = []
    for seed, iteration, rank in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1, 0, 0)):
        monkeypatch.setattr(module, "RANK", rank)
        drawn.append((module.reseed(seed, iteration), random.random(), np.random.random(), float(torch.rand(1))))
    assert drawn[0] == drawn[4]
    assert [len(set(column)) for column in zip(*drawn, strict=True)] == [4] * 4


def test_a_process_takes_the_gpu_of_its_own_rank(name: str, tmp_path: Path, monkeypatch) -> None:
    """With torchrun's variables, on a machine that seems to have GPUs; each device is tried before it is taken."""
    for variable, value in {"RANK": "5", "LOCAL_RANK": "3", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(variable, value)
    module = edited(name, tmp_path, monkeypatch)
    assert (module.RANK, module.LOCAL_RANK, module.WORLD) == (5, 3, 8)
    monkeypatch.setattr(module, "WORLD", 1)
    tried: list[Any] = []
    taken: list[Any] = []
    monkeypatch.setattr(torch, "zeros", lambda size, device: tried.append(device))
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for there, device, cuda, expected in (
        (True, "auto", True, "cuda:3"),
        (True, "cuda", True, "cuda:3"),
        (True, "cuda:1", True, "cuda:1"),
        (True, "auto", False, "cpu"),
        (True, "cpu", True, "cpu"),
        (False, "auto", True, "cpu"),
    ):
        tried.clear()
        taken.clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert module.start(module.Args(device=device, cuda=cuda)) == torch.device(expected)
        assert tried == [torch.device(expected)] and taken == [torch.device(expected)] * (expected != "cpu")
    for on, precision in ((True, "high"), (False, "highest")):
        module.start(module.Args(device="cpu", torch_deterministic=not on, bf16=on))
        assert torch.backends.cudnn.deterministic != on and torch.get_float32_matmul_precision() == precision


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("changes", [{}, {"bf16": True}, {"compile": True}], ids=["plain", "bf16", "compile"])
@pytest.mark.parametrize("there, back", [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_begun_on_one_device_goes_on_on_the_other(
    name: str, small_args, changes: dict[str, Any], there: str, back: str
) -> None:
    module = MODULES[name]
    args = small_args(module, device=there, **changes)
    metrics = module.train(args)
    assert math.isfinite(metrics["losses/policy_loss"]) and math.isfinite(metrics["losses/value_loss"])
    state = torch.load(folder(args) / "checkpoint.pt", weights_only=True, map_location="cpu")
    assert state["iteration"] == 4
    budget = BUDGET[name].removeprefix("--").replace("-", "_")
    resumed = small_args(module, device=back, resume=str(folder(args)), **changes, **{budget: 768})
    module.train(resumed)
    state = torch.load(folder(args) / "checkpoint.pt", weights_only=True, map_location="cpu")
    assert state["iteration"] == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_no_cuda_leaves_the_gpu_alone(name: str, small_args) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    MODULES[name].train(small_args(MODULES[name], cuda=False))
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.detail("R31")
def test_the_logged_gold_is_the_judge_s_and_not_the_reward_model_s(small_args, monkeypatch) -> None:
    """A judge that says 0.125 of every answer: so do training and evaluation, not the reward model."""
    rlhf = MODULES["rlhf_ppo_gpt2"]
    monkeypatch.setattr(rlhf.Task, "gold", lambda self, responses: torch.full((len(responses.tokens),), 0.125))
    args = small_args(rlhf, batch_size=16, total_episodes=32, eval_every=1, self_check=False)
    rlhf.train(args)
    for gold, proxy in (("charts/gold", "charts/proxy"), ("eval/gold", "eval/proxy")):
        assert set(logged(args, gold)) == {0.125} and 0.125 not in logged(args, proxy)
