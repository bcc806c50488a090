"""Random mutants: are the tests as good at errors that nobody thought of as at those of mutations.py?

    python tests/mutate.py ppo_continuous --sample 40 --seed 1

draws from all small changes of a script, each as likely as any other: a statement removed, an operator swapped, a
constant moved, an argument dropped or exchanged with its neighbour, a condition inverted, an index off by one,
`.detach()` or `no_grad` taken away. The tests run in a copy with the change, the quickest first, until one fails; those
that start processes (`PROCESSES`) run at the end, for the changes that all others have let pass.
Out of scope is what reads and refuses flags and files, words, and annotations (see `OUT`).

Only tests that can notice are run: they pass on the script as it is, and unless they are quick they fail once all its
functions in scope raise. Tests of texts and of speed are no judges of behaviour, and `LEFT_OUT` names slow ones that
others make up for.
"""

import argparse
import ast
import copy
import difflib
import functools
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from conftest import CHOICES, GAUSSIAN, IMPORTED, ROOT, SCRIPTS, TESTS, forked, left_in
from test_mutations import BEHAVIOUR, IMPORTED_TOO, ONLY

OUT = set(  # functions and names that read and refuse flags and files
    """parse_args check_args main require require_finite saved_args absolute check_room probe_env load_model read_rows
    POSITIVE FRACTIONS MAY_CHANGE Policy Map Texts Pairs Answer""".split()
)
WORDS = {"print", "write", "say", "UsageError", "RunError"}  # calls whose arguments are for people
PROCESSES = {"test_ranks.py", "test_rlhf_runs.py", "test_runs.py"}  # runs as users have them: seconds each
RANGES = "test_house.py::test_the_ranges_of_the_readme_are_those_of_the_scripts"  # the one that looks at numbers
NO_JUDGES = {"test_benchmarks.py", "test_faults.py", "test_house.py", "test_mutations.py"}
LEFT_OUT = {  # part of a test's name -> why
    "test_help_explains": "looks at the text",
    "SIGINT": "both signals take the same path; with SIGTERM these tests are run",
    "a_signal_after_the_end": "a race that hardly any change can lose",
    "no_thread_of_the_process_group": "about one import",
    "environments_that_do_not_divide": "a refused flag",
    "test_a_killed_worker": "gymnasium's part",
    "likely-": "the reloaded policy is tested in memory, too",
}
SYMMETRIC = {"max", "min", "maximum", "minimum", "allclose"}  # mean the same with their arguments exchanged
SQUARED = "(a - b)² = (b - a)², bit for bit, and so are the gradients"
EQUIVALENT = [  # script, old line, new line, why nothing can tell them apart
    (
        script,
        f'{line} = gaussian_logprob(batch["actions"], means, agent.actor_logstd){rest}',
        f'{line} = gaussian_logprob(means, batch["actions"], agent.actor_logstd){rest}',
        SQUARED,
    )
    for script in GAUSSIAN
    for line, rest in (("logratio", ' - batch["logprobs"]'), ('batch["logprobs"]', ""))
]
EQUIVALENT.append(
    (
        "trpo",
        "return gaussian_logprob(actions, self.outputs, self.logstd)",
        "return gaussian_logprob(self.outputs, actions, self.logstd)",
        SQUARED,
    )
)
EQUIVALENT += [
    (
        script,
        "taken = logp.gather(-1, actions[:, None]).squeeze(-1)",
        "taken = logp.gather(-1, actions[:, None]).squeeze(1)",
        "what is gathered has two dimensions, so the last one is 1",
    )
    for script in ("rlhf_ppo_gpt2", "grpo_gpt2")
]
EQUIVALENT += [
    (
        script,
        f'("losses/entropy", 0.01, {bound}, "the policy hardly explores any more; raise {flag}"),',
        f'("losses/entropy", 0.01, {moved}, "the policy hardly explores any more; raise {flag}"),',
        "no bound: an entropy is at most the logarithm of the number of actions",
    )
    for script, bound, flag in (
        *((name, "1e6", "--ent-coef") for name in CHOICES),
        *((name, "1e9", "--beta") for name in ("rlhf_ppo_gpt2", "grpo_gpt2")),
    )
    for moved in (float(bound) + 1, float(bound) * 2)
]

SYMBOLS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.And: "and",
    ast.Or: "or",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.USub: "-",
    ast.Not: "not",
    ast.Invert: "~",
}
PAIRED = ["+ -", "* /", "& |", "and or", "< <=", "> >=", "== !="]
SWAPPED = {a: b for pair in PAIRED for a, b in (pair.split(), pair.split()[::-1])}
SWAPPED |= {"//": "*", "%": "//", "**": "*", "is": "is not", "is not": "is", "in": "not in", "not in": "in"}
REMOVABLE = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr | ast.Return | ast.Raise | ast.Break | ast.Continue
QUICK = 0.5  # seconds that a test may take whether it can notice or not
SECONDS = 120  # at least, until a test counts as hanging


class Change(NamedTuple):
    """The bytes from start to end of a source replaced."""

    start: int
    end: int
    new: str


def called(node: ast.AST) -> str:
    """The name of what is called, without what it belongs to."""
    function = node.func if isinstance(node, ast.Call) else node
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def in_scope(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it but docstrings, words, imports, annotations and what `OUT` names."""
    targets = [getattr(target, "id", "") for target in getattr(node, "targets", [])]
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom) or {getattr(node, "name", ""), *targets} & OUT:
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        if isinstance(node, ast.Call) and field != "func" and called(node) in WORDS:
            continue
        if isinstance(node, ast.Call) and field == "args" and called(node) == "require":
            value = value[:1]
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from in_scope(child)


class Source:
    """A script's text, in bytes as the places of `ast` are."""

    def __init__(self, text: str):
        self.text = text
        self.bytes = text.encode()
        self.lines = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.tree = ast.parse(text)

    def start(self, node: Any) -> int:
        return self.lines[node.lineno - 1] + node.col_offset

    def end(self, node: Any) -> int:
        return self.lines[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: Any) -> str:
        return self.bytes[self.start(node) : self.end(node)].decode()

    def apply(self, change: Change) -> str:
        return (self.bytes[: change.start] + change.new.encode() + self.bytes[change.end :]).decode()

    def operator(self, left: int, right: int, kind: ast.AST, suffix: str = "") -> Iterator[Change]:
        """The operator that stands between two places swapped."""
        symbol = SYMBOLS.get(type(kind), "")
        if symbol in SWAPPED:
            gap = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), self.bytes[left:right])
            at = left + gap.index((symbol + suffix).encode())
            yield Change(at, at + len(symbol), SWAPPED[symbol])

    def arguments(self, call: ast.Call) -> Iterator[Change]:
        """One of them dropped, or exchanged with the next one."""
        given = sorted([*call.args, *call.keywords], key=self.start)
        if len(given) == 1 and isinstance(given[0], ast.GeneratorExp):
            return  # its place is that of the parentheses
        for i, argument in enumerate(given):
            if i + 1 < len(given):
                yield Change(self.start(argument), self.start(given[i + 1]), "")
            else:
                yield Change(self.end(given[i - 1]) if i else self.start(argument), self.end(argument), "")
        if called(call) in SYMMETRIC:
            return
        for a, b in zip(call.args, call.args[1:], strict=False):
            between = self.bytes[self.end(a) : self.start(b)].decode()
            yield Change(self.start(a), self.end(b), self.of(b) + between + self.of(a))

    def index(self, node: ast.Subscript) -> Iterator[Change]:
        """Names and bounds off by one; numbers are moved as all constants are."""
        for part in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            bounds = [part.lower, part.upper] if isinstance(part, ast.Slice) else [part]
            for bound in bounds:
                if isinstance(bound, ast.Name | ast.Attribute | ast.BinOp | ast.Call):
                    yield Change(self.start(bound), self.end(bound), f"{self.of(bound)} + 1")

    def gradients(self, node: ast.AST) -> Iterator[Change]:
        """`.detach()`, `no_grad` and `inference_mode` taken away."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and called(node) == "detach":
            yield Change(self.end(node.func.value), self.end(node), "")
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if called(decorator) in ("no_grad", "inference_mode"):
                    yield Change(self.start(decorator) - 1, self.end(decorator), "")
        if isinstance(node, ast.With) and called(node.items[0].context_expr) in ("no_grad", "inference_mode"):
            yield Change(self.start(node), self.end(node.items[0].context_expr), "if True")

    def changes_of(self, node: Any) -> Iterator[Change]:
        here = functools.partial(Change, self.start(node), self.end(node)) if hasattr(node, "lineno") else None
        if isinstance(node, REMOVABLE) and here:
            yield here("pass")
        yield from self.gradients(node)
        if isinstance(node, ast.BinOp):
            yield from self.operator(self.end(node.left), self.start(node.right), node.op)
        if isinstance(node, ast.AugAssign):
            yield from self.operator(self.end(node.target), self.start(node.value), node.op, "=")
        if isinstance(node, ast.BoolOp):
            for a, b in zip(node.values, node.values[1:], strict=False):
                yield from self.operator(self.end(a), self.start(b), node.op)
        if isinstance(node, ast.Compare):
            for a, b, op in zip([node.left, *node.comparators], node.comparators, node.ops, strict=False):
                yield from self.operator(self.end(a), self.start(b), op)
        if isinstance(node, ast.UnaryOp):
            yield Change(self.start(node), self.start(node) + len(SYMBOLS[type(node.op)]), "")
        if isinstance(node, ast.Constant) and here:
            if isinstance(node.value, bool):
                yield here(str(not node.value))
            elif isinstance(node.value, int | float):
                moved = {node.value + 1, node.value * 2, 0 if node.value else 1}
                yield from (here(repr(value)) for value in sorted(moved - {node.value}))
        if isinstance(node, ast.Call) and called(node) not in WORDS:
            yield from self.arguments(node)
        if isinstance(node, ast.Subscript):
            yield from self.index(node)
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield Change(self.start(node.test), self.end(node.test), f"not ({self.of(node.test)})")

    def changes(self) -> list[Change]:
        """All of them, in the order of the text."""
        fields = {id(field) for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef) for field in node.body}
        found = []
        for node in in_scope(self.tree):
            kept = [x for x in self.changes_of(node) if not (id(node) in fields and x.new == "pass")]
            found += [x for x in kept if self.apply(x) != self.text]
        return sorted(set(found))

    def means_something(self, change: Change) -> bool:
        try:
            return ast.dump(ast.parse(self.apply(change))) != ast.dump(self.tree)
        except SyntaxError:
            return False

    def raising(self) -> str:
        """The script with an error in the place of every function in scope."""
        tree = copy.deepcopy(self.tree)
        for node in in_scope(tree):
            if isinstance(node, ast.FunctionDef):
                node.body = ast.parse("raise NotImplementedError").body
        return ast.unparse(tree)


class Case(NamedTuple):
    """What a test came to: "passed", "skipped", "assertion", "crash", "timeout"."""

    test: str
    outcome: str
    seconds: float
    message: str = ""


def cases(report: Path) -> list[Case]:
    found = []
    for node in ElementTree.parse(report).iter("testcase"):
        test = f"{node.get('classname', '').replace('.', '/')}.py::{node.get('name')}"
        outcome, message = "passed", ""
        for child in node:
            if child.tag == "skipped":
                outcome = "skipped"
            if child.tag in ("error", "failure"):
                message = str(child.get("message"))
                behaviour = BEHAVIOUR.match(message) and "Traceback (most" not in message
                outcome = "timeout" if "TimeoutExpired" in message else "assertion" if behaviour else "crash"
        found.append(Case(test, outcome, float(node.get("time", 0)), message))
    return found


class Job(NamedTuple):
    """A copy of a tree of files with another text of the script, and what pytest is to do in it."""

    tree: Path
    script: str
    text: str
    arguments: list[str]
    seconds: float  # until a test hangs


def run_tests(job: Job) -> tuple[float, list[Case]]:
    """The seconds that it took, and what became of each test that was run."""
    begin = time.time()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name, "copy")
        shutil.copytree(job.tree, folder)
        (folder / f"{job.script}.py").write_text(job.text)
        hanging = ["faulthandler_exit_on_timeout=true", f"faulthandler_timeout={job.seconds:.0f}"]
        options = ["-n", "0", "-q", "-p", "no:cacheprovider", "--basetemp", "tmp", "--junitxml", "report.xml"]
        options += [x for option in hanging for x in ("-o", option)]
        output = folder / "output.txt"
        limit = 3000  # a whole run on a machine that others use, too
        code = forked(
            ["pytest", *options, *job.arguments], folder, [output, output], limit, f"{IMPORTED}, {IMPORTED_TOO}"
        )
        for process in left_in(folder):
            os.kill(process, signal.SIGKILL)
        seconds = time.time() - begin
        said = output.read_text(errors="replace")
        if (folder / "report.xml").exists():
            found = cases(folder / "report.xml")
            failed = any(case.outcome not in ("passed", "skipped") for case in found)
            return seconds, found if failed or code in (0, 5) else [*found, Case("pytest", "crash", 0, said[-2000:])]
        return seconds, [Case("pytest", "timeout" if "Timeout" in said or code < 0 else "crash", 0, said[-2000:])]


def snapshot(folder: Path) -> Path:
    """The repository as it is now, so that edits during the hours of a run do not matter."""
    folder.mkdir()
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "requirements.txt"]:
        shutil.copy(path, folder)
    shutil.copytree(TESTS, folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def that_can_notice(script: str, source: Source, tree: Path, processes: bool, pool: Any) -> list[Case]:
    """The tests that a change of the script can turn red, the quickest first."""
    files = [path.name for path in sorted((tree / "tests").glob("test_*.py")) if path.name not in NO_JUDGES]
    files = [name for name in files if script in ONLY.get(name, SCRIPTS) and (name in PROCESSES) == processes]
    files += [] if processes else [RANGES]
    others = " or ".join(name for name in SCRIPTS if name != script)
    arguments = [*(f"tests/{name}" for name in files), "-k", f"not ({others} or {' or '.join(LEFT_OUT)})"]
    jobs = [Job(tree, script, text, arguments, 600) for text in (source.text, source.raising())]
    (seconds, plain), (_, raising) = pool.map(run_tests, jobs, chunksize=1)
    for case in plain:
        if case.outcome not in ("passed", "skipped"):
            print(f"fails without any change, so it judges nothing: {case.test}: {case.message[:300]}")
    failed = {case.test for case in raising if case.outcome not in ("passed", "skipped")}
    able = [case for case in plain if case.outcome == "passed" and (case.test in failed or case.seconds < QUICK)]
    able.sort(key=lambda case: case.seconds)
    total = sum(case.seconds for case in able)
    print(f"{' '.join(files)}: {seconds:.0f} s, {total:.0f} s of them {len(able)} tests that can notice", flush=True)
    return able


def difference(old: str, new: str, script: str) -> str:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), script, script, lineterm="", n=1)
    return "\n".join(list(lines)[2:])


def excuse(script: str, difference: str) -> str:
    """Why this change is none, if a line of `EQUIVALENT` says so."""
    old = [line[1:].strip() for line in difference.splitlines() if line.startswith("-")]
    new = [line[1:].strip() for line in difference.splitlines() if line.startswith("+")]
    return next((why for name, a, b, why in EQUIVALENT if (name, [a], [b]) == (script, old, new)), "")


def interval(hits: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, p = 1.96, hits / count
    centre, width = p + z * z / (2 * count), z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return (centre - width) / (1 + z * z / count), (centre + width) / (1 + z * z / count)


def drawn(source: Source, number: int, seed: int) -> tuple[list[Change], int]:
    """Changes that mean something, each as likely as any other, and of how many."""
    every = source.changes()
    chosen: list[Change] = []
    for change in random.Random(seed).sample(every, len(every)):
        if len(chosen) < number and source.means_something(change):
            chosen.append(change)
    return chosen, len(every)


def judge_all(script: str, number: int, seed: int, jobs: int, rounds: list[bool], folder: Path) -> None:
    begin = time.time()
    tree = snapshot(folder / "tree")
    source = Source((tree / f"{script}.py").read_text())
    changes, count = drawn(source, number, seed)
    diffs = [difference(source.text, source.apply(change), script) for change in changes]
    survivors = [i for i, diff in enumerate(diffs) if not excuse(script, diff)]
    counted = len(survivors)
    print(f"{script}: {len(changes)} of {count} changes, {len(changes) - counted} of them equivalent", flush=True)
    outcomes: Counter[str] = Counter()
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for processes in rounds:
            able = that_can_notice(script, source, tree, processes, pool)
            arguments = ["-x", *(case.test for case in able)]
            hanging = max(SECONDS, 5 * able[-1].seconds)
            judged, survivors = survivors, []
            tasks = [Job(tree, script, source.apply(changes[i]), arguments, hanging) for i in judged]
            for i, (seconds, found) in zip(judged, pool.imap(run_tests, tasks), strict=True):
                last = found[-1] if found else Case("pytest", "crash", 0, "nothing was run")
                survived = last.outcome in ("passed", "skipped")
                survivors += [i] * survived
                verdict = "survived" if survived else f"{last.outcome} in {last.test}"
                outcomes[last.outcome] += 0 if survived else 1
                print(f"--- {i}: {verdict}, {len(found)} tests, {seconds:.0f} s\n{diffs[i]}", flush=True)
    killed = counted - len(survivors)
    low, high = interval(killed, counted)
    print(f"\n{script}: {killed} of {counted} killed, {killed / counted:.0%} [{low:.0%}, {high:.0%}]: {dict(outcomes)}")
    print(f"{time.time() - begin:.0f} s\n\nsurvivors:")
    for i in survivors:
        print(f"\n{diffs[i]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("--sample", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true", help="without the tests that start processes")
    args = parser.parse_args()
    rounds = [False] if args.quick else [False, True]
    with tempfile.TemporaryDirectory() as folder:
        judge_all(args.script, args.sample, args.seed, args.jobs, rounds, Path(folder))


if __name__ == "__main__":
    main()
