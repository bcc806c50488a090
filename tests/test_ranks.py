"""Data-parallel training with torch.distributed (gloo): K processes do what one would on all the data.

What needs no launcher runs in processes forked from one that has imported all: this file is their program, too.
"""

import copy
import dataclasses
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import combinations, count
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import test_dpo as comparisons
import test_rlhf as answers
import torch
import torch.distributed as dist
import tyro
from conftest import (
    BUDGET,
    CHOICES,
    CONTROL,
    ENVS,
    MODULES,
    PPO,
    ROOT,
    SMALL,
    TEXTS,
    Forked,
    command,
    environment,
    forked,
    run,
    scalars,
)
from test_control import as_they_are, playing, watch
from torch.distributions import Categorical

gym.register(id="Swing-v0", entry_point="gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=9)
gym.register(id="Cart-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=9)
here = pytest.MonkeyPatch()  # of a process that ends with its check, so that nothing is undone


def in_processes(check: Callable[[Any], Any], name: str, folder: Path, world: int = 2) -> list[Any]:
    """What `check(script)` returns in each of `world` processes that are joined."""
    folder = folder / f"{check.__name__}-{world}"
    folder.mkdir()
    output = folder / "output"
    status = forked(
        [__file__, check.__name__, name, str(world)], folder, [output, output], 300, "test_control, test_dpo, test_rlhf"
    )
    assert status == 0, output.read_text()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def work(check: str, name: str, world: int) -> None:
    """Be these processes."""
    module: Any = MODULES[name]
    children = []
    for rank in range(world):
        child = os.fork()
        if not child:
            here.setattr(module, "RANK", rank)
            here.setattr(module, "WORLD", world)
            store = f"file://{Path('store').absolute()}"
            dist.init_process_group("gloo", store, datetime.timedelta(seconds=60), world, rank)
            here.setattr(dist, "init_process_group", lambda: None)  # the script would, by the launcher's variables
            torch.save(globals()[check](module), f"{rank}.pt")
            dist.destroy_process_group()
            return
        children.append(child)
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))


def small(module: Any, **changes: Any) -> Any:
    return dataclasses.replace(tyro.cli(module.Args, args=SMALL[module.__name__]), **changes)


# ------------------------------------------------------------------------------------------------- two train as one


def in_float64() -> None:
    """All that networks take and give, so that only what is computed differently shows."""

    def widen(layer: Any, inputs: Any) -> Any:
        if isinstance(layer, torch.nn.LSTM):
            x, state = inputs
            return x.double(), tuple(part.double() for part in state)
        return tuple(x.double() for x in inputs) if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d) else None

    torch.set_default_dtype(torch.float64)
    torch.nn.modules.module.register_module_forward_pre_hook(widen)
    here.setattr(torch.Tensor, "float", torch.Tensor.double)


def draw_for_two(module: Any, args: Any) -> None:
    """Whatever is drawn is drawn for two halves of the environments: two processes have one each, one has both.

    A minibatch has as many rows of one half as of the other.
    """
    rng = np.random.default_rng(0)
    size = args.num_envs // 2
    steps = 1 if module.__name__ == "ppo_lstm" else args.num_steps  # whose rows are whole environments
    halves = [0, 1] if module.WORLD == 1 else [module.RANK]
    mine = slice(halves[0] * size, (halves[-1] + 1) * size)
    rows = np.arange(steps * size * len(halves)).reshape(steps, len(halves), size)

    def noise(shape: Any, device: Any) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal((shape[0], args.num_envs, shape[2]))[:, mine])

    def sample(policy: Any) -> torch.Tensor:
        gumbel = rng.gumbel(size=(args.num_envs, policy.logits.shape[1]))
        return (policy.logits + torch.from_numpy(gumbel[mine])).argmax(1)

    def minibatches(_: int, number: int, epochs: int, device: Any) -> Iterator[torch.Tensor]:
        for _ in range(epochs):
            orders = [rng.permutation(steps * size) for _ in range(2)]
            parts = [rows[:, i].ravel()[orders[half]].reshape(number, -1) for i, half in enumerate(halves)]
            yield from torch.from_numpy(np.concatenate(parts, 1))

    def gumbel(size: Any) -> np.ndarray:
        return rng.gumbel(size=(args.num_envs, *size[1:]))[mine]

    here.setattr(torch, "randn", noise)
    here.setattr(np.random, "gumbel", gumbel)
    here.setattr(Categorical, "sample", sample)
    here.setattr(module, "reseed", lambda seed, iteration: 1000 * iteration + mine.start)
    here.setattr(module, "minibatches", minibatches)


def normalize_by_earlier_iterations(module: Any) -> None:
    """What has been seen since differs between processes, until they share it."""
    stats, end = module.RunningMeanStd, module.Run.end_iteration
    original = stats.mean_and_std
    known: dict[Any, np.ndarray] = {}

    def mean_and_std(self: Any) -> Any:
        earlier = stats(*self.sums.shape[1:])
        earlier.sums[:] = known.get(self, earlier.sums)
        return original(earlier)

    def end_iteration(self: Any, metrics: Any) -> None:
        end(self, metrics)
        known.update((self.parts[key], self.parts[key].sums.copy()) for key in ("obs_stats", "return_stats"))

    here.setattr(stats, "mean_and_std", mean_and_std)
    here.setattr(module.Run, "end_iteration", end_iteration)


def pay_each_game_its_own(module: Any) -> None:
    """Rewards that differ between steps and games; the first steps of a game have none."""
    step, times = module.AtariGames.step, count()

    def paid(self: Any, actions: np.ndarray) -> Any:
        rewards, *rest = step(self, actions)
        games = 1 + np.arange(len(rewards)) + module.RANK * len(rewards)
        return ((next(times) * games) % 3 - 0.5 * games).astype(np.float32), *rest

    here.setattr(module.AtariGames, "step", paid)


def state_of(run: Any) -> dict[str, torch.Tensor]:
    """Copies of weights, β and statistics."""
    parts = {key: part.state_dict() for key, part in run.parts.items() if key != "optimizer"}
    return {f"{key} {name}": x.clone() for key, part in parts.items() for name, x in part.items() if name != "shared"}


def trained(module: Any) -> dict[str, Any]:
    """Two iterations in float64: weights before and after with the statistics, metrics, norms of gradients."""
    atari = module.__name__ == "ppo_atari"
    changes: dict[str, Any] = {"num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2}
    changes |= {"total_timesteps": 128, "checkpoint_every": 1, "learning_rate": 0.01, "env_id": "Swing-v0"}
    if module.__name__ in CHOICES:
        changes |= {"env_id": "Cart-v0", "anneal_clip": True}
    if atari:
        changes |= {"env_id": "Pong", "num_envs": 2, "total_timesteps": 64, "max_episode_frames": 40}
    if module.__name__ in PPO:
        changes |= {"max_grad_norm": 0.01}
    if module.__name__ == "ppo_penalty":
        changes |= {"kl_target": 1e-4}
    args = small(module, **changes)
    in_float64()
    draw_for_two(module, args)
    adapt = pay_each_game_its_own if atari else normalize_by_earlier_iterations
    adapt(module)
    begun = watch(here, module.Run, "__init__", lambda args, _: state_of(args[0]))
    norms = watch(here, torch.nn.utils, "clip_grad_norm_", lambda _, norm: float(norm))
    ended = watch(here, module.Run, "end_iteration", lambda args, _: state_of(args[0]))
    metrics = module.train(args)
    return {"before": begun[0], "after": ended[-1], "metrics": metrics, "norms": norms}


OWN = ("charts/SPS", "losses/explained_variance")  # time, and the mean of what each process says of its own values


@pytest.mark.detail("S2")
@pytest.mark.detail("7")
@pytest.mark.parametrize("name", CONTROL)
def test_two_processes_train_as_one(name: str, tmp_path: Path) -> None:
    """On the same data with the same minibatches: weights, statistics and metrics after two iterations, in float64."""
    (one,) = in_processes(trained, name, tmp_path, 1)
    both = in_processes(trained, name, tmp_path)
    for two in both:
        torch.testing.assert_close(two["after"], one["after"], atol=1e-6, rtol=1e-9)
        for tag in one["metrics"].keys() & two["metrics"].keys() - {*OWN}:
            assert two["metrics"][tag] == pytest.approx(one["metrics"][tag], rel=1e-6, abs=1e-6), tag
    moved = {key: float((x - one["before"][key]).abs().max()) for key, x in one["after"].items()}
    assert all(distance > 1e-5 for key, distance in moved.items() if key != "agent failures"), moved
    assert len(one["norms"]) == (8 if name in PPO else 0) and all(norm > 0.01 for norm in one["norms"])  # all are cut


def statistics(module: Any) -> dict[str, torch.Tensor]:
    stats = module.RunningMeanStd(2)
    for seed in (1, 2, 3):  # three rounds: what was shared must not be counted again
        rows = np.random.default_rng(seed).normal(5, 3, (40, 2))
        for part in np.split(rows, module.WORLD)[module.RANK].reshape(-1, 5, 2):
            stats.update(part)
        stats.share()
    mean, std = stats.mean_and_std()
    return {"sums": stats.sums.copy(), "mean": mean, "std": std}


@pytest.mark.parametrize("name", ENVS)
def test_two_processes_have_the_statistics_of_one(name: str, tmp_path: Path) -> None:
    both = in_processes(statistics, name, tmp_path)
    rows = np.concatenate([np.random.default_rng(seed).normal(5, 3, (40, 2)) for seed in (1, 2, 3)])
    for stats in both:
        assert (stats["sums"] == both[0]["sums"]).all()
        np.testing.assert_allclose(stats["sums"][0], 120 + 1e-4)
        np.testing.assert_allclose(stats["mean"], rows.mean(0), rtol=1e-5)
        np.testing.assert_allclose(stats["std"], rows.std(0), rtol=1e-4)


def gradient_on_texts(module: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    agent = module.Agent(answers.gpt2(vocabulary=12), answers.scorer(answers.gpt2(vocabulary=12, seed=3)))
    torch.manual_seed(5)
    responses, _ = module.sample_responses(answers.args(), agent.policy, answers.PROMPTS, 0)
    per_token = answers.random_tokens(responses)
    white = module.masked_whiten(per_token["advantages"], responses.real)  # of all, as each process holds all here
    mine = torch.arange(8)[module.RANK :: module.WORLD]  # with unequal numbers of tokens
    part = responses.rows(mine)
    shares = {name: x[mine][:, : part.real.shape[1]] for name, x in per_token.items()}
    whitened = module.masked_whiten(shares["advantages"], part.real)
    torch.testing.assert_close(whitened, white[mine][:, : part.real.shape[1]], atol=1e-5, rtol=0)
    optimizer = torch.optim.Adam(agent.parameters(), 1e-3)
    whole = answers.args(num_minibatches=1, update_epochs=1, max_grad_norm=1e9)
    history = module.update(whole, agent, optimizer, part, shares)
    flat = torch.cat([p.grad.flatten() for p in agent.parameters() if p.grad is not None])
    return flat, {name: module.global_mean(x.detach()) for name, x in history[0].items()}


@pytest.mark.detail("S2")
def test_two_processes_have_the_gradient_of_one_on_texts_of_unequal_length(tmp_path: Path) -> None:
    ((gradient_1, stats_1),) = in_processes(gradient_on_texts, "rlhf_ppo_gpt2", tmp_path, 1)
    for gradient_2, stats_2 in in_processes(gradient_on_texts, "rlhf_ppo_gpt2", tmp_path):
        assert float((gradient_2 - gradient_1).norm() / gradient_1.norm()) < 1e-5
        torch.testing.assert_close(stats_2, stats_1, atol=1e-5, rtol=1e-5)


def gradient_on_pairs(module: Any) -> list[torch.Tensor]:
    """Of fine-tuning on texts of unequal length, and of DPO on an iteration's pairs in two micro-batches each."""
    reference = answers.gpt2(vocabulary=12)
    policy = module.copied(comparisons.args(), reference)
    texts = [x + y for x, (y, _) in zip(answers.PROMPTS, comparisons.ANSWERS, strict=False)][
        module.RANK :: module.WORLD
    ]
    module.sft_loss(comparisons.args(), policy, texts).backward()
    module.average_gradients(policy)
    gradients = [torch.cat([p.grad.flatten() for p in policy.parameters()])]
    pairs = comparisons.pairs_of(answers.gpt2(vocabulary=12, seed=3))
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    arguments = comparisons.args(micro_batch_size=2, max_grad_norm=1e9)
    stats = module.update(arguments, policy, optimizer, pairs, module.pair_batch(5, 0, 8, 1))
    figures = torch.stack([module.global_mean(x) for x in stats.values()])
    return [*gradients, torch.cat([p.grad.flatten() for p in policy.parameters()]), figures]


@pytest.mark.detail("S2")
def test_two_processes_have_the_gradient_of_one_on_pairs(tmp_path: Path) -> None:
    (alone,) = in_processes(gradient_on_pairs, "dpo_gpt2", tmp_path, 1)
    for both in in_processes(gradient_on_pairs, "dpo_gpt2", tmp_path):
        for one, mine in zip(alone, both, strict=True):
            assert float((mine - one).norm() / one.norm()) < 1e-5


def gradient_on_groups(module: Any) -> list[torch.Tensor]:
    """Of GRPO on groups of two answers of unequal length, with each normaliser of the loss, and what is logged."""
    agent = module.Agent(answers.gpt2(vocabulary=12))
    torch.manual_seed(5)
    arguments = module.Args(response_length=6, num_minibatches=1, inner_steps=1, max_grad_norm=1e9, kl_in="loss")
    responses, _ = module.sample_responses(arguments, agent.policy, answers.PROMPTS, 0)
    returns, tokens = torch.randn(8), torch.randn(2, *responses.real.shape)
    mine = torch.arange(8).view(4, 2)[module.RANK :: module.WORLD].flatten()  # whole groups
    advantages = module.group_advantages(returns[mine], 2, "mean", "batch")
    everyone = [module.global_mean(x) for x in (advantages.abs().mean(), advantages.square().mean())]
    found = [torch.stack(everyone)]
    part = responses.rows(mine)
    shares = {
        name: x[mine][:, : part.real.shape[1]] for name, x in zip(("logprobs", "ref_logprobs"), tokens, strict=True)
    }
    shares["advantages"] = advantages[:, None] * part.real
    for norm in ("token", "sequence", "constant"):
        copied = copy.deepcopy(agent)
        optimizer = torch.optim.Adam(copied.parameters(), 1e-3)
        norms = dataclasses.replace(arguments, loss_norm=norm)
        (stats,) = module.update(norms, copied, optimizer, part, shares)
        found += [torch.cat([p.grad.flatten() for p in copied.parameters()]), torch.stack([*stats.values()])]
    return found


@pytest.mark.detail("S2")
@pytest.mark.detail("G3")
@pytest.mark.detail("G13")
@pytest.mark.detail("G14")
def test_two_processes_have_the_gradient_of_one_on_groups(tmp_path: Path) -> None:
    (alone,) = in_processes(gradient_on_groups, "grpo_gpt2", tmp_path, 1)
    for both in in_processes(gradient_on_groups, "grpo_gpt2", tmp_path):
        for one, mine in zip(alone, both, strict=True):
            assert float((mine - one).norm() / one.norm()) < 1e-5


# ------------------------------------------------------------------------------------ what none of them knows alone


def told_kl(module: Any) -> list[tuple[int, float]]:
    """Steps so far and β after each of two iterations of four minibatches, where the first process is told that KL is
    0. Gradients and advantages are each one's own, so that one which went on alone would not be waited for."""
    original = module.ppo_loss
    told: list[None] = []
    steps = watch(here, torch.optim.Adam, "step")

    def tell(args: Any, agent: Any, batch: Any) -> Any:
        loss, stats = original(args, agent, batch)
        approx_kl, kl = (0.029 if not told else 0.031), [0.04, 0.012][len(ended)]
        told.append(None)
        own = {"losses/approx_kl": torch.tensor(module.RANK * approx_kl), "losses/kl": torch.tensor(module.RANK * kl)}
        return loss, stats | own

    def keep(args: Any, _: Any) -> tuple[int, float]:
        told.clear()
        return len(steps), float(getattr(args[0].parts["agent"], "beta", 0))

    here.setattr(module, "ppo_loss", tell)
    here.setattr(module, "average_gradients", lambda agent: None)
    ended = watch(here, module.Run, "end_iteration", keep)
    four = {"num_minibatches": 4, "update_epochs": 1, "total_timesteps": 256, "norm_adv": False, "target_kl": 0.01}
    penalty = {"kl_target": 0.01, "beta": 1.0} if module.__name__ == "ppo_penalty" else {}
    whole = {"num_envs": 8, "num_steps": 16} if module.__name__ == "ppo_lstm" else {}
    module.train(small(module, **four | penalty | whole))
    return ended


def test_the_mean_kl_ends_epochs_and_moves_beta_in_both(ppo, tmp_path: Path) -> None:
    """Means of 0.0145 and 0.0155 about a limit of 0.015: one step. Then twice the target, and 0.6 times it."""
    beta = [2.0, 1.0] if ppo.__name__ == "ppo_penalty" else [0, 0]
    for steps_and_betas in in_processes(told_kl, ppo.__name__, tmp_path):
        assert steps_and_betas == [(1, beta[0]), (2, beta[1])]


CONTROLLERS = {  # what the second process is told of the KL to the reference in two iterations, and β after each
    "doubling": ([24.0, 7.2], [2.0, 1.0]),
    "proportional": ([13.2, 10.8], [1.05, 1.05 * 0.95]),
}


def told_kl_to_the_reference(module: Any) -> dict[str, Any]:
    """β after two iterations with each controller, the first answered tokens to the same prompts, and the weights."""
    rollout = module.rollout
    betas: list[float] = []
    result: dict[str, Any] = {}

    def tell(*args: Any) -> Any:
        answered = rollout(*args)
        answered.figures["kl/ref"].fill_(module.RANK * told[min(len(betas), 1)])
        return answered

    here.setattr(module, "prompt_batch", lambda prompts, *_: prompts[:16])
    here.setattr(module, "rollout", tell)
    scored = watch(here, module, "score_tokens", lambda args, _: args[3].actions[:, 0].numpy().copy())
    watch(here, module.Run, "end_iteration", lambda args, _: betas.append(float(args[0].parts["agent"].beta)))
    changes = {"batch_size": 32, "total_episodes": 64, "learning_rate": 1e-5, "self_check": False, "eval_episodes": 8}
    changes |= {"beta": 1.0, "kl_target": 6.0, "kl_horizon": 64.0}
    for controller in CONTROLLERS:
        told = CONTROLLERS[controller][0]
        betas.clear()
        scored.clear()
        module.train(small(module, beta_controller=controller, **changes))
        result[controller] = list(betas)
    first = [tokens for tokens in scored if len(tokens) == 16]
    return result | {"tokens": first}


def test_the_mean_kl_to_the_reference_moves_beta_in_both(tmp_path: Path) -> None:
    """The means are twice the target and 0.6 times it, and 10 % above and below it where 32 of 64 responses count."""
    both = in_processes(told_kl_to_the_reference, "rlhf_ppo_gpt2", tmp_path)
    for told in both:
        for controller, (_, expected) in CONTROLLERS.items():
            assert told[controller] == pytest.approx(expected)
    assert_different([tokens for told in both for tokens in told["tokens"]], 4, 0.5)


# ------------------------------------------------------------------------------------------------- games of their own


def assert_different(draws: list[np.ndarray], number: int, alike: float) -> None:
    """No two of so many are equal in that share of their elements, or more."""
    assert len(draws) == number
    for one, other in combinations(draws, 2):
        assert np.mean(one == other) < alike


def played(module: Any) -> dict[str, Any]:
    """First observations and noise of each of three starts, and the weights at the end."""
    atari = module.__name__ == "ppo_atari"
    if not atari:
        as_they_are(module, here)
    owner, name = (Categorical, "sample") if atari else (torch, "randn")
    if module.__name__ in CHOICES:
        owner, name = np.random, "gumbel"
    noise = watch(here, owner, name, lambda _, drawn: np.array(drawn))
    starts = watch(here, playing(module), "reset", lambda args, _: args[0].obs.copy())
    agents = watch(here, module, "Agent")
    game = {"env_id": "SpaceInvaders", "num_envs": 8, "num_steps": 16} if atari else {}
    module.train(small(module, total_timesteps=384, checkpoint_every=1, **game))
    return {"starts": starts, "noise": np.split(np.array(noise), 3), "weights": agents[0].state_dict()}


@pytest.mark.parametrize("name", CONTROL)
def test_each_process_and_each_restart_has_games_of_its_own_and_all_have_the_same_weights(
    name: str, tmp_path: Path
) -> None:
    both = in_processes(played, name, tmp_path)
    assert_different([start for games in both for start in games["starts"]], 6, 1)
    assert_different([noise for games in both for noise in games["noise"]], 6, 0.5)
    first, second = (games["weights"] for games in both)
    assert all(torch.equal(x, second[key]) for key, x in first.items())


# ---------------------------------------------------------------------------------------------- as torchrun starts them

THREADS = """
import atexit, pathlib, runpy, sys, time
sys.argv = sys.argv[1:]

def show():
    time.sleep(1)  # a thread that has been joined may be listed for another moment
    names = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    sys.stdout.write(f"left at exit: {[name for name in names if 'gloo' in name]}\\n")  # whole, as two processes write

atexit.register(show)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def torchrun(cwd: Path, ranks: int, *command: Any, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            *map(str, command),
        ],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def by_hand(name: str, cwd: Path, *flags: Any) -> list[Forked]:
    """Two ranks, told where they meet as torchrun would tell them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = []
    for rank in "01":
        output = cwd / f"rank{rank}.txt"
        env = where | {"RANK": rank, "LOCAL_RANK": rank}
        ranks.append(Forked(command(name, *flags)[1:], cwd, [output, output], timeout=150, env=env))
    return ranks


@pytest.mark.parametrize("name", ["ppo_atari", "ppo_continuous", "trpo", *TEXTS])  # the others by the same text
def test_torchrun_trains_logs_once_and_resumes(name: str, tmp_path: Path) -> None:
    script = ROOT / f"{name}.py"
    result = torchrun(tmp_path, 2, script, *SMALL[name])
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    logged = scalars(folder)
    assert [step for step, _ in logged["losses/policy_loss"]] == [128, 256, 384, 512]
    if name not in ("ppo_atari", *TEXTS):
        steps = [step for step, _ in logged["charts/episodic_return"]]
        assert len(steps) == len(set(steps)) == 2 * (256 // 5)  # the episodes of both processes
    assert result.stdout.count("run folder") == 2
    again = by_hand(name, tmp_path, "--resume", folder, BUDGET[name], 768)
    assert [rank.wait() for rank in again] == [0, 0], [rank.text() for rank in again]
    assert [step for step, _ in scalars(folder)["losses/policy_loss"]] == [128, 256, 384, 512, 640, 768]
    assert json.loads((folder / "args.json").read_text())[BUDGET[name][2:].replace("-", "_")] == 768
    alone = run(name, "--resume", folder, BUDGET[name], 1024, cwd=tmp_path)
    assert alone.returncode == 2 and "--resume needs as many processes as before, 2" in alone.stderr


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists threads as Linux does")
@pytest.mark.parametrize("script", ["ppo_continuous"])  # the others leave by the same text
def test_no_thread_of_the_process_group_outlives_it(script: str, tmp_path: Path) -> None:
    """One that drops a tensor while Python exits would abort the process, once in a while."""
    worker = tmp_path / "worker.py"
    worker.write_text(THREADS)
    result = torchrun(tmp_path, 2, worker, ROOT / f"{script}.py", *SMALL[script])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("left at exit: []") == 2, result.stdout


def test_environments_that_do_not_divide_are_refused(name: str, tmp_path: Path) -> None:
    flag = "--num-envs" if name in CONTROL else "--batch-size"
    result = run(name, *SMALL[name], flag, 3, cwd=tmp_path, env={"WORLD_SIZE": "2"})
    assert result.returncode == 2 and f"{flag} must be a multiple of the 2 processes" in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.faults)])
def test_a_lost_process_ends_the_others(name: str, lost: int, tmp_path: Path) -> None:
    """Each rank started by hand, as on two machines, so that nobody but itself can end the survivor."""
    ranks = by_hand(name, tmp_path, *SMALL[name], BUDGET[name], 10**6, "--checkpoint-every", 1)
    done = lambda: [torch.load(path, weights_only=True)["iteration"] for path in tmp_path.glob("runs/*/checkpoint.pt")]
    try:
        while not any(done()):
            assert all(rank.poll() is None for rank in ranks)
            time.sleep(0.05)
        ranks[lost].send_signal(signal.SIGKILL)
        assert ranks[1 - lost].wait() not in (0, -signal.SIGALRM)
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
    (iterations,) = done()
    assert iterations >= 1


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], int(sys.argv[3]))
