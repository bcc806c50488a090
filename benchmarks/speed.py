"""How fast the scripts are: steps or tokens per second, next to a plain loop, and to what the machine can do.

    python benchmarks/speed.py                                   everything, on the CPU
    python benchmarks/speed.py --only continuous rlhf --rounds 5
    python benchmarks/speed.py --device cuda --json speed.json

Script and plain loop take turns, A B A B, so that what else the machine does meets both; what is compared are the ratios of
neighbours, and of those the median. The first iteration of each turn is warm-up. Plain loops run on the CPU.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

import mujoco
import numpy as np
import torch
import tyro

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import plain  # noqa: E402

Timing = tuple[float, float, float]  # rollout seconds, update seconds, steps or tokens
WORK: dict[str, tuple[str, str, list[list[str]]]] = {  # name -> script, plain loop, sets of flags
    "atari": ("ppo_atari", "atari", [[], ["--bf16"], ["--bf16", "--compile"]]),
    "continuous": ("ppo_continuous", "control", [[], ["--compile"], ["--num-envs", "8", "--num-steps", "256"]]),
    "penalty": ("ppo_penalty", "control", [[], ["--compile"]]),
    "trpo": ("trpo", "", [[]]),
    "rlhf": ("rlhf_ppo_gpt2", "rlhf", [[]]),
}


@dataclass
class Args:
    """Speed of the scripts."""

    only: tuple[Literal["atari", "continuous", "penalty", "trpo", "rlhf"], ...] = ()  # what to measure; default all
    rounds: int = 3  # turns of script and plain loop
    iterations: int = 3  # iterations of each turn after its warm-up
    device: str = "cpu"  # of the scripts
    json: str | None = None  # file for the figures


def timed(name: str, flags: list[str], iterations: int) -> list[Timing]:
    """Iterations of a script's own `train`, without the first, by the clock when it calls compute_gae and end_iteration."""
    module: Any = importlib.import_module(name)
    timings: list[Timing] = []
    clock: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as undo:
        flags = [*flags, "--run-dir", folder, "--checkpoint-every", "0"]
        args = module.parse_args(flags)
        size = args.num_envs * args.num_steps
        args = module.parse_args([*flags, "--total-timesteps", str(size * (iterations + 1))])
        gae, end = module.compute_gae, module.Run.end_iteration

        def compute_gae(*inputs: Any) -> Any:
            synchronize(args.device)
            clock["middle"] = time.perf_counter()
            return gae(*inputs)

        def end_iteration(run: Any, metrics: dict[str, Any]) -> None:
            synchronize(args.device)
            now = time.perf_counter()
            if "begin" in clock:
                timings.append((clock["middle"] - clock["begin"], now - clock["middle"], float(size)))
            end(run, metrics)
            clock["begin"] = time.perf_counter()

        undo.callback(setattr, module, "compute_gae", gae)
        undo.callback(setattr, module.Run, "end_iteration", end)
        module.compute_gae, module.Run.end_iteration = compute_gae, end_iteration
        with contextlib.redirect_stdout(io.StringIO()):
            module.train(args)
    return timings


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


class Rlhf:
    """The PPO part of rlhf_ppo_gpt2.py and of the plain loop, from the same models after a short fine-tuning."""

    def __init__(self) -> None:
        self.module: Any = importlib.import_module("rlhf_ppo_gpt2")
        args = self.args = self.module.Args(sft_size=6_000)
        cpu = torch.device("cpu")
        self.task, raw = self.module.load_task(args, cpu)
        fresh = copy.deepcopy(raw)  # with the activation that transformers gives a GPT-2
        self.reference = self.module.fine_tune(args, self.task, raw)
        self.scorer = self.module.as_scorer(self.reference)
        self.plain_models = [fresh, copy.deepcopy(fresh)]
        for model in self.plain_models:
            model.load_state_dict(self.reference.state_dict())

    def batch(self, iteration: int) -> list[list[int]]:
        return self.module.prompt_batch(self.task.prompts, iteration, self.args.batch_size, 1)

    def script(self) -> Iterator[Timing]:
        m, args = self.module, self.args
        agent = m.make_agent(args, self.reference, self.scorer)
        optimizer = torch.optim.Adam(agent.parameters(), 1e-6, fused=True)
        score = lambda responses: m.reward_scores(self.scorer, responses.tokens, responses.mask)
        for i in count():
            begin = time.perf_counter()
            responses, per_token, _ = m.rollout(args, agent, self.reference, score, self.batch(i), self.task.eos, 0.15)
            middle = time.perf_counter()
            m.update(args, agent, optimizer, m.ppo_loss, responses, per_token)
            yield middle - begin, time.perf_counter() - middle, float(responses.real.sum())

    def plain(self) -> Iterator[Timing]:
        from transformers import GPT2ForSequenceClassification
        from transformers.activations import NewGELUActivation

        policy, reference = self.plain_models
        scorers = [GPT2ForSequenceClassification._from_config(self.scorer.config) for _ in range(2)]
        for model in (policy, reference, *scorers):
            model.eval()
            for block in model.transformer.h:
                block.mlp.act = NewGELUActivation()
        for model in scorers:
            model.load_state_dict(self.scorer.state_dict())
        prompts = (self.module.pad_left(self.batch(i), torch.device("cpu")) for i in count())
        return plain.rlhf(policy, reference, scorers[0], scorers[1], prompts, self.task.eos, self.args.response_length)


def limits(device: str) -> dict[str, float]:
    """What the machine does at best: TFLOP/s of square matrix products, GB/s of copies, steps/s of the simulator alone."""
    import gymnasium as gym

    def rate(work: Callable[[], Any], amount: float) -> float:
        work()
        times = []
        for _ in range(7):
            synchronize(device)
            begin = time.perf_counter()
            work()
            synchronize(device)
            times.append(time.perf_counter() - begin)
        return amount / statistics.median(times)

    a, b = torch.randn(2, 1024, 1024, device=device)
    x = torch.zeros(2**26, dtype=torch.uint8, device=device)
    env = gym.vector.SyncVectorEnv([lambda: gym.make("HalfCheetah-v5")])
    env.reset(seed=1)
    action = np.zeros((1, 6), np.float32)
    one = gym.make("HalfCheetah-v5").unwrapped
    one.reset(seed=1)
    return {
        "float32 TFLOP/s": rate(lambda: a @ b, 2 * 1024**3 / 1e12),
        "bfloat16 TFLOP/s": rate(lambda: a.bfloat16() @ b.bfloat16(), 2 * 1024**3 / 1e12),
        "copy GB/s": rate(x.clone, 2 * x.numel() / 1e9),
        "HalfCheetah alone, steps/s": rate(lambda: [one.step(action[0]) for _ in range(200)], 200),
        "HalfCheetah in a vector environment, steps/s": rate(lambda: [env.step(action) for _ in range(200)], 200),
    }


def median_rates(timings: list[Timing]) -> dict[str, float]:
    return {
        "rollout": statistics.median(n / a for a, _, n in timings),
        "update": statistics.median(n / b for _, b, n in timings),
        "all": statistics.median(n / (a + b) for a, b, n in timings),
    }


def compare(name: str, flags: list[str], args: Args) -> dict[str, Any]:
    """Rates of a script with flags, of its plain loop, and the ratios of their turns."""
    script, plain_name, _ = WORK[name]
    models = Rlhf() if name == "rlhf" else None
    loop = models.plain() if models else getattr(plain, plain_name)() if plain_name else None
    own = models.script() if models else None
    threads = torch.get_num_threads()
    turns: list[tuple[list[Timing], list[Timing]]] = []
    for _ in range(args.rounds):
        if own:
            mine = list(islice(own, args.iterations + 1))[1:]
        else:
            mine = timed(script, [*flags, "--device", args.device], args.iterations)
        if name == "atari":
            torch.set_num_threads(threads)
        theirs = list(islice(loop, args.iterations + 1))[1:] if loop else []
        turns.append((mine, theirs))
    result: dict[str, Any] = {"script": median_rates([t for mine, _ in turns for t in mine])}
    if loop:
        result["plain"] = median_rates([t for _, theirs in turns for t in theirs])
        ratios = [median_rates(mine)["all"] / median_rates(theirs)["all"] for mine, theirs in turns]
        result["ratios"] = [round(x, 2) for x in ratios]
        result["ratio"] = statistics.median(ratios)
    return result


def main() -> None:
    args = tyro.cli(Args)
    mujoco.set_mju_user_warning(lambda text: None)  # or each would go into a file in the current folder
    card = (
        torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or platform.machine()
    )
    report: dict[str, Any] = {"machine": card, "torch": torch.__version__, "threads": torch.get_num_threads()}
    report["limits"] = limits(args.device)
    print(f"{card}, torch {torch.__version__}, {report['threads']} threads")
    for what, value in report["limits"].items():
        print(f"  {what}: {value:,.2f}")
    print(f"{'':44}{'rollout':>10}{'update':>10}{'all':>10}{'plain':>10}{'ratio':>8}   turns")
    for name, (script, _, variants) in WORK.items():
        if args.only and name not in args.only:
            continue
        for flags in variants:
            result = report[" ".join([script, *flags])] = compare(name, flags, args)
            rates = "".join(f"{result['script'][k]:10,.0f}" for k in ("rollout", "update", "all"))
            other = (
                f"{result['plain']['all']:10,.0f}{result['ratio']:8.2f}   {result['ratios']}"
                if "plain" in result
                else ""
            )
            print(f"{' '.join([script, *flags]):44}{rates}{other}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
