"""Environments, normalisation and networks of the scripts for continuous actions."""

from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import MODULES


def envs(module: ModuleType, name: str = "Trunc", num_envs: int = 1, **changes: Any) -> Any:
    return module.NormalizedEnvs(module.Args(env_id=f"counting_envs:{name}-v0", **changes), num_envs)


def plain(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics that stay at mean 0 and variance 1, so that what is stored is what the environment said."""
    monkeypatch.setattr(module.Normalizer, "merge", lambda *_: None)


def zeros(env: Any) -> np.ndarray:
    return np.zeros((len(env.lengths), env.low.size), np.float32)


@pytest.mark.detail("1")
@pytest.mark.parametrize("name, terminated, truncated", [("Trunc", 0, 1), ("Term", 1, 0), ("Both", 1, 0)])
def test_episodes_end_within_the_step(gaussian, monkeypatch, name: str, terminated: int, truncated: int) -> None:
    plain(gaussian, monkeypatch)
    env = envs(gaussian, name, 2)
    env.reset(1)
    assert env.obs[:, 0].tolist() == [0, 0]
    for step in range(1, 12):
        before = env.obs.copy()
        rows, finished = env.step(zeros(env))
        last = step % 5 == 0
        assert (env.final_obs[:, 0] == before[:, 0] + 1).all()  # every row is a real transition
        assert (env.obs[:, 0] == (0 if last else before[:, 0] + 1)).all()
        assert rows[1].tolist() == [terminated * last] * 2 and rows[2].tolist() == [truncated * last] * 2
        assert finished == ([(0, 5.0, 5), (1, 5.0, 5)] if last else [])
        if last:  # although the environment writes into one array, the outcome and the new start are apart
            assert (env.final_obs[:, 1] != env.obs[:, 1]).all() and (env.final_obs[:, 2] != env.obs[:, 2]).all()


def test_a_constructor_need_not_know_render_modes(control) -> None:
    env = envs(control, "Plain")
    env.reset(1)
    assert env.step(zeros(env))[0].tolist() == [[pytest.approx(1, abs=9)], [0], [0]]


def test_seeds_decide_everything_and_environments_differ(control, monkeypatch) -> None:
    plain(control, monkeypatch)
    env = envs(control, num_envs=4)
    draws: dict[int, list[float]] = {}
    for seed in (1, 2, 1):
        env.reset(seed)
        if seed in draws:
            assert draws[seed] == env.obs[:, 2].tolist()
        draws[seed] = env.obs[:, 2].tolist()
    assert len(set(draws[1] + draws[2])) == 8


@pytest.mark.detail("27")
@pytest.mark.parametrize("name", ["Box05", "HalfOpen", "Unbounded", "Matrix", "Scalar", "Float64", "Trunc"])
def test_every_box_gets_actions_within_it(gaussian, name: str) -> None:
    """The environment asserts its bounds, shape and type; far-off actions arrive clipped, others as they are."""
    env = envs(gaussian, name)
    env.reset(1)
    received: list[np.ndarray] = []
    inner = env.envs.envs[0].unwrapped
    step = inner.step

    def spy(action: Any) -> Any:
        received.append(np.array(action))
        return step(action)

    inner.step = spy
    space = inner.action_space
    for value in (-100.0, 0.25, 100.0):
        actions = zeros(env) + value
        env.step(actions)
        assert (actions == np.float32(value)).all()  # what is stored stays raw
        np.testing.assert_allclose(received[-1], np.clip(np.full(space.shape, value), space.low, space.high))


@pytest.mark.parametrize("name, size", [("DiscreteObs", 5), ("DictObs", 5), ("TupleObs", 4)])
def test_structured_observations_are_flattened(control, name: str, size: int) -> None:
    env = envs(control, name)
    env.reset(1)
    assert env.obs.shape == (1, size) and env.obs.dtype == np.float32
    if name == "DiscreteObs":
        raw, _ = env.envs.envs[0].reset()
        assert sorted(raw.tolist()) == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "name, words",
    [
        ("ImageObs", "ppo_atari.py"),
        ("FloatImageObs", "ppo_atari.py"),
        ("NestedImageObs", "ppo_atari.py"),
        ("FlatImageObs", "ppo_atari.py"),
        ("SequenceObs", "do not flatten"),
        ("SequenceAction", "Box"),
        ("KeyError", "KeyError 'level'"),
        ("WrongShape", "not as declared"),
    ],
)
def test_spaces_that_cannot_work_are_refused(control, name: str, words: str) -> None:
    with pytest.raises(control.UsageError, match=words) as caught:
        envs(control, name)
    assert "--env-id" in str(caught.value) and "\n" not in str(caught.value)


def test_discrete_actions_are_for_trpo(gaussian) -> None:
    with pytest.raises(gaussian.UsageError, match="Box"):
        envs(gaussian, "DiscreteAction")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_environments_that_draw_from_the_global_generator_are_no_clones(control, kind: str) -> None:
    """Each worker process would inherit the same state; and what is drawn depends on the seed alone."""
    env = envs(control, "GlobalDraw", 4, vectorization=kind)
    draws = []
    for seed in (1, 2, 1):
        env.reset(control.reseed(seed, 0))
        draws.append(env.envs.reset()[0][:, 2].tolist())
        assert len(set(draws[-1])) == 4
    env.envs.close()
    assert draws[0] == draws[2] != draws[1]


@pytest.mark.parametrize("env_id", ["ALE/Pong-v5", "PongNoFrameskip-v4"])
def test_an_atari_game_is_sent_to_its_script(control, env_id: str) -> None:
    with pytest.raises(control.UsageError, match="ppo_atari.py"):
        control.make_envs(control.Args(env_id=env_id), 1)


@pytest.mark.parametrize("name, what", [("NanReward", "reward"), ("InfReward", "reward"), ("NanObs", "observation")])
def test_numbers_that_are_not_finite_stop_the_run_by_name(control, name: str, what: str) -> None:
    env = envs(control, name, 2)
    env.reset(1)
    with pytest.raises(FloatingPointError, match=f"{what} of environment 0 .* step [13] "):
        for _ in range(3):
            env.step(zeros(env))
    vast = envs(control, "Vast")  # finite, but its square is not
    vast.reset(1)
    with pytest.raises(FloatingPointError, match="reward of environment 0 is 1e\\+200 at step 1 "):
        vast.step(zeros(vast))
    healthy = envs(control, "Trunc", 2)
    healthy.reset(1)
    with pytest.raises(FloatingPointError, match="action of environment 1 .* step 1 "):
        healthy.step(np.array([[0.0], [np.nan]], np.float32))


@pytest.mark.detail("28")
@pytest.mark.detail("29")
def test_observations_are_normalised_by_what_was_seen_and_clipped(gaussian) -> None:
    env = envs(gaussian, num_envs=2)
    seen: list[np.ndarray] = []
    normalize = env.normalize

    def spy(raw: np.ndarray, *rest: Any) -> Any:
        seen.extend(np.array(raw, float))
        return normalize(raw, *rest)

    env.normalize = spy
    env.reset(1)
    for _ in range(23):
        env.step(zeros(env))
    stream = np.array(seen)
    # reset, 23 outcomes, and the new starts of 4 episodes: the final observation counts like any other
    assert len(stream) == 2 * (1 + 23 + 4)
    np.testing.assert_allclose(env.obs_stats.mean, stream.mean(0), rtol=1e-4)
    np.testing.assert_allclose(env.obs_stats.var, stream.var(0), rtol=1e-3)
    expected = (stream[-2:] - env.obs_stats.mean) / np.sqrt(env.obs_stats.var + 1e-8)
    np.testing.assert_allclose(env.final_obs, expected, rtol=1e-5)
    far = np.array([[1e6, 0, 0], [-1e6, 0, 0]])
    env.obs_stats.merge = lambda *_: None
    scaled = env.normalize(far)
    assert scaled[0, 0] == 10 and scaled[1, 0] == -10 and scaled.dtype == np.float32


@pytest.mark.detail("30")
@pytest.mark.detail("31")
@pytest.mark.parametrize("name", ["Trunc", "Term"])
def test_rewards_are_divided_by_the_std_of_the_discounted_return(gaussian, name: str) -> None:
    """By hand: rewards 1, episodes of 5; the discounted return starts at 0 in each, whichever way the last one ended."""
    env = envs(gaussian, name, gamma=0.9)
    env.reset(1)
    discounted, running = [], 0.0
    for step in range(1, 18):
        rows, _ = env.step(zeros(env))
        running = 0.9 * running + 1.0
        discounted.append(running)
        spread = np.var([*discounted]) if step > 1 else 0.0
        if step > 5:
            assert rows[0, 0] == pytest.approx(min(1 / np.sqrt(spread), 10), rel=1e-3)
        running = 0.0 if step % 5 == 0 else running
        assert float(env.discounted[0]) == pytest.approx(running)
    assert max(discounted) == pytest.approx(sum(0.9**k for k in range(5)))
    env.return_stats.var = np.array(1e-12)
    env.return_stats.merge = lambda *_: None
    assert env.step(zeros(env))[0][0, 0] == 10  # clipped


def test_two_environments_out_of_phase_keep_their_own_books(gaussian, monkeypatch) -> None:
    plain(gaussian, monkeypatch)
    env = envs(gaussian, "Step", 2, gamma=0.5)
    env.reset(1)
    env.envs.envs[1].unwrapped.end = 3
    ends: list[list[tuple[int, float, int]]] = []
    for _ in range(15):
        ends.append(env.step(zeros(env))[1])
    assert [i for i, f in enumerate(ends, 1) if any(e[0] == 0 for e in f)] == [5, 10, 15]
    assert [i for i, f in enumerate(ends, 1) if any(e[0] == 1 for e in f)] == [3, 6, 9, 12, 15]
    assert ends[14] == [(0, 15.0, 5), (1, 6.0, 3)] and ends[2] == [(1, 6.0, 3)]


@pytest.mark.detail("13")
@pytest.mark.detail("26")
def test_policy_and_value_have_networks_of_their_own(gaussian) -> None:
    agent = gaussian.Agent(5, 2)
    for network, outputs, gain in ((agent.actor_mean, 2, 0.01), (agent.critic, 1, 1.0)):
        kinds = [type(layer).__name__ for layer in network]
        assert kinds == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
        layers = [layer for layer in network if isinstance(layer, torch.nn.Linear)]
        assert [tuple(x.weight.shape) for x in layers] == [(64, 5), (64, 64), (outputs, 64)]
        rows = layers[2].weight.detach()
        torch.testing.assert_close(rows @ rows.T, gain**2 * torch.eye(outputs), atol=1e-6, rtol=1e-3)
        columns = layers[0].weight.detach()
        torch.testing.assert_close(columns.T @ columns, 2 * torch.eye(5), atol=1e-5, rtol=1e-5)
    agent(torch.randn(3, 5))[1].sum().backward()
    assert all(p.grad is None for p in agent.actor_mean.parameters())
    assert all(p.grad is not None for p in agent.critic.parameters())


@pytest.mark.detail("24")
def test_the_noise_is_one_parameter_that_starts_at_std_1(gaussian) -> None:
    agent = gaussian.Agent(5, 2)
    assert agent.actor_logstd.shape == (2,) and not agent.actor_logstd.any() and agent.actor_logstd.requires_grad


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_vectorization_does_not_change_the_numbers(control, kind: str) -> None:
    def play(kind: str) -> list[np.ndarray]:
        env = control.NormalizedEnvs(control.Args(env_id="Pendulum-v1", vectorization=kind), 2)
        env.reset(3)
        rng = np.random.default_rng(0)
        out = []
        for _ in range(210):
            rows, _ = env.step(rng.normal(size=(2, 1)).astype(np.float32))
            out += [rows, env.obs, env.final_obs]
        env.envs.close()
        return out

    for a, b in zip(play(kind), play("sync"), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_module_and_an_id_misspelt_are_two_messages(control) -> None:
    with pytest.raises(control.UsageError, match="no_such_module"):
        control.make_envs(control.Args(env_id="no_such_module:Trunc-v0"), 1)
    with pytest.raises(control.UsageError, match="Trunk"):
        control.make_envs(control.Args(env_id="counting_envs:Trunk-v0"), 1)
    with pytest.raises(control.UsageError, match="HalfCheeta"):
        control.make_envs(control.Args(env_id="HalfCheeta-v5"), 1)


def test_an_old_gymnasium_is_named(control, monkeypatch) -> None:
    monkeypatch.delattr(gym.vector, "AutoresetMode")
    with pytest.raises(control.UsageError, match="pip install gymnasium"):
        control.make_envs(control.Args(), 1)
    atari = MODULES["ppo_atari"]
    with pytest.raises(atari.UsageError, match="pip install gymnasium"):
        atari.make_game(atari.Args())


def test_the_policy_in_numpy_is_the_network(gaussian) -> None:
    """Also after a step of the optimiser's vector, whose parts the weights are."""
    torch.manual_seed(0)
    agent, obs = gaussian.Agent(5, 3), torch.randn(7, 5)
    weights = gaussian.flatten(agent)
    for _ in range(2):
        with torch.no_grad():
            weights += torch.randn_like(weights)
        means = gaussian.in_numpy(agent.actor_mean)(obs.numpy())
        assert means.dtype == np.float32
        torch.testing.assert_close(torch.from_numpy(means), agent.actor_mean(obs).detach(), rtol=1e-5, atol=1e-5)
    agent(obs)[0].sum().backward()
    grads = torch.cat([p.grad.reshape(-1) for p in agent.parameters()])
    assert torch.equal(weights.grad, grads) and grads.abs().sum() > 0
    agent.actor_mean[1] = torch.nn.ReLU()
    with pytest.raises(AssertionError, match="other layers"):
        gaussian.in_numpy(agent.actor_mean)
