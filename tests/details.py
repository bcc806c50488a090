"""Writes DETAILS.md from the marks in the scripts and the markers of the tests: `python tests/details.py`."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"\[([RS]?\d+)\]")
CATALOGUE = {
    "1": "N environments step together; segments of fixed length go on where the last one ended",
    "2": "Orthogonal weights (gain √2, 0.01 for the policy, 1 for the value), zero biases",
    "3": "Adam's ε is 1e-5",
    "4": "Learning rate falls linearly to 0",
    "5": "GAE, bootstrapped at the segment's end and at time limits; value target = advantage + value",
    "6": "Minibatches in a new order each epoch, every sample once per epoch",
    "7": "Advantages normalised per minibatch",
    "8": "Clipped surrogate objective",
    "9": "Clipped value loss",
    "10": "One loss: policy, value and entropy; one optimiser",
    "11": "Gradient clipped by its global norm",
    "12": "Debug variables: losses, entropy, KL estimates, clip fraction",
    "13": "Shared network (Atari) or separate networks (control)",
    "14": "Games start after a random number of no-ops",
    "15": "Four frames per step, maximum of the last two",
    "16": "A lost life ends the episode, not the game",
    "17": "FIRE at the start of a game and of a life, where the game has it",
    "18": "Grey scale, 84 × 84",
    "19": "Rewards clipped to their sign for learning",
    "20": "Stack of four frames",
    "21": "Nature CNN",
    "22": "Pixels scaled to [0, 1]",
    "23": "Independent normal distributions",
    "24": "Log std independent of the state, 0 at first",
    "25": "Joint log-probability is the sum over components",
    "26": "Separate tanh MLPs of 2 × 64",
    "27": "Raw action stored and scored, clipped action executed",
    "28": "Observations normalised by running mean and variance",
    "29": "Normalised observations clipped to ±10",
    "30": "Rewards divided by the std of the running discounted return, which restarts with each episode",
    "31": "Scaled rewards clipped to ±10",
    "32": "LSTM: orthogonal weights, zero biases",
    "33": "LSTM: zero initial state",
    "34": "LSTM: state reset at episode ends",
    "35": "LSTM: minibatches over environments, sequences in order",
    "36": "LSTM: state rebuilt from the segment's first when training",
    "37": "MultiDiscrete: independent categorical components",
    "S1": "Clip range annealed",
    "S2": "Gradient computed in parallel over processes",
    "S3": "Epochs stopped early on KL",
    "S4": "Invalid actions masked",
}
TRPO = {
    "TRPO-FVP": "Fisher-vector products JᵀMJv, linearised once per update",
    "TRPO-CG": "Conjugate gradient from zero",
    "TRPO-step": "Step √(2δ / xᵀFx)·x",
    "TRPO-search": "Accepted only if the surrogate improves and KL(old‖new) ≤ δ, else restored",
    "TRPO-degenerate": "No step, never NaN, where curvature, gradient or surrogate are degenerate",
}
ABSENT = "no script has it yet"


def scripts() -> list[Path]:
    return sorted(path for path in ROOT.glob("*.py"))


def marks(path: Path) -> dict[str, list[str]]:
    """Mark -> qualified names of the functions and classes whose comments or docstrings bear it."""
    source = path.read_text()
    spans = []  # (first line, last line, qualified name), outer before inner
    found: dict[str, list[str]] = defaultdict(list)

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                spans.append((child.lineno, child.end_lineno or 0, name))
                for mark in MARK.findall(ast.get_docstring(child) or ""):
                    found[mark].append(name)
                visit(child, f"{name}.")

    visit(ast.parse(source), "")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            inside = [name for first, last, name in spans if first <= token.start[0] <= last]
            for mark in MARK.findall(token.string):
                found[mark].append(inside[-1] if inside else "")
    return {mark: list(dict.fromkeys(names)) for mark, names in found.items()}


def tests() -> dict[str, list[str]]:
    """Mark -> `file::test` of the tests that claim it."""
    claims: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.detail":
                        claims[ast.literal_eval(decorator.args[0])].append(f"{path.name}::{node.name}")
    return claims


def table() -> str:
    where: dict[str, list[str]] = defaultdict(list)
    for path in scripts():
        for mark, names in marks(path).items():
            where[mark] += [f"[{path.name}]({path.name}) `{name}`" for name in names]
    claims = tests()
    rows = ["| detail | what | where | tests that fail without it |", "|---|---|---|---|"]
    for mark, what in CATALOGUE.items():
        test_names = "<br>".join(f"`{name}`" for name in claims[mark])
        rows.append(f"| {mark} | {what} | {'<br>'.join(where[mark]) or ABSENT} | {test_names or '-'} |")
    for mark in sorted(mark for mark in claims if mark.startswith("TRPO")):
        test_names = "<br>".join(f"`{name}`" for name in claims[mark])
        rows.append(f"| {mark} | {TRPO[mark]} | [trpo.py](trpo.py) | {test_names} |")
    return "\n".join(rows)


def text() -> str:
    return f"""# The implementation details, where they are, and what would notice their loss

Numbers as in Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization"; a mark such as `[7]`
in a script stands on the line that does it. This file is made by `python tests/details.py`; a test fails when it is stale.

{table()}
"""


if __name__ == "__main__":
    (ROOT / "DETAILS.md").write_text(text())
