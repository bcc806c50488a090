# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "filelock==4.3.1",
#     "gymnasium==1.4.0",
#     "numpy==2.4.6",
#     "tensorboard==2.21.0",
#     "torch==2.13.0",
#     "tqdm==4.70.1",
#     "tyro==1.0.17",
# ]
# ///
"""Proximal Policy Optimization with the clipped objective (PPO-Clip, arXiv:1707.06347) for discrete actions.

    for iteration = 1, 2, ...                                        Algorithm 1    train
        run policy π_old for T steps in each of N environments       §5             act, NormalizedEnvs.step
        advantage estimates Â_1 ... Â_T                              eq. 11         compute_gae
        for K epochs of minibatches: ascend L^CLIP - c1·L^VF + c2·S  eq. 7, eq. 9   minibatches, ppo_loss
        π_old <- π

    python ppo_discrete.py --env-id CartPole-v1                      train (--help lists every flag)
    ... --resume runs/FOLDER                                         go on after an interruption, exactly
    ... --evaluate runs/FOLDER                                       play episodes with the saved policy

[n] marks detail n of "The 37 Implementation Details of PPO" (see DETAILS.md); eq. and § are the paper's.
Shapes: T = num_steps, N = num_envs of this process, D = observation, A = action components, of which a plain discrete
action has one, M = actions of the largest component, B = any batch.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import traceback
import uuid
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from filelock import FileLock
from torch import Tensor
from tqdm import tqdm


@dataclass
class Args:
    """PPO-Clip for discrete actions. All that a run writes goes into one new folder under --run-dir."""

    env_id: str = "CartPole-v1"  # any registered id with Discrete or MultiDiscrete actions; module:Id-v0 imports module
    vectorization: Literal["sync", "async"] = "sync"  # environments in this process, or in one process each
    total_timesteps: int | float = 500_000  # steps over all environments; 1e6 works
    learning_rate: float = 2.5e-4  # Adam step size
    anneal_lr: bool = True  # bring the step size linearly to 0
    num_envs: int = 4  # environments in parallel (N), over all processes
    num_steps: int = 128  # steps per environment and iteration (T)
    num_minibatches: int = 4  # minibatches per epoch; divides num_envs x num_steps
    update_epochs: int = 4  # epochs per iteration (K)
    gamma: float = 0.99  # discount γ in [0, 1]
    gae_lambda: float = 0.95  # GAE λ in [0, 1]
    bootstrap_truncated: bool = True  # value what a time limit cuts off; --no-... counts it as death, as published
    norm_obs: bool = False  # normalise observations by their running mean and variance
    norm_reward: bool = False  # divide rewards by the standard deviation of the running discounted return
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # clip range ε of the ratio
    anneal_clip: bool = False  # bring the clip range linearly to 0, as the step size
    clip_vloss: bool = True  # clip the value loss with the same ε
    ent_coef: float = 0.01  # entropy coefficient c2
    vf_coef: float = 0.5  # value loss coefficient; c1 of eq. 9 is half of it, as L^VF here is half the square
    max_grad_norm: float = 0.5  # largest global L2 norm of the gradient
    target_kl: float | None = None  # end an iteration's epochs once approximate KL passes 1.5 times this (nats)
    seed: int = 1  # seed of every generator
    device: str = "auto"  # auto (CUDA if there is one), cpu, cuda, cuda:1 or mps
    cuda: bool = True  # --no-cuda means cpu
    torch_deterministic: bool = True  # deterministic cuDNN kernels; --no-... lets cuDNN choose the fastest
    compile: bool = False  # torch.compile, with CUDA graphs on CUDA
    bf16: bool = False  # networks in bfloat16 (autocast), other matrix products in TF32
    exp_name: str = "ppo_discrete"  # name of the experiment, part of the folder's name
    run_dir: str = "runs"  # where run folders are made
    checkpoint_every: int = 100  # iterations; 0 only at the end; episodes restart there
    resume: str | None = None  # run folder to go on with; its flags are the defaults
    evaluate: str | None = None  # run folder whose policy plays, without training
    eval_episodes: int = 10  # episodes to play
    eval_sample: bool = True  # sample actions as in training; --no-... takes the most probable ones
    capture_video: bool = False  # film an episode with each checkpoint, in evaluation all
    save_model: bool = False  # write model.pt at the end: the weights without optimiser state
    track: bool = False  # mirror TensorBoard to Weights & Biases
    wandb_project_name: str = "ppo"  # W&B project
    wandb_entity: str | None = None  # W&B team


class RunningMeanStd(nn.Module):
    """Mean and standard deviation of all rows seen so far, by sums in float64; a module for the sake of checkpoints."""

    def __init__(self, *shape: int):
        super().__init__()
        self.sums = np.zeros((3, *shape))  # of 1, x and x² over the rows
        self.sums[[0, 2]] = 1e-4  # as if a little of mean 0 and variance 1 had been seen
        self.state = nn.Buffer(torch.from_numpy(self.sums))  # the same memory
        self.shared = nn.Buffer(self.state.clone())  # what all processes know of

    def update(self, x: np.ndarray) -> None:
        """Take in the rows of x [n, ...]."""
        self.sums += np.array([np.ones_like(x), x, x**2]).sum(1)

    def mean_and_std(self) -> tuple[np.ndarray, np.ndarray]:
        count, total, squares = self.sums
        mean = total / count
        variance = np.maximum(squares / count - mean**2, 0)
        return mean, np.sqrt(variance + 1e-8)

    def normalize(self, x: np.ndarray) -> np.ndarray:
        """x [..., D] with mean 0 and variance 1 [28], clipped to ±10 [29], in float32."""
        mean, std = self.mean_and_std()
        return ((x - mean) / std).clip(-10, 10).astype(np.float32)

    def share(self) -> None:
        """Add what the other processes have seen since the last call."""
        new = self.state - self.shared
        dist.all_reduce(new)
        self.shared.add_(new)
        self.state.copy_(self.shared)


class Episode(NamedTuple):
    """An episode that has ended: in which environment of all processes, the sum of its raw rewards, its steps."""

    env: int
    score: float
    length: int


def valid_actions(space: Any, info: dict[str, Any]) -> np.ndarray:
    """Which actions may be chosen, bool [..., A, M]: those of `space` that `info["action_mask"]` does not exclude [S4].

    The mask has a number for each action of the first component, then of the second, and so on. Components of fewer
    than M actions are filled up with invalid ones [37]. Raises UsageError and RunError.
    """
    sizes = np.ravel(space.nvec if space.shape else space.n)  # [A]
    masks = np.arange(sizes.max()) < sizes[:, None]
    if "action_mask" in info:  # which every reset and every step gives, or none
        said = info["action_mask"]
        require(
            getattr(said, "shape", ())[-1:] == (sizes.sum(),),
            f'info["action_mask"] must be an array of {sizes.sum()} numbers, one for each action of {space}',
        )
        masks = np.tile(masks, (*said.shape[:-1], 1, 1))
        masks[masks] = said.flat > 0
        if not masks.any(-1).all():
            raise RunError(f'info["action_mask"] leaves a component of {space} without a valid action')
    return masks


def chosen_actions(space: Any, choices: np.ndarray) -> np.ndarray:
    """Choices [..., A], each counted from 0, as elements of `space`, whose actions may start elsewhere."""
    return (choices.reshape(choices.shape[:-1] + space.shape) + space.start).astype(space.dtype)


class NormalizedEnvs:
    """N environments stepped together [1], normalised if so wished; a finished one restarts in the step.

    `obs` float32 [N, D] is what to act on next: the first observation of the next episode where one has ended.
    `masks` bool [N, A, M], or [A, M] where no environment has one, tells which actions it allows.
    """

    def __init__(self, args: Args, num_envs: int):
        self.make = lambda: make_envs(args, num_envs)
        self.args = args
        self.envs = probe_env(args)
        self.obs_dim, self.space = self.envs.observation_space.shape[0], self.envs.action_space
        self.obs_stats = RunningMeanStd(self.obs_dim)
        self.return_stats = RunningMeanStd()

    def reset(self, seed: int) -> None:
        """Start N new episodes that depend on `seed` alone."""
        self.envs.close()
        self.envs = self.make()  # some environments remember more than their reset clears
        raw_obs, self.info = self.envs.reset(seed=seed)
        self.lengths, self.scores, self.discounted = np.zeros((3, len(raw_obs)))
        self.obs = self.normalize(raw_obs)
        self.masks = valid_actions(self.space, self.info)

    def normalize(self, raw_obs: np.ndarray) -> np.ndarray:
        if not self.args.norm_obs:
            return raw_obs.astype(np.float32)
        self.obs_stats.update(raw_obs.astype(np.float64))
        return self.obs_stats.normalize(raw_obs)

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """Take actions [N, A]; returns the observations [N, D] that they led to, also where an episode ended, scaled
        rewards, terminations and truncations [N], and the episodes that ended."""
        executed = chosen_actions(self.space, actions)
        raw_obs, rewards, terminations, truncations, self.info = self.envs.step(executed)
        dones = terminations | truncations
        raw_next_obs = raw_obs.copy()
        if dones.any():
            raw_next_obs[dones] = np.stack(self.info["final_obs"][dones])
        # A reward of your own belongs here: raw_next_obs is what the actions led to, self.info what came with it
        # (where an episode ended, self.info["final_info"]).

        self.lengths += 1
        self.scores += rewards
        self.discounted = self.discounted * self.args.gamma + rewards
        scaled_rewards = rewards
        if self.args.norm_reward:
            self.return_stats.update(self.discounted)
            _, std = self.return_stats.mean_and_std()
            scaled_rewards = (rewards / std).clip(-10, 10)  # [30] [31]
        ended = np.flatnonzero(dones).tolist()
        episodes = [Episode(RANK * len(dones) + i, float(self.scores[i]), int(self.lengths[i])) for i in ended]

        next_obs = self.normalize(raw_next_obs)
        self.obs = next_obs.copy()
        if episodes:
            self.obs[dones] = self.normalize(raw_obs[dones])
            self.lengths[dones] = 0
            self.scores[dones] = 0
            self.discounted[dones] = 0  # [30] no return leaks into the next episode
        self.masks = valid_actions(self.space, self.info)  # [S4] of `obs`, where an episode has ended the next one's
        return next_obs, scaled_rewards, terminations, truncations & ~terminations, episodes  # both at once: terminated


def layer_init(layer: Any, gain: float = 2**0.5) -> Any:
    """Orthogonal weights, zero biases [2]."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers of 64 [26]; `gain` of the last one."""
    return nn.Sequential(
        layer_init(nn.Linear(inputs, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, outputs), gain),
    )


class Agent(nn.Module):
    """Separate policy and value networks [13]."""

    def __init__(self, obs_dim: int, space: Any, bf16: bool = False):
        super().__init__()
        self.bf16 = bf16
        exist = valid_actions(space, {})
        self.choices = exist.shape  # (A, M)
        self.actor = mlp(obs_dim, exist.size, gain=0.01)
        self.critic = mlp(obs_dim, 1, gain=1.0)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Observations [B, D] to the logits [B, A, M] of all actions, valid or not, and the values [B]."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            return self.actor(obs).float().unflatten(-1, self.choices), self.critic(obs).float().squeeze(-1)


@torch.inference_mode()
def act(agent: Agent, obs: Tensor, masks: np.ndarray, sample: bool = True) -> np.ndarray:
    """Actions [B, A]: the valid ones [S4] with the largest logits, to which Gumbel noise makes samples of them."""
    logits = agent(obs)[0].cpu().numpy()
    if sample:
        logits = logits + np.random.gumbel(size=logits.shape)
    return np.where(masks, logits, -1e9).argmax(-1)


def masked_categorical(logits: Tensor, masks: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """log π(a|s) and entropy of independent components, the sums over them [37]; logits and masks [B, A, M], actions
    [B, A], both results [B]. Invalid actions have probability 0 and no gradient."""
    logpi = logits.masked_fill(~masks, -1e9).log_softmax(-1)  # [S4] not -∞, which in the entropy would be NaN
    return logpi.gather(-1, actions.unsqueeze(-1)).sum((-2, -1)), -(logpi.exp() * logpi).sum((-2, -1))


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminations: Tensor,
    dones: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation [5] (arXiv:1506.02438, eq. 16) and the TD(λ) targets of the value.

    All are [T, N]. `next_values[t]` is V of the state that step t led to: at an episode end the final observation, not
    the first of the next episode. A time limit (done, not terminated) still bootstraps, as the task would have gone on.
    """
    deltas = rewards + gamma * next_values * (1 - terminations) - values
    decays = gamma * gae_lambda * (1 - dones)  # 0 cuts the sum at every episode end
    advantages = torch.empty_like(deltas)
    running = torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        running = deltas[t] + decays[t] * running
        advantages[t] = running
    return advantages, advantages + values


def minibatches(size: int, count: int, epochs: int, device: torch.device) -> Iterator[Tensor]:
    """Indices [size / count], in a new order each epoch; an epoch uses every sample exactly once [6]."""
    for _ in range(epochs):
        yield from torch.randperm(size, device=device).split(size // count)


def normalize_advantages(advantages: Tensor) -> Tensor:
    """Zero mean, unit variance over the minibatch [7] (its shares in all processes); [B] to [B]."""
    centred = advantages - global_mean(advantages.mean())
    centred -= global_mean(centred.mean())  # or rounding would become ±1 where all are equal
    return centred / (global_mean(centred.square().mean()).sqrt() + 1e-8)


def clipped_surrogate_loss(logratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """-L^CLIP [8] (eq. 7) of logratio = log π(a|s) - log π_old(a|s) and advantages, both [B]; a scalar."""
    ratio = logratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.min(ratio * advantages, clipped * advantages).mean()  # no gradient beyond ε in the helpful direction


def value_loss(new_values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float | None) -> Tensor:
    """L^VF [9]: half the mean squared error, or of the worse of the value and its clipped move; all [B], a scalar."""
    errors = (new_values - returns).square()
    if clip_coef is not None:
        clipped = old_values + (new_values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (clipped - returns).square())
    return 0.5 * errors.mean()


def ppo_loss(args: Args, agent: Agent, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """-(L^CLIP - c1·L^VF + c2·S) (eq. 9) on a minibatch of [B, ...], and its debug variables [12]."""
    logits, new_values = agent(batch["obs"])
    logprobs, entropies = masked_categorical(logits, batch["masks"], batch["actions"])
    logratio = logprobs - batch["logprobs"]
    advantages = normalize_advantages(batch["advantages"]) if args.norm_adv else batch["advantages"]
    policy_loss = clipped_surrogate_loss(logratio, advantages, args.clip_coef)
    v_loss = value_loss(new_values, batch["values"], batch["returns"], args.clip_coef if args.clip_vloss else None)
    entropy = entropies.mean()
    loss = policy_loss + args.vf_coef * v_loss - args.ent_coef * entropy  # [10]
    stats = {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": v_loss,
        "losses/entropy": entropy,
        "losses/old_approx_kl": -logratio.mean(),  # KL(π_old‖π) by -log r, and by (r - 1) - log r, never below 0
        "losses/approx_kl": (logratio.expm1() - logratio).mean(),
        "losses/clipfrac": (logratio.expm1().abs() > args.clip_coef).float().mean(),
    }
    return loss, {name: x.detach() for name, x in stats.items()}


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """1 - Var[R - V] / Var[R] of values and returns [B], a scalar: 1 is perfect, a constant has 0. [12]"""
    return 1 - (returns - values).var(correction=0) / returns.var(correction=0)


def train(args: Args) -> dict[str, float]:
    """Run Algorithm 1; returns the last metrics. Raises UsageError before anything is written, and RunError."""
    device = start(args)
    torch.set_num_threads(1)  # networks this small lose time when threads share them
    envs = NormalizedEnvs(args, args.num_envs // WORLD)
    torch.manual_seed(args.seed)  # the same weights in every process
    agent = Agent(envs.obs_dim, envs.space, args.bf16).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)  # [3]
    run = Run(args, agent=agent, optimizer=optimizer, obs_stats=envs.obs_stats, return_stats=envs.return_stats)
    loss_fn = torch.compile(ppo_loss, mode="reduce-overhead") if args.compile else ppo_loss  # with CUDA graphs on CUDA
    tensor = lambda x: torch.from_numpy(x).to(device)
    shape = (args.num_steps, args.num_envs // WORLD)  # [T, N]
    obs, next_obs = np.zeros((2, *shape, envs.obs_dim), np.float32)  # before and after each step
    masks = np.zeros((*shape, *agent.choices), bool)
    actions = np.zeros(masks.shape[:-1], int)
    rewards, terminations, truncations = np.zeros((3, *shape), np.float32)

    for iteration in range(run.first, run.last):
        if iteration == run.first or iteration % run.every == 0:  # after each checkpoint: so resuming is exact
            envs.reset(reseed(args.seed, iteration))
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / run.last)  # [4]
        clip_coef: Any = torch.tensor(args.clip_coef * (1 - iteration / run.last), device=device)  # [S1]
        annealed = replace(args, clip_coef=clip_coef) if args.anneal_clip else args

        # Play a segment of fixed length; the next one goes on where this one ends [1]
        for t in range(args.num_steps):
            obs[t] = envs.obs
            masks[t] = envs.masks
            actions[t] = act(agent, tensor(envs.obs), envs.masks)
            next_obs[t], rewards[t], terminations[t], truncations[t], ended = envs.step(actions[t])
            run.episodes += [(t, episode) for episode in ended]

        # Estimate advantages
        dones = np.maximum(terminations, truncations)
        ends = terminations if args.bootstrap_truncated else dones
        batch = {"obs": tensor(obs), "masks": tensor(masks), "actions": tensor(actions)}
        with torch.no_grad():
            logits, batch["values"] = agent(batch["obs"])
            _, next_values = agent(tensor(next_obs))
            batch["logprobs"], _ = masked_categorical(logits, batch["masks"], batch["actions"])
        outcome = tensor(rewards), batch["values"], next_values, tensor(ends), tensor(dones)
        batch["advantages"], batch["returns"] = compute_gae(*outcome, args.gamma, args.gae_lambda)
        batch = {name: x.flatten(0, 1) for name, x in batch.items()}  # [T·N, ...]

        # Update policy and value
        history = []
        for index in minibatches(len(batch["obs"]), args.num_minibatches, args.update_epochs, device):
            loss, stats = loss_fn(annealed, agent, {name: x[index] for name, x in batch.items()})
            history.append({name: x.clone() for name, x in stats.items()})  # a CUDA graph writes into the same again
            if args.target_kl is not None and global_mean(stats["losses/approx_kl"]) > 1.5 * args.target_kl:
                break  # [S3] before the step that would go on
            optimizer.zero_grad()
            loss.backward()
            average_gradients(agent)
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)  # [11]
            optimizer.step()

        # Log and save
        metrics: dict[str, Any] = {name: torch.stack([stats[name] for stats in history]).mean() for name in history[0]}
        metrics["charts/minibatches"] = len(history)
        metrics["charts/cut_steps"] = envs.lengths.sum() / rewards.size / run.every
        metrics["losses/explained_variance"] = explained_variance(batch["values"], batch["returns"])
        run.end_iteration(metrics)
    return run.finish()


# ------------------------------------------------------------------------------------------------------------ Plumbing

# --- Flags and start

Policy = Callable[..., np.ndarray]  # observations [..., D] and the info that came with them to actions
RANK = int(os.environ.get("RANK", 0))  # of this process, as torchrun says
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))  # on this machine
WORLD = int(os.environ.get("WORLD_SIZE", 1))  # number of processes
POSITIVE = "num_envs num_steps num_minibatches update_epochs max_grad_norm target_kl eval_episodes".split()
FRACTIONS = "gamma gae_lambda".split()
MAY_CHANGE = set(  # with --resume
    """total_timesteps device cuda checkpoint_every run_dir resume evaluate eval_episodes eval_sample
    capture_video save_model track wandb_project_name wandb_entity""".split()
)


class UsageError(Exception):
    """A wrong flag, environment or file, in one sentence that says what to do; `main` exits with status 2."""


class RunError(Exception):
    """What ends a run midway: weights that are not finite, a full disk; `main` exits with status 1."""


def require(condition: object, sentence: str) -> None:
    if not condition:
        raise UsageError(sentence)


def check_args(args: Args) -> None:
    """Raises UsageError for flags that cannot work."""
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')} {value}"
        if isinstance(value, int | float):
            require(0 <= value < 2**63, f"{flag} must be a number in [0, 2^63)")
            require(value > 0 or name not in POSITIVE, f"{flag} must be greater than 0")
            require(value <= 1 or name not in FRACTIONS, f"{flag} must lie in [0, 1]")
    require(args.num_envs % WORLD == 0, f"--num-envs must be a multiple of the {WORLD} processes")
    size = args.num_envs * args.num_steps // WORLD
    require(size % args.num_minibatches == 0, f"--num-minibatches must divide num-envs x num-steps = {size} a process")


def start(args: Args) -> torch.device:
    """Check the flags, set torch up and join the other processes, if any; returns the device of this one."""
    check_args(args)
    name = args.device if args.cuda else "cpu"
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(f"cuda:{LOCAL_RANK}" if name == "cuda" else name)
        torch.zeros(1, device=device)
    except Exception as error:
        raise UsageError(f"--device {args.device} does not work here: {str(error).splitlines()[0]}") from None
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.set_float32_matmul_precision("high" if args.bf16 else "highest")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if WORLD > 1:
        from torch.distributed.nn import functional  # noqa: F401  # if Adam did it, the group would outlive the exit

        dist.init_process_group()  # gloo for tensors in memory, NCCL for those of CUDA
    return device


def reseed(seed: int, iteration: int) -> int:
    """Restart every generator from these two numbers and the rank; returns a seed for the environments."""
    seed = int(np.random.SeedSequence((seed, iteration, RANK)).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


# --- Environments


def make_env(args: Args, film: bool = False) -> Any:
    """One environment with flat observations. Raises gymnasium's errors, and UsageError."""
    if multiprocessing.parent_process():  # a worker of AsyncVectorEnv, which its parent ends
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    picture: Any = {"render_mode": "rgb_array"} if film else {}  # a keyword that some do not take
    env: Any = gym.make(args.env_id, disable_env_checker=True, **picture)
    require(
        isinstance(env.action_space, gym.spaces.Discrete | gym.spaces.MultiDiscrete),
        f"--env-id {args.env_id} has actions {env.action_space}; this script takes Discrete and MultiDiscrete spaces,"
        " ppo_continuous.py Box spaces of floats",
    )
    env = gym.wrappers.FlattenObservation(env)
    require(
        env.observation_space.shape[0] <= 10_000,
        f"--env-id {args.env_id} observes images, which only Atari's script takes",
    )
    return env


def make_envs(args: Args, num_envs: int) -> Any:
    """Environments stepped together; each restarts in the step that ends its episode."""
    kind = gym.vector.SyncVectorEnv if args.vectorization == "sync" else gym.vector.AsyncVectorEnv
    return kind([lambda: make_env(args)] * num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


def probe_env(args: Args) -> Any:
    """One environment that has been tried for a step; raises UsageError if it cannot be used."""
    require(
        hasattr(gym.vector, "AutoresetMode"), f"gymnasium {gym.__version__} is too old: pip install gymnasium==1.4.0"
    )
    env = make_env(args, args.capture_video)
    space = env.action_space
    try:
        _, info = env.reset()
        first_valid = valid_actions(space, info).argmax(-1)
        obs, reward, over, cut, info = env.step(chosen_actions(space, first_valid))
    except ValueError as error:  # of four values, as in the days of gym
        raise UsageError(
            f"--env-id {args.env_id} is not of Gymnasium 1: {error} ({traceback.extract_tb(error.__traceback__)[-1]})"
        ) from None
    if not over and not cut:
        valid_actions(space, info)
    if args.capture_video:  # what it needs must be there
        import imageio_ffmpeg  # noqa: F401
    require(
        obs.shape == env.observation_space.shape and np.ndim(reward) == 0,
        f"--env-id {args.env_id} observes {obs.shape}, not {env.observation_space}, or has no scalar reward",
    )
    return env


# --- Processes


def global_mean(x: Tensor) -> Tensor:
    """Mean of `x` over the processes; `x` itself when there is one."""
    if WORLD > 1:
        x = x / WORLD
        dist.all_reduce(x)
    return x


def average_gradients(agent: nn.Module) -> None:
    """The mean over the processes [S2], so that K of them step as one would on all their samples."""
    for p in agent.parameters():
        if p.grad is not None:
            p.grad = global_mean(p.grad)


# --- Log and checkpoints


HEALTHY = (  # metric, its healthy range, and what it means to leave it
    ("losses/clipfrac", 0, 0.8, "most samples are clipped; lower --learning-rate or --update-epochs"),
    ("losses/approx_kl", -1, 0.15, "the policy moves too far at once; lower --learning-rate or --update-epochs"),
    ("charts/cut_steps", 0, 0.05, "checkpoints cut long episodes, which no return shows; raise --checkpoint-every"),
    ("losses/explained_variance", 0, 1, "values are worse than a constant; check rewards, lower --learning-rate"),
    ("losses/entropy", 0.01, 1e6, "the policy hardly explores any more; raise --ent-coef"),
)


class Run:
    """Folder, log, progress and checkpoints of a run; only the first process writes.

    `parts` is what a checkpoint holds beside numbers: objects with `state_dict` and `load_state_dict`.
    """

    def __init__(self, args: Args, **parts: Any):
        self.args = args
        self.parts = parts
        self.batch_size = args.num_envs * args.num_steps
        self.last = int(args.total_timesteps) // self.batch_size
        self.every = args.checkpoint_every or self.last
        saved = load_checkpoint(args.resume, **parts) if args.resume else {}
        world = saved.get("world", WORLD)
        require(world == WORLD, f"--resume needs as many processes as before, {world}")
        self.first = saved.get("iteration", 0)
        require(
            self.last > self.first,
            f"--total-timesteps must be at least {(self.first + 1) * self.batch_size:,}:"
            f" {self.first * self.batch_size:,} are done, and one iteration has {self.batch_size:,}",
        )
        self.iteration = self.saved = self.first
        self.scores = deque(saved.get("scores", ()), maxlen=100)
        self.episodes: list[tuple[int, Episode]] = []  # of this iteration, with the step in which each ended
        self.warned = set[str]()
        self.stopping = False
        self.start_time = time.time()
        for sign in signal.SIGINT, signal.SIGTERM:
            signal.signal(sign, self.stop)
        if RANK == 0:
            self.open()
            if self.first and args.anneal_lr:
                self.bar.write(
                    f"learning rate {self.parts['optimizer'].param_groups[0]['lr']:.2g} when it was saved,"
                    f" {args.learning_rate * (1 - self.first / self.last):.2g} now"
                )

    def open(self) -> None:
        """Take a folder that no other process writes to, and start its log; raises UsageError."""
        from torch.utils.tensorboard import SummaryWriter

        args = self.args
        unique = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.strftime('%y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        name = re.sub(r"[^\w.-]+", "-", unique)
        self.folder = Path(args.resume or f"{args.run_dir}/{name}").absolute()
        try:
            if args.track:
                import wandb

                wandb.login()
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(self.folder / "lock", timeout=0)
            self.lock.acquire()
            (self.folder / "args.json").write_text(json.dumps(asdict(args), indent=2))
        except Exception as error:
            raise UsageError(f"{self.folder} cannot be used, by another process perhaps, or --track: {error}") from None
        if args.track:
            wandb.init(
                project=args.wandb_project_name,
                entity=args.wandb_entity,
                id=self.folder.name,
                dir=self.folder,
                resume="allow",
                config=asdict(args),
                sync_tensorboard=True,
            )
        step = self.first * self.batch_size
        self.writer = SummaryWriter(self.folder, purge_step=step + 1)
        self.bar = tqdm(total=self.last * self.batch_size, initial=step, unit="step", disable=None)
        atexit.register(self.close)  # also after an error
        self.bar.write(
            f"run folder: {self.folder}\n{args.env_id}, step {step:,} to {self.last * self.batch_size:,} of"
            f" {int(args.total_timesteps):,} by {self.batch_size:,}, saved every {self.every} iterations and at Ctrl-C"
        )

    def stop(self, *_: Any) -> None:
        """End with this iteration, saved; at the second signal at once."""
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True
        if RANK == 0:
            tqdm.write("interrupted: this iteration is finished and saved first; once more leaves at once")

    def end_iteration(self, metrics: dict[str, Any]) -> None:
        """Log, and save when it is due; raises RunError if not all is finite, KeyboardInterrupt after `stop`."""
        means = global_mean(torch.tensor(list(metrics.values())))
        self.metrics = dict(zip(metrics, means.tolist(), strict=True))
        for key in self.parts.keys() - {"optimizer"}:
            if not all(x.isfinite().all() for x in self.parts[key].state_dict().values()):
                raise RunError(
                    f"{key} is not finite after iteration {self.iteration + 1}, which is not saved; look at what"
                    f" --env-id {self.args.env_id} returns and at --learning-rate"
                )
        stopping = global_mean(torch.tensor(float(self.stopping))) > 0  # whichever process got the signal
        if WORLD > 1:  # the episodes and the statistics of each process become those of all
            everyone = [self.episodes] * WORLD
            dist.all_gather_object(everyone, self.episodes)
            self.episodes = sorted(sum(everyone, []))
            self.parts["obs_stats"].share()
            self.parts["return_stats"].share()
        self.scores.extend(episode.score for _, episode in self.episodes)
        self.iteration += 1
        if RANK == 0:
            self.log()
            if stopping or self.iteration == self.last or self.iteration % self.every == 0:
                self.save("checkpoint.pt", self.parts)
                if self.args.capture_video:
                    film = self.folder / f"videos/step-{self.iteration * self.batch_size}.mp4"
                    play(make_env(self.args, film=True), load_policy(str(self.folder)), self.args.seed, film)
        self.episodes = []
        if stopping and self.iteration < self.last:
            raise KeyboardInterrupt

    def log(self) -> None:
        """Write to TensorBoard, move the progress bar (without a terminal a line), warn once each."""
        step = self.iteration * self.batch_size
        self.metrics["charts/learning_rate"] = self.parts["optimizer"].param_groups[0]["lr"]
        self.metrics["charts/SPS"] = (self.iteration - self.first) * self.batch_size / (time.time() - self.start_time)
        for t, episode in self.episodes:
            at = step - self.batch_size + t * self.args.num_envs + episode.env + 1  # each its own
            self.writer.add_scalar("charts/episodic_return", episode.score, at)
            self.writer.add_scalar("charts/episodic_length", episode.length, at)
        for name, value in self.metrics.items():
            self.writer.add_scalar(name, value, step)

        text = f"return {np.mean(self.scores):.1f}" if self.scores else "no episode has ended"
        self.bar.set_postfix_str(text)
        self.bar.update(self.batch_size)
        if self.bar.disable:  # no terminal
            self.bar.write(f"step {step:,}, {text}, {self.metrics['charts/SPS']:.0f} steps/s")
        for name, low, high, meaning in HEALTHY:
            value = self.metrics[name]
            if (value < low or value > high) and self.iteration > 10 and name not in self.warned:
                self.warned.add(name)
                self.bar.write(f"step {step:,}: {name} is {value:.3g}: {meaning}")

    def save(self, name: str, parts: Any) -> None:
        """Write a file whole or not at all: aside, then renamed. It holds tensors, numbers and strings."""
        state = {key: self.parts[key].state_dict() for key in parts} | {
            "iteration": self.iteration,
            "scores": list(self.scores),
            "world": WORLD,
            "args": asdict(self.args),
        }
        aside = self.folder / f"{name}.tmp"
        try:
            self.writer.flush()  # the log knows all that a checkpoint does
            torch.save(state, aside)
            aside.replace(self.folder / name)
        except Exception as error:
            raise RunError(f"{self.folder / name} could not be written and is as it was ({error})") from error
        finally:
            aside.unlink(missing_ok=True)
        self.saved = self.iteration

    def finish(self) -> dict[str, float]:
        """Close the run; returns the last metrics and the mean return of the last 100 episodes."""
        if RANK == 0:
            if self.args.save_model:
                self.save("model.pt", self.parts.keys() - {"optimizer"})
            self.close()
        return self.metrics | {"episodic_return": float(np.mean(self.scores or np.nan))}

    def close(self) -> None:
        atexit.unregister(self.close)
        self.bar.close()
        self.writer.close()
        self.lock.release()
        left = f"not finished: --resume goes on from step {self.saved * self.batch_size:,}"
        print(f"run folder: {self.folder} ({left if self.iteration < self.last else 'finished'})", flush=True)


def load_checkpoint(folder: str, **parts: Any) -> dict[str, Any]:
    """What the checkpoint of a run folder holds, loaded into `parts`, too. Executes nothing. Raises UsageError."""
    path = Path(folder, "checkpoint.pt")
    try:
        assert not zipfile.ZipFile(path).testzip()  # or a bit has changed
        state = torch.load(path, map_location="cpu", weights_only=True)
        for key, part in parts.items():
            part.load_state_dict(state[key])
        state["args"] = Args(**state["args"])
        return state
    except Exception as error:
        raise UsageError(f"{path} is no whole checkpoint of this script ({type(error).__name__})") from None


# --- Evaluation and films


def load_policy(folder: str, sample: bool = True) -> Policy:
    """The policy saved in a run folder: flat raw observations [..., D], with their `action_mask` if any, to actions.

    Actions are sampled as in training, or the most probable. Raises UsageError if folder or environment cannot be used.
    """
    envs = NormalizedEnvs(load_checkpoint(folder)["args"], 1)
    agent = Agent(envs.obs_dim, envs.space)
    load_checkpoint(folder, agent=agent, obs_stats=envs.obs_stats)

    def policy(raw_obs: np.ndarray, **info: Any) -> np.ndarray:
        obs = envs.obs_stats.normalize(raw_obs) if envs.args.norm_obs else raw_obs.astype(np.float32)
        masks = valid_actions(envs.space, info)
        return chosen_actions(envs.space, act(agent, torch.from_numpy(obs), masks, sample))

    return policy


def play(env: Any, policy: Policy, seed: int, film: Path | None) -> float:
    """Return of one episode, which `film` shows, too; if filming fails, the film ends and the episode goes on."""
    video = None
    if film:
        from imageio.v2 import get_writer

        film.parent.mkdir(exist_ok=True)
        video = get_writer(film, fps=30, macro_block_size=2)
    obs, info = env.reset(seed=seed)
    score = 0.0
    done = False
    while not done:
        obs, reward, termination, truncation, info = env.step(policy(obs, **info))
        score += float(reward)
        done = termination or truncation
        if video:
            try:
                video.append_data(env.render())
            except Exception as error:
                print(f"{film} ends early: {error}", file=sys.stderr)
                video = None  # which closes it, as the return does
    return score


def evaluate(args: Args) -> list[float]:
    """Returns of --eval-episodes episodes by the policy saved in the folder --evaluate, its statistics frozen."""
    start(args)
    env = make_env(args, args.capture_video)
    policy = load_policy(str(args.evaluate), args.eval_sample)
    np.random.seed(args.seed)
    scores = []
    for number in range(args.eval_episodes):
        film = Path(f"{args.evaluate}/videos/evaluation-{time.time_ns()}-{number}.mp4")
        scores.append(play(env, policy, args.seed + number, film if args.capture_video else None))
    print(
        f"{args.env_id}: return {np.mean(scores):.2f} ± {np.std(scores):.2f} over {len(scores)} episodes,"
        f" {'sampled' if args.eval_sample else 'most probable'} actions"
    )
    return scores


# --- Main


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line; with --resume or --evaluate, the flags of that run are the defaults."""
    args = tyro.cli(Args, args=argv)
    folder = args.resume or args.evaluate
    if not folder:
        return args
    saved = load_checkpoint(folder)["args"]
    args = tyro.cli(Args, args=argv, default=saved)
    changed = {name for name, _ in asdict(args).items() - asdict(saved).items()} - MAY_CHANGE
    require(args.evaluate or not changed, f"--resume cannot change the run's own {', '.join(sorted(changed))}")
    return args


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]  # said at once
    try:
        args = parse_args()
        if args.evaluate:
            evaluate(args)
        else:
            train(args)
    except (UsageError, RunError, KeyboardInterrupt, ModuleNotFoundError, gym.error.Error) as error:
        print(
            f"error: {' '.join(str(error).split()) or 'interrupted'}"
            f"{'; --env-id module:Id-v0 imports a module first' if isinstance(error, gym.error.Error) else ''}",
            file=sys.stderr,
        )
        sys.exit(1 if isinstance(error, RunError) else 130 if isinstance(error, KeyboardInterrupt) else 2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for sign in signal.SIGINT, signal.SIGTERM:
            signal.signal(sign, signal.SIG_IGN)  # what is over ends with its own status


if __name__ == "__main__":
    main()
