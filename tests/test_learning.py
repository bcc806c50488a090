"""The final test: the scripts learn. Short runs whose outcome is far from chance."""

from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, run, scalars

README_PENDULUM = (
    "--env-id Pendulum-v1 --num-envs 4 --num-steps 512 --gamma 0.9 --learning-rate 1e-3 --total-timesteps 2e5".split()
)


def last_returns(folder: Path, count: int) -> float:
    return float(np.mean([value for _, value in scalars(folder)["charts/episodic_return"][-count:]]))


@pytest.mark.slow
def test_a_task_that_only_ends_by_time_limit_is_solved(tmp_path: Path) -> None:
    """Pendulum with the README's command: about -1200 by chance; with time limits as death it stays far below -250."""
    assert " ".join(README_PENDULUM) in (ROOT / "README.md").read_text()
    result = run("ppo_continuous", *README_PENDULUM, cwd=tmp_path, timeout=1500)
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert last_returns(folder, 50) > -250


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_continuous", "ppo_penalty"])
def test_inverted_pendulum_with_default_flags(name: str, tmp_path: Path) -> None:
    """Chance is about 6 of 1000."""
    result = run(name, "--env-id", "InvertedPendulum-v5", "--total-timesteps", 6e4, cwd=tmp_path, timeout=1500)
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert last_returns(folder, 20) > 300
