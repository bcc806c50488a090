"""ppo_atari.py on the real emulator: protocol, lives, scores, network."""

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch


def games(atari: ModuleType, env_id: str = "Breakout", num_envs: int = 1, **changes: Any) -> Any:
    return atari.AtariGames(atari.Args(env_id=env_id, **changes), num_envs)


class Recorder:
    """Stands before one emulator and keeps what passes: (action, reward, over, cut, lives) of each of its steps."""

    def __init__(self, game: Any):
        self.game, self.steps, self.sent = game, [], []  # type: ignore[var-annotated]
        self.reset = game.reset

    def send(self, action: np.ndarray) -> None:
        self.sent.append(int(action[0]))
        self.game.send(action)

    def recv(self) -> Any:
        result = self.game.recv()
        _, reward, over, cut, info = result
        self.steps.append((self.sent[-1], float(reward[0]), bool(over[0]), bool(cut[0]), int(info["lives"][0])))
        return result


class Outcome(NamedTuple):
    """What a step of the games returns."""

    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    episodes: list[Any]


def play(env: Any, steps: int, seed: int = 0, action: int | None = None) -> list[Outcome]:
    rng = np.random.default_rng(seed)
    n = len(env.games)
    outcomes = []
    for _ in range(steps):
        actions = rng.integers(0, env.num_actions, n) if action is None else np.full(n, action)
        outcomes.append(Outcome(*env.step(actions)))
    return outcomes


@pytest.mark.detail("1")
def test_every_game_gets_its_own_action(atari: ModuleType) -> None:
    env = games(atari, "Pong", num_envs=3)
    recorders = [Recorder(game) for game in env.games]
    env.games[:] = recorders
    env.reset(1)
    env.step(np.array([0, 2, 5]))
    assert [recorder.sent for recorder in recorders] == [[0], [2], [5]]


@pytest.mark.detail("1")
def test_a_segment_of_frames_goes_on_where_the_last_one_ended(atari: ModuleType, small_args: Any, monkeypatch) -> None:
    """Games cut after 3 steps in segments of 8: the rows learned from are what each action was chosen on, in turn."""
    acted_on: list[np.ndarray] = []
    came_next: list[np.ndarray] = []
    learned: list[torch.Tensor] = []
    step, loss = atari.AtariGames.step, atari.ppo_loss

    def watched(self: Any, actions: np.ndarray) -> Any:
        acted_on.append(self.obs.copy())
        result = step(self, actions)
        came_next.append(self.obs.copy())
        return result

    def keep(args: Any, agent: Any, batch: dict[str, torch.Tensor]) -> Any:
        learned.append(batch["obs"].clone())
        return loss(args, agent, batch)

    monkeypatch.setattr(atari.AtariGames, "step", watched)
    monkeypatch.setattr(atari, "ppo_loss", keep)
    args = small_args(
        atari,
        num_steps=8,
        num_minibatches=1,
        update_epochs=1,
        total_timesteps=48,
        max_episode_frames=12,
        checkpoint_every=0,
        learning_rate=0.0,
    )
    atari.train(args)
    assert len(acted_on) == 24 and len(learned) == 3
    for before, after in zip(came_next, acted_on[1:], strict=False):
        np.testing.assert_array_equal(before, after)
    for i, batch in enumerate(learned):
        rows = sorted(row.tobytes() for frames in acted_on[8 * i : 8 * i + 8] for row in frames)
        assert sorted(row.numpy().tobytes() for row in batch.contiguous()) == rows


@pytest.mark.detail("5")
def test_a_segment_bootstraps_from_the_frames_after_it(atari: ModuleType, small_args: Any, monkeypatch) -> None:
    """V of every successor, the last step's included, by the agent on the frames that the step led to."""
    agents: list[Any] = []
    inputs: list[Any] = []
    led_to: list[np.ndarray] = []
    step, gae, make = atari.AtariGames.step, atari.compute_gae, atari.Agent

    def watched(self: Any, actions: np.ndarray) -> Any:
        result = step(self, actions)
        led_to.append(self.next_obs.copy())
        return result

    def asked(*args: Any) -> Any:
        inputs.append([x.clone() for x in args[:5]])
        return gae(*args)

    def made(*args: Any) -> Any:
        agents.append(make(*args))
        agents[-1].critic.bias.data += 1  # values that nobody takes for 0
        return agents[-1]

    monkeypatch.setattr(atari.AtariGames, "step", watched)
    monkeypatch.setattr(atari, "compute_gae", asked)
    monkeypatch.setattr(atari, "Agent", made)
    args = small_args(atari, num_steps=8, total_timesteps=16, max_episode_frames=20, learning_rate=0.0)
    atari.train(args)
    ((_, _, next_values, ends, dones),) = inputs
    assert dones[4].all() and dones.sum() == 2 and not ends.any()
    with torch.no_grad():
        true = torch.stack([agents[0](torch.from_numpy(frames))[1] for frames in led_to])
    assert true.abs().min() > 0.1
    torch.testing.assert_close(next_values, true, atol=1e-4, rtol=1e-4)


SAME_GAME = ["Breakout", "breakout", "BreakoutNoFrameskip-v4", "ALE/Breakout-v5", "BreakoutDeterministic-v4"]


@pytest.mark.parametrize("env_id", SAME_GAME)
def test_every_spelling_is_the_same_game_and_protocol(atari: ModuleType, env_id: str) -> None:
    env, reference = games(atari, env_id), games(atari)
    env.reset(1)
    reference.reset(1)
    np.testing.assert_array_equal(env.obs, reference.obs)
    for outcome, expected in zip(play(env, 60), play(reference, 60), strict=True):
        np.testing.assert_array_equal(outcome.rewards, expected.rewards)
        np.testing.assert_array_equal(outcome.terminations, expected.terminations)
    np.testing.assert_array_equal(env.obs, reference.obs)


@pytest.mark.parametrize("env_id", ["MsPacman", "ms_pacman", "ALE/Freeway-v5", "Skiing", "Pong", "TicTacToe3D"])
def test_games_with_and_without_fire_run(atari: ModuleType, env_id: str) -> None:
    env = games(atari, env_id, num_envs=2)
    env.reset(1)
    has_fire = "FIRE" in [a.name for a in env.games[0].ale.get_action_set()]
    assert (env.fire is not None) == has_fire
    play(env, 20)
    assert env.obs.any() and env.obs.dtype == np.uint8 and env.obs.shape == (2, 4, 84, 84)


@pytest.mark.parametrize(
    "env_id, near", [("Brakout", "Breakout"), ("MontezumasRevengeNoFrameskip-v4", "MontezumaRevenge")]
)
def test_a_misspelt_game_names_the_nearest(atari: ModuleType, env_id: str, near: str) -> None:
    with pytest.raises(atari.UsageError, match=near):
        games(atari, env_id)


@pytest.mark.detail("16")
@pytest.mark.detail("17")
def test_lives_end_episodes_but_not_the_game_and_fire_follows_each(atari: ModuleType) -> None:
    env = games(atari)
    env.games[0] = recorder = Recorder(env.games[0])
    env.reset(1)
    lives = [int(env.lives[0])]
    results = play(env, 700)
    steps = recorder.steps
    lives += [step[4] for step in steps]
    changes = [b for a, b in zip(lives, lives[1:], strict=False) if a != b]
    assert lives[0] == 5 and changes[:11] == [4, 3, 2, 1, 0, 5, 4, 3, 2, 1, 0]
    assert len(steps) == len(results) + sum(b < a for a, b in zip(lives, lives[1:], strict=False))
    # the recorder sees the agent's steps and the extra ones; an extra one comes after each lost life and each game
    own, extra, i = [], [], 0
    for outcome in results:
        lost = steps[i][4] < (steps[i - 1][4] if i else 5)
        own.append((steps[i], lost or steps[i][2], bool(outcome.terminations[0])))
        i += 1
        if lost or steps[i - 1][2]:
            extra.append((steps[i - 1], steps[i]))
            i += 1
    assert i == len(steps)
    assert all(ended == terminated for _, ended, terminated in own)  # a row terminates exactly where a life was lost
    assert sum(ended for _, ended, _ in own) >= 11
    for before, after in extra:
        assert (
            after[0] == env.fire
        )  # FIRE after a life; after a game any action restarts and FIRE is the emulator's own
        assert after[4] == (5 if before[2] else before[4])


@pytest.mark.detail("17")
def test_a_game_starts_with_the_ball_in_play(atari: ModuleType) -> None:
    """Nobody moves, and still lives are lost: FIRE was pressed at the start and after each life."""
    env = games(atari)
    env.reset(1)
    assert any(outcome.episodes for outcome in play(env, 400, action=0))


@pytest.mark.detail("16")
@pytest.mark.detail("19")
def test_scores_are_raw_full_game_sums_and_no_reward_is_lost(atari: ModuleType) -> None:
    for env_id, steps in (("Breakout", 700), ("Qbert", 500)):
        env = games(atari, env_id)
        env.games[0] = recorder = Recorder(env.games[0])
        env.reset(1)
        results = play(env, steps)
        own = [0.0]
        for _, reward, over, cut, _ in recorder.steps:
            own[-1] += reward
            if over or cut:
                own.append(0.0)
        scores = [episode.score for outcome in results for episode in outcome.episodes]
        assert len(scores) >= 1 and scores == own[:-1]
        assert sum(outcome.rewards[0] for outcome in results) == pytest.approx(sum(own))
        if env_id == "Qbert":
            assert max(outcome.rewards[0] for outcome in results) >= 25  # not clipped


def test_the_reward_of_an_extra_step_counts(atari: ModuleType) -> None:
    """An emulator that pays 7 for FIRE after a lost life: the row and the score get it."""

    class Fake:
        def __init__(self) -> None:
            blank = np.zeros((1, 4, 84, 84), np.uint8)
            self.answers = [(0.0, False, 2), (1.0, False, 1), (7.0, False, 1), (2.0, True, 0), (0.0, False, 2)]
            self.queue = [
                (blank, np.array([r]), np.array([over]), np.array([False]), {"lives": np.array([lives])})
                for r, over, lives in self.answers
            ]
            self.sent: list[int] = []

        def send(self, action: np.ndarray) -> None:
            self.sent.append(int(action[0]))

        def recv(self) -> Any:
            return self.queue.pop(0)

    env = games(atari)
    env.games[0] = fake = Fake()
    env.lives[:] = 2
    results = play(env, 3, action=3)
    assert [outcome.rewards[0] for outcome in results] == [0, 8, 2]
    assert [outcome.terminations[0] for outcome in results] == [0, 1, 1]
    assert [outcome.episodes for outcome in results] == [[], [], [atari.Episode(env=0, score=10.0, length=3)]]
    assert fake.sent == [3, 3, env.fire, 3, env.fire]


def test_a_frame_cap_truncates_and_keeps_the_true_last_frames(atari: ModuleType) -> None:
    env = games(atari, "Pong", max_episode_frames=40)
    env.reset(1)
    results = play(env, 30)
    assert [bool(outcome.truncations[0]) for outcome in results] == [(t + 1) % 10 == 0 for t in range(30)]
    assert not any(outcome.terminations[0] for outcome in results)
    env.reset(1)
    for _ in range(10):
        previous = env.obs.copy()
        (outcome,) = play(env, 1, action=0)
        np.testing.assert_array_equal(env.next_obs[0, :3], previous[0, 1:])  # the game went on up to there
    assert outcome.truncations[0] and outcome.episodes[0].length == 10
    assert (env.obs != env.next_obs).any()  # and what to act on is already the next game


@pytest.mark.detail("14")
def test_games_start_after_a_random_number_of_no_ops(atari: ModuleType) -> None:
    game, starts = games(atari, "Freeway").games[0], set()
    game.reset(seed=np.array([1]))
    for _ in range(60):
        starts.add(int(game.reset()[1]["episode_frame_number"][0]))
    assert len(starts) > 15 and max(starts) <= 30


@pytest.mark.detail("14")
def test_games_of_one_batch_wait_for_different_numbers_of_no_ops(atari: ModuleType) -> None:
    env, frames = games(atari, "Freeway", num_envs=12), []
    for game in env.games:
        reset = game.reset

        def watched(reset: Any = reset, **options: Any) -> Any:
            result = reset(**options)
            frames.append(int(result[1]["episode_frame_number"][0]))
            return result

        game.reset = watched
    env.reset(1)
    assert len(set(frames)) >= 5 and max(frames) > 10


@pytest.mark.detail("15")
@pytest.mark.detail("18")
def test_frames_are_skipped_pooled_and_grey(atari: ModuleType) -> None:
    """Against the emulator driven by hand: 4 frames per step, luminance, maximum of the last two."""
    from ale_py import ALEInterface, LoggerMode, roms

    game = atari.make_game(atari.Args(env_id="Pong"), img_height=210, img_width=160, stack_num=1)
    ale = ALEInterface()
    ALEInterface.setLoggerMode(LoggerMode.Error)
    ale.setFloat("repeat_action_probability", 0.0)
    ale.setInt("random_seed", 5)
    rom = roms.get_rom_path("pong")
    assert rom
    ale.loadROM(rom)
    _, info = game.reset(seed=np.array([5]))
    actions = game.ale.get_action_set()
    for _ in range(int(info["episode_frame_number"][0]) - 1):
        ale.act(actions[0])
    ale.act(actions[1])  # FIRE at the start
    total = 0.0
    for step in range(120):
        action = step % len(actions)
        frames = []
        for _ in range(4):
            total += ale.act(actions[action])
            frames.append(ale.getScreenGrayscale().copy())
        obs, reward, _, _, info = game.step(np.array([action]))
        total -= float(reward[0])
        np.testing.assert_array_equal(obs[0, 0], np.maximum(frames[2], frames[3]))
    assert total == 0 and info["episode_frame_number"][0] == ale.getEpisodeFrameNumber()
    small = atari.make_game(atari.Args(env_id="Pong")).reset(seed=np.array([5]))[0]
    large = game.reset(seed=np.array([5]))[0][0, 0].astype(float)
    assert small.shape == (1, 4, 84, 84)
    pooled = overlap(84, 210) @ large @ overlap(84, 160).T  # every small pixel is the mean of the area under it
    assert np.abs(pooled - small[0, -1]).max() <= 1


def overlap(small: int, large: int) -> np.ndarray:
    """[small, large]: the share of each large pixel in the mean of each small one."""
    edges = np.arange(small + 1) * large / small
    pixels = np.arange(large)
    return (np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)).clip(0) * small / large


@pytest.mark.detail("20")
def test_observations_stack_the_last_four_frames(atari: ModuleType) -> None:
    env = games(atari, "Pong")
    env.reset(1)
    for _ in range(20):
        previous = env.obs.copy()
        env.step(np.array([2]))
        np.testing.assert_array_equal(env.obs[0, :3], previous[0, 1:])
    assert (env.obs[0, 3] != env.obs[0, 2]).any()


def test_seeds_decide_everything_and_games_differ(atari: ModuleType) -> None:
    def start(seed: int) -> np.ndarray:
        env = games(atari, num_envs=4, sticky_actions=0.25)
        env.reset(seed)
        play(env, 40)
        return env.obs.copy()

    np.testing.assert_array_equal(start(1), start(1))
    first, second = start(1), start(2)
    assert all((first[i] != first[j]).any() for i in range(4) for j in range(i))
    assert all((first[i] != second[j]).any() for i in range(4) for j in range(4))


def test_sticky_actions_change_the_game(atari: ModuleType) -> None:
    env, sticky = games(atari), games(atari, sticky_actions=0.25)
    env.reset(1)
    sticky.reset(1)
    play(env, 60)
    play(sticky, 60)
    assert (env.obs != sticky.obs).any()


@pytest.mark.detail("21")
def test_the_network_is_the_nature_cnn(atari: ModuleType) -> None:
    agent = atari.Agent(4)
    sizes = {name: tuple(p.shape) for name, p in agent.named_parameters() if "weight" in name}
    assert list(sizes.values()) == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136), (4, 512), (1, 512)]
    strides = [m.stride for m in agent.network if isinstance(m, torch.nn.Conv2d)]
    assert strides == [(4, 4), (2, 2), (1, 1)]
    side = 84
    for kernel, stride in ((8, 4), (4, 2), (3, 1)):
        side = (side - kernel) // stride + 1
    trunk = (4 * 64 + 1) * 32 + (32 * 16 + 1) * 64 + (64 * 9 + 1) * 64 + (64 * side * side + 1) * 512
    assert trunk == 1_684_128 and sum(p.numel() for p in agent.parameters()) == trunk + 513 * 4 + 513


@pytest.mark.detail("13")
@pytest.mark.detail("21")
def test_policy_and_value_share_the_network(atari: ModuleType) -> None:
    agent = atari.Agent(4)
    obs = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    for output in (agent(obs)[0].logits.square().sum(), agent(obs)[1].square().sum()):
        agent.zero_grad()
        output.backward()
        for layer in (agent.network[0], agent.network[7]):
            assert layer.weight.grad is not None and layer.weight.grad.abs().sum() > 0


@pytest.mark.detail("21")
@pytest.mark.detail("22")
def test_the_network_by_its_weights_alone(atari: ModuleType) -> None:
    """Convolutions as products with patches cut out by hand, ReLU as a maximum: logits and values are the agent's."""
    torch.manual_seed(0)
    agent = atari.Agent(4)
    for p in agent.parameters():
        p.data += 0.02 * torch.randn_like(p)  # biases and the small head count, too
    obs = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    weights = [p.detach().double().numpy() for p in agent.parameters()]
    x = obs.numpy() / 255
    for weight, bias, stride in zip(weights[0:6:2], weights[1:6:2], (4, 2, 1), strict=True):
        size = weight.shape[-1]
        side = range(0, x.shape[-1] - size + 1, stride)
        patches = np.array([[x[:, :, i : i + size, j : j + size] for j in side] for i in side])  # [h, w, B, C, k, k]
        x = np.maximum(np.einsum("hwbckl,ockl->bohw", patches, weight) + bias[:, None, None], 0)
    hidden = np.maximum(x.reshape(2, -1) @ weights[6].T + weights[7], 0)
    with torch.no_grad():
        policy, values = agent(obs)
    logits = hidden @ weights[8].T + weights[9]
    shifted = policy.logits.numpy() - logits  # a categorical knows its logits up to a constant
    np.testing.assert_allclose(shifted, shifted[:, :1].repeat(4, 1), atol=1e-4)
    np.testing.assert_allclose(values, (hidden @ weights[10].T + weights[11])[:, 0], atol=1e-4)
    assert np.abs(logits).max() > 0.1 and (hidden == 0).mean() > 0.1


@pytest.mark.detail("22")
def test_pixels_are_scaled_to_the_unit_interval(atari: ModuleType) -> None:
    """The network sees pixel / 255: feeding it by hand gives the same."""
    agent = atari.Agent(4)
    obs = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    seen = []
    agent.network[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    agent(obs)
    torch.testing.assert_close(seen[0], torch.from_numpy(obs.numpy() / 255).float())
    assert obs.max() > 1  # the frames themselves stay as they were


@pytest.mark.detail("2")
def test_heads_start_with_their_gains(atari: ModuleType) -> None:
    agent = atari.Agent(6)
    gram = agent.actor.weight @ agent.actor.weight.T
    torch.testing.assert_close(gram, 0.01**2 * torch.eye(6), atol=1e-7, rtol=1e-3)
    assert float(agent.critic.weight.detach().norm()) == pytest.approx(1.0, abs=1e-4)
    for layer in (agent.network[2], agent.network[7]):
        rows = layer.weight.detach().flatten(1)
        torch.testing.assert_close(rows @ rows.T, 2 * torch.eye(len(rows)), atol=1e-4, rtol=1e-4)
    probabilities = agent(torch.randint(0, 256, (8, 4, 84, 84), dtype=torch.uint8))[0].probs
    assert float((probabilities - 1 / 6).abs().max()) < 0.02  # nearly uniform at first


def test_bf16_and_channels_last_agree_with_plain_float32(atari: ModuleType) -> None:
    torch.manual_seed(0)
    agent = atari.Agent(4)
    obs = torch.randint(0, 256, (8, 4, 84, 84), dtype=torch.uint8)
    policy, values = agent(obs)
    agent.to(memory_format=torch.channels_last)
    policy_last, values_last = agent(obs)
    torch.testing.assert_close(policy_last.logits, policy.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values_last, values, atol=1e-4, rtol=1e-4)
    agent.bf16 = True
    policy_bf16, values_bf16 = agent(obs)
    assert policy_bf16.logits.dtype == values_bf16.dtype == torch.float32
    torch.testing.assert_close(policy_bf16.logits, policy.logits, atol=2e-3, rtol=0)
    torch.testing.assert_close(values_bf16, values, atol=0.05, rtol=0.05)


@pytest.fixture
def never_fires(atari: ModuleType, tmp_path: Path) -> Any:
    """Args to evaluate a folder whose policy finds NOOP the most probable action."""
    args = atari.Args(evaluate=str(tmp_path), eval_episodes=3, num_envs=2, eval_sample=False, max_episode_frames=2000)
    agent = atari.Agent(4)
    agent.actor.weight.data.zero_()
    agent.actor.bias.data.copy_(torch.tensor([2.0, 0.0, 0.0, 0.0]))
    state = {"agent": agent.state_dict(), "iteration": 0, "scores": [], "world": 1, "args": dataclasses.asdict(args)}
    torch.save(state, tmp_path / "checkpoint.pt")
    return args


def test_evaluation_of_a_policy_that_never_fires_ends(atari: ModuleType, never_fires: Any, capsys: Any) -> None:
    """In Breakout such a policy must still see its games end."""
    assert len(atari.evaluate(never_fires)) == 3
    assert "over 3 episodes, most probable actions" in capsys.readouterr().out


def test_a_saved_policy_acts_on_frames(atari: ModuleType, never_fires: Any) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (5, 4, 84, 84), np.uint8)
    actions = atari.load_policy(never_fires.evaluate, sample=False)(frames)
    assert actions.shape == (5,) and actions.dtype == np.int64 and not actions.any()
    sampled = atari.load_policy(never_fires.evaluate)(frames.repeat(40, 0))
    assert set(sampled.tolist()) == {0, 1, 2, 3}  # of 200 actions each of the other three is a tenth


def test_an_evaluation_is_filmed_in_colour_and_no_film_is_overwritten(atari: ModuleType, never_fires: Any) -> None:
    from imageio.v2 import get_reader

    args = dataclasses.replace(never_fires, capture_video=True, eval_episodes=1, max_episode_frames=80)
    for count in (1, 2):
        atari.evaluate(args)
        films = sorted(Path(args.evaluate, "videos").glob("*.mp4"))
        assert len(films) == count
    frame = get_reader(films[0]).get_data(0)
    assert frame.shape == (210, 160, 3) and np.ptp(frame.astype(int), axis=-1).max() > 50
