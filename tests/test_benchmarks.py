"""The benchmark runs and its figures are those of the clock."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment


def test_smoke_speed_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "speed.py"
    flags = ["--only", "trpo", "--rounds", "1", "--iterations", "1", "--json", "speed.json"]
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
    assert f"{rates['all']:,.0f}" in result.stdout and [path.name for path in tmp_path.iterdir()] == ["speed.json"]


def test_rates_are_medians_over_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    speed = importlib.import_module("speed")
    rates = speed.median_rates([(1.0, 3.0, 8.0), (2.0, 2.0, 8.0), (8.0, 8.0, 8.0)])
    assert rates == {"rollout": 4.0, "update": 8 / 3, "all": 2.0}
