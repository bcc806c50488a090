"""No flag is without effect: each one, changed alone, changes the run, what is kept of it, or what is printed."""

import ast
import dataclasses
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import BUDGET, CONTROL, MODULES, ROOT, SCRIPTS, SMALL, TEXTS, scalars
from test_runs import TIMING, result

TWO_ITERATIONS = {**dict.fromkeys(CONTROL, 256), **dict.fromkeys(TEXTS, 256)}
COMMON: dict[str, Any] = {  # field -> another value, with what else is needed for it to matter
    "total_timesteps": 384,
    "learning_rate": 0.1,
    "anneal_lr": False,
    "num_envs": 4,
    "num_steps": 32,
    "num_minibatches": 2,
    "update_epochs": 3,
    "gamma": 0.5,
    "gae_lambda": 0.1,
    "bootstrap_truncated": False,
    "norm_adv": False,
    "clip_coef": 0.001,
    "clip_vloss": False,
    "ent_coef": 0.5,
    "vf_coef": 5.0,
    "max_grad_norm": 1e-3,
    "target_kl": 1e-9,
    "seed": 2,
    "torch_deterministic": False,
    "compile": True,
    "bf16": True,
    "exp_name": "other",
    "run_dir": "elsewhere",
    "checkpoint_every": 1,
    "capture_video": True,
    "save_model": True,
    "track": True,
    "device": "nowhere",  # refused
    "cuda": (False, {"device": "cuda"}),  # where there is none, that alone is refused
    "wandb_project_name": ("other", {"track": True}),
    "wandb_entity": ("other", {"track": True}),
    "eval_episodes": (3, {"evaluate": True}),
    "eval_sample": (False, {"evaluate": True}),
}
VALUES = """preset beta_controller kl_target kl_horizon value_model whiten_rewards best_of_n gamma clip_coef clip_vloss
    vf_coef update_epochs""".split()  # flags of RLHF with PPO that GRPO has no use for
OWN: dict[str, dict[str, Any]] = {
    "ppo_atari": {
        "env_id": "Breakout",
        "sticky_actions": 1.0,
        "max_episode_frames": 40,
        "bootstrap_truncated": (False, {"max_episode_frames": 40}),
        "eval_episodes": (3, {"evaluate": True, "max_episode_frames": 40}),
        "eval_sample": (False, {"evaluate": True, "max_episode_frames": 40}),
    },
    "ppo_continuous": {"env_id": "counting_envs:Step-v0"},
    "ppo_discrete": {
        "env_id": "counting_envs:ChoiceStep-v0",
        "norm_obs": False,
        "norm_reward": (False, {"env_id": "counting_envs:ChoiceStep-v0"}),
        "anneal_clip": True,
    },
    "ppo_lstm": {
        "env_id": "counting_envs:ChoiceStep-v0",
        "norm_obs": False,
        "norm_reward": (False, {"env_id": "counting_envs:ChoiceStep-v0"}),
        "anneal_clip": True,
        "shared_lstm": True,
    },
    "ppo_penalty": {"env_id": "counting_envs:Step-v0", "beta": 50.0, "adaptive_beta": False, "kl_target": 1.0},
    "trpo": {
        "env_id": "counting_envs:Step-v0",
        "max_kl": 0.1,
        "cg_iters": 1,
        "cg_damping": 1.0,
        "fvp_subsample": 4,
        "line_search_steps": (1, {"max_kl": 1e-12}),
        "line_search_decay": (0.1, {"max_kl": 1e-12}),
    },
    "rlhf_ppo_gpt2": {
        "preset": "smoke",
        "prompt_length": 4,
        "response_length": 3,
        "temperature": 0.5,
        "sft_size": 96,
        "sft_learning_rate": 0.1,
        "num_pairs": 60,
        "reward_learning_rate": 0.1,
        "fit_batch_size": 16,
        "total_episodes": 384,
        "batch_size": 64,
        "num_minibatches": 4,
        "micro_batch_size": 3,
        "adam_eps": 0.1,
        "beta": 5.0,
        "beta_controller": "doubling",
        "kl_target": (0.001, {"beta_controller": "doubling"}),
        "kl_horizon": (500, {"beta_controller": "proportional"}),
        "value_model": "head",
        "whiten_rewards": True,
        "missing_eos_penalty": 9.0,
        "best_of_n": 2,
        "self_check": False,
        "min_accuracy": 1.0,
        "eval_every": 1,
        "eval_episodes": 4,
        "target_kl": 1e-12,
    },
    "dpo_gpt2": {
        "prompt_length": 4,
        "response_length": 3,
        "temperature": 0.5,
        "sft_size": 96,
        "sft_learning_rate": 0.1,
        "num_pairs": 60,
        "soft_labels": True,
        "fit_batch_size": 16,
        "total_episodes": 384,
        "batch_size": 64,
        "micro_batch_size": 3,
        "warmup": 1.0,
        "loss": "ipo",
        "beta": 5.0,
        "label_smoothing": 0.2,
        "length_normalize": True,
        "eval_every": 1,
        "eval_episodes": 4,
    },
}
OWN["grpo_gpt2"] = {k: v for k, v in OWN["rlhf_ppo_gpt2"].items() if k not in VALUES} | {
    "task": "reverse",
    "kl_in": "off",
    "kl_gradient": ("forward", {"kl_in": "loss", "learning_rate": 0.01}),
    "group_size": 4,
    "baseline": "rloo",
    "scale": "batch",
    "loss_norm": "sequence",
    "inner_steps": 2,
    "clip_low": (0.001, {"learning_rate": 0.01}),
    "clip_high": (0.001, {"learning_rate": 0.01}),
    "max_ratio": (0.5, {"learning_rate": 0.01}),
}
CLASSIC = {"seed": 1, "gamma": 0.99, "gae_lambda": 0.95, "device": "auto", "cuda": True, "torch_deterministic": True}
CLASSIC |= dict.fromkeys(("compile", "bf16", "track", "capture_video", "save_model"), False)
CLASSIC |= {"bootstrap_truncated": True, "norm_adv": True, "eval_sample": True, "eval_episodes": 10, "run_dir": "runs"}
CLIPPED = {"anneal_lr": True, "clip_vloss": True, "vf_coef": 0.5, "max_grad_norm": 0.5, "target_kl": None}
MUJOCO = {"env_id": "HalfCheetah-v5", "total_timesteps": 1_000_000, "num_envs": 1, "num_steps": 2048}
MUJOCO |= {"checkpoint_every": 25, "update_epochs": 10, "ent_coef": 0.0, "vectorization": "sync"}
PUBLISHED: dict[
    str, dict[str, Any]
] = {  # 1707.06347, tables 3 and 5, with the rates of the implementations; 1502.05477
    "ppo_atari": CLASSIC
    | CLIPPED
    | {"env_id": "Breakout", "total_timesteps": 10_000_000, "num_envs": 8, "num_steps": 128, "learning_rate": 2.5e-4}
    | {"num_minibatches": 4, "update_epochs": 4, "clip_coef": 0.1, "ent_coef": 0.01, "checkpoint_every": 500}
    | {"sticky_actions": 0.0, "max_episode_frames": 108_000},
    "ppo_continuous": CLASSIC | CLIPPED | MUJOCO | {"learning_rate": 3e-4, "num_minibatches": 32, "clip_coef": 0.2},
    "ppo_discrete": CLASSIC
    | CLIPPED
    | {"env_id": "CartPole-v1", "vectorization": "sync", "total_timesteps": 500_000, "num_envs": 4, "num_steps": 128}
    | {"learning_rate": 2.5e-4, "num_minibatches": 4, "update_epochs": 4, "clip_coef": 0.2, "ent_coef": 0.01}
    | {"checkpoint_every": 100, "norm_obs": False, "norm_reward": False, "anneal_clip": False},
    "ppo_lstm": CLASSIC
    | CLIPPED
    | {"env_id": "CartPoleNoVel-v1", "vectorization": "sync", "total_timesteps": 300_000, "num_envs": 16}
    | {"num_steps": 64, "learning_rate": 5e-4, "num_minibatches": 4, "update_epochs": 10, "clip_coef": 0.2}
    | {"ent_coef": 0.0, "checkpoint_every": 100, "norm_obs": True, "norm_reward": True, "anneal_clip": False}
    | {"shared_lstm": False},
    "ppo_penalty": CLASSIC
    | CLIPPED
    | MUJOCO
    | {"learning_rate": 3e-4, "num_minibatches": 32, "beta": 1.0, "adaptive_beta": True, "kl_target": 0.01},
    "trpo": CLASSIC
    | MUJOCO
    | {"learning_rate": 1e-3, "num_minibatches": 16, "max_kl": 0.01, "cg_iters": 10, "cg_damping": 0.1}
    | {"fvp_subsample": 1, "line_search_steps": 10, "line_search_decay": 0.8},
    "rlhf_ppo_gpt2": CLASSIC  # 1909.08593, appendix A, and what the built-in task needs
    | {"preset": "default", "prompt_length": 64, "response_length": 24, "temperature": 1.0, "sft_size": 20_000}
    | {"sft_learning_rate": 1e-3, "num_pairs": 16_000, "reward_learning_rate": 3e-4, "fit_batch_size": 32}
    | {"total_episodes": 10_240, "batch_size": 128, "num_minibatches": 4, "update_epochs": 4, "learning_rate": 3e-4}
    | {"anneal_lr": True, "adam_eps": 1e-5, "gamma": 1.0, "clip_coef": 0.2, "clip_vloss": True, "vf_coef": 0.1}
    | {"max_grad_norm": 1.0, "beta": 0.15, "beta_controller": "fixed", "kl_target": 6.0, "kl_horizon": 10_000}
    | {"value_model": "separate", "whiten_rewards": False, "missing_eos_penalty": 1.0, "best_of_n": 0}
    | {"self_check": True, "min_accuracy": 0.55, "checkpoint_every": 20, "eval_every": 10, "eval_episodes": 256}
    | dict.fromkeys(("model", "prompts", "preferences", "reward_model", "sft", "micro_batch_size", "target_kl")),
    "dpo_gpt2": CLASSIC  # 2305.18290, appendix B, but for what the built-in task needs
    | {"prompt_length": 64, "response_length": 24, "temperature": 1.0, "sft_size": 20_000, "sft_learning_rate": 1e-3}
    | {"num_pairs": 16_000, "soft_labels": False, "fit_batch_size": 32, "batch_size": 64, "learning_rate": 3e-4}
    | {"anneal_lr": True, "warmup": 0.1, "loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.0}
    | {"length_normalize": False, "max_grad_norm": 1.0, "self_check": True, "checkpoint_every": 50, "eval_every": 25}
    | {"eval_episodes": 256}
    | dict.fromkeys(("model", "prompts", "preferences", "sft", "micro_batch_size", "total_episodes")),
}
PUBLISHED["grpo_gpt2"] = {k: v for k, v in PUBLISHED["rlhf_ppo_gpt2"].items() if k not in VALUES} | {
    "task": "opinions",
    "group_size": 8,
    "baseline": "mean",
    "scale": "none",
    "loss_norm": "token",
    "inner_steps": 4,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "max_ratio": 10.0,
    "kl_in": "reward",
    "kl_gradient": "reverse",
}  # 2402.03300, without the std that 2503.20783 found to favour one-sided prompts


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_defaults_are_the_published_ones(script: str) -> None:
    defaults = dataclasses.asdict(MODULES[script].Args())
    named = {"exp_name": script, "wandb_project_name": "ppo", "resume": None, "evaluate": None, "wandb_entity": None}
    expected = {name: value for name, value in (PUBLISHED[script] | named).items() if name in defaults}
    assert defaults == expected


# What starts a run from elsewhere, needs files or an error; test_runs.py, test_rlhf_runs.py and test_dpo.py have tests.
ELSEWHERE = {
    "self_check",
    "resume",
    "evaluate",
    "vectorization",
    "model",
    "prompts",
    "preferences",
    "reward_model",
    "sft",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_is_read_somewhere(script: str) -> None:
    tree = ast.parse((ROOT / f"{script}.py").read_text())
    read = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    } | {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    fields = {field.name for field in dataclasses.fields(MODULES[script].Args)}
    assert not fields - read, "flags that nothing reads"


def outcome(module: ModuleType, cwd: Path, flags: dict[str, Any], monkeypatch: Any, capsys: Any) -> dict[str, Any]:
    """All that a run leaves behind, times and folder names aside."""
    seen: dict[str, Any] = {}
    remember = lambda name: (
        lambda *args, **kwargs: seen.setdefault(name, []).append(
            {key: value for key, value in kwargs.items() if key not in ("id", "dir", "config")}
        )
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=remember("wandb"), login=str, finish=lambda: None))
    monkeypatch.setattr(torch, "compile", lambda f, **options: seen.setdefault("compiled", True) and f)
    monkeypatch.setattr(torch.nn.Module, "compile", remember("compiled"))
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    play = flags.pop("evaluate", False)
    given = [x for k, v in flags.items() for x in option(k, v)]
    begin = [*SMALL[module.__name__], BUDGET[module.__name__], str(TWO_ITERATIONS[module.__name__])]
    if play:
        module.train(module.parse_args(begin))
        (folder,) = cwd.glob("*/*")
        capsys.readouterr()
        scores = module.evaluate(module.parse_args(["--evaluate", str(folder), *given]))
        return {"scores": scores, "printed": capsys.readouterr().out.replace(str(folder), "")}
    try:
        module.train(module.parse_args([*begin, *given]))
    except module.UsageError as error:
        return {"refused": str(error)}
    (folder,) = cwd.glob("*/*")
    seen["files"] = sorted({path.name.split(".")[0] + path.suffix for path in folder.iterdir()} - {"args.json"})
    seen["state"] = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in result(folder).items()}
    seen["log"] = repr({k: v for k, v in scalars(folder).items() if k not in TIMING})
    seen["where"] = folder.parent.name, folder.name.rsplit("__", 1)[0]
    seen["backends"] = torch.backends.cudnn.deterministic, torch.get_float32_matmul_precision()
    return seen


def option(field: str, value: Any) -> list[str]:
    flag = field.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{'' if value else 'no-'}{flag}"]
    return [f"--{flag}", str(value)]


@pytest.mark.faults
def test_every_flag_changed_alone_changes_something(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    module = MODULES[name]
    fields = {field.name for field in dataclasses.fields(module.Args)}
    changes = {k: v for k, v in (COMMON | OWN[name]).items() if k in fields}
    assert fields == set(changes) | (ELSEWHERE & fields)
    known: dict[str, Any] = {}
    without_effect = []
    for field, change in changes.items():
        value, base = change if isinstance(change, tuple) else (change, {})
        key = repr(base)
        if key not in known:
            known[key] = outcome(module, tmp_path / f"{field}-base", dict(base), monkeypatch, capsys)
        if outcome(module, tmp_path / field, base | {field: value}, monkeypatch, capsys) == known[key]:
            without_effect.append(field)
    assert not without_effect
