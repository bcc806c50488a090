"""`pytest -m faults`: every script stopped at random moments, by three signals, and resumed: nothing is lost.

After SIGKILL the run equals the undisturbed one bit for bit; SIGTERM and SIGINT save where no run would have.
"""

import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import BUDGET, CHOICES, GAUSSIAN, Forked, command, environment, left_in, run, scalars
from test_runs import TOTAL, assert_nothing_lost, assert_same_run, checkpoint, launch, wait_for

pytestmark = pytest.mark.faults


def start(name: str, cwd: Path) -> Forked:
    """A run with a checkpoint every second iteration, once it has said where it writes."""
    process = launch(name, cwd, "--checkpoint-every", 2, BUDGET[name], TOTAL.get(name, 6400))
    wait_for(process, lambda: "saved every" in process.text())
    return process


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    """For each script the folder of a run that nobody stopped, and the seconds that it took."""
    known: dict[str, tuple[Path, float]] = {}

    def get(name: str) -> tuple[Path, float]:
        if name not in known:
            cwd = tmp_path_factory.mktemp(name)
            process = start(name, cwd)
            begin = time.time()
            assert process.wait() == 0, process.text()
            known[name] = next(cwd.glob("runs/*")), time.time() - begin
        return known[name]

    return get


@pytest.mark.parametrize("moment", range(10))
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_a_run_stopped_at_any_moment_is_whole_once_resumed(
    name: str, sign: signal.Signals, moment: int, alone, tmp_path: Path
) -> None:
    expected, seconds = alone(name)
    last = TOTAL.get(name, 6400) // 128
    when = random.Random(f"{name} {sign} {moment}").uniform(0, 0.95)
    while True:  # until the signal came before the end
        process = start(name, tmp_path)
        time.sleep(when * seconds)
        process.send_signal(sign)
        status = process.wait()
        if [checkpoint(path.parent)["iteration"] for path in tmp_path.glob("runs/*/checkpoint.pt")] != [last]:
            break
        assert status in ((0, -9) if sign == signal.SIGKILL else (0,)), "a run that is over has its own status"
        when *= 0.7
        shutil.rmtree(tmp_path / "runs")
        process.output.unlink()
    output = process.text()
    assert process.returncode == (-9 if sign == signal.SIGKILL else 130), output
    (folder,) = (tmp_path / "runs").iterdir()
    if sign != signal.SIGKILL:
        assert "interrupted" in output and "Traceback" not in output and not list(folder.glob("*.tmp"))
    assert not left_in(tmp_path), "a process has outlived the run"
    scalars(folder)  # the event file opens
    resumed = run(name, "--resume", folder, cwd=tmp_path)
    if resumed.returncode == 2 and sign == signal.SIGKILL:  # nothing to go on with, and it says so
        assert "FileNotFoundError" in resumed.stderr and not (folder / "checkpoint.pt").exists()
        return
    assert resumed.returncode == 0, resumed.stderr
    assert list((tmp_path / "runs").iterdir()) == [folder] and not list(folder.glob("*.tmp"))
    assert_nothing_lost(folder, TOTAL.get(name, 6400))
    if sign == signal.SIGKILL:
        assert_same_run(folder, expected)


TRIVIAL = "--env-id counting_envs:Hundred-v0 --num-envs 8 --num-steps 512 --num-minibatches 1 --total-timesteps 2e6"
LONG = {
    "ppo_atari": "--env-id Pong --num-envs 16 --num-steps 32 --num-minibatches 1"
    " --update-epochs 1 --total-timesteps 1e5",
    **dict.fromkeys(GAUSSIAN, f"{TRIVIAL} --update-epochs 1"),
    **dict.fromkeys(CHOICES, f"{TRIVIAL} --update-epochs 1".replace("Hundred", "ChoiceHundred")),
    "trpo": f"{TRIVIAL} --update-epochs 1",
    "rlhf_ppo_gpt2": "--sft-size 64 --num-pairs 40 --min-accuracy 0 --batch-size 8 --num-minibatches 1"
    " --update-epochs 1 --total-episodes 16000 --eval-episodes 8",  # 2,000 updates
    "grpo_gpt2": "--sft-size 64 --num-pairs 40 --min-accuracy 0 --batch-size 8 --num-minibatches 1"
    " --inner-steps 1 --total-episodes 16000 --eval-episodes 8",
    "dpo_gpt2": "--sft-size 64 --num-pairs 40 --batch-size 8 --total-episodes 16000 --eval-episodes 8",
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_long_run_grows_neither_in_memory_nor_in_open_files(name: str, tmp_path: Path) -> None:
    """Less than 5 % from the second fifth of the run to its last one; the log grows as README.md says."""
    flags = LONG[name].split()
    process = subprocess.Popen(
        command(name, *flags),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    resident, files = [], []
    proc = Path("/proc", str(process.pid))
    while process.poll() is None:
        try:
            resident.append(int((proc / "statm").read_text().split()[1]))
            files.append(len(list((proc / "fd").iterdir())))
        except (OSError, IndexError):
            break  # it has just ended
        time.sleep(0.5)
    assert process.wait() == 0, process.stderr and process.stderr.read()
    fifth = len(resident) // 5
    assert fifth >= 5, "too short to tell"
    before, after = (statistics.median(resident[part]) for part in (slice(fifth, 2 * fifth), slice(-fifth, -1)))
    (folder,) = (tmp_path / "runs").iterdir()
    logged = scalars(folder)
    events = sum(path.stat().st_size for path in folder.glob("events*"))
    numbers = sum(len(points) for points in logged.values())
    print(f"{name}: {before * 4 / 1024:.0f} MB to {after * 4 / 1024:.0f} MB, {files[fifth]} to {files[-2]} open files")
    print(f"{events / 1e6:.2f} MB of events, {events / numbers:.0f} bytes a number")
    assert after < 1.05 * before
    assert files[-2] == files[fifth]
    assert events < 100 * numbers + 10_000
