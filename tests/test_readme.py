"""README.md: its commands do what they say, with smaller budgets, and the functions that it names exist."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import BUDGET, ROOT, SCRIPTS, SMALL, TESTS, environment, run, run_small

TEXT = (ROOT / "README.md").read_text()
BLOCKS = "".join(re.findall(r"```bash\n(.*?)```", TEXT, re.S))
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.S)
COMMANDS = [*BLOCKS.splitlines(), *re.findall(r"`((?:python|torchrun|pip|uv|tensorboard) [^`]+|pytest[^`]*)`", PROSE)]
COMMANDS = list(dict.fromkeys(part.strip() for line in COMMANDS for part in line.split("#")[0].split("&&")))
(LISTED,) = re.findall(r"A test runs every command of this page[^`]*((?:`[^`]+`[^`.]*)+)\.", TEXT)
NOT_RUN = re.findall(r"`([^`]+)`", LISTED)
RUN = [
    command for command in COMMANDS if not any(what in command for what in [*NOT_RUN, "benchmarks/"])
]  # for those see test_benchmarks.py
LESS = {  # the flags of a small run, but for its environment
    name: [f for f in flags if f not in ("--env-id", "Pong", "counting_envs:Trunc-v0")] for name, flags in SMALL.items()
}
MODULE = """
import gymnasium
from counting_envs import IDS
gymnasium.register("MyEnv-v0", "counting_envs:Counting", kwargs=IDS["Trunc"])
"""


def test_what_no_test_runs_is_still_on_the_page() -> None:
    assert len(RUN) >= 15 and all(any(what in command for command in COMMANDS) for what in NOT_RUN)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands name: a module, texts, and a GPT-2 in the place of the one of the hub."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "my_module.py").write_text(MODULE)
    for name, keys in (
        ("prompts", ["prompt"]),
        ("pairs", ["prompt", "chosen", "rejected"]),
        ("texts", ["prompt", "response"]),
    ):
        rows = [{key: f"the plot is {key} {i}" for key in keys} for i in range(64)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("command", RUN)
def test_the_command_works(command: str, place: Path) -> None:
    words = shlex.split(command)
    script = next(word for word in words if word.endswith(".py"))
    name = script.removesuffix(".py")
    if "FOLDER" in command or "gpt2 " in command.replace("_gpt2", ""):
        run_folder = run_small(name, cwd=place)
        words = [word.replace("runs/FOLDER", str(run_folder)).replace("FOLDER", f"{run_folder}/sft") for word in words]
        if name == "rlhf_ppo_gpt2":
            shutil.copytree(run_folder / "sft", place / "gpt2", dirs_exist_ok=True)
    flags = words[words.index(script) + 1 :]
    less = [BUDGET[name], "768"] if "--resume" in flags else [] if {"--evaluate", "--help"} & {*flags} else LESS[name]
    if words[0] == "torchrun":
        words[0] = str(Path(sys.executable).with_name("torchrun"))
        words[words.index(script)] = str(ROOT / script)
        result = subprocess.run(
            [*words, *less], cwd=place, env=environment(), capture_output=True, text=True, timeout=400
        )
    else:
        less = less + ["--no-compile"] * ("--compile" in flags)  # which other tests look at
        own: Any = {"env": {"PYTHONPATH": f"{TESTS}:{place}"}, "fresh": True} if "my_module" in command else {}
        result = run(name, *flags, *less, cwd=place, **own)
    assert result.returncode == 0, result.stderr
    assert ("usage" if "--help" in flags else "return" if "--evaluate" in flags else "(finished)") in result.stdout


def test_the_readme_names_functions_that_exist() -> None:
    """In the last column of "How to read a run", and in the table of scripts what to read first."""
    scripts = "".join((ROOT / f"{name}.py").read_text() for name in SCRIPTS)
    rows = re.findall(r"^\| `(?:charts|losses|kl)/.*\| ([^|]+) \|$", TEXT, re.M)
    names = [name for row in rows for name in re.findall(r"`([\w.]+)`", row)]
    assert len(rows) >= 10
    for name in names:
        assert re.search(rf"(def|class) {name.split('.')[0]}\b|\b{name}\b = |\b{name} = ", scripts), name
        assert f"def {name.split('.')[-1]}(" in scripts or re.search(rf"\b{name}\b.* = ", scripts), name
