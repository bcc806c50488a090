"""Runs as users have them: real processes, killed and resumed, wrong flags, what is printed, what lies in the folder."""

import io
import json
import math
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    BOXES,
    BUDGET,
    CONTROL,
    MODULES,
    ROOT,
    SMALL,
    command,
    environment,
    left_in,
    run,
    run_small,
    scalars,
)

TIMING = {"charts/SPS", "charts/rollout_tokens_per_second", "charts/update_tokens_per_second"}


def checkpoint(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def flatten(state: Any, path: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        return {k: v for key, value in state.items() for k, v in flatten(value, f"{path}/{key}").items()}
    if isinstance(state, list):
        return {k: v for i, value in enumerate(state) for k, v in flatten(value, f"{path}/{i}").items()}
    return {path: state}


def assert_same_run(a: Path, b: Path) -> None:
    """Weights, optimiser, statistics, step and every logged scalar but the clock are equal bit for bit."""
    first, second = flatten(checkpoint(a)), flatten(checkpoint(b))
    assert first.keys() == second.keys()
    for key, value in first.items():
        same = torch.equal(value, second[key]) if isinstance(value, torch.Tensor) else value == second[key]
        assert same, key
    logs = [{k: v for k, v in scalars(folder).items() if k not in TIMING} for folder in (a, b)]
    assert logs[0].keys() == logs[1].keys()
    for tag, events in logs[0].items():
        steps = [step for step, _ in events]
        assert steps == sorted(set(steps)), f"{tag} shows a step twice"
        assert steps == [step for step, _ in logs[1][tag]], tag
        for (_, x), (_, y) in zip(events, logs[1][tag], strict=True):
            assert x == y or (math.isnan(x) and math.isnan(y)), tag


TOTAL = {"ppo_atari": 1280, "rlhf_ppo_gpt2": 1920}  # steps of a run long enough to be stopped half-way; others: 6,400


def interrupted(name: str, cwd: Path, sign: signal.Signals, *flags: Any) -> tuple[Path, int, str]:
    """Start a run, send it a signal once its first checkpoint lies there; returns folder, status and what it printed."""
    total = TOTAL.get(name, 6400)
    process = subprocess.Popen(
        command(name, *SMALL[name], "--checkpoint-every", 3, BUDGET[name], total, *flags),
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs inherit that it is ignored
    )
    while not (found := list(cwd.glob("runs/*/checkpoint.pt"))):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.send_signal(sign)
    output, _ = process.communicate(timeout=200)
    return found[0].parent, process.returncode, output


def test_a_run_killed_and_resumed_equals_one_left_alone(name: str, tmp_path: Path) -> None:
    folder, status, _ = interrupted(name, tmp_path, signal.SIGKILL)
    total = TOTAL.get(name, 6400)
    assert status == -signal.SIGKILL
    assert 0 < checkpoint(folder)["iteration"] < total // 128, "the run was over before it was killed"
    resumed = run(name, "--resume", folder, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert checkpoint(folder)["iteration"] == total // 128 and list((tmp_path / "runs").iterdir()) == [folder]
    alone = run_small(name, "--checkpoint-every", 3, BUDGET[name], total, cwd=tmp_path)
    assert_same_run(folder, alone)
    again = run(name, "--resume", folder, cwd=tmp_path)
    assert again.returncode == 0 and "this run is finished" in again.stdout
    assert_same_run(folder, alone)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_an_interrupt_closes_the_log_and_names_the_folder(name: str, tmp_path: Path, sign: signal.Signals) -> None:
    folder, status, output = interrupted(name, tmp_path, sign)
    assert status == 130
    assert "interrupted" in output and f"{folder} (not finished: --resume" in output and "Traceback" not in output
    assert not list(folder.glob("*.tmp")) and checkpoint(folder)["iteration"] >= 3
    assert len(scalars(folder)["losses/value_loss"]) >= checkpoint(folder)["iteration"]


def test_an_interrupt_within_a_checkpoint_is_one(name: str, tmp_path: Path, monkeypatch) -> None:
    """torch turns what is raised while it writes into an error of the file; the old checkpoint stands either way."""
    module = MODULES[name]
    args = module.parse_args([*SMALL[name], "--checkpoint-every", "1", "--run-dir", str(tmp_path)])
    files = iter(range(9))

    class Interrupted(io.FileIO):
        number = 0

        def write(self, data: Any) -> int:
            if self.number == 1 and self.tell() > 1000:
                raise KeyboardInterrupt
            return super().write(data)

    def opened(path: Any, mode: str) -> Any:
        file = Interrupted(path, mode)
        file.number = next(files)
        return file

    monkeypatch.setattr(module, "open", opened, raising=False)
    with pytest.raises(KeyboardInterrupt):
        module.train(args)
    (folder,) = tmp_path.iterdir()
    assert checkpoint(folder)["iteration"] == 1 and not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_a_signal_after_the_end_changes_nothing(tmp_path: Path, sign: signal.Signals) -> None:
    process = subprocess.Popen(
        command("ppo_continuous", *SMALL["ppo_continuous"]),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stderr
    while "(finished)" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.2)
    process.send_signal(sign)
    assert process.wait(60) == 0 and not process.stderr.read()


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(name: str, tmp_path: Path) -> None:
    one, two, three = (run_small(name, "--seed", seed, cwd=tmp_path) for seed in (1, 1, 2))
    assert_same_run(one, two)
    weights = [checkpoint(folder)["agent"] for folder in (one, three)]
    assert any(not torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    steps = [step for step, _ in scalars(one)["losses/value_loss"]]
    assert steps == [128, 256, 384, 512] and checkpoint(one)["iteration"] == 4


BAD = [
    (["--num-minibatches", "0"], "--num-minibatches"),
    (["--num-minibatches", "100"], "--num-minibatches"),
    (["--learning-rate", "-1"], "--learning-rate"),
    (["--learning-rate", "inf"], "--learning-rate"),
    (["--gamma", "1.5"], "--gamma"),
    (["--gae-lambda", "-0.1"], "--gae-lambda"),
    (["--seed", "-1"], "--seed"),
    (["--checkpoint-every", "-1"], "--checkpoint-every"),
    (["--device", "foo"], "--device"),
    (["--device", "cuda:9"], "--device"),
    (["--device", "mps"], "--device"),
    (["--device", "meta"], "--device"),
    (["--device", "cuda", "--no-cuda"], "--device"),
    (["--resume", "no/such/run"], "no/such/run"),
    (["--evaluate", "."], "no run folder"),
    (["--run-dir", "/dev/null/runs"], "--run-dir"),
]
CONTROL_BAD = [
    (["--num-envs", "0"], "--num-envs"),
    (["--num-envs", "-2"], "--num-envs"),
    (["--num-steps", "0"], "--num-steps"),
    (["--num-envs", "3", "--num-steps", "7", "--num-minibatches", "4"], "--num-minibatches"),
    (["--env-id", "NoSuchThing-v0"], "--env-id"),
]
PPO_BAD = [
    (["--update-epochs", "0"], "--update-epochs"),
    (["--max-grad-norm", "0"], "--max-grad-norm"),
    (["--target-kl", "0"], "--target-kl"),
    (["--target-kl", "-0.1"], "--target-kl"),
    (["--vf-coef", "-1"], "--vf-coef"),
]
RLHF_BAD = [
    (["--batch-size", "0"], "--batch-size"),
    (["--response-length", "0"], "--response-length"),
    (["--prompt-length", "4"], "--prompt-length"),
    (["--temperature", "0"], "--temperature"),
    (["--temperature", "-1"], "--temperature"),
    (["--beta", "-1"], "--beta"),
    (["--kl-target", "0"], "--kl-target"),
    (["--micro-batch-size", "0"], "--micro-batch-size"),
    (["--min-accuracy", "1.5"], "--min-accuracy"),
    (["--beta-controller", "proportional", "--kl-horizon", "10"], "--kl-horizon"),
    (["--model", "gpt2"], "--prompts"),
    (["--model", "gpt2", "--prompts", "x"], "--preferences"),
    (["--model", "gpt2", "--prompts", "x", "--preferences", "y", "--reward-model", "z"], "either"),
    (["--model", ".", "--prompts", "x", "--preferences", "y"], "is a folder that holds no such model"),
    (["--prompts", "x"], "--prompts needs --model"),
    (["--sft", "x"], "--sft needs --model"),
    (["--model", "m", "--prompts", "hf:imdb:train", "--preferences", "y"], "pip install datasets"),
]
ATARI_BAD = [
    (["--sticky-actions", "2"], "--sticky-actions"),
    (["--max-episode-frames", "4"], "--max-episode-frames"),
    (["--env-id", "Brakout"], "Breakout"),
    (["--env-id", "combat"], "--env-id"),
]


def test_bad_input_is_one_sentence_status_2_and_nothing_written(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """Inside this process for speed, through `main` as the command line goes."""
    module = MODULES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    cases = BAD + [([BUDGET[name], number], BUDGET[name]) for number in ("100", "0", "nan")]
    cases += RLHF_BAD if name == "rlhf_ppo_gpt2" else CONTROL_BAD
    cases += (PPO_BAD if name != "trpo" else []) + (ATARI_BAD if name == "ppo_atari" else [])
    if name == "ppo_penalty":
        cases = [*cases, (["--kl-target", "0"], "--kl-target"), (["--beta", "-1"], "--beta")]
    for flags, words in cases:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *SMALL[name], *flags])
        with pytest.raises(SystemExit) as caught:
            module.main()
        out, err = capsys.readouterr()
        assert caught.value.code == 2, flags
        assert words in err and err.startswith("error: ") and err.count("\n") == 1 and not out, (flags, err)
        assert not list(tmp_path.iterdir()), flags


def test_missing_packages_name_the_install_command(name: str, tmp_path: Path, monkeypatch) -> None:
    module = MODULES[name]
    flags = {"track": "wandb"} | ({"capture_video": "moviepy"} if name in CONTROL else {"sft": "datasets"})
    flags |= {"env_id": "ale_py"} if name == "ppo_atari" else {}
    given = {"env_id": "Pong", "sft": "hf:imdb:train"}
    for flag, package in flags.items():
        monkeypatch.setattr(module, "find_spec", lambda wanted, package=package: wanted != package or None)
        args = module.Args(**{flag: given.get(flag, True)})
        with pytest.raises(module.UsageError, match=f"pip install {package}"):
            module.check_args(args)


@pytest.mark.parametrize(
    "flags", [["--track", "True"], ["--num-minibatches", "2.0"], ["--eval-episodes", "1e3"], ["--nope"]]
)
def test_the_parser_refuses_what_it_cannot_read(name: str, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        MODULES[name].parse_args(flags)
    assert caught.value.code == 2


def test_the_parser_takes_what_people_type(name: str) -> None:
    args = MODULES[name].parse_args([BUDGET[name], *"1e6 --num_minibatches 2 --torch_deterministic --no-cuda".split()])
    assert args.num_minibatches == 2 and not args.cuda
    assert getattr(args, BUDGET[name].removeprefix("--").replace("-", "_")) == 10**6


@pytest.mark.parametrize("name", CONTROL)
def test_the_parser_takes_command_lines_of_other_scripts(name: str) -> None:
    module = MODULES[name]
    cleanrl = "--exp-name x --seed 2 --track --wandb-project-name p --wandb-entity e --capture-video --num-steps 64 --gamma 0.9"
    args = module.parse_args(cleanrl.split())
    assert (args.exp_name, args.wandb_entity, args.num_steps, args.gamma) == ("x", "e", 64, 0.9)


def test_help_explains_every_flag_in_a_line(name: str, tmp_path: Path) -> None:
    result = run(name, "--help", cwd=tmp_path, env={"COLUMNS": "200"}, fresh=True)
    assert result.returncode == 0 and not result.stderr
    flags = re.findall(r"^│ (?:-h, )?(--[a-z0-9-]+)", result.stdout, re.M)
    fields = MODULES[name].Args.__dataclass_fields__
    assert {f"--{field.replace('_', '-')}" for field in fields} <= set(flags)
    source = (ROOT / f"{name}.py").read_text()
    for field in fields:
        assert re.search(rf"^    {field}: .*  # \S.{{5,}}$", source, re.M), f"{field} has no help"
    assert "--anneal-lr, --no-anneal-lr" in result.stdout or name == "trpo"


def test_a_start_prints_no_warnings_and_the_folder_first_and_last(name: str, tmp_path: Path) -> None:
    flags = ["--env-id", "Pendulum-v1"] if name not in ("ppo_atari", "rlhf_ppo_gpt2") else []
    result = run(name, *SMALL[name], *flags, cwd=tmp_path, fresh=True)
    assert result.returncode == 0 and result.stderr == ""
    (folder,) = (tmp_path / "runs").iterdir()
    lines = result.stdout.splitlines()
    assert str(folder) in lines[0] and str(folder) in lines[-1] and "finished" in lines[-1]
    assert len([line for line in lines if "512 of 512" in line and "on cpu" in line]) == 1
    assert name != "ppo_atari" or "sticky actions 0," in lines[2]  # the protocol
    models = ["policy", "reward_model", "sft"] if name == "rlhf_ppo_gpt2" else []
    assert sorted(p.name.split(".")[0] for p in folder.iterdir()) == sorted(["args", "checkpoint", "events", *models])
    assert json.loads((folder / "args.json").read_text())["seed"] == 1


def test_run_folders_are_flat_and_unique(name: str, tmp_path: Path) -> None:
    env_id = {"ppo_atari": "ALE/Pong-v5"}.get(name, "counting_envs:Trunc-v0")
    flags = [*SMALL[name], *(["--env-id", env_id] if name in CONTROL else []), BUDGET[name], 128]
    processes = [
        subprocess.Popen(command(name, *flags), cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [p.wait(400) for p in processes] == [0, 0]
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert re.fullmatch(r"[\w.-]+", folder.name) and (folder / "checkpoint.pt").exists()
        assert folder.stat().st_mode & 0o755 == 0o755


def test_resume_refuses_what_would_make_another_run_and_takes_the_rest(name: str, tmp_path: Path) -> None:
    folder = run_small(name, cwd=tmp_path)
    before = (folder / "checkpoint.pt").read_bytes()
    size = "--num-envs" if name in CONTROL else "--batch-size"
    refused = run(name, "--resume", folder, "--gamma", 0.9, size, 4, "--seed", 7, cwd=tmp_path)
    assert refused.returncode == 2
    assert all(flag in refused.stderr for flag in ("--gamma", size, "--seed")) and "--device" not in refused.stderr
    assert (folder / "checkpoint.pt").read_bytes() == before
    longer = run(name, "--resume", folder, BUDGET[name], 768, cwd=tmp_path)
    assert longer.returncode == 0 and "512 to 768" in longer.stdout
    assert checkpoint(folder)["iteration"] == 6
    assert [step for step, _ in scalars(folder)["losses/value_loss"]] == list(range(128, 769, 128))


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def hostile(path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {path.parent}/executed",)

    torch.save({"agent": Trap(), "iteration": 1, "scores": []}, path)


def foreign(path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, path)


@pytest.mark.parametrize("spoil", [torn, hostile, foreign, Path.unlink], ids=lambda f: f.__name__)
def test_spoiled_checkpoints_are_refused_in_a_sentence(
    name: str, tmp_path: Path, spoil: Any, monkeypatch, capsys
) -> None:
    module = MODULES[name]
    args = module.parse_args([*SMALL[name], "--run-dir", str(tmp_path / "runs")])
    module.train(args)
    (folder,) = (tmp_path / "runs").iterdir()
    spoil(folder / "checkpoint.pt")
    capsys.readouterr()
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    kept = name == "rlhf_ppo_gpt2" and spoil is Path.unlink  # then the policy's own folder is enough to answer
    for flag in ("--resume", "--evaluate")[: 1 if kept else 2]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", flag, str(folder)])
        with pytest.raises(SystemExit) as caught:
            module.main()
        assert caught.value.code == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and str(folder) in err
    assert not (folder / "executed").exists()


def test_a_disk_that_fills_up_leaves_the_old_checkpoint(name: str, tmp_path: Path) -> None:
    folder = run_small(name, cwd=tmp_path)
    before = (folder / "checkpoint.pt").read_bytes()

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, len(before) // 2))

    result = run(name, "--resume", folder, BUDGET[name], 768, cwd=tmp_path, preexec_fn=limit)
    assert result.returncode == 1 and "checkpoint.pt could not be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert (folder / "checkpoint.pt").read_bytes() == before and not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("name", CONTROL)
@pytest.mark.parametrize("mode", ["sampled", "most likely"])
def test_evaluation_plays_exactly_what_was_asked_with_frozen_statistics(name: str, tmp_path: Path, mode: str) -> None:
    folder = run_small(name, "--save-model", cwd=tmp_path)
    before = (folder / "checkpoint.pt").read_bytes()
    flags = ["--max-episode-frames", 400] if name == "ppo_atari" else []
    flags += [] if mode == "sampled" else ["--no-eval-sample"]
    results = [run(name, "--evaluate", folder, "--eval-episodes", 3, *flags, cwd=tmp_path) for _ in range(2)]
    assert results[0].returncode == 0, results[0].stderr
    assert "over 3 episodes" in results[0].stdout and ("sampled actions" in results[0].stdout) == (mode == "sampled")
    assert results[0].stdout == results[1].stdout
    assert (folder / "checkpoint.pt").read_bytes() == before
    (folder / "checkpoint.pt").unlink()  # the weights that --save-model wrote are enough to play
    assert run(name, "--evaluate", folder, "--eval-episodes", 3, *flags, cwd=tmp_path).stdout == results[0].stdout


def keeping(original: Any, made: list[Any]) -> Any:
    def make(*args: Any) -> Any:
        made.append(original(*args))
        return made[-1]

    return make


@pytest.mark.parametrize("name", BOXES)
def test_a_reloaded_agent_acts_like_the_one_in_memory(name: str, tmp_path: Path, monkeypatch) -> None:
    """The mean action for a fixed raw observation, statistics included."""
    module = MODULES[name]
    made: list[Any] = []
    for kind in ("Agent", "NormalizedEnvs"):
        monkeypatch.setattr(module, kind, keeping(getattr(module, kind), made))
    module.train(module.parse_args([*SMALL[name], "--env-id", "Pendulum-v1", "--run-dir", str(tmp_path)]))
    (folder,) = tmp_path.iterdir()
    for episodes in ("1", "20"):
        module.evaluate(module.parse_args(["--evaluate", str(folder), "--eval-episodes", episodes]))
    envs, agent, _, _, played_envs, played_agent = made
    raw = torch.tensor([[0.5, -0.5, 3.0]]).numpy()
    played_envs.lengths[:] = envs.lengths[:] = 0
    freeze = lambda *_: None
    envs.obs_stats.update = freeze
    actions = [a(torch.from_numpy(e.normalize(raw)))[0] for a, e in ((agent, envs), (played_agent, played_envs))]
    torch.testing.assert_close(actions[0], actions[1], rtol=0, atol=1e-7)
    assert played_envs.obs_stats.count == envs.obs_stats.count > 512


@pytest.mark.parametrize("name", CONTROL)
def test_filming_writes_playable_clips_and_changes_nothing(name: str, tmp_path: Path) -> None:
    import imageio.v2 as imageio

    plain, filmed = run_small(name, cwd=tmp_path), run_small(name, "--capture-video", cwd=tmp_path)
    assert_same_run(plain, filmed)
    clips = sorted((filmed / "videos").glob("*.mp4"))
    assert clips and (
        name == "ppo_atari" or {c.stem[-10:] for c in clips} >= {"-episode-0", "-episode-1", "-episode-8"}
    )
    assert len(imageio.mimread(clips[0], memtest=False)) >= (20 if name == "ppo_atari" else 5)
    flags = ["--max-episode-frames", 200] if name == "ppo_atari" else []
    played = run(
        name, "--evaluate", filmed, "--eval-episodes", 2, "--num-envs", 1, "--capture-video", *flags, cwd=tmp_path
    )
    assert played.returncode == 0, played.stderr
    for clip in (filmed / "videos").glob("evaluation*"):
        assert len(imageio.mimread(clip, memtest=False)) >= 5
    assert len(list((filmed / "videos").glob("evaluation*"))) == 2


def test_a_picture_is_tried_before_training_and_may_have_odd_sides(control, tmp_path: Path) -> None:
    import imageio.v2 as imageio

    flags = [*SMALL[control.__name__], "--capture-video", "--run-dir", str(tmp_path)]
    with pytest.raises(control.UsageError, match="--capture-video cannot film .*it draws no picture"):
        control.train(control.parse_args([*flags, "--env-id", "counting_envs:NoPicture-v0"]))
    assert not list(tmp_path.iterdir())
    control.train(control.parse_args([*flags, "--env-id", "counting_envs:OddPicture-v0"]))
    clip, *_ = sorted(tmp_path.glob("*/videos/*.mp4"))
    assert imageio.mimread(clip, memtest=False)[0].shape == (300, 400, 3)


@pytest.mark.parametrize("name", BOXES)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_crash_inside_an_environment_ends_the_run_with_its_message(name: str, tmp_path: Path, kind: str) -> None:
    flags = [*SMALL[name], "--env-id", "counting_envs:Crash-v0", "--vectorization", kind]
    result = run(name, *flags, cwd=tmp_path, timeout=200)
    assert result.returncode not in (0, 2) and "the simulator crashed" in result.stderr
    assert not left_in(tmp_path)


@pytest.mark.parametrize("name", BOXES)
def test_a_killed_worker_does_not_hang_the_run(name: str, tmp_path: Path) -> None:
    flags = [*SMALL[name], "--vectorization", "async", "--total-timesteps", 10**7]
    process = subprocess.Popen(
        command(name, *flags),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not list(tmp_path.glob("runs/*/checkpoint.pt")) and not list(tmp_path.glob("runs/*/events*")):
        time.sleep(0.05)
    time.sleep(1)
    workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    assert len(workers) >= 2
    os.kill(int(workers[-1]), signal.SIGKILL)
    output, _ = process.communicate(timeout=200)
    assert process.returncode not in (0, 2), output


@pytest.mark.parametrize("name", BOXES)
@pytest.mark.parametrize("env", ["NanReward", "InfReward", "NanObs"])
def test_nan_stops_the_run_with_a_sentence_and_keeps_the_checkpoint(name: str, tmp_path: Path, env: str) -> None:
    result = run(name, *SMALL[name], "--env-id", f"counting_envs:{env}-v0", cwd=tmp_path)
    assert (
        result.returncode == 1 and "of environment 0 is" in result.stderr and re.search(r"at step [13] ", result.stderr)
    )
    assert "Traceback" not in result.stderr


MEMORY = """
import ctypes, ppo_continuous as script
script.start(script.Args())
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd _ _ _ _ keepcost".split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before = libc.mallinfo2().hblks
block = libc.malloc(28_000_000)
mapped = libc.mallinfo2().hblks - before
libc.free(block)
print(mapped, libc.mallinfo2().keepcost)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="is about glibc")
def test_memory_that_is_needed_again_is_kept() -> None:
    """By default glibc maps a block of this size on its own and unmaps it when it is freed. `start` is one text in all."""
    result = subprocess.run([sys.executable, "-c", MEMORY], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    mapped, kept = map(int, result.stdout.split())
    assert mapped == 0 and kept > 28_000_000
