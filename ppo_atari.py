# /// script
# requires-python = ">=3.11"
# dependencies = ["ale-py==0.12.1", "gymnasium==1.4.0", "numpy==2.4.6", "tensorboard==2.21.0", "torch==2.13.0", "tqdm==4.70.1", "tyro==1.0.17"]
# ///
"""Proximal Policy Optimization with the clipped objective (PPO-Clip, arXiv:1707.06347) for Atari games.

    for iteration = 1, 2, ...                                        Algorithm 1    train
        run policy π_old for T steps in each of N games              §5             act, AtariGames.step
        advantage estimates Â_1 ... Â_T                              eq. 11         compute_gae
        for K epochs of minibatches: ascend L^CLIP - c1·L^VF + c2·S  eq. 7, eq. 9   minibatches, ppo_loss
        π_old <- π

    python ppo_atari.py --env-id Breakout                            train (--help lists every flag)
    python ppo_atari.py --resume runs/FOLDER                         go on after an interruption, exactly
    python ppo_atari.py --evaluate runs/FOLDER                       play full games with the saved policy

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
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
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
    vf_coef: float = 0.5  # value loss coefficient c1
    max_grad_norm: float = 0.5  # largest global L2 norm of the gradient
    target_kl: float | None = None  # end an iteration's epochs once approximate KL passes 1.5 times this (nats)
    seed: int = 1  # seed of every generator
    device: str = "auto"  # auto (CUDA if there is one), cpu, cuda, cuda:1 or mps
    cuda: bool = True  # --no-cuda means cpu
    torch_deterministic: bool = True  # deterministic cuDNN kernels; --no-... lets cuDNN choose the fastest
    compile: bool = False  # torch.compile, with CUDA graphs on CUDA
    bf16: bool = False  # networks in bfloat16 (autocast), other matrix products in TF32
    exp_name: str = "ppo_atari"  # name of the experiment, part of the folder's name
    run_dir: str = "runs"  # where run folders are made
    checkpoint_every: int | None = None  # iterations; 0 never, default 51,200 steps per env; episodes restart there
    resume: str | None = None  # run folder to go on with; its flags are the defaults
    evaluate: str | None = None  # run folder whose policy plays, without training
    eval_episodes: int = 10  # full games to play
    eval_sample: bool = True  # sample actions as in training; --no-... takes the most probable one
    capture_video: bool = False  # film games 0, 1, 8, 27, ... of the first environment, in evaluation all
    save_model: bool = False  # write model.pt at the end: the weights without optimiser state
    track: bool = False  # mirror TensorBoard to Weights & Biases
    wandb_project_name: str = "ppo"  # W&B project
    wandb_entity: str | None = None  # W&B team


class AtariGames:
    """N games of one kind, stepped in parallel by the emulator's own threads [1]; a finished game restarts in the step.

    One game per emulator instance: a single game can be given an extra step (FIRE, restart) while the others wait. `obs`
    uint8 [N, 4, 84, 84] is what to act on next; `final_obs` is what the step led to, another one where an episode ended.
    """

    def __init__(self, args: Args, num_envs: int, pin: bool = False):
        self.games: list[Any] = [make_game(args) for _ in range(num_envs)]
        actions = [action.name for action in self.games[0].ale.get_action_set()]
        self.num_actions, self.fire = len(actions), actions.index("FIRE") if "FIRE" in actions else None
        self.obs = torch.zeros((num_envs, 4, 84, 84), dtype=torch.uint8, pin_memory=pin).numpy()
        self.final_obs = np.zeros_like(self.obs)
        self.lives, self.lengths, self.scores = np.zeros((3, num_envs), int)

    def reset(self, seed: int) -> None:
        """Start N new games that depend on `seed` alone."""
        seeds = np.random.SeedSequence(seed).generate_state(len(self.games)) % (2**31 - 2) + 1  # 0 would be ignored
        for i, game in enumerate(self.games):
            frames, info = game.reset(seed=seeds[i : i + 1])
            self.obs[i], self.lives[i], self.lengths[i], self.scores[i] = frames[0], info["lives"][0], 0, 0

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, list[tuple[int, float, int]]]:
        """Play `actions` int [N]; returns [3, N], raw rewards, terminations and truncations, and the finished games.

        A finished game is (index, raw score over all lives, agent steps). A lost life terminates the episode, but the
        game goes on [16]. Steps that no agent chose (FIRE, restart) make no row; their reward counts in this one.
        """
        rows, finished = np.zeros((3, len(self.games)), np.float32), []
        for i, game in enumerate(self.games):
            game.send(actions[i : i + 1])
        self.lengths += 1
        waiting = deque((i, True) for i in range(len(self.games)))
        while waiting:
            i, chosen = waiting.popleft()
            (frames,), (reward,), (over,), (cut,), info = self.games[i].recv()
            lost, self.lives[i] = info["lives"][0] < self.lives[i], info["lives"][0]
            self.obs[i] = frames
            rows[0, i] += reward
            self.scores[i] += reward
            if chosen:
                self.final_obs[i] = frames
                rows[1:, i] = [over or lost, cut and not (over or lost)]  # both at once count as terminated
            if over or cut:  # whatever is sent to a finished game restarts it
                finished.append((i, float(self.scores[i]), int(self.lengths[i])))
                self.scores[i] = self.lengths[i] = 0
            if over or cut or (lost and self.fire is not None):
                self.games[i].send(np.array([self.fire or 0]))  # [17]
                waiting.append((i, False))
        return rows, finished


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
            layer_init(nn.Conv2d(4, 32, 8, stride=4)), nn.ReLU(),  # [B, 32, 20, 20]
            layer_init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(),  # [B, 64, 9, 9]
            layer_init(nn.Conv2d(64, 64, 3, stride=1)), nn.Flatten(), nn.ReLU(),  # [B, 64 x 7 x 7]; so its gradient is flat, too
            layer_init(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(),
        )  # fmt: skip
        self.actor = layer_init(nn.Linear(512, num_actions), gain=0.01)
        self.critic = layer_init(nn.Linear(512, 1), gain=1.0)

    def forward(self, obs: Tensor) -> tuple[Categorical, Tensor]:
        """Frames uint8 [B, 4, 84, 84] to the policy, B categoricals, and the values [B]."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            hidden = self.network(obs.to(torch.bfloat16 if self.bf16 else torch.float32).div_(255.0))  # [22]
            logits, values = self.actor(hidden).float(), self.critic(hidden).float()
        return Categorical(logits=logits, validate_args=False), values.squeeze(-1)


def act(agent: Agent, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sampled actions, their log-probabilities and the values, all [B], for frames uint8 [B, 4, 84, 84]."""
    policy, values = agent(obs)
    actions = policy.sample()
    return actions, policy.log_prob(actions), values


def compute_gae(rewards: Tensor, values: Tensor, next_values: Tensor, terminations: Tensor, dones: Tensor, gamma: float,
                gae_lambda: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Generalised advantage estimation [5] (arXiv:1506.02438, eq. 16) and the TD(λ) targets of the value.

    All are [T, N]. `next_values[t]` is V of the state that step t led to: at an episode end the final observation, not
    the first of the next episode. A time limit (done, not terminated) still bootstraps, as the task would have gone on.
    """
    deltas = rewards + gamma * next_values * (1 - terminations) - values
    decays = gamma * gae_lambda * (1 - dones)  # 0 cuts the sum at every episode end
    advantages, running = torch.empty_like(deltas), torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = running = deltas[t] + decays[t] * running
    return advantages, advantages + values


def minibatches(size: int, count: int, epochs: int, device: torch.device) -> Iterator[Tensor]:
    """Indices [size / count], in a new order each epoch; an epoch uses every sample exactly once [6]."""
    for _ in range(epochs):
        yield from torch.randperm(size, device=device).split(size // count)


def normalize_advantages(advantages: Tensor) -> Tensor:
    """Zero mean, unit variance over the minibatch [7] (its shares in all processes); [B] to [B]."""
    centred = advantages - global_mean(advantages.mean())
    return centred / (global_mean(centred.square().mean()).sqrt() + 1e-8)


def clipped_surrogate_loss(logratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """-L^CLIP [8] (eq. 7) of logratio = log π(a|s) - log π_old(a|s) and advantages, both [B]; a scalar."""
    ratio = logratio.exp()  # the min drops the gradient only beyond ε in the helpful direction, never on the way back
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages).mean()


def value_loss(new_values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float | None) -> Tensor:
    """L^VF [9]: half the mean squared error, or of the worse of the value and its clipped move; all [B], a scalar."""
    errors = (new_values - returns).square()
    if clip_coef is not None:
        clipped = old_values + (new_values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (clipped - returns).square())
    return 0.5 * errors.mean()


def ppo_loss(args: Args, agent: nn.Module, obs: Tensor, actions: Tensor, logprobs: Tensor, advantages: Tensor, returns: Tensor,
             values: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-(L^CLIP - c1·L^VF + c2·S) (eq. 9) on a minibatch [B], and its debug variables [12] as STATS names them."""
    policy, new_values = agent(obs)
    logratio = policy.log_prob(actions) - logprobs
    policy_loss = clipped_surrogate_loss(logratio, advantages, args.clip_coef)
    v_loss = value_loss(new_values, values, returns, args.clip_coef if args.clip_vloss else None)
    entropy = policy.entropy().mean()
    loss = policy_loss + args.vf_coef * v_loss - args.ent_coef * entropy  # [10]
    with torch.no_grad():  # KL(π_old‖π) is estimated by the means of -log r and of (r - 1) - log r, which is never < 0
        clipfrac = (logratio.expm1().abs() > args.clip_coef).float().mean()
        kls = -logratio.mean(), (logratio.expm1() - logratio).mean()
        return loss, torch.stack([v_loss, policy_loss, entropy, *kls, clipfrac])


def train(args: Args) -> dict[str, float]:
    """Run Algorithm 1; returns the last metrics. Raises UsageError before anything is written, and FloatingPointError."""
    device = start(args)
    games = AtariGames(args, args.num_envs // WORLD, pin=device.type == "cuda")
    torch.manual_seed(args.seed)  # the same weights in every process
    agent = Agent(games.num_actions, args.bf16).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)  # [3]
    run = Run(args, device, agent=agent, optimizer=optimizer)
    if not RANK:
        print(f"4 frames a step, sticky actions {args.sticky_actions:g}, games of {args.max_episode_frames} frames")
    act_fn, loss_fn, threads = run.compile(act), run.compile(ppo_loss), torch.get_num_threads()
    shape = (args.num_steps, args.num_envs // WORLD)  # [T, N]; frames lie in memory as channels_last, which is faster
    obs = torch.zeros((*shape, 84, 84, 4), dtype=torch.uint8, device=device).permute(0, 1, 4, 2, 3)
    actions = torch.zeros(shape, dtype=torch.long, device=device)
    logprobs, values, final_values = torch.zeros((3, *shape), device=device)
    rows = np.zeros((args.num_steps, 3, shape[1]), np.float32)  # rewards, terminations, truncations

    for iteration in range(run.first, run.last):
        if run.starts_afresh(iteration):
            games.reset(reseed(args.seed, iteration))
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - args.anneal_lr * iteration / run.last)  # [4]
        torch.set_num_threads(max(1, threads // 2))  # the emulators need cores, too
        with torch.inference_mode():
            for t in range(args.num_steps):  # a segment of fixed length; the next one goes on where this one ends [1]
                obs[t].copy_(torch.from_numpy(games.obs), non_blocking=True)
                actions[t], logprobs[t], values[t] = act_fn(agent, obs[t])
                rows[t], finished = games.step(actions[t].cpu().numpy())
                if rows[t, 2].any():
                    final_values[t] = agent(torch.from_numpy(games.final_obs).to(device))[1]
                run.episodes(t, finished, lambda: games.obs[0, -1])
            last_value = agent(torch.from_numpy(games.obs).to(device))[1]
        torch.set_num_threads(threads)
        rewards, terminations, truncations = torch.from_numpy(rows).to(device).unbind(1)
        dones = terminations + truncations
        next_values = torch.cat([values[1:], last_value[None]])  # the row below is the successor, but at an episode end
        next_values = torch.where(truncations > 0, final_values, next_values)
        ends = terminations if args.bootstrap_truncated else dones
        rewards = rewards.sign()  # [19]
        advantages, returns = compute_gae(rewards, values, next_values, ends, dones, args.gamma, args.gae_lambda)
        batch = [x.flatten(0, 1) for x in (obs, actions, logprobs, advantages, returns, values)]  # [T·N, ...]
        history, updates = [], 0
        for index in minibatches(len(batch[0]), args.num_minibatches, args.update_epochs, device):
            sample = [x[index] for x in batch]
            sample[3] = normalize_advantages(sample[3]) if args.norm_adv else sample[3]
            loss, stats = loss_fn(args, agent, *sample)
            history.append(stats.clone())
            if args.target_kl is not None and global_mean(history[-1][4]) > 1.5 * args.target_kl:
                break  # [S3] before the step that would go on
            optimizer.zero_grad()
            loss.backward()
            average_gradients(agent)
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)  # [11]
            optimizer.step()
            updates += 1
        metrics = dict(zip(STATS, torch.stack(history).mean(0), strict=True))
        metrics["losses/explained_variance"] = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
        metrics["charts/updates"] = updates
        run.end_iteration(metrics)
    return run.finish()


# ------------------------------------------------------------------------------------------------------------ Plumbing

RANK, WORLD, LOCAL_RANK = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
STATS = [f"losses/{k}" for k in "value_loss policy_loss entropy old_approx_kl approx_kl clipfrac".split()]
POSITIVE = "num_envs num_steps num_minibatches update_epochs max_grad_norm target_kl eval_episodes".split()
FRACTIONS = "gamma gae_lambda sticky_actions".split()
PACKAGES = {"env_id": "ale_py", "capture_video": "moviepy", "track": "wandb"}  # what a flag needs
MAY_CHANGE = """total_timesteps device cuda checkpoint_every resume evaluate eval_episodes eval_sample capture_video
    save_model track wandb_project_name wandb_entity""".split()  # with --resume; any other would make it another run


class UsageError(Exception):
    """A wrong flag, environment or file, in one sentence that says what to do; `main` exits with status 2."""


def require(condition: object, sentence: str) -> None:
    if not condition:
        raise UsageError(sentence)


def check_args(args: Args) -> None:
    """Raises UsageError for flags that cannot work."""
    batch_size = args.num_envs * args.num_steps
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')} {value}"
        if isinstance(value, int | float):
            require(0 <= value < float("inf"), f"{flag} must be a number that is finite and not negative")
            require(value > 0 or name not in POSITIVE, f"{flag} must be greater than 0")
            require(value <= 1 or name not in FRACTIONS, f"{flag} must lie in [0, 1]")
        package = PACKAGES.get(name) if value else None
        require(not package or find_spec(package), f"{flag} needs a package: pip install {package}")
    require(args.seed < 2**63, f"--seed {args.seed} must be below 2^63")
    if args.evaluate:
        return require(WORLD == 1, "--evaluate plays in one process")
    require(args.num_envs % WORLD == 0, f"--num-envs {args.num_envs} must be a multiple of the {WORLD} processes")
    require(batch_size // WORLD % args.num_minibatches == 0, f"--num-minibatches {args.num_minibatches} must divide"
            f" num-envs x num-steps = {batch_size // WORLD} in each process")  # fmt: skip
    require(args.total_timesteps >= batch_size, f"--total-timesteps {args.total_timesteps} must be at least"
            f" num-envs x num-steps = {batch_size}, one iteration")  # fmt: skip


def start(args: Args) -> torch.device:
    """Check the flags, set torch up and join the other processes, if any; returns the device of this one."""
    import ctypes

    check_args(args)
    name = "cpu" if args.device == "auto" and not (args.cuda and torch.cuda.is_available()) else args.device
    try:
        device = torch.device(f"cuda:{LOCAL_RANK}" if name in ("auto", "cuda") else name)
        if device.type not in ("cpu", "cuda", "mps") or (device.type == "cuda" and not args.cuda):
            raise RuntimeError("it must be auto, cpu, cuda, cuda:N or mps, and not CUDA together with --no-cuda")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {args.device} does not work here: {str(error).splitlines()[0]}") from None
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.benchmark = not args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = args.bf16
    torch.set_float32_matmul_precision("high" if args.bf16 else "highest")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    libc: Any = ctypes.CDLL(None) if os.name == "posix" else None
    if hasattr(libc, "mallopt"):  # glibc hands freed memory back, though the next minibatch needs as much: keep it
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, as large as it may be
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
    if WORLD > 1 and not dist.is_initialized():
        # Imported later, by Adam, its default arguments would keep the group and its threads alive into the exit.
        from torch.distributed.nn import functional  # noqa: F401

        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def make_game(args: Args, **view: Any) -> Any:
    """One game in an emulator of its own, seen as [1, 4, 84, 84] unless `view` says otherwise."""
    import gymnasium

    old = f"gymnasium {gymnasium.__version__} is too old: pip install gymnasium==1.4.0"
    require(hasattr(gymnasium.vector, "AutoresetMode"), old)
    from ale_py.vector_env import AtariVectorEnv
    from gymnasium import registry
    from gymnasium.vector import AutoresetMode

    games = {spec.kwargs["game"].replace("_", ""): spec for spec in registry.values() if spec.id.startswith("ALE/")}
    name = re.sub(r"^ale/|(deterministic|noframeskip)?(-v\d+)?$", "", args.env_id.lower()).replace("_", "")
    near = ", ".join(games[match].id[4:-3] for match in difflib.get_close_matches(name, games, 3, 0.5))
    require(name in games, f"--env-id {args.env_id} is no Atari game; nearest: {near or 'none'}")
    require(args.max_episode_frames >= 8, f"--max-episode-frames {args.max_episode_frames} must be at least 8")
    return AtariVectorEnv(
        games[name].kwargs["game"], 1, num_threads=1, autoreset_mode=AutoresetMode.NEXT_STEP, reward_clipping=False,
        repeat_action_probability=args.sticky_actions, max_num_frames_per_episode=args.max_episode_frames,
        noop_max=30, use_fire_reset=True, frameskip=4, maxpool=True,  # [14] [15]
        **({"grayscale": True, "img_height": 84, "img_width": 84, "stack_num": 4} | view),  # [18] [20]
    )  # fmt: skip


def reseed(seed: int, iteration: int) -> int:
    """Restart every generator from these two numbers and the rank; returns a seed for the environments."""
    words = np.random.SeedSequence((seed, iteration, RANK)).generate_state(4).tolist()
    random.seed(words[0])
    np.random.seed(words[1])
    torch.manual_seed(words[2])
    return words[3]


def global_mean(x: Tensor) -> Tensor:
    """Mean of `x` over the processes; `x` itself when there is one."""
    if WORLD > 1:
        dist.all_reduce(x := x / WORLD)
    return x


def average_gradients(agent: nn.Module) -> None:
    """The mean over the processes [S2], so that K of them step as one would on all their samples."""
    if WORLD > 1:
        grads = [p.grad for p in agent.parameters() if p.grad is not None]
        means = global_mean(torch.cat([grad.reshape(-1) for grad in grads])).split([grad.numel() for grad in grads])
        for grad, mean in zip(grads, means, strict=True):
            grad.copy_(mean.view(grad.shape))


def health(metrics: dict[str, float], flat: bool, max_kl: float) -> Iterator[tuple[str, str]]:
    """(metric, sentence) for each one outside its healthy range: what it means and what to do."""
    gaussian = "charts/policy_std" in metrics  # its entropy may well be negative
    for name, low, high, meaning in (
        ("losses/clipfrac", 0, 0.8, "most gradients are switched off; lower --learning-rate or --update-epochs"),
        ("losses/clipfrac", 1e-3 * flat, 1, "the policy hardly moves and the return is flat; raise --learning-rate"),
        ("losses/approx_kl", -1, max_kl, "the policy moves too far at once; lower --learning-rate or --update-epochs"),
        ("losses/entropy", -1e9 if gaussian else 0.01, 1e9, "the policy hardly explores any more; raise --ent-coef"),
        ("losses/explained_variance", 0, 1, "values are worse than a constant; check rewards, lower --learning-rate"),
        ("charts/policy_std", 0.01, 10, "exploration noise has vanished or runs away; check --ent-coef"),
        ("charts/clipped_actions", 0, 0.5, "most actions lie outside the bounds; lower --ent-coef or rescale them"),
    ):
        value = metrics.get(name, float("nan"))
        if value < low or value > high:
            yield name, f"{name} is {value:.3g}: {meaning}"


class Run:
    """Folder, log, progress and checkpoints of a run; only the first process writes.

    `parts` is what a checkpoint holds beside numbers: objects with `state_dict` and `load_state_dict`.
    """

    def __init__(self, args: Args, device: torch.device, **parts: Any):
        self.args, self.device, self.parts, self.start_time, self.line_time = args, device, parts, time.time(), 0.0
        self.iteration, scores, world = restore(args.resume, device, **parts) if args.resume else (0, [], WORLD)
        require(world == WORLD, f"--resume {args.resume} needs as many processes as before, {world}, not {WORLD}")
        self.batch_size = args.num_envs * args.num_steps
        self.first, self.last = self.iteration, int(args.total_timesteps) // self.batch_size
        self.every = -(-51_200 // args.num_steps) if args.checkpoint_every is None else args.checkpoint_every
        self.scores, self.metrics, self.said = deque[float](scores, maxlen=100), dict[str, float](), set[str]()
        self.finished: list[tuple[int, float, int]] = []
        self.ended, self.film = False, None  # type: bool, Film | None
        if RANK:
            return
        from torch.utils.tensorboard import SummaryWriter

        if args.resume:
            self.folder = Path(args.resume).absolute()
        else:  # characters that no file system minds; unique also among runs that start in the same second
            stamp = time.strftime("%y%m%d-%H%M%S")
            name = re.sub(r"[^\w.-]+", "-", f"{args.env_id}__{args.exp_name}__{args.seed}__{stamp}_")
            try:
                os.makedirs(args.run_dir, exist_ok=True)
                self.folder = Path(tempfile.mkdtemp(prefix=name, dir=args.run_dir)).absolute()
            except OSError as error:
                raise UsageError(f"--run-dir {args.run_dir} cannot hold run folders: {error}") from None
        (self.folder / "args.tmp").write_text(json.dumps(asdict(replace(args, resume=None)), indent=2))
        (self.folder / "args.tmp").replace(self.folder / "args.json")
        if args.track:
            import wandb

            wandb.init(project=args.wandb_project_name, entity=args.wandb_entity, id=self.folder.name, resume="allow",
                       config=asdict(args), sync_tensorboard=True)  # fmt: skip
        step, steps = self.iteration * self.batch_size, self.last * self.batch_size
        self.writer = SummaryWriter(str(self.folder), purge_step=step + 1, flush_secs=30)
        self.writer.add_text("args", "".join(f"    {k} = {v}\n" for k, v in vars(args).items()))
        self.bar = tqdm(total=steps, initial=step, unit="step", disable=not sys.stderr.isatty())
        atexit.register(self.close)  # also after an interrupt or an error
        if self.first >= self.last:
            self.bar.write("this run is finished, nothing is left to train; a larger --total-timesteps goes on with it")
        if args.capture_video:
            self.film = Film(self.folder, f"from-step-{step}", False, 15)
        self.folder.chmod(0o755)
        self.bar.write(f"run folder: {self.folder}\n{args.env_id} on {device}, step {step:,} to {steps:,} of"
                       f" {int(args.total_timesteps):,} by {self.batch_size:,}")  # fmt: skip

    def starts_afresh(self, iteration: int) -> bool:
        """Generators and environments restart at the start and after each checkpoint, which makes resuming exact."""
        afresh = iteration == self.first or iteration % (self.every or self.last) == 0
        if afresh and self.film and self.film.video:
            self.film.end()
        if afresh and iteration > self.first and not (self.ended or RANK or "restart" in self.said):
            self.said.add("restart")
            self.bar.write("no episode ended between two checkpoints, where all start anew; raise --checkpoint-every")
        self.ended = self.ended and not afresh
        return afresh

    def compile(self, function: Any) -> Any:
        mode = "reduce-overhead" if self.device.type == "cuda" else "default"
        return torch.compile(function, mode=mode) if self.args.compile else function

    def episodes(self, t: int, finished: list[tuple[int, float, int]], frame: Callable[[], np.ndarray]) -> None:
        """Note the episodes (environment, return, length) that ended in step t, each under a step number of its own."""
        if self.film:
            self.film.add(frame, any(i == 0 for i, _, _ in finished))
        self.ended |= bool(finished)
        before = self.iteration * self.batch_size + (t * WORLD + RANK) * self.args.num_envs // WORLD
        self.finished += [(before + i + 1, score, length) for i, score, length in finished]

    def end_iteration(self, metrics: dict[str, Any]) -> None:
        """Log, and write a checkpoint when it is due; raises FloatingPointError instead if a loss is not finite."""
        stacked = torch.stack([torch.as_tensor(x, dtype=torch.float32, device=self.device) for x in metrics.values()])
        self.metrics = dict(zip(metrics, global_mean(stacked).tolist(), strict=True))
        if not np.isfinite(self.metrics["losses/explained_variance"]):
            self.metrics["losses/explained_variance"] = float("nan")  # it does not exist for constant returns
        bad = [f"{k} is {v}" for k, v in self.metrics.items() if not np.isfinite(v) and "explained" not in k]
        if bad:
            raise FloatingPointError(f"{bad[0]} in iteration {self.iteration + 1}; nothing of it was saved")
        for part in self.parts.values():
            if hasattr(part, "share"):  # statistics that each process has gathered on its own
                part.share()
        everyone = [self.finished] * WORLD
        if WORLD > 1:
            dist.all_gather_object(everyone, self.finished)
        finished, self.finished, self.iteration = sorted(sum(everyone, [])), [], self.iteration + 1
        self.scores.extend(score for _, score, _ in finished)
        step, trained = self.iteration * self.batch_size, (self.iteration - self.first) * self.batch_size
        self.metrics["charts/learning_rate"] = self.parts["optimizer"].param_groups[0]["lr"]
        self.metrics["charts/SPS"] = trained / (time.time() - self.start_time)
        if not RANK:
            for at, score, length in finished:
                self.writer.add_scalar("charts/episodic_return", score, at)
                self.writer.add_scalar("charts/episodic_length", length, at)
            for name, value in self.metrics.items():
                self.writer.add_scalar(name, value, step)
            self.show(step)
        if self.every and (self.iteration % self.every == 0 or self.iteration == self.last):
            self.save("checkpoint.pt", **self.parts)

    def show(self, step: int) -> None:
        """Move the progress bar (without a terminal: a line every ten seconds); give each health warning once."""
        scores = list(self.scores)
        text = f"return {np.mean(scores):.1f}" if scores else "no episode has ended"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(self.batch_size)
        if self.bar.disable and (time.time() > self.line_time + 10 or self.iteration == self.last):
            self.line_time = time.time()
            print(f"step {step:,}, {text}, {self.metrics['charts/SPS']:.0f} steps/s", flush=True)
        flat = len(scores) == 100 and np.mean(scores[50:]) <= np.mean(scores[:50])
        for name, warning in health(self.metrics, bool(flat), 1.5 * (self.args.target_kl or 0.1)):
            if self.iteration > 10 and name not in self.said:
                self.said.add(name)
                self.bar.write(f"step {step:,}: {warning}")

    def save(self, name: str, **parts: Any) -> None:
        """Write a file whole or not at all: aside, to the disk, then renamed. It holds tensors, numbers and strings."""
        weights = torch.cat([p.detach().reshape(-1) for p in self.parts["agent"].parameters()])
        if not weights.isfinite().all():
            raise FloatingPointError(f"weights are not finite after iteration {self.iteration}; {name} was not written")
        if WORLD > 1:
            low, high = weights.clone(), weights.clone()
            dist.all_reduce(low, dist.ReduceOp.MIN)
            dist.all_reduce(high, dist.ReduceOp.MAX)
            if not torch.equal(low, high):
                raise FloatingPointError("the processes hold different weights; nothing was saved")
        if RANK:
            return
        state = {key: part.state_dict() for key, part in parts.items()}
        aside = self.folder / f"{name}.tmp"
        try:
            with open(aside, "wb") as file:
                numbers = {"iteration": self.iteration, "scores": list(self.scores), "processes": WORLD}
                torch.save(state | numbers, file)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(self.folder / name)
        except (OSError, RuntimeError) as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # which torch reports as a file that ends too early
                raise KeyboardInterrupt from None
            raise OSError(f"{self.folder / name} could not be written and is as it was before ({error})") from error
        finally:
            aside.unlink(missing_ok=True)

    def finish(self) -> dict[str, float]:
        """Close the run; returns the last metrics and the mean return of the last 100 episodes."""
        if self.args.save_model:
            self.save("model.pt", **{key: part for key, part in self.parts.items() if key != "optimizer"})
        if not RANK:
            atexit.unregister(self.close)
            self.close()
        score = float(np.mean(self.scores)) if self.scores else float("nan")
        return self.metrics | {"global_step": self.iteration * self.batch_size, "episodic_return": score}

    def close(self) -> None:
        self.bar.close()
        self.writer.close()
        saved = (self.folder / "checkpoint.pt").exists()
        left = "--resume goes on from its last checkpoint" if saved else "no checkpoint"
        state = "finished" if self.iteration >= self.last else f"not finished: {left}"
        print(f"run folder: {self.folder} ({state})", flush=True)


def restore(folder: str, device: torch.device, **parts: Any) -> tuple[int, list[float], int]:
    """Load a checkpoint into `parts`; returns its iteration, latest scores and number of processes. Executes nothing."""
    path = Path(folder, "checkpoint.pt" if Path(folder, "checkpoint.pt").exists() else "model.pt")
    require(path.exists(), f"{folder} holds no checkpoint.pt yet")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        for key, part in parts.items():
            part.load_state_dict(state[key])
        return int(state["iteration"]), [float(score) for score in state["scores"]], int(state["processes"])
    except Exception as error:
        sentence = f"{path} is no checkpoint of this script and run: {type(error).__name__} {error}"
        raise UsageError(sentence.splitlines()[0]) from None


class Film:
    """Episodes of the first environment as video files: with `every` all of them, else numbers 0, 1, 8, 27, ..."""

    def __init__(self, folder: Path, name: str, every: bool, fps: int):
        from imageio.v2 import get_writer

        (folder / "videos").mkdir(exist_ok=True)
        self.every, self.count, self.video = every, 0, None  # type: bool, int, Any
        self.open = lambda: get_writer(f"{folder}/videos/{name}-episode-{self.count}.mp4", fps=fps, macro_block_size=1)
        atexit.register(self.end)

    def add(self, frame: Callable[[], np.ndarray], ended: bool) -> None:
        """`frame()` gives uint8 [H, W] or [H, W, 3]; `ended` says that it is an episode's last one."""
        due = self.every or round(self.count ** (1 / 3)) ** 3 == self.count or self.count % 1000 == 0
        if self.video is None and due:
            self.video = self.open()
        if self.video:
            image = frame()
            zoom = -(-200 // len(image))
            height, width = image.shape[0] * zoom // 2 * 2, image.shape[1] * zoom // 2 * 2  # the codec wants them even
            self.video.append_data(image.repeat(zoom, 0).repeat(zoom, 1)[:height, :width])
        if ended:
            self.end()

    def end(self) -> None:
        if self.video:
            self.video.close()
        self.video, self.count = None, self.count + 1


def evaluate(args: Args) -> list[float]:
    """Raw scores of exactly --eval-episodes full games by the policy saved in the folder --evaluate.

    Each of the parallel games plays a fixed share, so that short ones do not crowd in.
    """
    device, folder = start(args), str(args.evaluate)
    games = AtariGames(args, min(args.num_envs, args.eval_episodes))
    agent = Agent(games.num_actions, args.bf16).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    iteration, *_ = restore(folder, device, agent=agent)
    film = Film(Path(folder), "evaluation", True, 15) if args.capture_video else None
    games.reset(reseed(args.seed, iteration))
    n, scores = len(games.games), []
    share = [args.eval_episodes // n + (i < args.eval_episodes % n) for i in range(n)]
    while any(share):
        with torch.inference_mode():
            policy, _ = agent(torch.from_numpy(games.obs).to(device))
        actions = policy.sample() if args.eval_sample else policy.logits.argmax(-1)
        finished = games.step(actions.cpu().numpy())[1]
        if film and share[0]:
            film.add(lambda: games.obs[0, -1], any(i == 0 for i, _, _ in finished))
        for i, score, _ in finished:
            if share[i]:
                scores.append(score)
                share[i] -= 1
    how = f"{'sampled' if args.eval_sample else 'most probable'} actions"
    print(f"{args.env_id}: return {np.mean(scores):.2f} ± {np.std(scores):.2f} over {len(scores)} episodes, {how}")
    return scores


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line; with --resume or --evaluate, the flags of that run are the defaults."""
    args = tyro.cli(Args, args=argv)
    folder = args.resume or args.evaluate
    require(not (args.resume and args.evaluate), "--resume and --evaluate exclude each other")
    if folder is None:
        return args
    try:
        saved = Args(**json.loads(Path(folder, "args.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{folder} is no run folder of this script: {error}") from None
    args = tyro.cli(Args, args=argv, default=saved)
    changed = [k.replace("_", "-") for k, v in vars(args).items() if k not in MAY_CHANGE and v != getattr(saved, k)]
    require(args.evaluate or not changed, f"--resume cannot change the run's own --{', --'.join(changed)}")
    return args


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave as after Ctrl-C
    try:
        args = parse_args()
        evaluate(args) if args.evaluate else train(args)
        for sign in (signal.SIGINT, signal.SIGTERM):  # all is written, and the exit is no interruption
            signal.signal(sign, signal.SIG_IGN)
    except (EOFError, ConnectionError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not (WORLD > 1 and re.search("gloo|nccl", str(error), re.I)):
            raise
        sys.exit(f"error: a process on which this one depends has died: {' '.join(repr(error).split())}")
    except (UsageError, FloatingPointError, OSError, KeyboardInterrupt) as error:
        print(f"error: {' '.join(str(error).split()) or 'interrupted'}", file=sys.stderr)
        sys.exit({UsageError: 2, KeyboardInterrupt: 130}.get(type(error), 1))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
