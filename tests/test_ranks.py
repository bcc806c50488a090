"""Data-parallel training with torch.distributed (gloo): K processes do what one would on all the data."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BUDGET, CONTROL, ROOT, SMALL, command, environment, scalars

WORKER = """
import sys, json, torch
sys.path.insert(0, {root!r})
import {name} as script
import torch.distributed as dist
if script.WORLD > 1:
    dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
atari = {name!r} == "ppo_atari"
agent = script.Agent(4) if atari else script.Agent(3, 2)
obs = torch.randint(0, 256, (16, 4, 84, 84), dtype=torch.uint8) if atari else torch.randn(16, 3)
actions = torch.randint(4, (16,)) if atari else torch.randn(16, 2)
names = ["logprobs", "advantages", "returns", "values"]
batch = dict(zip(names, torch.randn(4, 16)), obs=obs, actions=actions)
batch["logprobs"] -= 3
batch["advantages"] = 5 * batch["advantages"] + 2
if {name!r} == "ppo_penalty":
    batch |= {{"means": torch.randn(16, 2), "logstd": torch.zeros(16, 2)}}
batch = {{name: x.chunk(script.WORLD)[script.RANK] for name, x in batch.items()}}
loss, stats = script.ppo_loss(script.Args(), agent, batch)
loss.backward()
script.average_gradients(agent)
flat = torch.cat([p.grad.reshape(-1) for p in agent.parameters() if p.grad is not None])
stats = {{name: script.global_mean(x.detach()) for name, x in stats.items()}}
if script.RANK == 0:
    torch.save([flat, stats], sys.argv[1])
if script.WORLD > 1:
    dist.barrier()
    dist.destroy_process_group()
"""

RLHF = """
import sys, torch
sys.path[:0] = [{root!r}, {tests!r}]
import rlhf_ppo_gpt2 as script
from test_rlhf import PROMPTS, args, gpt2, random_tokens, scorer
import torch.distributed as dist
if script.WORLD > 1:
    dist.init_process_group("gloo")
torch.set_num_threads(1)
agent = script.Agent(gpt2(vocabulary=12), scorer(gpt2(vocabulary=12, seed=3)))
torch.manual_seed(5)
responses, _ = script.sample_responses(agent.policy, PROMPTS, 6, 1.0, 0)
per_token = random_tokens(responses)
white = script.masked_whiten(per_token["advantages"], responses.real)  # of all, as both processes hold all here
mine = torch.arange(8)[script.RANK :: script.WORLD]  # with unequal numbers of tokens
part = responses.rows(mine)
shares = {{name: x[mine][:, : part.real.shape[1]] for name, x in per_token.items()}}
whitened = script.masked_whiten(shares["advantages"], part.real)
assert torch.allclose(whitened, white[mine][:, : part.real.shape[1]], atol=1e-5)
optimizer = torch.optim.Adam(agent.parameters(), 1e-3)
arguments = args(num_minibatches=1, update_epochs=1, max_grad_norm=1e9)
history, *_ = script.update(arguments, agent, optimizer, script.ppo_loss, part, shares)
stats = {{name: script.global_mean(x.detach()) for name, x in history[0].items()}}
if script.RANK == 0:
    flat = torch.cat([p.grad.flatten() for p in agent.parameters() if p.grad is not None])
    torch.save([flat, stats], sys.argv[1])
if script.WORLD > 1:
    dist.barrier()
    dist.destroy_process_group()
"""

SHARE = """
import sys, torch, numpy as np
sys.path.insert(0, {root!r})
import {name} as script
import torch.distributed as dist
if script.WORLD > 1:
    dist.init_process_group("gloo")
stats = script.RunningMeanStd(2)
for seed in (1, 2, 3):  # three rounds: what was shared must not be counted again
    rows = np.random.default_rng(seed).normal(5, 3, (40, 2))
    for part in np.split(rows, script.WORLD)[script.RANK].reshape(-1, 5, 2):
        stats.update(part)
    stats.share()
states = [None] * script.WORLD
dist.all_gather_object(states, stats.state_dict())
assert all(torch.equal(x, states[-1][key]) for key, x in states[0].items()), "the processes hold different statistics"
if script.RANK == 0:
    count, _, _ = stats.sums
    torch.save([count, *stats.mean_and_std()], sys.argv[1])
dist.barrier()
dist.destroy_process_group()
"""

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


@pytest.mark.detail("S2")
@pytest.mark.detail("7")
def test_two_processes_have_the_gradient_of_one(ppo, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(root=str(ROOT), name=ppo.__name__))
    results = []
    for ranks in (1, 2):
        result = torchrun(tmp_path, ranks, worker, tmp_path / f"{ranks}.pt")
        assert result.returncode == 0, result.stderr
        results.append(torch.load(tmp_path / f"{ranks}.pt"))
    (gradient_1, stats_1), (gradient_2, stats_2) = results
    assert float((gradient_2 - gradient_1).norm() / gradient_1.norm()) < 1e-6
    torch.testing.assert_close(stats_2, stats_1, atol=1e-5, rtol=1e-5)


@pytest.mark.detail("S2")
def test_two_processes_have_the_gradient_of_one_on_texts_of_unequal_length(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(RLHF.format(root=str(ROOT), tests=str(ROOT / "tests")))
    results = []
    for ranks in (1, 2):
        result = torchrun(tmp_path, ranks, worker, tmp_path / f"{ranks}.pt")
        assert result.returncode == 0, result.stderr
        results.append(torch.load(tmp_path / f"{ranks}.pt"))
    (gradient_1, stats_1), (gradient_2, stats_2) = results
    assert float((gradient_2 - gradient_1).norm() / gradient_1.norm()) < 1e-5
    torch.testing.assert_close(stats_2, stats_1, atol=1e-5, rtol=1e-5)


def test_two_processes_have_the_statistics_of_one(gaussian, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(SHARE.format(root=str(ROOT), name=gaussian.__name__))
    result = torchrun(tmp_path, 2, worker, tmp_path / "2.pt")
    assert result.returncode == 0, result.stderr
    count, mean, std = torch.load(tmp_path / "2.pt", weights_only=False)
    rows = np.concatenate([np.random.default_rng(seed).normal(5, 3, (40, 2)) for seed in (1, 2, 3)])
    np.testing.assert_allclose(count, 120 + 1e-4)
    np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(std, rows.std(0), rtol=1e-4)


def test_torchrun_trains_logs_once_and_resumes(name: str, tmp_path: Path) -> None:
    script = ROOT / f"{name}.py"
    result = torchrun(tmp_path, 2, script, *SMALL[name])
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    logged = scalars(folder)
    assert [step for step, _ in logged["losses/value_loss"]] == [128, 256, 384, 512]
    if name not in ("ppo_atari", "rlhf_ppo_gpt2"):
        steps = [step for step, _ in logged["charts/episodic_return"]]
        assert len(steps) == len(set(steps)) == 2 * (256 // 5)  # the episodes of both processes
    assert result.stdout.count("run folder") == 2
    again = torchrun(tmp_path, 2, script, "--resume", folder, BUDGET[name], 768)
    assert again.returncode == 0, again.stderr
    assert [step for step, _ in scalars(folder)["losses/value_loss"]] == [128, 256, 384, 512, 640, 768]
    assert json.loads((folder / "args.json").read_text())[BUDGET[name][2:].replace("-", "_")] == 768


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists threads as Linux does")
@pytest.mark.parametrize("script", ["ppo_continuous", "trpo"])
def test_no_thread_of_the_process_group_outlives_it(script: str, tmp_path: Path) -> None:
    """One that drops a tensor while Python exits would abort the process, once in a while."""
    worker = tmp_path / "worker.py"
    worker.write_text(THREADS)
    result = torchrun(tmp_path, 2, worker, ROOT / f"{script}.py", *SMALL[script])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("left at exit: []") == 2, result.stdout


def test_environments_that_do_not_divide_are_refused(name: str, tmp_path: Path) -> None:
    flag = "--num-envs" if name in CONTROL else "--batch-size"
    result = torchrun(tmp_path, 2, ROOT / f"{name}.py", *SMALL[name], flag, 3)
    assert result.returncode != 0 and f"{flag} must be a multiple of the 2 processes" in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.faults)])
def test_a_lost_process_ends_the_others(name: str, lost: int, tmp_path: Path) -> None:
    """Each rank started by hand, as on two machines, so that nobody but itself can end the survivor."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    flags = command(name, *SMALL[name], BUDGET[name], 10**6, "--checkpoint-every", 1)
    ranks = [
        subprocess.Popen(
            flags,
            cwd=tmp_path,
            env=environment() | where | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in (0, 1)
    ]
    try:
        while not list(tmp_path.glob("runs/*/checkpoint.pt")):
            assert all(process.poll() is None for process in ranks)
            time.sleep(0.05)
        os.kill(ranks[lost].pid, signal.SIGKILL)
        assert ranks[1 - lost].wait(timeout=60) != 0
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    (path,) = tmp_path.glob("runs/*/checkpoint.pt")
    assert torch.load(path, weights_only=True)["iteration"] >= 1
