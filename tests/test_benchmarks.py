"""The benchmarks run, their figures are those of the clock and of the log, and an interrupted one goes on."""

import importlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, environment, left_in, scalars


def test_smoke_speed_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "speed.py"
    flags = ["--only", "trpo", "--rounds", "1", "--iterations", "1", "--scaling", "--json", "speed.json"]
    result = subprocess.run(
        [sys.executable, str(script), *flags],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "speed.json").read_text())
    rates = report["trpo"]["script"]
    assert 0 < rates["all"] < min(rates["rollout"], rates["update"])
    assert {f"trpo, {n} environments" for n in (1, 2, 4, 8, 16, 32, 64)} == set(report["scaling"])
    assert f"{rates['all']:,.0f}" in result.stdout and [path.name for path in tmp_path.iterdir()] == ["speed.json"]


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("results")


def test_rates_are_medians_over_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    speed = importlib.import_module("speed")
    rates = speed.median_rates([(1.0, 3.0, 8.0), (2.0, 2.0, 8.0), (8.0, 8.0, 8.0)])
    assert rates == {"rollout": 4.0, "update": 8 / 3, "all": 2.0}


FEW = """
import sys
sys.path.insert(0, {benchmarks!r})
import results
few = "--num-steps 128 --num-minibatches 4 --update-epochs 2 --checkpoint-every 2"
smoke = "--preset smoke --sft-size 64 --num-pairs 64 --total-episodes 128 --min-accuracy 0 --best-of-n 4"
results.experiments = lambda: [
    *results.control("mujoco", "ppo_continuous", "ppo_continuous", "Pendulum-v1", "6400", 2, few),
    *results.control("epochs", "K = 2", "ppo_continuous", "Pendulum-v1", "6400", 1, few),
    *results.rlhf("rlhf", "beta = 0.15", smoke, 1),
]
results.TASKS, results.PUBLISHED = ("Pendulum-v1",), {{"ppo_continuous": {{"Pendulum-v1": (-1000, 10)}}}}
results.main()
"""


def results_py(cwd: Path, *flags: str) -> subprocess.Popen[str]:
    code = FEW.format(benchmarks=str(ROOT / "benchmarks"))
    command = [sys.executable, "-c", code, "--results", "out", *flags]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=environment(), **pipes)


def test_results_are_made_once_go_on_when_interrupted_and_are_those_of_the_log(
    results: ModuleType, tmp_path: Path
) -> None:
    interrupted = results_py(tmp_path, "--workers", "2")
    while len(list(tmp_path.glob("runs/results/*/*/checkpoint.pt"))) < 2:  # both at work have come so far
        assert interrupted.poll() is None, interrupted.communicate()
        time.sleep(0.05)
    interrupted.send_signal(signal.SIGTERM)
    _, errors = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 1 and "interrupted; the same command goes on" in errors
    assert not left_in(tmp_path)
    begun = {folder.name for folder in tmp_path.glob("runs/results/*/*")}
    process = results_py(tmp_path, "--workers", "2")
    table, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    out = tmp_path / "out"
    folders = list(tmp_path.glob("runs/results/*/*"))
    assert begun <= {folder.name for folder in folders} and len(folders) == len(list(out.glob("*.csv"))) == 4
    pictures = {"mujoco.png", "diagnostics.png", "epochs.png", "rlhf.png", "surrogate.png"}
    assert pictures <= {path.name for path in out.iterdir()} and (out / "RESULTS.md").read_text() in table
    facts, curve = results.read(out / "mujoco__ppo_continuous__Pendulum-v1__2.csv")
    (folder,) = (tmp_path / "runs" / "results" / "mujoco__ppo_continuous__Pendulum-v1__2").iterdir()
    logged = scalars(folder)
    returns = np.array(logged["charts/episodic_return"])
    assert facts["last_100"] == pytest.approx(returns[-100:, 1].mean()) and facts["steps"] == 6400
    assert facts["command"].startswith("python ppo_continuous.py --env-id Pendulum-v1 --total-timesteps 6400")
    width = 64  # a hundredth of 6,400 steps
    inside = returns[(returns[:, 0] > 3 * width) & (returns[:, 0] <= 4 * width), 1]
    assert len(inside) == 1 and curve["return"][4 * width] == pytest.approx(inside[0], rel=1e-5)
    assert curve["kl"].dropna().to_list() == pytest.approx([x for _, x in logged["losses/approx_kl"]], rel=1e-4)
    last = [results.read(path)[0]["last_100"] for path in sorted(out.glob("mujoco*.csv"))]
    assert f"| mujoco | Pendulum-v1 | ppo_continuous | 2 | {np.mean(last):,.0f}" in table
    rlhf, _ = results.read(out / "rlhf__beta_0.15__opinions__1.csv")
    assert list(rlhf["best_of_n"]["gold"]) == ["1", "2", "4"]
    written = {path: path.stat().st_mtime for path in out.glob("*.csv")}
    again = results_py(tmp_path)
    text, _ = again.communicate(timeout=200)
    assert again.returncode == 0 and table.endswith(text) and text.startswith("# Results")
    assert {path: path.stat().st_mtime for path in out.glob("*.csv")} == written, "a finished run was repeated"


def test_an_interval_of_many_draws_is_that_of_the_normal_law(results: ModuleType) -> None:
    """Of the mean of 400 numbers: 1.96 standard errors; the interquartile mean drops what lies outside the quarters."""
    x = np.random.default_rng(3).normal(5, 2, 400)
    low, high = results.interval(lambda sample: float(np.mean(sample)), x)
    assert (high - low) / 2 == pytest.approx(1.96 * x.std() / 20, rel=0.05) and low < 5 < high
    assert results.iqm(np.array([-1e9, 1.0, 2.0]), np.array([3.0, 4.0, 5.0, 6.0, 1e9])) == pytest.approx(3.5)


def test_the_surrogate_drawn_is_that_of_figure_1(results: ModuleType) -> None:
    """Positive advantages: flat from 1 + ε on; negative: flat below 1 - ε; the slope is A elsewhere."""
    for axis, knee, sign in zip(results.surrogate_figure().axes, (1.2, 0.8), (1, -1), strict=True):
        ratio, term = axis.lines[0].get_data()
        flat = sign * ratio > sign * knee + 1e-3
        assert term[flat] == pytest.approx(sign * knee, rel=1e-4) and flat.any()
        assert term[~flat] == pytest.approx(sign * ratio[~flat], rel=1e-4, abs=1e-5)


def test_what_is_committed_is_what_the_readme_shows() -> None:
    """Every row of the README's table of results is one of RESULTS.md, and those of SPEED.md are speed.json's."""
    readme, benchmarks = (ROOT / "README.md").read_text(), ROOT / "benchmarks"
    made = (benchmarks / "results" / "RESULTS.md").read_text()
    for folder, text in ((ROOT, readme), (benchmarks / "results", made)):
        for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
            assert (folder / picture).exists(), picture
    rows = re.findall(r"^\| (?:mujoco|atari|rlhf|leash|time-limits|epochs) \|.*$", readme, re.M)
    assert len(rows) == 6 and all(row in made for row in rows)
    report = json.loads((benchmarks / "speed.json").read_text())
    measured = re.findall(
        r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", (benchmarks / "SPEED.md").read_text(), re.M
    )
    assert len(measured) == 14
    for name, *rates in measured:
        assert rates == [f"{report[name]['script'][kind]:,.0f}" for kind in ("rollout", "update", "all")]


def test_what_was_written_by_hand_into_the_results_stays(results: ModuleType, tmp_path: Path) -> None:
    """And the tables above it are made anew."""
    out = tmp_path / "out"
    out.mkdir()
    source = ROOT / "benchmarks" / "results" / "time-limits__bootstrapped__Pendulum-v1__1.csv"
    (out / source.name).write_bytes(source.read_bytes())
    (out / "RESULTS.md").write_text(f"stale\n{results.NOTES}\nA note.\n")
    script = ROOT / "benchmarks" / "results.py"
    command = [sys.executable, str(script), "--workers", "0", "--results", str(out)]
    subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, check=True)
    text = (out / "RESULTS.md").read_text()
    assert text.startswith("# Results") and text.endswith(f"\n{results.NOTES}\nA note.\n") and "stale" not in text
