# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "ale-py==0.12.1",
#     "filelock==4.3.1",
#     "gymnasium==1.4.0",
#     "numpy==2.4.6",
#     "tensorboard==2.21.0",
#     "torch==2.13.0",
#     "tqdm==4.70.1",
#     "tyro==1.0.17",
# ]
# ///
"""Proximal Policy Optimization with the clipped objective (PPO-Clip, arXiv:1707.06347) for Atari games.

    for iteration = 1, 2, ...                                        Algorithm 1    train
        run policy π_old for T steps in each of N games              §5             act, AtariGames.step
        advantage estimates Â_1 ... Â_T                              eq. 11         compute_gae
        for K epochs of minibatches: ascend L^CLIP - c1·L^VF + c2·S  eq. 7, eq. 9   minibatches, ppo_loss
        π_old <- π

    python ppo_atari.py --env-id Breakout                            train (--help lists every flag)
    ... --resume runs/FOLDER                                         go on after an interruption, exactly
    ... --evaluate runs/FOLDER                                       play full games with the saved policy

[n] marks detail n of "The 37 Implementation Details of PPO" (see DETAILS.md); eq. and § are the paper's.
Shapes: T = num_steps, N = num_envs of this process, B = any batch.
"""

from __future__ import annotations

import atexit
import difflib
import json
import os
import random
import re
import signal
import sys
import time
import uuid
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from filelock import FileLock
from torch import Tensor
from torch.distributions import Categorical
from tqdm import tqdm


@dataclass
class Args:
    """PPO-Clip for Atari games. All that a run writes goes into one new folder under --run-dir."""

    env_id: str = "Breakout"  # game; Breakout, ALE/Breakout-v5 and BreakoutNoFrameskip-v4 mean the same
    sticky_actions: float = 0.0  # chance in [0, 1] that a frame repeats the last action; 0.25 is the other protocol
    max_episode_frames: int = 108_000  # emulator frames after which a game is truncated (30 minutes of play)
    total_timesteps: int | float = 10_000_000  # agent steps over all games, 4 frames each; 1e6 works
    learning_rate: float = 2.5e-4  # Adam step size
    anneal_lr: bool = True  # bring the step size linearly to 0
    num_envs: int = 8  # games in parallel (N), over all processes
    num_steps: int = 128  # steps per game and iteration (T)
    num_minibatches: int = 4  # minibatches per epoch; divides num_envs x num_steps
    update_epochs: int = 4  # epochs per iteration (K)
    gamma: float = 0.99  # discount γ in [0, 1]
    gae_lambda: float = 0.95  # GAE λ in [0, 1]
    bootstrap_truncated: bool = True  # value what a time limit cuts off; --no-... counts it as death, as published
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.1  # clip range ε of the ratio
    clip_vloss: bool = True  # clip the value loss with the same ε
    ent_coef: float = 0.01  # entropy coefficient c2
    vf_coef: float = 0.5  # value loss coefficient; c1 of eq. 9 is half of it, as L^VF here is half the square
    max_grad_norm: float = 0.5  # largest global L2 norm of the gradient
    target_kl: float | None = None  # end an iteration's epochs once approximate KL passes 1.5 times this (nats)
    seed: int = 1  # seed of every generator
    device: str = "auto"  # auto (CUDA if there is one), cpu, cuda, cuda:1 or mps
    cuda: bool = True  # --no-cuda means cpu
    torch_deterministic: bool = True  # deterministic cuDNN kernels
    compile: bool = False  # torch.compile, with CUDA graphs on CUDA
    bf16: bool = False  # networks in bfloat16 (autocast), other matrix products in TF32
    exp_name: str = "ppo_atari"  # name of the experiment, part of the folder's name
    run_dir: str = "runs"  # where run folders are made
    checkpoint_every: int = 500  # iterations; 0 only at the end; games restart there
    resume: str | None = None  # run folder to go on with; its flags are the defaults
    evaluate: str | None = None  # run folder whose policy plays, without training
    eval_episodes: int = 10  # full games to play
    eval_sample: bool = True  # sample actions as in training; --no-... takes the most probable one
    capture_video: bool = False  # film a game with each checkpoint, in evaluation those of the first environment
    save_model: bool = False  # write model.pt at the end: the weights without optimiser state
    track: bool = False  # mirror TensorBoard to Weights & Biases
    wandb_project_name: str = "ppo"  # W&B project
    wandb_entity: str | None = None  # W&B team


def make_game(args: Args, **view: Any) -> Any:
    """One game in an emulator of its own, seen as [1, 4, 84, 84] unless `view` says otherwise. Raises UsageError."""
    from ale_py.vector_env import AtariVectorEnv

    if args.capture_video:  # what it needs must be there
        import imageio_ffmpeg  # noqa: F401
    games = {spec.kwargs["game"].replace("_", ""): spec for spec in gym.registry.values() if spec.id.startswith("ALE/")}
    name = re.sub(r"^ale/|(deterministic|noframeskip)?(-v\d+)?$", "", args.env_id.lower()).replace("_", "")
    near = ", ".join(games[match].id[4:-3] for match in difflib.get_close_matches(name, games, 3, 0.5))
    require(name in games, f"--env-id {args.env_id} is no Atari game; nearest: {near or 'none'}")
    require(args.max_episode_frames >= 8, "--max-episode-frames must be at least 8, two steps")
    settings: dict[str, Any] = {
        "noop_max": 30,  # [14]
        "frameskip": 4,  # [15]
        "maxpool": True,
        "grayscale": True,  # [18]
        "img_height": 84,
        "img_width": 84,
        "stack_num": 4,  # [20]
        "use_fire_reset": True,  # [17] at the start of a game
        "reward_clipping": False,  # the learner does it, so that scores are raw
        "repeat_action_probability": args.sticky_actions,
        "max_num_frames_per_episode": args.max_episode_frames,
        "autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP,
    }
    return AtariVectorEnv(games[name].kwargs["game"], 1, num_threads=1, **(settings | view))


class Episode(NamedTuple):
    """A game that has ended: in which environment of all processes, its raw score over all lives, its agent steps."""

    env: int
    score: float
    length: int


class AtariGames:
    """N games of one kind, stepped in parallel by the emulator's own threads [1]; a finished game restarts in the step.

    One game per emulator instance: a single game can be given an extra step (FIRE, restart) while the others wait.
    `obs` uint8 [N, 4, 84, 84] is what to act on next; `next_obs`, what the step led to, differs where a game ended.
    """

    def __init__(self, args: Args, num_envs: int, **view: Any):
        self.games = [make_game(args, **view) for _ in range(num_envs)]
        actions = [action.name for action in self.games[0].ale.get_action_set()]
        self.num_actions = len(actions)
        self.fire = actions.index("FIRE") if "FIRE" in actions else None
        self.obs = np.zeros((num_envs, *self.games[0].single_observation_space.shape), np.uint8)
        self.next_obs = np.zeros_like(self.obs)
        self.lives, self.lengths, self.scores = np.zeros((3, num_envs), int)

    def reset(self, seed: int) -> None:
        """Start N new games that depend on `seed` alone."""
        for i, game in enumerate(self.games):
            frames, info = game.reset(seed=np.array([(seed + i) % 2**30 + 1]))  # 0 would be ignored
            self.obs[i] = frames[0]
            self.lives[i] = info["lives"][0]
            self.lengths[i] = self.scores[i] = 0

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[Episode]]:
        """Play `actions` int [N]; returns raw rewards, terminations and truncations [N], and the games that ended.

        A lost life terminates the episode, but the game goes on [16]. Steps that no agent chose (FIRE, restart) make no
        row of their own; their reward counts in this one.
        """
        rewards, terminations, truncations = np.zeros((3, len(self.games)), np.float32)
        episodes = []
        for i, game in enumerate(self.games):
            game.send(actions[i : i + 1])
        self.lengths += 1
        waiting = deque((i, True) for i in range(len(self.games)))
        while waiting:
            i, chosen = waiting.popleft()
            (frames,), (reward,), (over,), (cut,), info = self.games[i].recv()
            lives = info["lives"][0]
            lost = lives < self.lives[i]
            self.lives[i] = lives
            self.obs[i] = frames
            rewards[i] += reward
            self.scores[i] += reward
            if chosen:
                self.next_obs[i] = frames
                terminations[i] = over or lost
                truncations[i] = cut and not (over or lost)  # both at once count as terminated
            if over or cut:  # whatever is sent to a finished game restarts it
                episodes.append(Episode(RANK * len(self.games) + i, float(self.scores[i]), int(self.lengths[i])))
                self.scores[i] = self.lengths[i] = 0
            if over or cut or (lost and self.fire is not None):
                self.games[i].send(np.array([self.fire or 0]))  # [17]
                waiting.append((i, False))
        return rewards, terminations, truncations, episodes


def layer_init(layer: Any, gain: float = 2**0.5) -> Any:
    """Orthogonal weights, zero biases [2]."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value heads on one shared network [13], the Nature CNN [21]; `bf16` computes it in bfloat16."""

    def __init__(self, num_actions: int, bf16: bool = False):
        super().__init__()
        self.bf16 = bf16
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),  # [B, 32, 20, 20]
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),  # [B, 64, 9, 9]
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)),  # [B, 64, 7, 7]
            nn.Flatten(),  # before the ReLU, so that its gradient is flat, too
            nn.ReLU(),
            layer_init(nn.Linear(64 * 7 * 7, 512)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, num_actions), gain=0.01)
        self.critic = layer_init(nn.Linear(512, 1), gain=1.0)

    def forward(self, obs: Tensor) -> tuple[Categorical, Tensor]:
        """Frames uint8 [B, 4, 84, 84] to the policy, B categoricals, and the values [B]."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            pixels = obs.to(torch.bfloat16 if self.bf16 else torch.float32).div_(255.0)  # [22]
            hidden = self.network(pixels)
            logits, values = self.actor(hidden).float(), self.critic(hidden).float()
        return Categorical(logits=logits, validate_args=False), values.squeeze(-1)


def act(agent: Agent, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sampled actions, their log-probabilities and the values, all [B], for frames uint8 [B, 4, 84, 84]."""
    policy, values = agent(obs)
    actions = policy.sample()
    return actions, policy.log_prob(actions), values


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
    policy, new_values = agent(batch["obs"])
    logratio = policy.log_prob(batch["actions"]) - batch["logprobs"]
    advantages = normalize_advantages(batch["advantages"]) if args.norm_adv else batch["advantages"]
    policy_loss = clipped_surrogate_loss(logratio, advantages, args.clip_coef)
    v_loss = value_loss(new_values, batch["values"], batch["returns"], args.clip_coef if args.clip_vloss else None)
    entropy = policy.entropy().mean()
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
    torch.backends.cudnn.allow_tf32 = args.bf16
    games = AtariGames(args, args.num_envs // WORLD)
    torch.manual_seed(args.seed)  # the same weights in every process
    agent: Any = Agent(games.num_actions, args.bf16).to(device)
    agent.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)  # [3]
    run = Run(args, agent=agent, optimizer=optimizer)
    act_fn = torch.compile(act, mode="reduce-overhead") if args.compile else act  # with CUDA graphs on CUDA
    loss_fn = torch.compile(ppo_loss, mode="reduce-overhead") if args.compile else ppo_loss
    threads = torch.get_num_threads()
    tensor = lambda x: torch.from_numpy(x).to(device)
    shape = (args.num_steps, args.num_envs // WORLD)  # [T, N]; frames lie in memory as channels_last, which is faster
    obs = torch.zeros((*shape, 84, 84, 4), dtype=torch.uint8, device=device).permute(0, 1, 4, 2, 3)
    actions = torch.zeros(shape, dtype=torch.long, device=device)
    logprobs, values, final_values = torch.zeros((3, *shape), device=device)
    rewards, terminations, truncations = np.zeros((3, *shape), np.float32)

    for iteration in range(run.first, run.last):
        if iteration == run.first or iteration % run.every == 0:  # after each checkpoint: so resuming is exact
            games.reset(reseed(args.seed, iteration))
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / run.last)  # [4]

        # Play a segment of fixed length; the next one goes on where this one ends [1]
        torch.set_num_threads(max(1, threads // 2))  # the emulators need cores, too
        with torch.inference_mode():
            for t in range(args.num_steps):
                obs[t] = torch.from_numpy(games.obs)
                actions[t], logprobs[t], values[t] = act_fn(agent, obs[t])
                rewards[t], terminations[t], truncations[t], ended = games.step(actions[t].cpu().numpy())
                run.episodes += [(t, episode) for episode in ended]
                if truncations[t].any():
                    _, final_values[t] = agent(tensor(games.next_obs))
            _, last_value = agent(tensor(games.obs))
        torch.set_num_threads(threads)

        # Estimate advantages
        dones = np.maximum(terminations, truncations)
        ends = terminations if args.bootstrap_truncated else dones
        next_values = torch.cat([values[1:], last_value[None]])  # the row below is the successor, but at an episode end
        next_values = torch.where(tensor(truncations) > 0, final_values, next_values)
        outcome = tensor(np.sign(rewards)), values, next_values, tensor(ends), tensor(dones)  # [19]
        advantages, returns = compute_gae(*outcome, args.gamma, args.gae_lambda)
        batch = {"obs": obs, "actions": actions, "logprobs": logprobs, "values": values}
        batch |= {"advantages": advantages, "returns": returns}
        batch = {name: x.flatten(0, 1) for name, x in batch.items()}  # [T·N, ...]

        # Update policy and value
        history = []
        for index in minibatches(len(batch["obs"]), args.num_minibatches, args.update_epochs, device):
            loss, stats = loss_fn(args, agent, {name: x[index] for name, x in batch.items()})
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
        metrics["losses/explained_variance"] = explained_variance(batch["values"], batch["returns"])
        metrics["charts/minibatches"] = len(history)
        metrics["charts/cut_steps"] = games.lengths.sum() / rewards.size / run.every
        run.end_iteration(metrics)
    return run.finish()


# ------------------------------------------------------------------------------------------------------------ Plumbing

# --- Flags and start

Policy = Callable[[np.ndarray], np.ndarray]  # frames uint8 [B, 4, 84, 84] to actions int [B]
RANK = int(os.environ.get("RANK", 0))  # of this process, as torchrun says
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))  # on this machine
WORLD = int(os.environ.get("WORLD_SIZE", 1))  # number of processes
POSITIVE = (
    "max_episode_frames num_envs num_steps num_minibatches update_epochs max_grad_norm target_kl eval_episodes".split()
)
FRACTIONS = "gamma gae_lambda sticky_actions".split()
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
    ("losses/entropy", 0.01, 9, "the policy hardly explores any more; raise --ent-coef"),
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
        if WORLD > 1:  # the episodes of each process become those of all
            everyone = [self.episodes] * WORLD
            dist.all_gather_object(everyone, self.episodes)
            self.episodes = sorted(sum(everyone, []))
        self.scores.extend(episode.score for _, episode in self.episodes)
        self.iteration += 1
        if RANK == 0:
            self.log()
            if stopping or self.iteration == self.last or self.iteration % self.every == 0:
                self.save("checkpoint.pt", self.parts)
                if self.args.capture_video:
                    film = self.folder / f"videos/step-{self.iteration * self.batch_size}.mp4"
                    play(self.args, load_policy(str(self.folder)), 1, film)
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
    """The policy saved in a run folder: frames uint8 [B, 4, 84, 84] to actions int [B].

    Actions are sampled as in training, or the most probable ones. Raises UsageError if the folder cannot be used.
    """
    saved = load_checkpoint(folder)
    agent = Agent(len(saved["agent"]["actor.bias"]), saved["args"].bf16)
    agent.load_state_dict(saved["agent"])

    @torch.inference_mode()
    def policy(obs: np.ndarray) -> np.ndarray:
        distribution, _ = agent(torch.from_numpy(obs))
        actions = distribution.sample() if sample else distribution.logits.argmax(-1)
        return actions.numpy()

    return policy


def play(args: Args, policy: Policy, episodes: int, film: Path | None = None) -> list[float]:
    """Raw scores of full games, each environment playing a fixed share of them, so that short ones do not crowd in.

    `film` shows the first environment, in colour, by a second emulator that is given the same seed and actions.
    If filming fails, the film ends and the games go on.
    """
    n = min(args.num_envs, episodes)
    games = AtariGames(args, n)
    games.reset(args.seed)
    screen: Any = None
    if film:
        from imageio.v2 import get_writer

        screen = AtariGames(args, 1, grayscale=False, img_height=210, img_width=160, stack_num=1)
        screen.reset(args.seed)
        film.parent.mkdir(exist_ok=True)
        video = get_writer(film, fps=15, macro_block_size=2)
    share = [len(range(i, episodes, n)) for i in range(n)]  # games left to each environment
    scores = []
    while any(share):
        actions = policy(games.obs)
        *_, ended = games.step(actions)
        if screen and share[0]:
            try:
                screen.step(actions)
                video.append_data(screen.obs.reshape(210, 160, 3))
            except Exception as error:
                print(f"{film} ends early: {error}", file=sys.stderr)
                screen = None
        for episode in ended:
            if share[episode.env]:
                scores.append(episode.score)
                share[episode.env] -= 1
    return scores


def evaluate(args: Args) -> list[float]:
    """Raw scores of --eval-episodes full games by the policy saved in the folder --evaluate."""
    start(args)
    torch.manual_seed(args.seed)
    film = Path(str(args.evaluate), "videos", f"evaluation-{time.time_ns()}.mp4") if args.capture_video else None
    scores = play(args, load_policy(str(args.evaluate), args.eval_sample), args.eval_episodes, film)
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
        print(f"error: {' '.join(str(error).split()) or 'interrupted'}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RunError) else 130 if isinstance(error, KeyboardInterrupt) else 2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for sign in signal.SIGINT, signal.SIGTERM:
            signal.signal(sign, signal.SIG_IGN)  # what is over ends with its own status


if __name__ == "__main__":
    main()
