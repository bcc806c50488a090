"""How fast the scripts are: steps or tokens per second, next to a plain loop, and to what the machine can do.

    python benchmarks/speed.py                                   everything, on the CPU
    python benchmarks/speed.py --only continuous rlhf --rounds 5
    python benchmarks/speed.py --scaling                         also over environments, widths, model sizes, lengths
    python benchmarks/speed.py --device cuda --json speed.json

Script and plain loop take turns, A B A B, so that what else the machine does meets both; what is compared are the
ratios of neighbours, and of those the median. The first iteration of each turn is warm-up. Plain loops run on the CPU,
in a process of their own, as they would by themselves; that of Atari needs OpenCV, and TRPO is held against
SB3-contrib, if it is installed.

Of the limit: operations per second of the update (counted by torch, in float32) over those of large matrix products
with as many threads and of the same type; steps per second of the rollout over those of the simulator alone.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import io
import json
import multiprocessing
import platform
import re
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

import mujoco
import numpy as np
import torch
import tyro
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import plain  # noqa: E402

mujoco.set_mju_user_warning(lambda text: None)  # or each would go into a file in the current folder; in every process

Timing = tuple[float, float, float]  # rollout seconds, update seconds, steps or tokens
WORK: dict[str, tuple[str, str, list[list[str]]]] = {  # name -> script, plain loop, sets of flags
    "atari": ("ppo_atari", "atari", [[], ["--bf16"], ["--bf16", "--compile"]]),
    "continuous": ("ppo_continuous", "control", [[], ["--compile"], ["--num-envs", "8", "--num-steps", "256"]]),
    "discrete": ("ppo_discrete", "discrete", [[], ["--compile"]]),
    "lstm": ("ppo_lstm", "recurrent", [[], ["--shared-lstm"]]),
    "penalty": ("ppo_penalty", "control", [[], ["--compile"]]),
    "trpo": ("trpo", "trpo", [[]]),
    "rlhf": ("rlhf_ppo_gpt2", "rlhf", [[]]),
}


@dataclass
class Args:
    """Speed of the scripts."""

    only: tuple[Literal["atari", "continuous", "discrete", "lstm", "penalty", "trpo", "rlhf"], ...] = ()  # default all
    rounds: int = 3  # turns of script and plain loop
    iterations: int = 3  # iterations of each turn after its warm-up
    scaling: bool = False  # how cost grows with environments, width of the network, model size and length
    device: str = "cpu"  # of the scripts
    json: str | None = None  # file for the figures


def timed(name: str, flags: list[str], iterations: int, width: int = 64) -> tuple[list[Timing], float]:
    """Iterations of a script's own `train` but the first, by the clock when it calls compute_gae and end_iteration.

    Also the floating point operations of an update, counted in that first one, or 0 if it is compiled. `width`
    replaces that of the networks for control.
    """
    module: Any = load(name, width)
    timings: list[Timing] = []
    clock: dict[str, float] = {}
    counter = None if "--compile" in flags else FlopCounterMode(display=False)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as undo:
        flags = [*flags, "--run-dir", folder, "--checkpoint-every", "0"]
        args = module.parse_args(flags)
        size = args.num_envs * args.num_steps
        args = module.parse_args([*flags, "--total-timesteps", str(size * (iterations + 1))])
        gae, end = module.compute_gae, module.Run.end_iteration

        def compute_gae(*inputs: Any) -> Any:
            synchronize(args.device)
            clock["middle"] = time.perf_counter()
            if counter and "begin" not in clock:
                counter.__enter__()
            return gae(*inputs)

        def end_iteration(run: Any, metrics: dict[str, Any]) -> None:
            synchronize(args.device)
            now = time.perf_counter()
            if "begin" in clock:
                timings.append((clock["middle"] - clock["begin"], now - clock["middle"], float(size)))
            elif counter:
                counter.__exit__(None, None, None)
            end(run, metrics)
            clock["begin"] = time.perf_counter()

        undo.callback(torch.set_num_threads, torch.get_num_threads())
        undo.callback(setattr, module, "compute_gae", gae)
        undo.callback(setattr, module.Run, "end_iteration", end)
        module.compute_gae, module.Run.end_iteration = compute_gae, end_iteration
        with contextlib.redirect_stdout(io.StringIO()):
            module.train(args)
    return timings, float(counter.get_total_flops()) if counter else 0.0


def load(name: str, width: int) -> Any:
    """A script as a module, hidden layers of 64 replaced by others if so wished."""
    if width == 64:
        return importlib.import_module(name)
    source = (ROOT / f"{name}.py").read_text()
    module: Any = types.ModuleType(f"{name}_{width}")
    sys.modules[module.__name__] = module  # where its dataclass looks for its types
    exec(compile(re.sub(r"\b64\b(?=[,)])", str(width), source), f"{name}.py", "exec"), module.__dict__)
    return module


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


class Rlhf:
    """The PPO part of rlhf_ppo_gpt2.py and of the plain loop, from the same models after a short fine-tuning."""

    def __init__(self, **changes: Any) -> None:
        self.module: Any = importlib.import_module("rlhf_ppo_gpt2")
        args = self.args = self.module.Args(**({"sft_size": 6_000} | changes))
        self.flops = 0.0  # of the first update
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
        m.start(args)
        score = lambda responses: m.reward_scores(self.scorer, responses.tokens, responses.mask)
        for i in count():
            begin = time.perf_counter()
            responses, _, per_token, _ = m.rollout(args, agent, self.reference, score, self.batch(i), self.task.eos)
            middle = time.perf_counter()
            counter = FlopCounterMode(display=False)
            with counter if not i else contextlib.nullcontext():
                m.update(args, agent, optimizer, responses, per_token)
            self.flops = self.flops or float(counter.get_total_flops()) / float(responses.real.sum())
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


class Untrained(Rlhf):
    """The same with a new GPT-2 of any size, random prompts, and answers that all have the full length."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, **changes: Any):
        import transformers

        self.module, self.flops = importlib.import_module("rlhf_ppo_gpt2"), 0.0
        self.args = self.module.Args(**changes)
        config = transformers.GPT2Config(
            vocab_size=vocabulary,
            n_positions=1024,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
            **self.module.NETWORK,
        )
        torch.manual_seed(1)
        self.reference = transformers.GPT2LMHeadModel._from_config(config)
        self.scorer = self.module.as_scorer(self.reference)
        self.task = types.SimpleNamespace(eos=vocabulary)  # a token that is never drawn
        self.size = sum(p.numel() for p in self.reference.parameters())

    def batch(self, iteration: int) -> list[list[int]]:
        return torch.randint(1, 50, (self.args.batch_size, 8)).tolist()


def rate(work: Callable[[], Any], amount: float, device: str) -> float:
    """Amount per second, the median of seven times after one that is not counted."""
    work()
    times = []
    for _ in range(7):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return amount / statistics.median(times)


def simulator_rate(name: str, num_envs: int) -> float:
    """Steps per second of the simulator alone, with random actions: so many games, or one MuJoCo model."""
    if name == "atari":
        module: Any = importlib.import_module("ppo_atari")
        games = module.AtariGames(module.Args(num_envs=num_envs), num_envs)
        games.reset(1)
        actions = np.random.default_rng(1).integers(games.num_actions, size=(100, num_envs))
        return rate(lambda: [games.step(row) for row in actions], actions.size, "cpu")
    import gymnasium as gym

    env = gym.make("HalfCheetah-v5").unwrapped
    env.reset(seed=1)
    actions = np.random.default_rng(1).uniform(-1, 1, (200, 6)).astype(np.float32)
    return rate(lambda: [env.step(row) for row in actions], len(actions), "cpu")


def limits(device: str) -> dict[str, float]:
    """What the machine does at best: TFLOP/s of matrix products, GB/s of copies, steps/s of the simulators alone."""
    a, b = torch.randn(2, 1024, 1024, device=device)
    low_a, low_b = a.bfloat16(), b.bfloat16()
    x = torch.zeros(2**26, dtype=torch.uint8, device=device)
    products, threads = 2 * 1024**3 / 1e12, torch.get_num_threads()
    found = {
        "float32 TFLOP/s": rate(lambda: a @ b, products, device),
        "bfloat16 TFLOP/s": rate(lambda: low_a @ low_b, products, device),
        "copy GB/s": rate(x.clone, 2 * x.numel() / 1e9, device),
    }
    torch.set_num_threads(1)
    found["float32 TFLOP/s, one thread"] = rate(lambda: a @ b, products, device)
    torch.set_num_threads(threads)
    found["HalfCheetah alone, steps/s"] = simulator_rate("control", 1)
    found["8 games of Breakout alone, steps/s"] = simulator_rate("atari", 8)
    return found


def median_rates(timings: list[Timing]) -> dict[str, float]:
    return {
        "rollout": statistics.median(n / a for a, _, n in timings),
        "update": statistics.median(n / b for _, b, n in timings),
        "all": statistics.median(n / (a + b) for a, b, n in timings),
    }


def serve(name: str, pipe: Any) -> None:
    """The plain loop of a script: says when it is ready, then runs as many iterations as `pipe` asks for, 0 to end."""
    loop = Rlhf().plain() if name == "rlhf" else getattr(plain, WORK[name][1])()
    pipe.send([])
    while n := pipe.recv():
        pipe.send(list(islice(loop, n)))


@contextlib.contextmanager
def plain_loop(name: str) -> Iterator[Callable[[int], list[Timing]]]:
    """Gives the next n timings of what a script is held against, or none if the package for it is missing."""
    package = {"atari": "cv2", "trpo": "sb3_contrib"}.get(name, "torch")
    if not importlib.util.find_spec(package):
        print(f"{name}: nothing to compare with, as the package {package} is not installed")
        yield lambda n: []
        return
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    process = context.Process(target=serve, args=(name, end), daemon=True)
    process.start()
    end.close()  # so that a process that died is noticed
    pipe.recv()  # until it is ready, it would take time from the script

    def timings(n: int) -> list[Timing]:
        pipe.send(n)
        return list(pipe.recv())

    yield timings
    pipe.send(0)
    process.join()


def compare(name: str, flags: list[str], args: Args, machine: dict[str, float]) -> dict[str, Any]:
    """Rates of a script with flags and of its plain loop, ratios of their turns, shares of the machine's limits."""
    models = Rlhf() if name == "rlhf" else None
    own = models.script() if models else None
    turns: list[tuple[list[Timing], list[Timing]]] = []
    flops, size = 0.0, 1.0
    with plain_loop(name) as timings:
        for _ in range(args.rounds):
            if own:
                mine = list(islice(own, args.iterations + 1))[1:]
                flops = models.flops if models else 0.0
            else:
                mine, counted = timed(WORK[name][0], [*flags, "--device", args.device], args.iterations)
                flops, size = counted, mine[0][2]
            turns.append((mine, timings(args.iterations + 1)[1:]))
    rates = median_rates([t for mine, _ in turns for t in mine])
    result: dict[str, Any] = {"script": rates, "limits": {}}
    one = "" if name in ("atari", "rlhf") else ", one thread"
    peak = machine["bfloat16 TFLOP/s" if "--bf16" in flags else f"float32 TFLOP/s{one}"]
    if flops:
        result["limits"]["update"] = flops / size * rates["update"] / 1e12 / peak
    if name not in ("discrete", "lstm", "rlhf"):  # whose simulator is a few lines of Python
        alone = "8 games of Breakout alone" if name == "atari" else "HalfCheetah alone"
        result["limits"]["rollout"] = rates["rollout"] / machine[f"{alone}, steps/s"]
    if turns[0][1]:
        result["plain"] = median_rates([t for _, theirs in turns for t in theirs])
        ratios = [median_rates(mine)["all"] / median_rates(theirs)["all"] for mine, theirs in turns]
        result["ratios"] = [round(x, 2) for x in ratios]
        result["ratio"] = statistics.median(ratios)
    return result


def show(what: str, rates: dict[str, float], more: str = "") -> None:
    print(f"{what:46}" + "".join(f"{rates[k]:10,.0f}" for k in ("rollout", "update", "all")) + more, flush=True)


def scaling(args: Args) -> dict[str, dict[str, float]]:
    """How cost grows: steps/s over environments (always 2,048 steps) and widths, tokens/s over sizes and lengths."""
    tables: dict[str, dict[str, float]] = {}

    def add(what: str, timings: list[Timing]) -> None:
        tables[what] = median_rates(timings)
        show(what, tables[what])

    for n in (1, 2, 4, 8, 16, 32, 64):
        flags = ["--num-envs", str(n), "--num-steps", str(2048 // n), "--device", args.device]
        for name in ("continuous", "trpo", "atari"):
            if not args.only or name in args.only:
                more = ["--num-minibatches", "8"] if name == "atari" else []  # of 256, as by default
                add(f"{WORK[name][0]}, {n} environments", timed(WORK[name][0], [*flags, *more], args.iterations)[0])
    for width in (32, 64, 128, 256, 512, 1024) if not args.only or "continuous" in args.only else ():
        flags = ["--device", args.device]
        add(f"ppo_continuous, width {width}", timed("ppo_continuous", flags, args.iterations, width)[0])
    sizes = ((2, 128, 4, 64), (6, 320, 10, 8_000), (12, 768, 12, 50_257))  # layers, width, heads, vocabulary
    for size in sizes if not args.only or "rlhf" in args.only else ():
        models = Untrained(*size, batch_size=16, num_minibatches=2)
        what = f"rlhf_ppo_gpt2, {models.size / 1e6:.1f}M parameters"
        add(what, list(islice(models.script(), args.iterations + 1))[1:])
    for length in (24, 48, 96, 192) if not args.only or "rlhf" in args.only else ():
        models = Untrained(*sizes[0], response_length=length)
        what = f"rlhf_ppo_gpt2, responses of {length} tokens"
        add(what, list(islice(models.script(), args.iterations + 1))[1:])
    return tables


def main() -> None:
    args = tyro.cli(Args)
    card = (
        torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or platform.machine()
    )
    report: dict[str, Any] = {"machine": card, "torch": torch.__version__, "threads": torch.get_num_threads()}
    report["limits"] = limits(args.device)
    print(f"{card}, torch {torch.__version__}, {report['threads']} threads")
    for what, value in report["limits"].items():
        print(f"  {what}: {value:,.2f}")
    print(f"{'':46}{'rollout':>10}{'update':>10}{'all':>10}{'of the limit':>16}{'plain':>10}{'ratio':>8}   turns")
    for name, (script, _, variants) in WORK.items():
        if args.only and name not in args.only:
            continue
        for flags in variants:
            result = report[" ".join([script, *flags])] = compare(name, flags, args, report["limits"])
            shares = "".join(
                f"{result['limits'][k]:8.0%}" if k in result["limits"] else " " * 8 for k in ("rollout", "update")
            )
            other = (
                f"{result['plain']['all']:10,.0f}{result['ratio']:8.2f}   {result['ratios']}"
                if "plain" in result
                else ""
            )
            show(" ".join([script, *flags]), result["script"], shares + other)
    if args.scaling:
        report["scaling"] = scaling(args)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
