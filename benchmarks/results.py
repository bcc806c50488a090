"""Curves with several seeds: make the runs that are still missing, then tables and figures of all that are there.

    python benchmarks/results.py                                  every experiment
    python benchmarks/results.py --only rlhf leash --workers 2    some of them
    python benchmarks/results.py --workers 0                      tables and figures alone
    python benchmarks/results.py --workers 0 --film runs/FOLDER   also pictures of what that run's agent does

A finished run lies as one CSV file in benchmarks/results and is never made again; one that was interrupted goes on
from its checkpoint in --run-dir. Everything comes from the TensorBoard events that any run writes.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import tyro
from matplotlib.ticker import EngFormatter
from scipy.stats import bootstrap, trim_mean
from tqdm import tqdm

matplotlib.use("Agg")
ROOT = Path(__file__).parents[1]
BINS = 100  # rows of a CSV file
FEWEST = 5  # seeds from which on an interval says something; below, each seed does
TASKS = ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4")
# 1M steps, last 100 training episodes: mean and std over 3 seeds (PPO: CleanRL), mean over 6 (TRPO: baselines, v2)
PUBLISHED: dict[str, dict[str, tuple[float, float | None]]] = {
    "ppo_continuous": {"HalfCheetah-v4": (1443, 46), "Hopper-v4": (2383, 272), "Walker2d-v4": (2288, 572)},
    "trpo": {"HalfCheetah-v4": (1290, None), "Hopper-v4": (1913, None), "Walker2d-v4": (2343, None)},
    "ppo_atari": {"Breakout": (21.9, None), "Pong": (-2.6, None)},
    "constant step size": {"Breakout": (21.9, None), "Pong": (-2.6, None)},
}
TAGS = {  # column -> tags, the first that a run has; these six are the diagnostics of a PPO run
    "return": ["charts/episodic_return"],
    "kl": ["losses/kl", "kl/old", "losses/approx_kl"],
    "clipfrac": ["losses/clipfrac"],
    "entropy": ["losses/entropy"],
    "explained_variance": ["losses/explained_variance"],
    "value_loss": ["losses/value_loss"],
    "gold": ["eval/gold"],
    "proxy": ["eval/proxy"],
    "kl_ref": ["eval/kl_ref"],
    "length": ["eval/length"],
    "ended": ["eval/ended"],
}
INTRODUCTION = """# Results

Made by `python benchmarks/results.py`, which makes every run that is not there yet, as many at once as the machine has
cores; interrupted, the same command goes on. Each run is one CSV file, whose first line holds its command, versions and
machine.

Returns are means over the last 100 training episodes; RLHF gives the rise of the mean gold score on held-out
prompts. ± is the standard deviation over seeds; from five seeds on, IQM is the interquartile mean with a 95 % bootstrap
interval. Published: CleanRL's PPO at 1M steps (3 seeds), baselines' TRPO (older environments, 6 seeds), and for Atari
what baselines' ppo2 has after the first of ten million steps, read off the curves of
[its benchmark](https://github.com/openai/baselines/blob/46fa1b645325868940adfd423cdf26a7b34ecaa8/benchmarks_atari10M.htm)
(6 seeds).
"""
NOTES = "\n## Figures and notes\n"  # what RESULTS.md has from here on is written by hand and stays
PACKAGES = ("torch", "numpy", "gymnasium", "mujoco", "ale-py", "transformers")


@dataclass(frozen=True)
class Spec:
    """One run."""

    experiment: str
    label: str  # runs that differ by their seed alone share it
    script: str
    task: str
    flags: str
    seed: int

    @property
    def name(self) -> str:
        return re.sub(r"[^\w.-]+", "_", f"{self.experiment}__{self.label}__{self.task}__{self.seed}")

    @property
    def command(self) -> list[str]:
        return [f"{self.script}.py", *self.flags.split(), "--seed", str(self.seed)]


def control(experiment: str, label: str, script: str, task: str, steps: str, seeds: int, more: str = "") -> list[Spec]:
    flags = f"--env-id {task} --total-timesteps {steps} {more}".strip()
    return [Spec(experiment, label, script, task, flags, seed) for seed in range(1, seeds + 1)]


def rlhf(experiment: str, label: str, flags: str, seeds: int) -> list[Spec]:
    return [Spec(experiment, label, "rlhf_ppo_gpt2", "opinions", flags, seed) for seed in range(1, seeds + 1)]


def experiments() -> list[Spec]:
    """All runs, those that take longest last."""
    pendulum = "--num-envs 4 --num-steps 512 --gamma 0.9 --learning-rate 1e-3"
    specs = rlhf("rlhf", "beta = 0.15", "--best-of-n 64", 5)
    specs += [spec for beta in ("0", "0.05", "0.5") for spec in rlhf("leash", f"beta = {beta}", f"--beta {beta}", 3)]
    for label, flag in (("bootstrapped", ""), ("counted as death", " --no-bootstrap-truncated")):
        specs += control("time-limits", label, "ppo_continuous", "Pendulum-v1", "2e5", 3, pendulum + flag)
    for k in (3, 10, 15):
        specs += control("epochs", f"K = {k}", "ppo_continuous", "Hopper-v4", "3e5", 3, f"--update-epochs {k}")
    for script in ("ppo_continuous", "ppo_penalty", "trpo"):
        specs += [spec for task in TASKS for spec in control("mujoco", script, script, task, "1e6", 3)]
    specs.sort(key=lambda spec: spec.seed if spec.experiment == "mujoco" else 0)  # first one seed of everything
    for task in ("CartPole-v1", "Acrobot-v1"):
        specs += control("discrete", "ppo_discrete", "ppo_discrete", task, "5e5", 5)
    for script in ("ppo_lstm", "ppo_discrete"):
        specs += control("memory", script, script, "ppo_lstm:CartPoleNoVel-v1", "3e5", 5)
    for task, seeds in (("Breakout", 2), ("Pong", 1)):
        specs += control("atari", "ppo_atari", "ppo_atari", task, "1e6", seeds)
    for task, more in (("Breakout", ""), ("Pong", " --bf16")):
        specs += control("atari", "constant step size", "ppo_atari", task, "1e6", 1, "--no-anneal-lr" + more)
    return specs


@dataclass
class Args:
    """Learning results of the scripts."""

    only: tuple[str, ...] = ()  # experiments; default all
    workers: int = max(1, os.cpu_count() or 1)  # runs at once, each with its share of the cores; 0 makes none
    run_dir: str = "runs/results"  # where run folders lie until they are done
    results: str = str(ROOT / "benchmarks" / "results")  # where CSV files, tables and figures lie
    film: str | None = None  # run folder whose agent is filmed; without a display MuJoCo needs MUJOCO_GL=egl


def digest(folder: Path, spec: Spec) -> tuple[dict[str, Any], pd.DataFrame]:
    """What is kept of a run folder: facts about it, and the mean of each tag over each hundredth of the run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    log.Reload()
    tags = log.Tags()["scalars"]
    events: dict[str, Any] = {
        name: next((log.Scalars(tag) for tag in wanted if tag in tags), []) for name, wanted in TAGS.items()
    }
    times = [(event.step, event.wall_time) for event in log.Scalars("charts/SPS")]
    steps, clock = (np.array(column) for column in zip(*times, strict=True))
    gaps = np.diff(clock, prepend=2 * clock[0] - clock[1] if len(clock) > 1 else clock[0])
    gaps[gaps > 20 * np.median(gaps)] = np.median(gaps)  # while it was interrupted
    width = -(-steps[-1] // BINS)
    ends = lambda at: np.minimum(-(-np.asarray(at) // width) * width, steps[-1])  # of the hundredth that a step lies in
    table = pd.DataFrame({"seconds": pd.Series(gaps.cumsum(), index=steps).groupby(ends(steps)).last()})
    for name, points in events.items():
        if points:
            series = pd.Series([point.value for point in points]).groupby(ends([point.step for point in points])).mean()
            table = table.join(series.rename(name), how="outer")
    facts: dict[str, Any] = {
        "command": " ".join(["python", *spec.command]),
        "last_100": float(np.mean([point.value for point in events["return"][-100:]])),
        "seconds": round(float(gaps.sum())),
        "steps": int(steps[-1]),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    if facts["last_100"] != facts["last_100"] or spec.script == "rlhf_ppo_gpt2":
        del facts["last_100"]
    if "reward_model/accuracy" in tags:
        facts["accuracy"] = round(log.Scalars("reward_model/accuracy")[0].value, 4)
    best = {tag.split("/")[1]: log.Scalars(tag) for tag in tags if tag.startswith("best_of_n/")}
    if best:
        facts["best_of_n"] = {k: {event.step: round(event.value, 4) for event in v} for k, v in best.items()}
    return facts, table.rename_axis("step")


def write(path: Path, facts: dict[str, Any], table: pd.DataFrame) -> None:
    aside = path.with_suffix(".tmp")
    aside.write_text(f"# {json.dumps(facts)}\n{table.to_csv(float_format='%.6g')}")
    aside.replace(path)


def read(path: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    facts = json.loads(path.read_text().split("\n", 1)[0].removeprefix("# "))
    return facts, pd.read_csv(path, comment="#", index_col="step")


def follow(
    spec: Spec, args: Args, report: tqdm, running: list[subprocess.Popen[str]], stop: threading.Event
) -> str | None:
    """Make a run, or go on with it, and write its CSV file; returns what went wrong, if anything."""
    if stop.is_set():
        return None
    runs = Path(args.run_dir).absolute() / spec.name
    begun = sorted(folder.parent for folder in runs.glob("*/args.json"))
    flags = [*spec.command[1:], "--run-dir", str(runs)]
    if begun and ((begun[-1] / "checkpoint.pt").exists() or spec.script == "rlhf_ppo_gpt2"):
        flags = ["--resume", str(begun[-1])]
    threads = max(1, (os.cpu_count() or 1) // args.workers)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / f"{spec.script}.py"), *flags],
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    running.append(process)
    assert process.stdout
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        report.set_postfix_str(f"{spec.name}: {lines[-1][:60]}")
    if process.wait():
        return f"{spec.name} ended with status {process.returncode}: {lines[-1] if lines else ''}"
    folder = max(runs.glob("*/args.json")).parent
    write(Path(args.results) / f"{spec.name}.csv", *digest(folder, spec))
    report.write(f"{spec.name} is done")
    return None


def make_runs(specs: list[Spec], args: Args) -> list[str]:
    """Run what has no CSV file yet, `workers` at a time; returns what went wrong."""
    missing = [spec for spec in specs if not (Path(args.results) / f"{spec.name}.csv").exists()]
    failures, running, stop = list[str](), list[subprocess.Popen[str]](), threading.Event()
    report = tqdm(total=len(specs), initial=len(specs) - len(missing), unit="run", disable=not sys.stderr.isatty())
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        futures = [pool.submit(follow, spec, args, report, running, stop) for spec in missing]
        try:
            for future in concurrent.futures.as_completed(futures):
                report.update()
                if failure := future.result():
                    failures.append(failure)
                    report.write(failure, file=sys.stderr)
        except KeyboardInterrupt:
            stop.set()
            for process in running:
                process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    report.close()
    return failures


def interval(statistic: Any, *samples: Any) -> tuple[float, float]:
    """95 % bootstrap interval, each sample drawn anew on its own (percentiles of 9,999 draws)."""
    result = bootstrap(samples, statistic, vectorized=False, method="percentile", rng=np.random.default_rng(1))
    return tuple(map(float, result.confidence_interval))  # type: ignore[return-value]


def iqm(*samples: Any) -> float:
    """The interquartile mean of all samples together: a quarter of the values dropped at each end."""
    return float(trim_mean(np.concatenate(samples), 0.25))


Runs = dict[Spec, tuple[dict[str, Any], pd.DataFrame]]


def grouped(runs: Runs, experiment: str) -> Iterator[tuple[str, str, Runs]]:
    """Label, task and runs of each group of an experiment that differs by the seed alone."""
    keys = dict.fromkeys((s.label, s.task) for s in runs if s.experiment == experiment)
    for label, task in keys:
        yield (
            label,
            task,
            {s: r for s, r in runs.items() if (s.experiment, s.label, s.task) == (experiment, label, task)},
        )


def final(spec: Spec, facts: dict[str, Any], table: pd.DataFrame) -> float:
    """The figure of a run: mean return of its last 100 episodes, or by how much the gold score rose."""
    if spec.script == "rlhf_ppo_gpt2":
        gold = table["gold"].dropna()
        return float(gold.iloc[-1] - gold.iloc[0])
    return float(facts["last_100"])


def tables(runs: Runs) -> str:
    """Markdown: for each group the figures of its seeds, and for each script one over all tasks."""
    lines = [
        INTRODUCTION,
        "| experiment | task | what | seeds | mean ± std | IQM | each seed | published |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for experiment in dict.fromkeys(spec.experiment for spec in runs):
        for label, task, group in grouped(runs, experiment):
            x = np.array([final(spec, *run) for spec, run in group.items()])
            digits = 2 if np.abs(x).max() < 100 else 0
            show = lambda v, digits=digits: f"{v:,.{digits}f}"
            middle = f"{show(iqm(x))} [{', '.join(map(show, interval(iqm, x)))}]" if len(x) >= FEWEST else "-"
            mean, std = PUBLISHED.get(label, {}).get(task, (None, None))
            published = "" if mean is None else f"{mean}" + (f" ± {std}" if std else "")
            spread = f" ± {show(x.std(ddof=1))}" if len(x) > 1 else ""
            lines.append(
                f"| {experiment} | {task} | {label} | {len(x)} | {show(x.mean())}{spread} | {middle} |"
                f" {', '.join(map(show, x))} | {published} |"
            )
    lines += [
        "",
        "Over the three MuJoCo tasks together, each return divided by the published one of PPO:",
        "",
        "| script | mean | each seed |",
        "|---|---|---|",
    ]
    scores: dict[str, list[np.ndarray]] = {}
    for label, task, group in grouped(runs, "mujoco"):
        x = np.array([final(spec, *run) for spec, run in group.items()])
        scores.setdefault(label, []).append(x / PUBLISHED["ppo_continuous"][task][0])
    for label, samples in scores.items():
        if len(samples) == len(TASKS) and len(set(map(len, samples))) == 1:  # each seed on every task
            over_tasks = np.mean(samples, axis=0)
            lines.append(f"| {label} | {over_tasks.mean():.2f} | {', '.join(f'{x:.2f}' for x in over_tasks)} |")
    lines += [
        "",
        "RLHF, means over 256 held-out prompts' answers, each seed, and the reward model's accuracy on held-out pairs:",
        "",
        "| what | gold before | gold after | proxy after | KL to the reference | ended | accuracy |",
        "|---|---|---|---|---|---|---|",
    ]
    for experiment in ("rlhf", "leash"):
        for label, _, group in grouped(runs, experiment):
            ends = [table.dropna(subset=["gold"]) for _, table in group.values()]
            columns = [[t["gold"].iloc[0] for t in ends]]
            columns += [[t[name].iloc[-1] for t in ends] for name in ("gold", "proxy", "kl_ref", "ended")]
            columns.append([facts["accuracy"] for facts, _ in group.values()])
            lines.append(
                f"| {label} | " + " | ".join(", ".join(f"{x:.2f}" for x in column) for column in columns) + " |"
            )
    facts = [facts for facts, _ in runs.values()]
    kinds = {(f["machine"], ", ".join(f"{k} {v}" for k, v in f["versions"].items())) for f in facts}
    lines += ["", "Machine and versions:", "", *(f"- {machine}: {versions}" for machine, versions in sorted(kinds)), ""]
    return "\n".join(lines)


def draw(axis: Any, group: Runs, column: str, label: str) -> None:
    """Mean and band of one standard deviation over the seeds of a group, against steps."""
    curves = [table[column].interpolate(limit_area="inside") for _, table in group.values() if column in table]
    if not curves:
        return
    together = pd.concat(curves, axis=1)
    smooth = together.rolling(3, min_periods=1, center=True).mean().to_numpy()
    mean, std = smooth.mean(1), smooth.std(1)
    (line,) = axis.plot(
        together.index, mean, label=f"{label} ({len(curves)} seed{'s' * (len(curves) > 1)})", linewidth=1.4
    )
    axis.fill_between(together.index, mean - std, mean + std, alpha=0.2, linewidth=0, color=line.get_color())


def panels(rows: int, columns: int, width: float = 3.6, height: float = 2.8) -> tuple[Any, list[Any]]:
    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure, list(axes.flat)


def returns_figure(runs: Runs, experiment: str) -> Any:
    """Return against steps, a panel for each task; the runs shared a machine, so there is no axis of time."""
    groups = list(grouped(runs, experiment))
    tasks = list(dict.fromkeys(task for _, task, _ in groups))
    figure, axes = panels(1, len(tasks))
    for axis, task in zip(axes, tasks, strict=True):
        for label, of, group in groups:
            if of == task:
                draw(axis, group, "return", label)
        axis.set(title=task, xlabel="steps", ylabel="return" if axis is axes[0] else "")
    axes[0].legend(fontsize="small", frameon=False)
    return figure


def columns_figure(runs: Runs, experiment: str, columns: list[str]) -> Any:
    """One panel for each column, one line for each label."""
    rows = -(-len(columns) // 3)
    figure, axes = panels(rows, min(len(columns), 3))
    for axis, column in zip(axes, columns, strict=False):
        for label, task, group in grouped(runs, experiment):
            draw(axis, group, column, label)
            axis.set(title=column.replace("_", " "), xlabel=f"steps of {task}")
    axes[0].legend(fontsize="small", frameon=False)
    return figure


def diagnostics_figure(runs: Runs) -> Any:
    """The six metrics that tell what a run of ppo_continuous.py does, each task a line."""
    figure, axes = panels(2, 3)
    for axis, column in zip(axes, list(TAGS)[:6], strict=True):
        for label, task, group in grouped(runs, "mujoco"):
            if label == "ppo_continuous":
                draw(axis, group, column, task)
        axis.set(title=column.replace("_", " "), xlabel="steps")
    axes[0].legend(fontsize="small", frameon=False)
    return figure


def leash_figure(runs: Runs) -> Any:
    """Gold and proxy against the root of the KL to the reference, each β a colour, with the best of n answers."""
    figure, axes = panels(1, 2, 4.6, 3.4)
    for axis, judge in zip(axes, ("gold", "proxy"), strict=True):
        for i, (label, _, group) in enumerate(
            sorted([*grouped(runs, "leash"), *grouped(runs, "rlhf")], key=lambda group: group[0])
        ):
            for j, (_, table) in enumerate(group.values()):
                path = table[["kl_ref", judge]].dropna()
                style = {"color": f"C{i}", "alpha": 0.6, "linewidth": 1, "markersize": 3}
                root = path["kl_ref"].clip(lower=0) ** 0.5
                axis.plot(root, path[judge], ".-", label=label if not j else None, **style)
        best = [facts["best_of_n"] for facts, _ in runs.values() if "best_of_n" in facts]
        if best:
            n = list(best[0]["kl"])
            d = [best[0]["kl"][k] ** 0.5 for k in n]
            axis.plot(d, [np.mean([b[judge][k] for b in best]) for k in n], "k--", label=f"best of n to {n[-1]}, mean")
        axis.set(title=f"{judge} score", xlabel="√KL to the reference (√nats per response)")
    axes[0].legend(fontsize="small", frameon=False)
    return figure


def surrogate_figure() -> Any:
    """Figure 1 of arXiv:1707.06347: one term of L^CLIP against the ratio, by the script's own loss."""
    sys.path.insert(0, str(ROOT))
    loss = importlib.import_module("ppo_continuous").clipped_surrogate_loss
    figure, axes = panels(1, 2, 3.4, 2.6)
    ratios = torch.linspace(0.01, 2, 400)
    for axis, advantage in zip(axes, (1.0, -1.0), strict=True):
        terms = [-float(loss(ratio.log()[None], torch.tensor([advantage]), 0.2)) for ratio in ratios]
        axis.plot(ratios, terms, color="black")
        axis.plot(1, advantage, "o", color="C3")
        axis.axvline(1 + 0.2 * advantage, color="grey", linestyle=":")
        axis.set(title=f"A {'>' if advantage > 0 else '<'} 0", xlabel="ratio r", ylabel="$L^{CLIP}$")
    return figure


def film_strip(folder: Path) -> Any:
    """Eight pictures of the beginning of an episode played by a run's agent; MuJoCo's camera stays where it is."""
    from imageio.v2 import mimread

    saved = json.loads((folder / "args.json").read_text())
    script = next(name for name in ("ppo_atari", "ppo_continuous", "ppo_penalty", "trpo") if name == saved["exp_name"])
    command = [sys.executable, str(ROOT / f"{script}.py"), "--evaluate", str(folder), "--eval-episodes", "1"]
    subprocess.run([*command, "--capture-video", "--no-eval-sample"], check=True)
    frames = mimread(max((folder / "videos").glob("evaluation*")), memtest=False)
    figure, axes = panels(1, 8, 1.6, 1.7)
    for axis, frame in zip(axes, frames[10:140:16], strict=False):
        axis.imshow(frame)
        axis.axis("off")
    return figure


def main() -> None:
    args = tyro.cli(Args)
    specs = experiments()
    known = dict.fromkeys(spec.experiment for spec in specs)
    if unknown := [name for name in args.only if name not in known]:
        print(f"error: --only {unknown[0]} is none of {', '.join(known)}", file=sys.stderr)
        sys.exit(2)
    results = Path(args.results)
    results.mkdir(parents=True, exist_ok=True)
    failures = list[str]()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if args.workers:
        try:
            failures = make_runs([spec for spec in specs if not args.only or spec.experiment in args.only], args)
        except KeyboardInterrupt:
            sys.exit("error: interrupted; the same command goes on")
    runs = {spec: read(path) for spec in specs if (path := results / f"{spec.name}.csv").exists()}
    figures = {"surrogate": surrogate_figure}
    there = {spec.experiment for spec in runs}
    if "mujoco" in there:
        figures |= {"mujoco": lambda: returns_figure(runs, "mujoco"), "diagnostics": lambda: diagnostics_figure(runs)}
    for experiment in {"atari", "discrete", "memory"} & there:
        figures[experiment] = partial(returns_figure, runs, experiment)
    if {"rlhf", "leash"} & there:
        figures["rlhf"] = lambda: leash_figure(runs)
    if "time-limits" in there:
        figures["time-limits"] = lambda: columns_figure(runs, "time-limits", ["return", "explained_variance"])
    if "epochs" in there:
        figures["epochs"] = lambda: columns_figure(runs, "epochs", ["return", "kl", "clipfrac"])
    if args.film:
        figures["agent"] = lambda: film_strip(Path(args.film or ""))
    for name, make in figures.items():
        figure = make()
        figure.savefig(results / f"{name}.png", dpi=110)
        plt.close(figure)
    if runs:
        text = tables(runs)
        path = results / "RESULTS.md"
        old = path.read_text() if path.exists() else ""
        _, notes, figures_and_words = old.partition(NOTES)
        path.write_text(text + notes + figures_and_words)
        print(text)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
