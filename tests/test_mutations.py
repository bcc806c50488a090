"""A test that cannot fail is a defect: each mutant of mutations.py must be noticed by a test that claims its detail.

`pytest -m mutation` applies every one of them, the plain run a sample. A mutant works in a copy of the repository.
"""

import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import details
import pytest
from conftest import IMPORTED, ROOT, SCRIPTS, forked
from mutations import MUTANTS, Mutant

PAIRS = [(mutant, script) for mutant in MUTANTS for script in mutant.scripts.split()]
ONLY = {  # test files that concern some scripts alone
    "test_atari.py": ["ppo_atari"],
    "test_dpo.py": ["dpo_gpt2"],
    "test_grpo.py": ["grpo_gpt2"],
    "test_discrete.py": ["ppo_discrete", "ppo_lstm"],
    "test_lstm.py": ["ppo_lstm"],
    "test_rlhf.py": ["rlhf_ppo_gpt2"],
    "test_rlhf_runs.py": ["rlhf_ppo_gpt2"],
    "test_trpo.py": ["trpo"],
}
BEHAVIOUR = re.compile(r'(failed on setup with ")?(assert |AssertionError)|Failed: DID NOT RAISE')
ELEMENTS = {mark for mark in details.CATALOGUE if mark.startswith(("TRPO-", "PEN-", "LSTM-"))}


def label(pair: tuple[Mutant, str]) -> str:
    return f"{pair[1]}-{pair[0].detail}-{pair[0].what}"


def claiming(marks: list[str], script: str) -> list[str]:
    """The tests that claim one of these details and concern the script (those of other scripts: see `judge`)."""
    claims = details.tests()
    found = [test for mark in marks for test in claims[mark] if script in ONLY.get(test.split("::")[0], SCRIPTS)]
    return sorted(dict.fromkeys(found), key=lambda test: test.startswith("test_ranks"))  # the slowest ones last


IMPORTED_TOO = "hypothesis, pytest, tensorboard, tokenizers, torch._dynamo, transformers.models.auto"


def judge(folder: Path, script: str, tests: list[str], change: Mutant | None) -> str:
    """Run the tests for this script in a copy with `change`: "passed", "noticed" or what went wrong."""
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "requirements.txt"]:
        shutil.copy(path, folder)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    if change:
        path = folder / f"{script}.py"
        path.write_text(path.read_text().replace(change.old, change.new))
    others = " or ".join(name for name in SCRIPTS if name != script)
    options = ["-n", "0", "-x", "-q", "-p", "no:cacheprovider", "--basetemp", "tmp", "--junitxml", "report.xml"]
    arguments = [*options, "-k", f"not ({others})", *(f"tests/{test}" for test in tests)]
    output = folder / "output.txt"
    code = forked(["pytest", *arguments], folder, [output, output], 600, f"{IMPORTED}, {IMPORTED_TOO}")
    if code == 0:
        return "passed"
    if code != 1:
        return f"pytest ended with {code}: {output.read_text()[-3000:]}"
    report = ElementTree.parse(folder / "report.xml")
    message = next(str(node.get("message")) for tag in ("error", "failure") for node in report.iter(tag))
    crashed = not BEHAVIOUR.match(message) or "Traceback (most" in message
    return f"crashed: {message}" if crashed else "noticed"


def check(mutant: Mutant, script: str, folder: Path) -> None:
    tests = mutant.tests.split() or claiming([mutant.detail], script)
    assert tests, f"no test claims {mutant.detail} for {script}"
    verdict = judge(folder, script, tests, mutant)
    if mutant.crash:
        assert verdict.startswith("crashed"), f"{verdict}, but it is said to crash: {mutant.crash}"
    else:
        assert verdict == "noticed", f"[{mutant.detail}] {mutant.what} in {script}.py: {verdict}"


@pytest.mark.mutation
@pytest.mark.parametrize("mutant, script", PAIRS, ids=map(label, PAIRS))
def test_every_mutant_is_noticed(mutant: Mutant, script: str, tmp_path: Path) -> None:
    check(mutant, script, tmp_path)


SAMPLE = [(mutant, mutant.sample) for mutant in MUTANTS if mutant.sample]


@pytest.mark.parametrize("mutant, script", SAMPLE, ids=map(label, SAMPLE))
def test_a_sample_of_mutants_is_noticed(mutant: Mutant, script: str, tmp_path: Path) -> None:
    check(mutant, script, tmp_path)


@pytest.mark.mutation
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_claims_a_detail_passes_on_the_script_as_it_is(script: str, tmp_path: Path) -> None:
    """Otherwise a mutant that is noticed would prove nothing."""
    marks = sorted({mutant.detail for mutant, name in PAIRS if name == script})
    assert judge(tmp_path, script, claiming(marks, script), None) == "passed"


def test_the_judge_tells_life_death_and_crash_apart(tmp_path: Path) -> None:
    tests = [test for test in claiming(["8"], "ppo_continuous") if "six_rows" in test]
    mutant = lambda new: Mutant("8", "ppo_continuous", "", "return -torch.min(", new)
    for i, (new, verdict) in enumerate(
        (
            ("return -torch.minimum(", "passed"),
            ("return torch.min(", "noticed"),
            ("return -torch.no_such_function(", "crashed: AttributeError"),
        )
    ):
        folder = tmp_path / str(i)
        folder.mkdir()
        assert judge(folder, "ppo_continuous", tests, mutant(new)).startswith(verdict)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_mutant_fits_the_script_and_compiles(script: str) -> None:
    source = (ROOT / f"{script}.py").read_text()
    for mutant, name in PAIRS:
        if name == script:
            assert source.count(mutant.old) == 1, f"[{mutant.detail}] {mutant.what}: {mutant.old!r} must occur once"
            assert mutant.old != mutant.new
            compile(source.replace(mutant.old, mutant.new), script, "exec")


def test_every_detail_of_every_script_has_mutants() -> None:
    """One for each mark of each script, two different ones for each detail that several scripts share, and of RLHF."""
    for script in SCRIPTS:
        missing = set(details.marks(ROOT / f"{script}.py")) - {m.detail for m, name in PAIRS if name == script}
        assert not missing, f"no mutant in {script}.py for {sorted(missing)}"
    for detail in [
        *map(str, range(1, 38)),
        "S1",
        "S3",
        "S4",
        *ELEMENTS,
        *details.RLHF,
        *details.DPO,
        *set(details.GRPO) - set(details.NOT_DONE),
    ]:
        changes = {(mutant.old, mutant.new) for mutant in MUTANTS if mutant.detail == detail}
        assert len(changes) >= 2, f"{detail} has {len(changes)} mutants"


def test_every_number_is_in_a_script_or_excused() -> None:
    found = {mark for path in details.scripts() for mark in details.marks(path)}
    assert not found & set(details.NOT_DONE), "excused, and yet a script has it"
    begun = any(mark.startswith("R") for mark in found)
    expected = {mark for mark in details.CATALOGUE if begun or not mark.startswith("R")} - ELEMENTS
    assert not expected - found - set(details.NOT_DONE), "neither marked nor excused in details.NOT_DONE"
