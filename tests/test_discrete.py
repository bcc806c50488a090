"""Where actions are choices: masks from environment to gradient, components, offsets, a clip range that falls."""

import importlib
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import CHOICES, MODULES, ROOT, SMALL, of_rows
from counting_envs import Masked
from gymnasium import spaces
from test_control import batch_of, folder, watch

COMPONENTS = spaces.MultiDiscrete([2, 3])
OF_COMPONENTS = torch.tensor([[True, True, False], [True, True, True]])  # (2, 3), filled up to three actions each
MASKED = torch.tensor([[False, True, False], [True, False, True]])
BOTH = pytest.mark.parametrize("mask", [OF_COMPONENTS, MASKED], ids=["all valid", "masked"])
ONE_BATCH = {"num_minibatches": 1, "update_epochs": 1, "total_timesteps": 128}


@pytest.fixture(params=CHOICES)
def discrete(request: pytest.FixtureRequest) -> Any:
    return MODULES[request.param]


def envs(discrete: Any, kind: str, num_envs: int = 2, **changes: Any) -> Any:
    plain = {"norm_obs": False, "norm_reward": False}
    env = discrete.NormalizedEnvs(discrete.Args(env_id=f"counting_envs:{kind}-v0", **plain | changes), num_envs)
    env.reset(1)
    return env


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def acting(discrete: Any, agent: Any, obs: torch.Tensor, mask: torch.Tensor, **how: bool) -> np.ndarray:
    """Actions of `act` on rows [B, D], each the first of an episode."""
    if discrete.__name__ == "ppo_discrete":
        return discrete.act(agent, obs, mask.numpy(), **how)
    state = agent.initial_state.expand(-1, len(obs), -1)
    actions, _ = discrete.act(agent, obs, torch.ones(len(obs), dtype=torch.bool), state, mask.numpy(), **how)
    return actions


def enumerated(logits: list[list[float]], mask: list[list[bool]]) -> dict[tuple[int, ...], float]:
    """Probability of every valid joint action, by exponentials in plain Python."""
    tables = []
    for row, valid in zip(logits, mask, strict=True):
        weights = {a: math.exp(x) for a, (x, ok) in enumerate(zip(row, valid, strict=True)) if ok}
        tables.append({a: w / sum(weights.values()) for a, w in weights.items()})
    return {joint: math.prod(t[a] for t, a in zip(tables, joint, strict=True)) for joint in itertools.product(*tables)}


# -------------------------------------------------------------------------------------------------- the distribution


@pytest.mark.detail("37")
@pytest.mark.detail("S4")
@BOTH
def test_joint_probabilities_and_entropy_by_enumeration(discrete: Any, mask: torch.Tensor) -> None:
    """Over all joint actions of (2, 3): log-probabilities are sums over components, entropy the table's."""
    for logits in 2 * draw(5, 2, 3):
        table = enumerated(logits.tolist(), mask.tolist())
        assert sum(table.values()) == pytest.approx(1)
        entropy = -sum(p * math.log(p) for p in table.values())
        for joint, p in table.items():
            logprob, h = discrete.masked_categorical(logits[None], mask[None], torch.tensor([joint]))
            assert float(logprob) == pytest.approx(math.log(p)) and float(h) == pytest.approx(entropy)


@pytest.mark.detail("S4")
def test_invalid_actions_have_no_probability_and_no_gradient(discrete: Any) -> None:
    """Exactly 0, also where an invalid logit is by far the largest; the gradient of valid ones is p - 1 and p."""
    logits = torch.tensor([[1.0, 0.5, 80.0], [0.3, 60.0, -0.2]], requires_grad=True)
    every = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    batch = MASKED.expand(9, 2, 3)
    logprobs, entropies = discrete.masked_categorical(logits.expand(9, 2, 3), batch, every)
    valid = MASKED[0][every[:, 0]] & MASKED[1][every[:, 1]]
    assert (logprobs.exp()[~valid] == 0).all() and float(logprobs.exp()[valid].sum().detach()) == pytest.approx(1)
    (gradient,) = torch.autograd.grad(-logprobs[valid][0] - entropies.mean(), logits)
    assert (gradient[~MASKED] == 0).all() and gradient.isfinite().all() and (gradient[1, [0, 2]] != 0).all()
    logprobs, _ = discrete.masked_categorical(logits[None], MASKED[None], torch.tensor([[1, 0]]))
    (gradient,) = torch.autograd.grad(logprobs, logits)
    p = 1 / (1 + math.exp(-0.2 - 0.3))
    torch.testing.assert_close(gradient, torch.tensor([[0, 0, 0], [1 - p, 0, p - 1]]))


@pytest.mark.detail("S4")
def test_one_valid_action_is_certain(discrete: Any) -> None:
    only = torch.tensor([[[False, True, False]]])
    logprob, entropy = discrete.masked_categorical(torch.tensor([[[9.0, -30.0, 9.0]]]), only, torch.tensor([[1]]))
    assert float(logprob) == 0 and float(entropy) == 0


@pytest.mark.detail("37")
@pytest.mark.detail("S4")
@BOTH
def test_actions_are_drawn_by_the_policy_that_is_trained(discrete: Any, mask: torch.Tensor) -> None:
    """20,000 joint draws against the table of the agent's own logits: no invalid one, frequencies within 5 σ."""
    torch.manual_seed(0)
    np.random.seed(0)
    agent = discrete.Agent(4, COMPONENTS)
    head = agent.actor if discrete.__name__ == "ppo_lstm" else agent.actor[-1]
    head.weight.data *= 200
    obs = torch.randn(1, 4)
    with torch.no_grad():
        logits, _ = of_rows(agent, obs)
    table = enumerated(logits[0].tolist(), mask.tolist())
    count = 20_000
    actions = acting(discrete, agent, obs.expand(count, 4), mask)
    drawn = Counter(map(tuple, actions.tolist()))
    assert {*drawn} <= {*table}
    for joint, p in table.items():
        assert abs(drawn[joint] - count * p) < 5 * math.sqrt(count * p * (1 - p)) + 1e-9, joint
    best = acting(discrete, agent, obs, mask, sample=False)
    assert tuple(best[0].tolist()) == max(table, key=lambda joint: table[joint])


@pytest.mark.detail("37")
@pytest.mark.detail("LSTM-l")
def test_a_discrete_space_is_one_component(discrete: Any) -> None:
    """The same network and the same numbers, whatever the space is called."""
    agents = []
    for space in (spaces.Discrete(4, start=7), spaces.MultiDiscrete([4])):
        torch.manual_seed(0)
        agents.append(discrete.Agent(3, space))
    obs = torch.randn(6, 3)
    logits, values = of_rows(agents[0], obs)
    assert logits.shape == (6, 1, 4) and values.shape == (6,)
    assert torch.equal(logits, of_rows(agents[1], obs)[0])


@pytest.mark.detail("13")
@pytest.mark.detail("26")
def test_policy_and_value_have_networks_of_their_own() -> None:
    """Two hidden layers of 64 with tanh each; an output for each action that the largest component could have."""
    discrete: Any = MODULES["ppo_discrete"]
    agent = discrete.Agent(5, spaces.MultiDiscrete([3, 5, 2]))
    for network, outputs in ((agent.actor, 15), (agent.critic, 1)):
        assert [type(layer).__name__ for layer in network] == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]
        shapes = [tuple(layer.weight.shape) for layer in network if isinstance(layer, torch.nn.Linear)]
        assert shapes == [(64, 5), (64, 64), (outputs, 64)]
    agent(torch.randn(3, 5))[1].sum().backward()
    assert all(p.grad is None for p in agent.actor.parameters())
    assert all(p.grad is not None for p in agent.critic.parameters())


# -------------------------------------------------------------------------------------------------- spaces and masks


@pytest.mark.detail("1")
@pytest.mark.detail("37")
@pytest.mark.parametrize(
    "kind, choices, expected",
    [
        ("ChoiceTrunc", [[2], [0]], [7, 5]),
        ("MultiAction", [[0, 4, 1], [2, 0, 0]], [[2, 4, 0], [4, 0, -1]]),
        ("TableAction", [[0, 3, 1, 0], [1, 0, 2, 1]], [[[0, 3], [1, 0]], [[1, 0], [2, 1]]]),
    ],
)
def test_every_environment_gets_its_own_actions_as_its_space_has_them(
    discrete: Any, kind: str, choices: Any, expected: Any
) -> None:
    """Counted from the space's own start, in its shape and type; the environment asserts that they are within it."""
    env = envs(discrete, kind)
    received = {}
    for i, wrapped in enumerate(env.envs.envs):

        def step(action: Any, i: int = i, inner: Any = wrapped.unwrapped.step) -> Any:
            received[i] = np.array(action).tolist()
            return inner(action)

        wrapped.unwrapped.step = step
    env.step(np.array(choices))
    assert received == dict(enumerate(expected))


@pytest.mark.detail("37")
@pytest.mark.parametrize("kind", ["ChoiceTrunc", "MultiAction", "TableAction", "Clock"])
def test_a_run_on_each_space_acts_within_it(discrete: Any, kind: str, small_args: Any) -> None:
    """Over all actions: the environment would refuse any other."""
    args = small_args(discrete, env_id=f"counting_envs:{kind}-v0", norm_obs=False)
    metrics = discrete.train(args)
    assert math.isfinite(metrics["losses/policy_loss"]) and metrics["episodic_return"] == 5


@pytest.mark.detail("S4")
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_the_mask_is_that_of_the_observation_to_act_on(discrete: Any, vectorization: str) -> None:
    """One valid action a component, by step and episode: after an end those of the next episode's first observation."""
    env = envs(discrete, "Clock", vectorization=vectorization)
    starts = 0
    for _ in range(13):
        for obs, mask in zip(env.obs.astype(int), env.masks, strict=True):
            expected = np.zeros((3, 5), bool)
            for component, size in enumerate((3, 5, 2)):
                expected[component, (obs[0] + obs[1]) % size] = True
            np.testing.assert_array_equal(mask, expected)
            starts += int(obs[0] == 0 and obs[1] > 1)
        *_, ended = env.step(env.masks.argmax(-1))
        assert all(episode.length == 5 for episode in ended)
    env.envs.close()
    assert starts == 4


@pytest.mark.detail("S4")
def test_the_mask_is_stored_with_its_step_and_used_again_in_the_update(
    discrete: Any, small_args: Any, monkeypatch: Any
) -> None:
    """Each row's mask, in every epoch, is that of its own observation, its action the valid one; so ratios are 1."""
    batches = watch(monkeypatch, discrete, "ppo_loss", lambda args, result: (batch_of(args, result), result[1]))
    args = small_args(discrete, env_id="counting_envs:Clock-v0", norm_obs=False, update_epochs=2, total_timesteps=256)
    discrete.train(args)
    assert len(batches) == 4 * args.num_minibatches
    for batch, stats in batches:
        clock = (batch["obs"][:, 0] + batch["obs"][:, 1]).long()
        for component, size in enumerate((3, 5, 2)):
            assert torch.equal(batch["actions"][:, component], clock % size)
            assert torch.equal(batch["masks"][:, component], torch.eye(5, dtype=torch.bool)[clock % size])
        assert not batch["logprobs"].any() and float(stats["losses/approx_kl"]) == 0
        assert float(stats["losses/entropy"]) == 0


@pytest.mark.detail("S4")
@pytest.mark.detail("LSTM-j")
def test_the_mask_of_a_final_observation_is_not_looked_at(discrete: Any, small_args: Any) -> None:
    metrics = discrete.train(small_args(discrete, env_id="counting_envs:ChoiceFinalMask-v0", norm_obs=False))
    assert metrics["episodic_return"] == 5


@pytest.mark.detail("S4")
@pytest.mark.parametrize("kind", ["ChoiceShortMask", "ChoiceListMask", "ChoiceShrinksMask"])
def test_a_wrong_mask_is_refused_before_anything_is_written(
    discrete: Any, kind: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sys.argv", [f"{discrete.__name__}.py", *SMALL[discrete.__name__], "--env-id", f"counting_envs:{kind}-v0"]
    )
    with pytest.raises(SystemExit) as caught:
        discrete.main()
    err = capsys.readouterr().err
    assert caught.value.code == 2 and err.count("\n") == 1 and 'info["action_mask"] must be an array of 3' in err
    assert not list(tmp_path.iterdir())


@pytest.mark.detail("S4")
@pytest.mark.detail("LSTM-k")
def test_a_component_without_a_valid_action_ends_the_run_by_name(discrete: Any, small_args: Any) -> None:
    """All are masked in step 3."""
    with pytest.raises(discrete.RunError, match="leaves a component of Discrete.* without a valid action"):
        discrete.train(small_args(discrete, env_id="counting_envs:ChoiceEmptyMask-v0"))


@pytest.mark.parametrize(
    "kind, words",
    [
        ("Trunc", "ppo_continuous.py"),
        ("ChoiceImageObs", "only Atari's script"),
        ("SequenceAction", "Discrete"),
        ("ChoiceWrongShape", r"observes \(4,\), not"),
        ("ChoiceVectorReward", "no scalar reward"),
        ("ChoiceOldStep", "not of Gymnasium 1: .*expected 5, got 4"),
        ("ChoiceOldReset", "not of Gymnasium 1: .*expected 2"),
    ],
)
def test_other_spaces_are_refused_by_the_script_that_takes_them(discrete: Any, kind: str, words: str) -> None:
    with pytest.raises(discrete.UsageError, match=words) as caught:
        envs(discrete, kind)
    assert "--env-id" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("env_id, size", [("FrozenLake-v1", 16), ("Taxi-v4", 500)])
def test_environments_of_numbered_states_are_seen_one_hot(discrete: Any, env_id: str, size: int) -> None:
    env = discrete.NormalizedEnvs(discrete.Args(env_id=env_id, norm_obs=False), 3)
    env.reset(1)
    assert env.obs.shape == (3, size) and (env.obs.sum(1) == 1).all()
    env.step(np.zeros((3, 1), int))


# -------------------------------------------------------------------------------------------------- policies and flags


@pytest.mark.detail("S4")
@pytest.mark.detail("LSTM-m")
def test_a_reloaded_policy_takes_masks_and_gives_actions_of_the_space(discrete: Any, small_args: Any) -> None:
    """The best valid action without sampling, of the logits of the saved weights; one observation, or many."""
    args = small_args(discrete, env_id="counting_envs:MultiAction-v0", norm_obs=False, learning_rate=0.1)
    discrete.train(args)
    saved = torch.load(folder(args) / "checkpoint.pt", weights_only=True)
    agent = discrete.Agent(3, spaces.MultiDiscrete([3, 5, 2]))
    agent.load_state_dict(saved["agent"])
    policy, sampling = (discrete.load_policy(str(folder(args)), sample=s) for s in (False, True))
    obs = np.array([[1.0, 4.0, 0.2], [3.0, 9.0, 0.7]], np.float32)
    mask = np.array([[1, 0, 1, 0, 1, 1, 0, 0, 0, 1], [0, 1, 1, 1, 0, 0, 1, 0, 1, 1]], np.int8)
    with torch.no_grad():
        logits = of_rows(agent, torch.from_numpy(obs))[0].tolist()
    begins: tuple[bool, ...] = (True,) if discrete.__name__ == "ppo_lstm" else ()
    for row in (0, 1):
        at, expected = 0, []
        for component, (size, start) in enumerate(((3, 2), (5, 0), (2, -1))):
            valid = [a for a in range(size) if mask[row, at + a]]
            expected.append(start + max(valid, key=lambda a: logits[row][component][a]))
            at += size
        assert policy(obs[row], *begins, action_mask=mask[row]).tolist() == expected
        if not begins:  # a memory is of one environment
            assert policy(obs, action_mask=mask)[row].tolist() == expected
        for _ in range(50):
            action = sampling(obs[row], *begins, action_mask=mask[row])
            assert mask[row][np.array([0, 3, 8]) + action - [2, 0, -1]].all()
    assert gym.make("counting_envs:MultiAction-v0").action_space.contains(policy(obs[0], *begins))


@pytest.mark.detail("S4")
@pytest.mark.parametrize("sample", [True, False])
def test_evaluation_plays_valid_actions_alone(discrete: Any, sample: bool, small_args: Any, monkeypatch: Any) -> None:
    args = small_args(discrete, env_id="counting_envs:Masked-v0", norm_obs=False)
    discrete.train(args)
    monkeypatch.setattr(Masked, "invalid", 0)
    flags = [
        "--evaluate",
        str(folder(args)),
        "--eval-episodes",
        "20",
        "--eval-sample" if sample else "--no-eval-sample",
    ]
    scores = discrete.evaluate(discrete.parse_args(flags))
    assert len(scores) == 20 and Masked.invalid == 0 and len({*scores}) > 1


@pytest.mark.detail("S1")
@pytest.mark.parametrize("anneal", [True, False])
@pytest.mark.parametrize("anneal_lr", [True, False])
def test_the_clip_range_falls_linearly_and_only_if_it_should(
    discrete: Any, anneal: bool, anneal_lr: bool, small_args: Any, monkeypatch: Any
) -> None:
    """As ratio and value have it in each of four iterations, whatever the step size does."""
    ratios = watch(monkeypatch, discrete, "clipped_surrogate_loss", lambda args, _: float(args[2]))
    values = watch(monkeypatch, discrete, "value_loss", lambda args, _: float(args[3]))
    args = small_args(discrete, anneal_clip=anneal, anneal_lr=anneal_lr, clip_coef=0.4, num_minibatches=1)
    discrete.train(args)
    expected = [0.4, 0.4, 0.3, 0.3, 0.2, 0.2, 0.1, 0.1] if anneal else [0.4] * 8
    assert ratios == pytest.approx(expected) and values == pytest.approx(expected)


@pytest.mark.detail("28")
@pytest.mark.detail("30")
def test_observations_and_rewards_stay_as_they_are_unless_asked(
    discrete: Any, small_args: Any, monkeypatch: Any
) -> None:
    """Rewards that count the step; the statistics of what is not normalised see nothing."""
    for norm_obs, norm_reward in itertools.product((False, True), repeat=2):
        env = envs(discrete, "ChoiceStep", norm_obs=norm_obs, norm_reward=norm_reward)
        for _ in range(4):
            next_obs, rewards, *_ = env.step(np.zeros((2, 1), int))
        assert (next_obs[:, 0].tolist() == [4, 4]) != norm_obs and (rewards.tolist() == [4, 4]) != norm_reward
        assert (env.obs_stats.sums[0, 0] > 1) == norm_obs and (env.return_stats.sums[0] > 1) == norm_reward
        assert next_obs.dtype == env.obs.dtype == np.float32


# -------------------------------------------------------------------------------------------------- learning


@pytest.mark.slow
@pytest.mark.detail("S4")
@pytest.mark.detail("37")
def test_a_masked_task_is_learned_to_its_optimum_without_an_invalid_action(
    discrete: Any, small_args: Any, monkeypatch: Any
) -> None:
    """Sizes 3, 5 and 2: 98 % of what is possible, where chance among valid actions earns some 80 %."""
    monkeypatch.setattr(Masked, "invalid", 0)
    flags = "--num-envs 4 --num-steps 128 --gamma 0.5 --learning-rate 2e-3 --ent-coef 0.001 --total-timesteps 16384"
    args = discrete.parse_args(["--env-id", "counting_envs:Masked-v0", *flags.split()])
    args = small_args(discrete, **{**vars(args), "run_dir": small_args(discrete).run_dir})
    metrics = discrete.train(args)
    scores = discrete.evaluate(discrete.parse_args(["--evaluate", str(folder(args)), "--no-eval-sample"]))
    assert Masked.invalid == 0 and metrics["episodic_return"] > 9.5 and np.mean(scores) > 9.8


@pytest.mark.slow
def test_the_example_of_a_masked_environment_is_played_by_its_rules_and_learned(tmp_path: Path, monkeypatch) -> None:
    """Whoever takes at random against one that does so wins every second game, whoever knows the game nearly all."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    nim = importlib.import_module("nim")
    left = []
    step = nim.Nim.step

    def watched(env: Any, action: int) -> Any:
        left.append(env.matches - action - 1)
        return step(env, action)

    monkeypatch.setattr(nim.Nim, "step", watched)
    module = MODULES["ppo_discrete"]
    flags = "--env-id nim:Nim-v0 --total-timesteps 30720 --learning-rate 2.5e-3 --checkpoint-every 0".split()
    metrics = module.train(module.parse_args([*flags, "--run-dir", str(tmp_path)]))
    assert min(left) == 0 and metrics["episodic_return"] > 0.9
