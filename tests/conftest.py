"""Helpers of the tests: load a script as a module, run it as a user does, read what it logged."""

import dataclasses
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import tyro

torch.set_num_threads(1)  # the tests run in several processes
TESTS = Path(__file__).parent
ROOT = TESTS.parent
PPO = ["ppo_atari", "ppo_continuous", "ppo_discrete", "ppo_lstm", "ppo_penalty"]
GAUSSIAN = ["ppo_continuous", "ppo_penalty"]
CONTROL = [*PPO, "trpo"]  # what plays in environments
BOXES = [*GAUSSIAN, "trpo"]  # those of them that take continuous actions
CHOICES = ["ppo_discrete", "ppo_lstm"]  # those that take discrete ones
ENVS = [*BOXES, *CHOICES]  # those that take environments of Gymnasium
TEXTS = ["rlhf_ppo_gpt2", "grpo_gpt2", "dpo_gpt2"]  # what writes texts
SCRIPTS = [*CONTROL, *TEXTS]
BUDGET = {**dict.fromkeys(CONTROL, "--total-timesteps"), **dict.fromkeys(TEXTS, "--total-episodes")}
sys.path.insert(0, str(TESTS))  # counting_envs:Trunc-v0

SMALL: dict[str, list[str]] = {  # flags of a run of a few seconds: 4 iterations of 128 steps
    "ppo_atari": "--env-id Pong --num-envs 2 --num-steps 64 --update-epochs 1 --total-timesteps 512".split(),
    **dict.fromkeys(
        GAUSSIAN,
        "--env-id counting_envs:Trunc-v0 --num-envs 2 --num-steps 64 --num-minibatches 4 --update-epochs 2"
        " --total-timesteps 512".split(),
    ),
    "ppo_discrete": "--env-id counting_envs:ChoiceTrunc-v0 --num-envs 2 --num-steps 64 --num-minibatches 4"
    " --update-epochs 2 --norm-obs --norm-reward --total-timesteps 512".split(),
    "ppo_lstm": "--env-id counting_envs:ChoiceTrunc-v0 --num-envs 2 --num-steps 64 --num-minibatches 1"
    " --update-epochs 2 --norm-obs --norm-reward --total-timesteps 512".split(),
    "trpo": "--env-id counting_envs:Trunc-v0 --num-envs 2 --num-steps 64 --num-minibatches 4"
    " --total-timesteps 512".split(),
    "rlhf_ppo_gpt2": "--sft-size 64 --num-pairs 40 --fit-batch-size 32 --min-accuracy 0 --response-length 5"
    " --num-minibatches 2 --update-epochs 1 --total-episodes 512 --eval-episodes 8".split(),
    "grpo_gpt2": "--sft-size 64 --num-pairs 40 --fit-batch-size 32 --min-accuracy 0 --response-length 5"
    " --num-minibatches 2 --inner-steps 1 --total-episodes 512 --eval-episodes 8".split(),
    "dpo_gpt2": "--sft-size 64 --num-pairs 40 --fit-batch-size 32 --response-length 5 --batch-size 128"
    " --total-episodes 512 --eval-episodes 8".split(),
}


def counting(name: str, kind: str) -> str:
    """The environment of this kind whose actions the script takes."""
    return f"counting_envs:{'Choice' if name in CHOICES else ''}{kind}-v0"


def load(name: str) -> ModuleType:
    """The script as a module; importing starts nothing."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


MODULES = {name: load(name) for name in SCRIPTS}


def of_rows(agent: Any, obs: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Policy and values of rows [B, ...], each of which begins an episode for an agent with a memory."""
    if not hasattr(agent, "lstms"):
        return agent(obs)
    starts = torch.ones(1, len(obs), dtype=torch.bool)
    logits, values, _ = agent(obs[None], starts, agent.initial_state.expand(-1, len(obs), -1))
    return logits[0], values[0]


def environment() -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    return own | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}


def command(name: str, *flags: Any) -> list[str]:
    return [sys.executable, str(ROOT / f"{name}.py"), *map(str, flags)]


SERVER = """
import gc, json, os, resource, runpy, signal, sys
import {modules}
gc.freeze()  # or each child would copy all that has been imported when it ends: a second each
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
if job["session"]:
    os.setsid()
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs inherit that it is ignored
if job["limit"]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (job["limit"], job["limit"]))
signal.alarm(job["timeout"])
os.chdir(job["cwd"])
os.environ |= job["env"]
for stream, path in enumerate([os.devnull, *job["outputs"]]):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), stream)
sys.argv = job["argv"]
if sys.argv[0].endswith(".py"):
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
IMPORTED = """ale_py.vector_env, gymnasium, numpy, torch, tqdm, transformers, tyro, torch.utils.tensorboard,
    transformers.models.gpt2.modeling_gpt2"""


class Forked:
    """A script or module with its arguments, in a fork of a process that has imported modules: it starts at once.

    `send_signal`, `poll`, `wait` and `pid` are as those of subprocess.Popen; `output` has all that it prints. With a
    limit, no file grows beyond so many bytes, as on a full disk.
    """

    servers: dict[str, list[subprocess.Popen[bytes]]] = {}  # those that wait for work, by what they have imported

    def __init__(
        self,
        argv: list[str],
        cwd: Path,
        outputs: list[Path],
        timeout: int = 400,
        modules: str = IMPORTED,
        env: dict[str, str] | None = None,
        session: bool = False,
        limit: int = 0,
    ):
        self.output = outputs[0]
        self.output.touch()
        self.returncode: int | None = None
        self.idle = self.servers.setdefault(modules, [])
        self.server = self.idle.pop() if self.idle else self.start_server(modules)
        job = {"argv": argv, "cwd": str(cwd), "env": env or {}, "timeout": timeout, "session": session, "limit": limit}
        assert self.server.stdin and self.server.stdout
        self.answers = self.server.stdout
        self.server.stdin.write(json.dumps(job | {"outputs": [*map(str, outputs)]}).encode() + b"\n")
        self.pid = int(self.answers.readline())

    @staticmethod
    def start_server(modules: str) -> subprocess.Popen[bytes]:
        source = SERVER.replace("{modules}", " ".join(modules.split()))
        command = [sys.executable, "-c", source]
        return subprocess.Popen(command, bufsize=0, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self.answers.readline())
            self.idle.append(self.server)
        return self.returncode

    def poll(self) -> int | None:
        ended = self.returncode is None and select.select([self.answers], [], [], 0)[0]
        return self.wait() if ended else self.returncode

    def send_signal(self, sign: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sign)

    def text(self) -> str:
        return self.output.read_text()


def forked(argv: list[str], cwd: Path, outputs: list[Path], timeout: int, modules: str = IMPORTED) -> int:
    """The exit status of a script or module with its arguments, run in a fork."""
    return Forked(argv, cwd, outputs, timeout, modules).wait()


def run(
    name: str,
    *flags: Any,
    cwd: Path,
    timeout: int = 400,
    fresh: bool = False,
    env: dict[str, str] | None = None,
    **how: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a script as a user does, without a terminal: in a process of its own, or if `fresh` in a new interpreter."""
    argv = command(name, *flags)
    if fresh:
        known = environment() | (env or {})
        return subprocess.run(argv, cwd=cwd, timeout=timeout, env=known, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, "out"), Path(folder, "err")]
        status = Forked(argv[1:], cwd, outputs, timeout, env=env, **how).wait()
        return subprocess.CompletedProcess(argv, status, *(path.read_text() for path in outputs))


def left_in(cwd: Path) -> list[int]:
    """The processes whose current folder this is, which tells those of a run from all others; on Linux."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found += [int(process.name)] * (process / "cwd").resolve(strict=True).is_relative_to(cwd)
        except OSError:
            continue  # it has ended, or is not ours
    return found


def run_small(name: str, *flags: Any, cwd: Path) -> Path:
    """A small run that must succeed; returns its folder."""
    before = set((cwd / "runs").glob("*"))
    result = run(name, *SMALL[name], *flags, cwd=cwd)
    assert result.returncode == 0, result.stderr
    (folder,) = set((cwd / "runs").glob("*")) - before
    return folder


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run folder: tag -> [(step, value), ...]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A run in this process takes SIGINT and SIGTERM; they are given back."""
    handlers = {sign: signal.getsignal(sign) for sign in (signal.SIGINT, signal.SIGTERM)}
    yield
    for sign, handler in handlers.items():
        signal.signal(sign, handler)


@pytest.fixture(params=SCRIPTS)
def name(request: pytest.FixtureRequest) -> str:
    """Every script in turn."""
    return request.param


@pytest.fixture(params=PPO)
def ppo(request: pytest.FixtureRequest) -> ModuleType:
    return MODULES[request.param]


@pytest.fixture(params=GAUSSIAN)
def gaussian(request: pytest.FixtureRequest) -> ModuleType:
    return MODULES[request.param]


@pytest.fixture(params=ENVS)
def control(request: pytest.FixtureRequest) -> ModuleType:
    """The scripts that take environments of Gymnasium."""
    return MODULES[request.param]


@pytest.fixture
def atari() -> ModuleType:
    return MODULES["ppo_atari"]


@pytest.fixture
def penalty() -> ModuleType:
    return MODULES["ppo_penalty"]


@pytest.fixture
def small_args(tmp_path: Path) -> Callable[..., Any]:
    """Args of a small run of a module inside this process, into a temporary folder."""

    def make(module: ModuleType, **changes: Any) -> Any:
        args = tyro.cli(module.Args, args=[*SMALL[module.__name__], "--run-dir", str(tmp_path / "runs")])
        return dataclasses.replace(args, **changes)

    return make
