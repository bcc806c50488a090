"""Runs as users have them: processes killed and resumed, wrong flags, what is printed, what lies in the folder."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from conftest import (
    BOXES,
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
    counting,
    left_in,
    run,
    run_small,
    scalars,
)
from counting_envs import Counting
from tqdm import tqdm

TIMING = {"charts/SPS", "charts/rollout_tokens_per_second", "charts/update_tokens_per_second"}


def checkpoint(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def flatten(state: Any, path: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        return {k: v for key, value in state.items() for k, v in flatten(value, f"{path}/{key}").items()}
    if isinstance(state, list):
        return {k: v for i, value in enumerate(state) for k, v in flatten(value, f"{path}/{i}").items()}
    return {path: state}


def result(folder: Path) -> dict[str, Any]:
    """What training has made: all that a checkpoint holds but the flags."""
    return flatten({key: value for key, value in checkpoint(folder).items() if key != "args"})


def assert_same_run(a: Path, b: Path) -> None:
    """Weights, optimiser, statistics, step and every logged scalar but the clock are equal bit for bit."""
    first, second = result(a), result(b)
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


def assert_nothing_lost(folder: Path, total: int) -> None:
    """The run has reached its end, and every iteration is logged once."""
    assert checkpoint(folder)["iteration"] == total // 128
    for tag in ("losses/policy_loss", "charts/SPS"):
        assert [step for step, _ in scalars(folder)[tag]] == list(range(128, total + 1, 128)), tag
    episodes = [step for step, _ in scalars(folder).get("charts/episodic_return", [])]
    assert episodes == sorted(set(episodes))


TOTAL = {
    "ppo_atari": 1280,
    **dict.fromkeys(TEXTS, 1920),
}  # steps of a run that can be stopped half-way; others: 6,400
ENDLESS: dict[str, list[Any]] = {
    "dpo_gpt2": [x for flag in ("--batch-size", BUDGET["dpo_gpt2"]) for x in (flag, 10**5)],
    "grpo_gpt2": ["--inner-steps", 10**6],
}


def launch(name: str, cwd: Path, *flags: Any, session: bool = False) -> Forked:
    """A small run with these flags, which can be sent signals."""
    argv = command(name, *SMALL[name], *flags)[1:]
    output = cwd / "output.txt"
    return Forked(argv, cwd, [output, output], session=session)


def wait_for(process: Forked, condition: Callable[[], Any]) -> Any:
    """What the condition gives as soon as it gives something."""
    while not (found := condition()):
        assert process.poll() is None, process.text()
        time.sleep(0.01)
    return found


def saved(process: Forked, cwd: Path) -> Path:
    """The folder of a run, once it holds a checkpoint of training."""
    trained = lambda: [path.parent for path in cwd.glob("runs/*/checkpoint.pt") if checkpoint(path.parent)["iteration"]]
    return wait_for(process, trained)[0]


def long_enough(name: str) -> list[Any]:
    """Flags of a run in which episodes end before and after each of its checkpoints."""
    flags = ["--checkpoint-every", 3, BUDGET[name], TOTAL.get(name, 6400)]
    return [*flags, "--max-episode-frames", 200] if name == "ppo_atari" else flags


def interrupted(name: str, cwd: Path, sign: signal.Signals) -> tuple[Path, int, str]:
    """Start a run, send it a signal once its first checkpoint lies there; its folder, status and what it printed."""
    process = launch(name, cwd, *long_enough(name))
    folder = saved(process, cwd)
    process.send_signal(sign)
    status = process.wait()
    return folder, status, process.text()


@pytest.mark.detail("G30")
def test_a_run_killed_and_resumed_equals_one_left_alone(name: str, tmp_path: Path) -> None:
    folder, status, _ = interrupted(name, tmp_path, signal.SIGKILL)
    total = TOTAL.get(name, 6400)
    assert status == -signal.SIGKILL
    assert 0 < checkpoint(folder)["iteration"] < total // 128, "the run was over before it was killed"
    (folder / "args.json").write_text("no longer what it was")  # the checkpoint knows the flags
    resumed = run(name, "--resume", folder, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert list((tmp_path / "runs").iterdir()) == [folder]
    assert_nothing_lost(folder, total)
    alone = run_small(name, *long_enough(name), cwd=tmp_path)
    assert_same_run(folder, alone)
    assert name in TEXTS or len(scalars(alone)["charts/episodic_return"]) > total // 128
    again = run(name, "--resume", folder, cwd=tmp_path)
    assert again.returncode == 2 and f"{BUDGET[name]} must be at least" in again.stderr
    assert_same_run(folder, alone)


def signal_of(name: str) -> signal.Signals:
    """One of the two for each script: what answers them is the same text in all."""
    return signal.SIGTERM if name in ("ppo_continuous", "rlhf_ppo_gpt2") else signal.SIGINT


def test_an_interrupted_run_is_saved_and_goes_on(name: str, tmp_path: Path) -> None:
    folder, status, output = interrupted(name, tmp_path, signal_of(name))
    iteration = checkpoint(folder)["iteration"]
    assert status == 130 and 3 <= iteration < TOTAL.get(name, 6400) // 128
    assert "interrupted" in output and "Traceback" not in output
    assert f"{folder} (not finished: --resume goes on from step {iteration * 128:,})" in output
    assert len(scalars(folder)["losses/policy_loss"]) == iteration and not list(folder.glob("*.tmp"))
    played = run(name, "--evaluate", folder, "--eval-episodes", 1, cwd=tmp_path)
    assert played.returncode == 0, played.stderr
    resumed = run(name, "--resume", folder, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert_nothing_lost(folder, TOTAL.get(name, 6400))


def test_a_second_interrupt_leaves_at_once(name: str, tmp_path: Path) -> None:
    sign = signal_of(name)
    flags = ENDLESS.get(name, ["--update-epochs", 10**6])  # an iteration that would not end
    process = launch(name, tmp_path, *flags)
    training = "\nstep 0: " if name in TEXTS else "saved every"
    wait_for(process, lambda: training in process.text())
    time.sleep(0.5)
    for _ in range(2):
        process.send_signal(sign)
        time.sleep(0.3)
    assert process.wait() in (130, -sign)  # -sign: on its way out already
    output = process.text()
    assert "(not finished: --resume goes on from step 0)" in output and "Traceback" not in output
    assert not any(checkpoint(path.parent)["iteration"] for path in tmp_path.glob("runs/*/checkpoint.pt"))


@pytest.mark.parametrize("name", ENVS)
def test_control_c_in_a_terminal_reaches_workers_too(name: str, tmp_path: Path) -> None:
    flags = ["--vectorization", "async", "--checkpoint-every", 1, "--total-timesteps", 10**6]
    process = launch(name, tmp_path, *flags, session=True)
    saved(process, tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() == 130 and "Traceback" not in process.text(), process.text()
    assert not left_in(tmp_path), "a worker has outlived the run"


def test_what_stops_a_write_leaves_the_old_checkpoint(name: str, tmp_path: Path, monkeypatch) -> None:
    module = MODULES[name]
    args = module.parse_args([*SMALL[name], "--checkpoint-every", "1", "--run-dir", str(tmp_path)])
    save = torch.save

    def half(state: dict[str, Any], path: Any) -> None:
        save(state, path)
        if state.get("iteration") == 2:
            torn(Path(path))
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        module.train(args)
    (folder,) = tmp_path.iterdir()
    assert checkpoint(folder)["iteration"] == 1 and not list(folder.glob("*.tmp"))


def test_a_folder_has_one_writer(name: str, tmp_path: Path) -> None:
    process = launch(name, tmp_path, "--checkpoint-every", 1, BUDGET[name], 10**6)
    folder = saved(process, tmp_path)
    before = (folder / "args.json").read_bytes(), sorted(folder.glob("events*"))
    refused = run(name, "--resume", folder, "--checkpoint-every", 7, cwd=tmp_path)
    assert refused.returncode == 2 and "another process" in refused.stderr and refused.stderr.count("\n") == 1
    assert before == ((folder / "args.json").read_bytes(), sorted(folder.glob("events*")))
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    total = 128 * (checkpoint(folder)["iteration"] + 1)
    resumed = run(name, "--resume", folder, BUDGET[name], total, cwd=tmp_path)  # the lock has died with its process
    assert resumed.returncode == 0, resumed.stderr
    assert_nothing_lost(folder, total)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_a_signal_after_the_end_changes_nothing(tmp_path: Path, sign: signal.Signals) -> None:
    for delay in (0, 0.02, 0.05, 0.1, 0.2):  # also while the interpreter is on its way out
        process = launch("ppo_continuous", tmp_path)
        while "(finished)" not in process.text():
            assert process.poll() in (None, 0)
        time.sleep(delay)
        process.send_signal(sign)
        assert process.wait() == 0 and "Traceback" not in process.text(), delay
        process.output.unlink()


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(name: str, tmp_path: Path) -> None:
    one, two, three = (run_small(name, "--seed", seed, cwd=tmp_path) for seed in (1, 1, 2))
    assert_same_run(one, two)
    weights = [checkpoint(folder)["agent"] for folder in (one, three)]
    assert any(not torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    steps = [step for step, _ in scalars(one)["losses/policy_loss"]]
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
    (["--resume", "no/such/run"], "no/such/run"),
    (["--evaluate", "."], "checkpoint.pt is no whole checkpoint"),
    (["--run-dir", "/dev/null/runs"], "/dev/null/runs"),
]
CONTROL_BAD = [
    (["--num-envs", "0"], "--num-envs"),
    (["--num-envs", "-2"], "--num-envs"),
    (["--num-steps", "0"], "--num-steps"),
    (["--num-envs", "3", "--num-steps", "7", "--num-minibatches", "4"], "--num-minibatches"),
    (["--env-id", "NoSuchThing-v0"], "NoSuchThing"),
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
    (["--prompt-length", "4"], "--prompt-length must be at least 5"),
    (["--temperature", "0"], "--temperature"),
    (["--temperature", "-1"], "--temperature"),
    (["--beta", "-1"], "--beta"),
    (["--kl-target", "0"], "--kl-target"),
    (["--micro-batch-size", "0"], "--micro-batch-size"),
    (["--min-accuracy", "1.5"], "--min-accuracy"),
    (["--kl-horizon", "0"], "--kl-horizon"),
    (["--model", "gpt2"], "--prompts"),
    (["--model", "gpt2", "--prompts", "x"], "--preferences"),
    (["--model", "gpt2", "--prompts", "x", "--preferences", "y", "--reward-model", "z"], "either"),
    (["--model", ".", "--prompts", "x", "--preferences", "y"], "it must be the folder of a model"),
    (["--prompts", "x"], "--prompts needs --model"),
    (["--sft", "x"], "--sft needs --model"),
    (["--model", "m", "--prompts", "hf:imdb:train", "--preferences", "y"], "pip install datasets"),
]
GRPO_BAD = [
    (["--group-size", "1"], "--group-size 1 leaves nothing to compare"),
    (["--group-size", "0"], "--group-size"),
    (["--group-size", "3"], "must be a multiple of the 1 processes times --group-size 3"),
    (["--inner-steps", "0"], "--inner-steps"),
    (["--clip-low", "1.5"], "--clip-low"),
    (["--clip-high", "-1"], "--clip-high"),
    (["--max-ratio", "0"], "--max-ratio"),
    (["--task", "reverse", "--model", "gpt2", "--prompts", "x", "--preferences", "y"], "--task reverse"),
]
NOT_IN_GRPO = {"--gamma", "--gae-lambda", "--vf-coef", "--update-epochs", "--kl-target", "--kl-horizon"}
DPO_BAD = [
    (["--beta", "0"], "--beta 0.0 must be greater than 0"),
    (["--label-smoothing", "0.5"], "must lie in [0, 0.5)"),
    (["--label-smoothing", "-0.1"], "--label-smoothing"),
    (["--warmup", "1.1"], "--warmup"),
    (["--num-pairs", "0"], "--num-pairs"),
    (["--model", "m", "--prompts", "x", "--preferences", "y", "--soft-labels"], "--soft-labels"),
    (["--model", ".", "--prompts", "x", "--preferences", "y"], "it must be the folder of a model"),
    (["--model", "m", "--prompts", "hf:imdb:train", "--preferences", "y"], "pip install datasets"),
    *(
        ([flag, "x"], "--model, --prompts FILE and --preferences FILE need each other")
        for flag in ("--model", "--prompts", "--preferences")
    ),
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
    cases = BAD + [([BUDGET[name], number], BUDGET[name]) for number in ("100", "0", "nan")]
    cases += RLHF_BAD if name in TEXTS else CONTROL_BAD
    cases += (PPO_BAD if name != "trpo" else []) + (ATARI_BAD if name == "ppo_atari" else [])
    if name == "grpo_gpt2":
        cases = [case for case in cases if case[0][0] not in NOT_IN_GRPO] + GRPO_BAD
    if name in ENVS:
        cases += [(["--env-id", f"{space}Thing-v0"], "module:Id-v0") for space in ("", "nowhere/")]
    if name == "ppo_penalty":
        cases = [*cases, (["--kl-target", "0"], "--kl-target"), (["--beta", "-1"], "--beta")]
    if name == "dpo_gpt2":
        fields = {field.replace("_", "-") for field in module.Args.__dataclass_fields__}
        cases = [case for case in cases if case[0][0][2:] in fields - {"model", "prompts"}] + DPO_BAD
    for flags, words in cases:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *SMALL[name], *flags])
        with pytest.raises(SystemExit) as caught:
            module.main()
        out, err = capsys.readouterr()
        assert caught.value.code == 2, flags
        assert words in err and err.startswith("error: ") and err.count("\n") == 1 and not out, (flags, err)
        assert not list(tmp_path.iterdir()), flags


def test_missing_packages_are_named(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    module = MODULES[name]
    flags = {"wandb": ["--track"]}
    flags |= {"imageio_ffmpeg": ["--capture-video"]} if name in CONTROL else {}
    flags |= {"ale_py.vector_env": []} if name == "ppo_atari" else {}
    for package, given in flags.items():
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *SMALL[name], "--run-dir", str(tmp_path), *given])
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            with pytest.raises(SystemExit) as caught:
                module.main()
        err = capsys.readouterr().err
        assert caught.value.code == 2 and package in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "flags", [["--track", "True"], ["--num-minibatches", "2.0"], ["--eval-episodes", "1e3"], ["--nope"]]
)
def test_the_parser_refuses_what_it_cannot_read(name: str, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        MODULES[name].parse_args(flags)
    assert caught.value.code == 2


def test_the_parser_takes_what_people_type(name: str) -> None:
    args = MODULES[name].parse_args([BUDGET[name], *"1e6 --eval_episodes 2 --torch_deterministic --no-cuda".split()])
    assert args.eval_episodes == 2 and not args.cuda
    assert getattr(args, BUDGET[name].removeprefix("--").replace("-", "_")) == 10**6


@pytest.mark.parametrize("name", CONTROL)
def test_the_parser_takes_command_lines_of_other_scripts(name: str) -> None:
    module = MODULES[name]
    cleanrl = "--exp-name x --seed 2 --track --wandb-project-name p --wandb-entity e --capture-video"
    args = module.parse_args([*cleanrl.split(), *"--num-steps 64 --gamma 0.9".split()])
    assert (args.exp_name, args.wandb_entity, args.num_steps, args.gamma) == ("x", "e", 64, 0.9)


def test_help_explains_every_flag_in_a_line(name: str, tmp_path: Path) -> None:
    result = run(name, "--help", cwd=tmp_path, env={"COLUMNS": "200"})
    assert result.returncode == 0 and not result.stderr
    flags = re.findall(r"^│ (?:-h, )?(--[a-z0-9-]+)", result.stdout, re.M)
    fields = MODULES[name].Args.__dataclass_fields__
    assert {f"--{field.replace('_', '-')}" for field in fields} <= set(flags)
    source = (ROOT / f"{name}.py").read_text()
    for field in fields:
        assert re.search(rf"^    {field}: .*  # \S.{{5,}}$", source, re.M), f"{field} has no help"
    assert "--anneal-lr, --no-anneal-lr" in result.stdout or name == "trpo"


def test_a_start_prints_no_warnings_and_the_folder_first_and_last(name: str, tmp_path: Path) -> None:
    flags = ["--env-id", "Pendulum-v1"] if name in BOXES else []
    fresh = name in ("ppo_atari", "ppo_continuous", "rlhf_ppo_gpt2")  # the others import nothing that these do not
    result = run(name, *SMALL[name], *flags, cwd=tmp_path, fresh=fresh)
    assert result.returncode == 0 and result.stderr == ""
    (folder,) = (tmp_path / "runs").iterdir()
    lines = result.stdout.splitlines()
    assert lines[0] == f"run folder: {folder}" and lines[-1] == f"run folder: {folder} (finished)"
    assert "step 0 to 512 of 512 by 128, saved every" in result.stdout and "Ctrl-C" in result.stdout
    progress = [re.match(r"step ([\d,]+), ", line) for line in lines]
    assert [match[1] for match in progress if match] == ["128", "256", "384", "512"]
    models = {**dict.fromkeys(TEXTS, ["policy", "reward_model", "sft"]), "dpo_gpt2": ["policy", "sft"]}.get(name, [])
    files = {path.name.split(".")[0] for path in folder.iterdir()} - {"lock"}
    assert files == {"args", "checkpoint", "events", *models}
    assert json.loads((folder / "args.json").read_text())["seed"] == 1


class Bar(tqdm):
    """What a terminal would show: where it begins and ends, and how far it has come."""

    shown: list[Any] = []

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.path = [options.get("initial"), options.get("total"), options.get("initial")]
        Bar.shown += [self.path] if "initial" in options else []

    def update(self, n: Any = 1) -> None:
        self.path[2] += n


def test_bar_and_mirror_are_told_the_whole_run(name: str, tmp_path: Path, monkeypatch) -> None:
    module = MODULES[name]
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "tqdm", Bar)
    monkeypatch.setattr(Bar, "shown", [])
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: told.append(options), login=str))
    mine = ["--run-dir", str(tmp_path), "--track", "--wandb-entity", "me"]
    module.train(module.parse_args([*SMALL[name], BUDGET[name], "256", *mine]))
    (folder,) = tmp_path.iterdir()
    module.train(module.parse_args(["--resume", str(folder), BUDGET[name], "512"]))
    assert Bar.shown == [[0, 256, 256], [256, 512, 512]]
    for options in told:
        config = options.pop("config")
        assert (config["seed"], config["exp_name"], config["track"]) == (1, name, True)
        expected = {"project": "ppo", "entity": "me", "id": folder.name, "dir": folder, "resume": "allow"}
        assert options == expected | {"sync_tensorboard": True}
    assert len(told) == 2


@pytest.mark.parametrize("name", CONTROL)
def test_a_mirror_that_cannot_log_in_is_said_before_anything_is_written(name: str, tmp_path: Path, monkeypatch) -> None:
    module = MODULES[name]

    def login() -> None:
        raise RuntimeError("no API key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=login))
    args = module.parse_args([*SMALL[name], "--run-dir", str(tmp_path / "runs"), "--track"])
    with pytest.raises(module.UsageError, match="--track: no API key"):
        module.train(args)
    assert not list(tmp_path.iterdir())


def test_help_is_printed_in_any_code_page(name: str, monkeypatch) -> None:
    written = io.BytesIO()
    page = io.TextIOWrapper(written, "cp1252")
    monkeypatch.setattr(sys, "stdout", page)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as caught:
        MODULES[name].main()
    page.flush()
    assert caught.value.code == 0 and b"--learning-rate" in written.getvalue()


def test_run_folders_are_flat_and_unique(name: str, tmp_path: Path) -> None:
    """Also those of one moment."""
    module = MODULES[name]
    env_id = {"ppo_atari": "ALE/Pong-v5"}.get(name, counting(name, "Trunc"))
    flags = [*SMALL[name], *(["--env-id", env_id] if name in CONTROL else []), BUDGET[name], "128"]
    for _ in range(2):
        module.train(module.parse_args([*flags, "--run-dir", str(tmp_path / "runs")]))
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert re.fullmatch(r"[\w.-]+", folder.name) and (folder / "checkpoint.pt").exists()
        assert folder.stat().st_mode & 0o755 == 0o755


def test_resume_refuses_what_would_make_another_run_and_takes_the_rest(name: str, tmp_path: Path) -> None:
    folder = run_small(name, cwd=tmp_path)
    before = (folder / "checkpoint.pt").read_bytes()
    size = "--num-envs" if name in CONTROL else "--batch-size"
    refused = run(name, "--resume", folder, "--learning-rate", 0.9, size, 4, "--seed", 7, cwd=tmp_path)
    assert refused.returncode == 2
    fields = [size[2:].replace("-", "_"), "learning_rate", "seed"]
    assert all(field in refused.stderr for field in fields) and "device" not in refused.stderr
    assert (folder / "checkpoint.pt").read_bytes() == before
    longer = run(name, "--resume", folder, BUDGET[name], 768, cwd=tmp_path)
    assert longer.returncode == 0 and "512 to 768" in longer.stdout
    if name in PPO:
        rate = MODULES[name].Args.learning_rate
        assert f"learning rate {rate / 4:.2g} when it was saved, {rate / 3:.2g} now" in longer.stdout
    assert checkpoint(folder)["iteration"] == 6
    assert [step for step, _ in scalars(folder)["losses/policy_loss"]] == list(range(128, 769, 128))


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def hostile(path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {path.parent}/executed",)

    torch.save({"agent": Trap(), "iteration": 1, "scores": []}, path)


def flipped(path: Path) -> None:
    """One bit, in the middle of a tensor's bytes."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def foreign(path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, path)


@pytest.mark.parametrize("spoil", [torn, flipped, hostile, foreign, Path.unlink], ids=lambda f: f.__name__)
def test_spoiled_checkpoints_are_refused_in_a_sentence(
    name: str, tmp_path: Path, spoil: Any, monkeypatch, capsys
) -> None:
    module = MODULES[name]
    args = module.parse_args([*SMALL[name], "--run-dir", str(tmp_path / "runs")])
    module.train(args)
    (folder,) = (tmp_path / "runs").iterdir()
    spoil(folder / "checkpoint.pt")
    capsys.readouterr()
    for flag in ("--resume", "--evaluate"):
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
    result = run(name, "--resume", folder, BUDGET[name], 768, cwd=tmp_path, limit=len(before) // 2)
    assert result.returncode == 1 and "checkpoint.pt could not be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert (folder / "checkpoint.pt").read_bytes() == before and not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("name", CONTROL)
def test_evaluation_plays_exactly_what_was_asked(name: str, tmp_path: Path) -> None:
    folder = run_small(name, "--save-model", cwd=tmp_path)
    before = (folder / "checkpoint.pt").read_bytes()
    flags = ["--max-episode-frames", 400] if name == "ppo_atari" else []
    play = lambda *more: run(name, "--evaluate", folder, "--eval-episodes", 3, *flags, *more, cwd=tmp_path)
    for more, sampled in ((["--no-eval-sample"], False), ([], True)):
        results = [play(*more) for _ in range(2)]
        assert results[0].returncode == 0 and not results[0].stderr, results[0].stderr
        assert "over 3 episodes" in results[0].stdout and ("sampled actions" in results[0].stdout) == sampled
        assert name == "ppo_atari" or "return 5.00 ± 0.00" in results[0].stdout
        assert results[0].stdout == results[1].stdout
        assert (folder / "checkpoint.pt").read_bytes() == before
    (folder / "model.pt").replace(folder / "checkpoint.pt")  # what --save-model wrote is enough to play
    assert play().stdout == results[0].stdout


def keeping(original: Any, made: list[Any]) -> Any:
    def make(*args: Any) -> Any:
        made.append(original(*args))
        return made[-1]

    return make


def trained(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[Any, Any, Path]:
    """The agent and the environments in memory after a small run, and its folder."""
    made: list[Any] = []
    with monkeypatch.context() as watched:
        for kind in ("Agent", "AtariGames" if module.__name__ == "ppo_atari" else "NormalizedEnvs"):
            watched.setattr(module, kind, keeping(getattr(module, kind), made))
        module.train(module.parse_args([*SMALL[module.__name__], "--run-dir", str(tmp_path), *flags]))
    agent, envs = sorted(made, key=lambda x: not isinstance(x, torch.nn.Module))
    (folder,) = tmp_path.iterdir()
    return agent, envs, folder


@pytest.mark.parametrize("name", BOXES)
def test_a_reloaded_policy_acts_like_the_agent_in_memory(name: str, tmp_path: Path, monkeypatch) -> None:
    """Its mean action for raw observations, statistics included; sampled ones lie around it as far as in training."""
    control = MODULES[name]
    agent, envs, folder = trained(control, tmp_path, monkeypatch, "--env-id", "Pendulum-v1")
    raw = np.array([[0.5, -0.5, 3.0], [-1.0, 0.1, -8.0]], np.float32)
    mean, std = envs.obs_stats.mean_and_std()
    normalized = torch.from_numpy(((raw - mean) / std).clip(-10, 10).astype(np.float32))
    with torch.no_grad():
        network = agent.actor if control.__name__ == "trpo" else agent.actor_mean
        expected = network(normalized).numpy()
    np.testing.assert_allclose(control.load_policy(str(folder), sample=False)(raw), expected, atol=1e-6)
    sampling = control.load_policy(str(folder))
    np.random.seed(0)
    torch.manual_seed(0)
    noise = np.array([sampling(raw) for _ in range(2000)]) - expected
    spread = 0.6745 * agent.actor_logstd.detach().exp().numpy()  # the median distance of a normal distribution
    np.testing.assert_allclose(np.median(abs(noise), 0), np.broadcast_to(spread, (2, 1)), rtol=0.1)


def test_a_reloaded_policy_of_atari_acts_like_the_agent_in_memory(
    atari: ModuleType, tmp_path: Path, monkeypatch
) -> None:
    agent, _, folder = trained(atari, tmp_path, monkeypatch)
    obs = np.random.default_rng(0).integers(0, 256, (8, 4, 84, 84), np.uint8)
    with torch.no_grad():
        policy, _ = agent(torch.from_numpy(obs))
    np.testing.assert_array_equal(atari.load_policy(str(folder), sample=False)(obs), policy.logits.argmax(-1))


def test_statistics_are_frozen_in_evaluation(control: ModuleType, tmp_path: Path, monkeypatch) -> None:
    _, envs, folder = trained(control, tmp_path, monkeypatch)
    made: list[Any] = []
    monkeypatch.setattr(control, "RunningMeanStd", keeping(control.RunningMeanStd, made))
    scores = control.evaluate(control.parse_args(["--evaluate", str(folder), "--eval-episodes", "3"]))
    assert scores == [5.0] * 3
    used = [stats for stats in made if stats.sums.shape == (3, 3)]
    assert used and all(torch.equal(stats.state, envs.obs_stats.state) for stats in used)
    assert envs.obs_stats.sums[0, 0] > 512


def frames(clip: Path) -> list[Any]:
    return imageio.mimread(clip, memtest=False)


@pytest.mark.parametrize("name", CONTROL)
def test_filming_writes_playable_clips_and_changes_nothing(name: str, tmp_path: Path) -> None:
    flags = ["--checkpoint-every", 2, *(["--max-episode-frames", 200] if name == "ppo_atari" else [])]
    plain, filmed = (run_small(name, *flags, *more, cwd=tmp_path) for more in ([], ["--capture-video"]))
    assert_same_run(plain, filmed)
    clips = sorted((filmed / "videos").iterdir())
    assert [clip.name for clip in clips] == ["step-256.mp4", "step-512.mp4"]
    length = 50 if name == "ppo_atari" else 5  # a frame a step, of four of the emulator
    assert [len(frames(clip)) for clip in clips] == [length] * 2
    before = [clip.read_bytes() for clip in clips]
    for _ in range(2):
        played = run(name, "--evaluate", filmed, "--eval-episodes", 2, "--capture-video", cwd=tmp_path)
        assert played.returncode == 0, played.stderr
    assert [clip.read_bytes() for clip in clips] == before
    evaluated = list((filmed / "videos").glob("evaluation*"))
    whole = [2 * length // 2] * 2 if name == "ppo_atari" else [length] * 4  # games share a film
    assert [len(frames(clip)) for clip in evaluated] == whole


def test_a_film_that_fails_is_said_and_training_goes_on(control: ModuleType, tmp_path: Path, capsys) -> None:
    flags = [*SMALL[control.__name__], "--run-dir"]
    agents = []
    for number, more in enumerate(([], ["--capture-video"])):
        given = ["--env-id", counting(control.__name__, "NoPicture"), *more]
        control.train(control.parse_args([*flags, str(tmp_path / str(number)), *given]))
        (folder,) = (tmp_path / str(number)).iterdir()
        agents.append(result(folder))
    assert capsys.readouterr().err.count("step-512.mp4 ends early: ") == 1
    assert all(not isinstance(x, torch.Tensor) or torch.equal(x, agents[1][key]) for key, x in agents[0].items())


def test_pictures_may_have_odd_sides(control: ModuleType, tmp_path: Path) -> None:
    flags = ["--capture-video", "--run-dir", str(tmp_path), "--env-id", counting(control.__name__, "OddPicture")]
    control.train(control.parse_args([*SMALL[control.__name__], *flags]))
    (clip,) = tmp_path.glob("*/videos/*.mp4")
    height, width, _ = frames(clip)[0].shape
    assert abs(height - 301) <= 1 and abs(width - 401) <= 1


@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_crash_inside_an_environment_ends_the_run_with_its_message(name: str, tmp_path: Path, kind: str) -> None:
    flags = [*SMALL[name], "--env-id", counting(name, "Crash"), "--vectorization", kind]
    crashed = run(name, *flags, cwd=tmp_path, timeout=200)
    assert crashed.returncode not in (0, 2) and "the simulator crashed" in crashed.stderr
    assert "(not finished: " in crashed.stdout and not left_in(tmp_path)


@pytest.mark.parametrize("name", ENVS)
def test_a_killed_worker_does_not_hang_the_run(name: str, tmp_path: Path) -> None:
    process = launch(name, tmp_path, "--vectorization", "async", "--total-timesteps", 10**7, "--checkpoint-every", 0)
    wait_for(process, lambda: "\nstep 128" in process.text())
    workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    assert len(workers) >= 2
    os.kill(int(workers[-1]), signal.SIGKILL)
    assert process.wait() not in (0, 2), process.text()


class Later(Counting):
    """Healthy for `healthy` steps of all of them together, then `reward` or an observation of NaN."""

    healthy = 0

    def step(self, action: Any) -> Any:
        obs, reward, *ends, info = super().step(np.nan_to_num(action))
        Later.healthy -= 1
        if Later.healthy >= 0:
            return obs, 1.0, *ends, info
        return (obs * np.nan if self.fault == "observation" else obs), reward, *ends, info


LATER: dict[str, dict[str, Any]] = {
    "NanReward": {"reward": "nan"},
    "InfReward": {"reward": "inf"},
    "Vast": {"reward": 1e200},  # finite, but its square is not
    "NanObs": {"fault": "observation"},
}
for _name, _options in LATER.items():
    gymnasium.register(f"Later{_name}-v0", f"{__name__}:Later", kwargs=_options)
    _choice = {"action": gymnasium.spaces.Discrete(3)} | _options
    gymnasium.register(f"ChoiceLater{_name}-v0", f"{__name__}:Later", kwargs=_choice)


@pytest.mark.parametrize("fault", ["NanReward", "InfReward", "Vast", "NanObs"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_not_finite_stops_the_run_in_a_sentence_and_is_not_saved(
    control: ModuleType, tmp_path: Path, fault: str, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(Later, "healthy", 128 + 64)  # the first of 4 iterations, saved, and a part of the second
    kind = "ChoiceLater" if control.__name__ in CHOICES else "Later"
    flags = ["--env-id", f"{kind}{fault}-v0", "--checkpoint-every", "1", "--run-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [f"{control.__name__}.py", *SMALL[control.__name__], *flags])
    with pytest.raises(SystemExit) as caught:
        control.main()
    err = capsys.readouterr().err
    assert caught.value.code == 1 and err.startswith("error: ") and err.count("\n") == 1
    assert "is not finite after iteration 2, which is not saved" in err
    assert "--env-id" in err and "--learning-rate" in err
    (folder,) = tmp_path.iterdir()
    assert checkpoint(folder)["iteration"] == 1 and not list(folder.glob("*.tmp"))
    assert all(x.isfinite().all() for x in result(folder).values() if isinstance(x, torch.Tensor))
    monkeypatch.setattr(Later, "healthy", 10**6)
    assert control.evaluate(control.parse_args(["--evaluate", str(folder), "--eval-episodes", "2"])) == [5.0] * 2


# ------------------------------------------------------------------------------------------------ learning

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
@pytest.mark.parametrize("name", ["ppo_penalty"])
def test_inverted_pendulum_with_default_flags(name: str, tmp_path: Path) -> None:
    """Chance is about 6 of 1000."""
    result = run(name, "--env-id", "InvertedPendulum-v5", "--total-timesteps", 6e4, cwd=tmp_path, timeout=1500)
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert last_returns(folder, 20) > 300
