"""What holds the scripts together without a shared package: equal text, sizes, pins, marks, true documents."""

import ast
import difflib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import details
import pytest
from conftest import BUDGET, CHOICES, MODULES, ROOT, SCRIPTS, SMALL, TESTS, TEXTS, counting, environment, run, run_small

ATARI = {*map(str, [*range(1, 23), "S2", "S3"])}
CONTINUOUS = {*map(str, [*range(1, 14), *range(23, 32), "S2", "S3"])}
DISCRETE = (CONTINUOUS - {*map(str, [23, 24, 25, 27])}) | {"37", "S1", "S4"}
LSTM = (DISCRETE - {"26"}) | {*map(str, range(32, 37)), *(f"LSTM-{x}" for x in "abcdefghi")}
RLHF = {*(f"R{n}" for n in range(1, 32)), *"3 4 5 6 8 9 11 S2 S3".split()}
DPO = {f"D{n}" for n in (*range(1, 9), *range(10, 23))} | {*"3 4 11 S2".split()}
DPO |= {f"R{n}" for n in (1, 2, 3, 4, 5, 6, 7, 13, 14, 15, 16, 18, 26, 31)}
GRPO = {f"G{n}" for n in range(1, 31)} - {f"G{n}" for n in (9, 22, 24, 25, 26, 28, 29)}
GRPO |= {f"L{n}" for n in range(1, 6)} | RLHF - {"R20", "R21", "R22", "R23", "R24", "R25", "R27", "R29", "5", "9"}
EXPECTED_MARKS = {
    "ppo_atari": ATARI,
    "ppo_continuous": CONTINUOUS,
    "ppo_discrete": DISCRETE,
    "ppo_lstm": LSTM,
    "ppo_penalty": CONTINUOUS - {"8", "9"},  # its objective is the penalised one, its value loss the squared error
    "rlhf_ppo_gpt2": RLHF,
    "grpo_gpt2": GRPO,
    "dpo_gpt2": DPO,
}
MEANT_TO_DIFFER = {
    "Args": "flags and defaults",
    "Agent": "network and distribution",
    "Episode": "in Atari a game with all its lives, as its docstring says",
    "value_loss": "clipped or not",
    "ppo_loss": "objective and distribution",
    "train": "the algorithm itself",
    "make_env": "games; TRPO takes discrete actions too",
    "in_numpy": "TRPO's network has outputs of two kinds",
    "load_policy": "network and distribution",
    "Run.__init__": "TRPO's step size does not fall, and so does not rise with the budget",
    "Run.end_iteration": "Atari has no statistics of observations and returns to share",
    "play": "games are shown in colour by a second emulator, and shared out among environments",
    "evaluate": "what is sampled, and what is best",
    "main": "environments of Gymnasium may come from a module of their own",
}
CHOICES_DIFFER = {  # where actions are choices; in the other scripts these are still the same
    "NormalizedEnvs": "masks, actions counted from 0, observations and rewards normalised by flag",
    "probe_env": "the step that tries it is one of those that are valid",
}
DISCRETE_DIFFERS = CHOICES_DIFFER | {
    "act": "choices of several components among valid actions; one game has all its actions always",
}
LSTM_DIFFERS = CHOICES_DIFFER | {  # where a policy remembers
    "act": "takes and returns the state of the memory",
    "check_args": "minibatches are of whole environments",
    "play": "tells the policy where an episode begins",
}
RLHF_DIFFERS = {  # where texts take the place of environments; in the other scripts these are still the same
    "check_args": "other flags",
    "Run.__init__": "three stages, and evaluations beside training",
    "Run.open": "what is learnt has no id",
    "Run.stop": "a stage before it has another handler",
    "Run.log": "other figures, no episodes",
    "Run.finish": "models lie there already",
    "parse_args": "presets",
}
DPO_DIFFERS = {  # where comparisons take the place of rewards; in the other scripts these are still the same
    **{name: why for name, why in RLHF_DIFFERS.items() if name != "parse_args"},
    "Responses": "answers are judged and shown, and no minibatches are made of them",
    "Task": "comparisons know where their prompt ends",
    "sft_loss": "reads rows as they are padded, without sharing them out; also what other processes read counts",
    "update": "one step on pairs",
    "load_stage": "no reward model",
    "file_task": "prompts of comparisons, equal answers counted",
    "fine_tune": "the one stage that is fitted",
    "annotate": "different answers only, and soft labels",
    "measure": "pairs, too, and no proxy",
    "describe": "accuracy on pairs in place of the proxy",
    "self_check": "neither ratio nor reward model",
    "Run.report": "health looks at evaluations, too",
}
GRPO_DIFFERS = {  # where groups take the place of values; in the other scripts these are still the same
    **{name: why for name, why in RLHF_DIFFERS.items() if name != "parse_args"},
    "Rollout": "what is compared comes later",
    "score_tokens": "no values",
    "rollout": "returns of whole answers, which are compared later",
    "update": "weights of tokens; the norm of the gradient is logged; Adam's ε as torch has it",
    "builtin_task": "the words are those of this task",
    "word_tokenizer": "the words of either task",
    "load_task": "there are two",
    "make_agent": "no value model",
    "answers_of": "a task may need no reward model",
    "self_check": "a task may need no reward model",
    "summarize": "no values to explain",
}
DIFFERS = {
    "ppo_discrete": DISCRETE_DIFFERS,
    "ppo_lstm": LSTM_DIFFERS,
    "rlhf_ppo_gpt2": RLHF_DIFFERS,
    "grpo_gpt2": GRPO_DIFFERS,
    "dpo_gpt2": DPO_DIFFERS,
}
CEILINGS = {  # code tokens of the whole file, and above the heading Plumbing
    "ppo_atari": (5_900, 3_100),
    "ppo_continuous": (6_200, 3_200),
    "ppo_discrete": (6_300, 3_300),
    "ppo_lstm": (6_900, 3_800),
    "ppo_penalty": (6_400, 3_400),
    "trpo": (7_300, 4_200),
    "rlhf_ppo_gpt2": (12_000, 6_400),
    "grpo_gpt2": (11_500, 5_900),
    "dpo_gpt2": (8_500, 3_300),
}
DENSE = 25  # tokens in a line
LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
README = (ROOT / "README.md").read_text()


def pieces(path: Path) -> dict[str, str]:
    """Name -> text of each function and class; of the class Run each method, `Run.log`."""
    source = path.read_text()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            whole = node.name != "Run"
            parts = [node] if whole else [part for part in ast.walk(node) if isinstance(part, ast.FunctionDef)]
            for part in parts:
                name = part.name if whole else f"Run.{part.name}"
                found[name] = ast.get_source_segment(source, part) or ""
    return found


def test_what_means_the_same_is_the_same_text() -> None:
    first: dict[str, tuple[str, str]] = {}
    for name in SCRIPTS:
        for piece, text in pieces(ROOT / f"{name}.py").items():
            script, reference = first.setdefault(piece, (name, text))
            if piece not in MEANT_TO_DIFFER and piece not in DIFFERS.get(name, ()):
                change = "\n".join(
                    difflib.unified_diff(reference.split("\n"), text.split("\n"), script, name, lineterm="", n=0)
                )
                assert text == reference, f"{piece} differs:\n{change}"


def test_what_is_meant_to_differ_does() -> None:
    texts = [(name, pieces(ROOT / f"{name}.py")) for name in SCRIPTS]
    for piece in MEANT_TO_DIFFER:
        assert len({found[piece] for _, found in texts if piece in found}) > 1, piece
    for script, reasons in DIFFERS.items():
        (own,) = [found for name, found in texts if name == script]
        for piece in reasons:
            others = [found.get(piece) for name, found in texts if piece not in DIFFERS.get(name, ())]
            assert own[piece] not in others, piece
    for piece in CHOICES_DIFFER:
        assert len({pieces(ROOT / f"{name}.py")[piece] for name in CHOICES}) == 1, piece


@pytest.mark.parametrize(
    "one, other, limit",
    [
        ("ppo_continuous", "ppo_penalty", 80),
        ("ppo_continuous", "ppo_discrete", 220),
        ("ppo_discrete", "ppo_lstm", 170),
        ("rlhf_ppo_gpt2", "grpo_gpt2", 430),  # half of them what groups do without: values, GAE, β's controllers
    ],
)
def test_what_an_objective_an_action_or_a_memory_changes_is_one_short_diff(one: str, other: str, limit: int) -> None:
    before, after = ((ROOT / f"{name}.py").read_text().splitlines() for name in (one, other))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    changed = [i2 - i1 + j2 - j1 for kind, i1, i2, j1, j2 in matcher.get_opcodes() if kind != "equal"]
    assert sum(changed) <= limit


def heading(lines: list[str]) -> int:
    """Index of the line below which the plumbing stands."""
    return next(i for i, line in enumerate(lines) if line.startswith("# ---") and line.endswith("Plumbing"))


def tokens_of_lines(source: str) -> Counter[int]:
    """Line number -> code tokens, without comments and docstrings: neither layout nor packing changes the sum."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            docstrings.add(node.body[0].lineno)
    found: Counter[int] = Counter()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and not (token.type == tokenize.STRING and token.start[0] in docstrings):
            found[token.start[0]] += 1
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_algorithm_comes_first_and_both_are_small(name: str) -> None:
    source = (ROOT / f"{name}.py").read_text()
    lines = source.splitlines()
    above = "\n".join(lines[: heading(lines)])
    assert "def train(" in above and "_loss(" in above and "def main(" not in above
    tokens = tokens_of_lines(source)
    whole = sum(tokens.values())
    algorithm = sum(count for line, count in tokens.items() if line <= heading(lines))
    assert whole <= CEILINGS[name][0] and algorithm <= CEILINGS[name][1], (whole, algorithm)
    dense = [line for line, count in tokens.items() if count >= DENSE]
    assert len(dense) <= 0.06 * len(tokens), dense
    assert max(map(len, lines)) <= 120 and "fmt: skip" not in source


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_function_is_long(name: str) -> None:
    for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= (70 if node.name == "train" else 40), f"{node.name}: {length}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_mark_stands_above_the_plumbing(name: str) -> None:
    lines = (ROOT / f"{name}.py").read_text().splitlines()
    below = re.findall(r"\[[RSGLD]?\d+\]", "\n".join(line.partition("#")[2] for line in lines[heading(lines) :]))
    assert {*below} <= {"[S2]"}


def test_no_script_imports_another() -> None:
    for name in SCRIPTS:
        for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {m.split(".")[0] for m in modules} & {*SCRIPTS, "tests", "conftest"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_inline_header_agrees_with_the_pins(name: str) -> None:
    source = (ROOT / f"{name}.py").read_text()
    block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", source)
    assert block
    header = tomllib.loads(re.sub(r"^# ?", "", block[1], flags=re.M))
    pins = {line for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line}
    pins |= {re.sub(r"\[.*\]", "", pin) for pin in pins}  # gymnasium with or without its extra
    assert header["requires-python"] == ">=3.11" and set(header["dependencies"]) <= pins
    third_party = {"torch", "numpy", "tyro", "tqdm", "gymnasium", "ale_py", "transformers", "filelock"}
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", source, re.M)) & third_party
    named = {re.split(r"[=\[]", dependency)[0].replace("-", "_") for dependency in header["dependencies"]}
    assert imported <= named and "tensorboard" in named


@pytest.mark.parametrize("name", EXPECTED_MARKS)
def test_every_detail_is_marked_and_every_mark_has_a_test(name: str) -> None:
    found, claims = details.marks(ROOT / f"{name}.py"), details.tests()
    assert set(found) == EXPECTED_MARKS[name]
    assert all("" not in names for names in found.values()), "a mark outside every function"
    assert not [mark for mark in found if not claims[mark]]
    assert {mark for mark in claims if not mark.startswith("TRPO")} <= set(details.CATALOGUE)


def test_details_md_is_up_to_date() -> None:
    assert (ROOT / "DETAILS.md").read_text() == details.text(), "run: python tests/details.py"


def test_importing_a_script_starts_nothing(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {', '.join(SCRIPTS)}"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0 and not result.stdout and not result.stderr and not list(tmp_path.iterdir())


# README.md: its commands do what they say, with smaller budgets; its ranges are those of the scripts.

BLOCKS = "".join(re.findall(r"```bash\n(.*?)```", README, re.S))
PROSE = re.sub(r"```.*?```", "", README, flags=re.S)
COMMANDS = [*BLOCKS.splitlines(), *re.findall(r"`((?:python|torchrun) [^`]+)`", PROSE)]
RUN = [command for command in dict.fromkeys(COMMANDS) if command.startswith(("python ", "torchrun "))]
LESS = {  # the flags of a small run, but for its environment
    name: [f for f in flags if f not in ("--env-id", "Pong", counting(name, "Trunc"))] for name, flags in SMALL.items()
}
MODULE = """
import gymnasium
from counting_envs import IDS
gymnasium.register("MyEnv-v0", "counting_envs:Counting", kwargs=IDS["Trunc"])
"""


def test_the_readme_is_short_and_says_what_no_test_runs() -> None:
    assert len(README.splitlines()) <= 160 and len(RUN) >= 15
    (listed,) = re.findall(r"A test runs every command of this page[^`]*((?:`[^`]+`[^`.]*)+)\.", README)
    for what in re.findall(r"`([^`]+)`", listed):
        assert README.count(what) > 1 and not any(what in command for command in RUN), what


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands name: a module, texts, and a GPT-2 in the place of the one of the hub."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "my_module.py").write_text(MODULE)
    texts = {"prompt": "the plot", "chosen": " was great", "rejected": " was slow", "response": " was great"}
    for name, keys in (
        ("prompts", ["prompt"]),
        ("pairs", ["prompt", "chosen", "rejected"]),
        ("texts", ["prompt", "response"]),
    ):
        rows = [{key: texts[key] for key in keys}] * 64
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("command", RUN)
def test_the_command_works(command: str, place: Path) -> None:
    words = shlex.split(command)
    script = next(word for word in words if word.endswith(".py"))
    name = script.removesuffix(".py")
    if "FOLDER" in command or "gpt2 " in command.replace("_gpt2", ""):
        run_folder = run_small(name, cwd=place)
        words = [word.replace("runs/FOLDER", str(run_folder)) for word in words]
        if name in TEXTS:
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


def test_the_loop_of_your_own_works(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_small("ppo_continuous", cwd=place)
    (loop,) = re.findall(r"```python\n(.*?)```", README, re.S)
    loop = loop.replace("HalfCheetah-v5", "counting_envs:Trunc-v0").replace("runs/FOLDER", str(folder))
    names: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "ppo_continuous", MODULES["ppo_continuous"])
    exec(loop, names)
    assert names["done"] and names["env"].action_space.contains(names["policy"](names["obs"]).astype("float32"))


def shown(low: float, high: float) -> str:
    """A range as README.md writes it; bounds that nothing reaches are none: -1, as no KL is below 0, and high ones."""
    if low == high:
        return f"exactly {low:g}"
    if low == -1:
        return f"below {high:g}"
    return f"above {low:g}" if high >= 1e6 or (low, high) == (0.01, 9) else f"{low:g} to {high:g}"


def test_the_ranges_of_the_readme_are_those_of_the_scripts() -> None:
    section = README.partition("## How to read a run")[2].partition("\n## ")[0]
    ranges: dict[str, set[str]] = {}
    for tags, cell in re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", section, re.M):
        for tag in re.findall(r"`([^`]+)`", tags):
            ranges[tag] = set(re.findall(r"exactly [\d.]+|below [\d.]+|above [\d.]+|-?[\d.]+ to [\d.]+", cell))
    wanted: dict[str, set[str]] = {"charts/episodic_return": set()}
    for name in SCRIPTS:
        for tag, low, high, _ in MODULES[name].HEALTHY:
            wanted.setdefault(tag, set()).add(shown(low, high))
    assert ranges == wanted


def test_the_functions_that_the_readme_says_to_read_first_exist() -> None:
    for name in SCRIPTS:
        (row,) = re.findall(rf"^\| `{name}\.py` .*\| ([^|]+) \|$", README, re.M)
        for function in re.findall(r"`(\w+)`", row):
            assert function in pieces(ROOT / f"{name}.py"), function
