"""What holds the scripts together without a shared package: equal text, equal pins, marks with tests, a README that works."""

import ast
import difflib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import details
import pytest
from conftest import ROOT, SCRIPTS

ATARI = {*map(str, [*range(1, 23), "S2", "S3"])}
CONTINUOUS = {*map(str, [*range(1, 8), *range(8, 14), *range(23, 32), "S2", "S3"])}
RLHF = {*(f"R{n}" for n in range(1, 32)), *"3 4 5 6 8 9 11 S2 S3".split()}
EXPECTED_MARKS = {
    "ppo_atari": ATARI,
    "ppo_continuous": CONTINUOUS,
    "ppo_penalty": CONTINUOUS - {"8"},  # its objective is the penalised one
    "rlhf_ppo_gpt2": RLHF,
}
MEANT_TO_DIFFER = {
    "Args": "flags and defaults",
    "Agent": "network and distribution",
    "ppo_loss": "objective and distribution",
    "train": "the algorithm itself",
    "evaluate": "environment and network",
    "make_envs": "TRPO takes discrete actions too",
    "NormalizedEnvs": "TRPO sends discrete actions too",
    "check_args": "flags that only one algorithm has",
    "kl_divergence": "TRPO has two kinds of distributions",
}
RLHF_DIFFERS = {  # where texts take the place of environments; in the other scripts these are still the same
    "Run": "three stages, models as folders, evaluations with two judges",
    "health": "other metrics",
    "parse_args": "presets",
}


def pieces(path: Path) -> dict[str, str]:
    source = path.read_text()
    return {
        node.name: ast.get_source_segment(source, node) or ""
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def test_what_means_the_same_is_the_same_text() -> None:
    first: dict[str, tuple[str, str]] = {}
    for name in SCRIPTS:
        for piece, text in pieces(ROOT / f"{name}.py").items():
            script, reference = first.setdefault(piece, (name, text))
            if piece not in MEANT_TO_DIFFER and not (name == "rlhf_ppo_gpt2" and piece in RLHF_DIFFERS):
                change = "\n".join(
                    difflib.unified_diff(reference.split("\n"), text.split("\n"), script, name, lineterm="", n=0)
                )
                assert text == reference, f"{piece} differs:\n{change}"


def test_the_two_objectives_are_one_short_diff_apart() -> None:
    continuous, penalty = ((ROOT / f"ppo_{name}.py").read_text().splitlines() for name in ("continuous", "penalty"))
    changed = [line for line in difflib.ndiff(continuous, penalty) if line[:2] in ("- ", "+ ")]
    assert len(changed) <= 120


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_algorithm_comes_first_and_fits(name: str) -> None:
    """And README.md says how long it and the file are."""
    lines = (ROOT / f"{name}.py").read_text().splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("# ---") and line.endswith("Plumbing"))
    assert heading <= (550 if name == "rlhf_ppo_gpt2" else 300)
    row = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| `{name}.py`"))
    assert row.endswith(f" {heading}, {len(lines)} |"), f"{heading}, {len(lines)}"
    above = "\n".join(lines[:heading])
    assert "def train(" in above and "def compute_gae(" in above and "def main(" not in above


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
    third_party = {"torch", "numpy", "tyro", "tqdm", "gymnasium", "ale_py", "transformers"}
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
