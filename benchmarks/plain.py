"""The loops that people copy, kept plain on purpose: what benchmarks/speed.py measures the scripts against.

Contiguous float32, distribution objects, unfused Adam, gymnasium's wrappers in one process, GAE step by step in
Python, statistics fetched from every minibatch; for RLHF `generate` and the full logits of padded texts.
Hyper-parameters are those of the scripts' defaults. Each function yields (rollout seconds, update seconds, steps or
tokens) of one iteration after another.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical, Normal

Timing = tuple[float, float, float]


def layer(module: Any, gain: float = 2**0.5) -> Any:
    nn.init.orthogonal_(module.weight, gain)
    nn.init.constant_(module.bias, 0.0)
    return module


class ControlAgent(nn.Module):
    def __init__(self, obs_dim: int, action_dim: int):
        super().__init__()
        mlp = lambda out, gain: nn.Sequential(
            layer(nn.Linear(obs_dim, 64)),
            nn.Tanh(),
            layer(nn.Linear(64, 64)),
            nn.Tanh(),
            layer(nn.Linear(64, out), gain),
        )
        self.critic, self.actor = mlp(1, 1.0), mlp(action_dim, 0.01)
        self.logstd = nn.Parameter(torch.zeros(1, action_dim))

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(x)

    def forward(self, x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        mean = self.actor(x)
        pi = Normal(mean, self.logstd.expand_as(mean).exp())
        action = pi.sample() if action is None else action
        return action, pi.log_prob(action).sum(1), pi.entropy().sum(1), self.critic(x)


class DiscreteAgent(nn.Module):
    def __init__(self, obs_dim: int, actions: int):
        super().__init__()
        mlp = lambda out, gain: nn.Sequential(
            layer(nn.Linear(obs_dim, 64)),
            nn.Tanh(),
            layer(nn.Linear(64, 64)),
            nn.Tanh(),
            layer(nn.Linear(64, out), gain),
        )
        self.critic, self.actor = mlp(1, 1.0), mlp(actions, 0.01)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(x)

    def forward(self, x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        pi = Categorical(logits=self.actor(x))
        action = pi.sample() if action is None else action
        return action, pi.log_prob(action), pi.entropy(), self.critic(x)


class AtariAgent(nn.Module):
    def __init__(self, actions: int):
        super().__init__()
        self.network = nn.Sequential(
            layer(nn.Conv2d(4, 32, 8, 4)),
            nn.ReLU(),
            layer(nn.Conv2d(32, 64, 4, 2)),
            nn.ReLU(),
            layer(nn.Conv2d(64, 64, 3, 1)),
            nn.ReLU(),
            nn.Flatten(),
            layer(nn.Linear(3136, 512)),
            nn.ReLU(),
        )
        self.actor, self.critic = layer(nn.Linear(512, actions), 0.01), layer(nn.Linear(512, 1), 1.0)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(self.network(x / 255.0))

    def forward(self, x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        hidden = self.network(x / 255.0)
        pi = Categorical(logits=self.actor(hidden))
        action = pi.sample() if action is None else action
        return action, pi.log_prob(action), pi.entropy(), self.critic(hidden)


def half_cheetah() -> gym.Env:
    env: gym.Env = gym.make("HalfCheetah-v5")
    env = gym.wrappers.ClipAction(gym.wrappers.RecordEpisodeStatistics(gym.wrappers.FlattenObservation(env)))
    env = gym.wrappers.NormalizeObservation(env)
    env = gym.wrappers.TransformObservation(env, lambda obs: np.clip(obs, -10, 10), env.observation_space)
    env = gym.wrappers.NormalizeReward(env, gamma=0.99)
    return gym.wrappers.TransformReward(env, lambda reward: np.clip(float(reward), -10, 10))


def cart_pole() -> gym.Env:
    return gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))


def cart_pole_without_velocities() -> gym.Env:
    env: gym.Env = gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
    shown = np.array([1, 0, 1, 0], np.float32)
    env = gym.wrappers.TransformObservation(env, lambda obs: obs * shown, env.observation_space)
    env = gym.wrappers.TransformObservation(
        gym.wrappers.NormalizeObservation(env), lambda obs: np.clip(obs, -10, 10), env.observation_space
    )
    return gym.wrappers.TransformReward(gym.wrappers.NormalizeReward(env), lambda r: np.clip(float(r), -10, 10))


def breakout() -> gym.Env:
    import ale_py

    gym.register_envs(ale_py)
    env: gym.Env = gym.wrappers.RecordEpisodeStatistics(gym.make("BreakoutNoFrameskip-v4"))
    env = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84, terminal_on_life_loss=True)
    return gym.wrappers.FrameStackObservation(
        gym.wrappers.TransformReward(env, lambda reward: np.sign(float(reward))), 4
    )


def control() -> Iterator[Timing]:
    torch.set_num_threads(1)
    return ppo([half_cheetah], ControlAgent(17, 6), 2048, 3e-4, 10, 32, 0.2, 0.0)


def discrete() -> Iterator[Timing]:
    torch.set_num_threads(1)
    return ppo([cart_pole] * 4, DiscreteAgent(4, 2), 128, 2.5e-4, 4, 4, 0.2, 0.01)


class RecurrentAgent(nn.Module):
    """An LSTM each for policy and value, asked for one step after the other, in training too."""

    def __init__(self, obs_dim: int, actions: int):
        super().__init__()
        self.memories = nn.ModuleList(nn.LSTM(obs_dim, 64) for _ in range(2))
        self.actor, self.critic = layer(nn.Linear(64, actions), 0.01), layer(nn.Linear(64, 1), 1.0)

    def forward(self, x: torch.Tensor, state: Any, done: torch.Tensor, action: torch.Tensor | None = None) -> Any:
        """x [T, B, D], state of pairs [1, B, 64], done [T, B]."""
        outputs, after = [], []
        for memory, pair in zip(self.memories, state, strict=True):
            new = []
            for row, d in zip(x, done, strict=True):
                alive = (1.0 - d).view(1, -1, 1)
                h, pair = memory(row.unsqueeze(0), (alive * pair[0], alive * pair[1]))
                new.append(h)
            outputs.append(torch.cat(new))
            after.append(pair)
        pi = Categorical(logits=self.actor(outputs[0]))
        action = pi.sample() if action is None else action
        return action, pi.log_prob(action), pi.entropy(), self.critic(outputs[1]).squeeze(-1), after


def recurrent() -> Iterator[Timing]:
    torch.set_num_threads(1)
    steps, n, epochs, minibatches = 64, 16, 10, 4
    envs, agent = gym.vector.SyncVectorEnv([cart_pole_without_velocities] * n), RecurrentAgent(4, 2)
    optimizer = torch.optim.Adam(agent.parameters(), 5e-4, eps=1e-5)
    obs, actions = torch.zeros((steps, n, 4)), torch.zeros((steps, n))
    logprobs, rewards, dones, values = torch.zeros((4, steps, n))
    next_obs, next_done = torch.Tensor(envs.reset(seed=1)[0]), torch.zeros(n)
    state = [(torch.zeros(1, n, 64), torch.zeros(1, n, 64)) for _ in range(2)]
    while True:
        begin = time.perf_counter()
        first = [(h.clone(), c.clone()) for h, c in state]
        for t in range(steps):
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value, state = agent(next_obs[None], state, next_done[None])
            actions[t], logprobs[t], values[t] = action[0], logprob[0], value[0]
            raw, reward, terminations, truncations, _ = envs.step(action[0].numpy())
            rewards[t] = torch.tensor(reward).view(-1)
            next_obs, next_done = torch.Tensor(raw), torch.Tensor(np.logical_or(terminations, truncations))
        middle = time.perf_counter()
        with torch.no_grad():
            *_, last_value, _ = agent(next_obs[None], state, next_done[None])
        advantages, returns = gae(rewards, values, dones, last_value, next_done)
        order, size = np.arange(n), n // minibatches
        for _ in range(epochs):
            np.random.shuffle(order)
            for start in range(0, n, size):
                some = order[start : start + size]
                memory = [(h[:, some], c[:, some]) for h, c in first]
                _, logprob, entropy, value, _ = agent(obs[:, some], memory, dones[:, some], actions[:, some])
                step(
                    optimizer,
                    agent,
                    (logprob - logprobs[:, some]).flatten(),
                    advantages[:, some].flatten(),
                    (value.flatten(), values[:, some].flatten(), returns[:, some].flatten()),
                    entropy,
                    0.2,
                    0.0,
                )
        yield middle - begin, time.perf_counter() - middle, steps * n


def atari() -> Iterator[Timing]:
    return ppo([breakout] * 8, AtariAgent(4), 128, 2.5e-4, 4, 4, 0.1, 0.01)


def trpo() -> Iterator[Timing]:
    """Not a loop of this file but that of SB3-contrib, on one thread, with the batch and the epochs of trpo.py.

    Its KL is a mean over the six components of an action, too: a sixth of δ and of the damping is the same algorithm.
    """
    from sb3_contrib import TRPO
    from stable_baselines3.common.callbacks import ConvertCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    torch.set_num_threads(1)
    envs = VecNormalize(DummyVecEnv([lambda: gym.make("HalfCheetah-v5")]))
    model: Any = TRPO(
        "MlpPolicy",
        envs,
        n_steps=2048,
        batch_size=128,
        n_critic_updates=10,
        cg_max_steps=10,
        cg_damping=0.1 / 6,
        target_kl=0.01 / 6,
        device="cpu",
        seed=1,
    )
    _, callback = model._setup_learn(10**9, ConvertCallback(lambda *_: True))
    callback.on_training_start({}, {})
    while True:
        begin = time.perf_counter()
        model.collect_rollouts(envs, callback, model.rollout_buffer, 2048)
        middle = time.perf_counter()
        model.train()
        yield middle - begin, time.perf_counter() - middle, 2048


def gae(rewards: Any, values: Any, dones: Any, last_value: Any, next_done: Any) -> tuple[torch.Tensor, torch.Tensor]:
    advantages, running = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    steps = len(rewards)
    for t in reversed(range(steps)):
        alive = 1.0 - (next_done if t == steps - 1 else dones[t + 1])
        after = last_value if t == steps - 1 else values[t + 1]
        delta = rewards[t] + 0.99 * after * alive - values[t]
        advantages[t] = running = delta + 0.99 * 0.95 * alive * running
    return advantages, advantages + values


def step(
    optimizer: Any, agent: Any, logratio: Any, advantages: Any, of_value: Any, entropy: Any, clip: float, ent: float
) -> None:
    value, old_value, returns = of_value
    ratio = logratio.exp()
    with torch.no_grad():
        ((ratio - 1) - logratio).mean()
        ((ratio - 1.0).abs() > clip).float().mean().item()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip)).mean()
    clipped = old_value + (value - old_value).clamp(-clip, clip)
    value_loss = 0.5 * torch.max((value - returns) ** 2, (clipped - returns) ** 2).mean()
    loss = policy_loss - ent * entropy.mean() + 0.5 * value_loss
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
    optimizer.step()


def ppo(
    makers: list[Callable[[], gym.Env]],
    agent: nn.Module,
    steps: int,
    lr: float,
    epochs: int,
    minibatches: int,
    clip: float,
    ent_coef: float,
) -> Iterator[Timing]:
    envs = gym.vector.SyncVectorEnv(makers)
    optimizer = torch.optim.Adam(agent.parameters(), lr, eps=1e-5)
    n, shape = len(makers), envs.single_observation_space.shape or ()
    action_shape = envs.single_action_space.shape or ()
    obs, actions = torch.zeros((steps, n, *shape)), torch.zeros((steps, n, *action_shape))
    logprobs, rewards, dones, values = torch.zeros((4, steps, n))
    next_obs, next_done = torch.Tensor(envs.reset(seed=1)[0]), torch.zeros(n)
    while True:
        begin = time.perf_counter()
        for t in range(steps):
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent(next_obs)
            actions[t], logprobs[t], values[t] = action, logprob, value.flatten()
            raw, reward, terminations, truncations, _ = envs.step(action.numpy())
            rewards[t] = torch.tensor(reward).view(-1)
            next_obs, next_done = torch.Tensor(raw), torch.Tensor(np.logical_or(terminations, truncations))
        middle = time.perf_counter()
        with torch.no_grad():
            last_value: Any = agent.value(next_obs).reshape(1, -1)  # type: ignore[operator]
        advantages, returns = gae(rewards, values, dones, last_value, next_done)
        flat = [x.reshape(steps * n, *x.shape[2:]) for x in (obs, actions, logprobs, advantages, returns, values)]
        order, size = np.arange(steps * n), steps * n // minibatches
        for _ in range(epochs):
            np.random.shuffle(order)
            for start in range(0, steps * n, size):
                b_obs, b_actions, b_logprobs, b_advantages, b_returns, b_values = (
                    x[order[start : start + size]] for x in flat
                )
                _, logprob, entropy, value = agent(b_obs, b_actions)
                step(
                    optimizer,
                    agent,
                    logprob - b_logprobs,
                    b_advantages,
                    (value.view(-1), b_values, b_returns),
                    entropy,
                    clip,
                    ent_coef,
                )
        yield middle - begin, time.perf_counter() - middle, steps * n


def rlhf(
    policy: Any,
    reference: Any,
    value: Any,
    reward_model: Any,
    prompts: Iterator[tuple[torch.Tensor, torch.Tensor]],
    eos: int,
    length: int,
) -> Iterator[Timing]:
    """`prompts` gives tokens and mask [B, P], padded on the left. The models are transformers' own, without dropout."""
    parameters = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(parameters, 3e-4, eps=1e-5)

    def logprobs_of(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        logp = model(input_ids=tokens, attention_mask=mask.long(), position_ids=positions).logits.log_softmax(-1)
        return logp[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1), logp

    def scores_of(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        out = model.transformer(input_ids=tokens, attention_mask=mask.long(), position_ids=positions)
        return model.score(out.last_hidden_state).squeeze(-1)

    for ids, prompt_mask in prompts:
        begin, columns = time.perf_counter(), ids.shape[1]
        with torch.no_grad():
            tokens = policy.generate(
                input_ids=ids,
                attention_mask=prompt_mask.long(),
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                max_new_tokens=length,
                pad_token_id=eos,
                eos_token_id=eos,
            )
            ended = (tokens[:, columns:] == eos).cumsum(1)
            real = nn.functional.pad(ended[:, :-1], (1, 0)) == 0
            mask, rows = torch.cat([prompt_mask, real], 1), torch.arange(len(tokens))
            logprobs, ref_logprobs = (logprobs_of(m, tokens, mask)[0][:, columns - 1 :] for m in (policy, reference))
            values = scores_of(value, tokens, mask)[:, columns - 1 : -1] * real
            rewards = -0.15 * (logprobs - ref_logprobs) * real
            last = real.sum(1) - 1
            rewards[rows, last] += scores_of(reward_model, tokens, mask)[rows, columns + last]
            advantages, running = torch.zeros_like(rewards), torch.zeros(len(tokens))
            for t in reversed(range(rewards.shape[1])):
                after = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
                advantages[:, t] = running = rewards[:, t] + after - values[:, t] + 0.95 * running
            returns = advantages + values
            mean = advantages[real].mean()
            advantages = (advantages - mean) / (advantages[real].std() + 1e-8)
        middle = time.perf_counter()
        for _ in range(4):
            for i in torch.randperm(len(tokens)).split(len(tokens) // 4):
                r = real[i]
                new, logp = logprobs_of(policy, tokens[i], mask[i])
                with torch.no_grad():
                    -(logp.exp() * logp).sum(-1)
                ratio, a = (new[:, columns - 1 :] - logprobs[i]).exp(), advantages[i]
                policy_loss = (torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2)) * r).sum() / r.sum()
                v = scores_of(value, tokens[i], mask[i])[:, columns - 1 : -1]
                clipped = values[i] + (v - values[i]).clamp(-0.2, 0.2)
                value_loss = (0.5 * torch.max((v - returns[i]) ** 2, (clipped - returns[i]) ** 2) * r).sum() / r.sum()
                optimizer.zero_grad()
                (policy_loss + 0.1 * value_loss).backward()
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
        yield middle - begin, time.perf_counter() - middle, float(real.sum())
