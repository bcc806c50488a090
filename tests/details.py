"""Writes DETAILS.md from the marks of scripts and tests and from the mutants: `python tests/details.py`."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

from mutations import MUTANTS

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"\[([RSGLD]?\d+|LSTM-[a-m])\]")
PPO = {
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
    "37": "Discrete and MultiDiscrete: independent categorical components, log-probability and entropy summed",
    "S1": "Clip range annealed",
    "S2": "Gradient computed in parallel over processes",
    "S3": "Epochs stopped early on KL",
    "S4": "Invalid actions masked, with the mask of the step that was acted in",
}
TRPO = {
    "TRPO-surrogate": "Objective E[π/π_old·Â] + c·entropy over the whole batch",
    "TRPO-FVP": "Fisher-vector products JᵀMJv, damped, linearised once per update",
    "TRPO-CG": "Conjugate gradient from zero, ended by its relative tolerance or by curvature that is not positive",
    "TRPO-step": "Step √(2δ / xᵀFx)·x",
    "TRPO-search": "Accepted only if the surrogate improves and KL(old‖new) ≤ δ, else the old parameters stand",
    "TRPO-degenerate": "No step, never NaN, where curvature, gradient or surrogate are degenerate",
}
LSTM = {
    "LSTM-a": "The end that resets the state came with the observation: it is that of the step before",
    "LSTM-b": "V at the segment's end has the state after the last step, and leaves the state that acts where it is",
    "LSTM-c": "At a time limit V of the final observation has the state of the episode that was cut",
    "LSTM-d": "Before the first step of an update every ratio is 1, after ends of episodes, too",
    "LSTM-e": "States of the rollout are stale after the first step: each minibatch makes its own",
    "LSTM-f": "[T, N] becomes rows step by step, in observations and states alike",
    "LSTM-g": "In evaluation each environment has a state of its own, 0 at first",
    "LSTM-h": "No gradient crosses the segment's start",
    "LSTM-i": "torch's LSTM has two bias vectors, both 0 at first",
    "LSTM-j": "The mask of a final observation is not that of the next episode's first",
    "LSTM-k": "A component without a valid action is an error by name",
    "LSTM-l": "A Discrete space is a MultiDiscrete one of one component",
    "LSTM-m": "Greedy play takes the best valid action",
}
PENALTY = {
    "PEN-KL": "KL(old‖new) of normal distributions in closed form",
    "PEN-loss": "Surrogate minus β·KL(old‖new)",
    "PEN-beta": "β halved below target / 1.5 and doubled above 1.5 × target, within [1e-4, 1e4]; once per iteration",
    "PEN-old": "Means and log std of the old policy kept with the batch; the KL of the whole batch moves β",
}
RLHF = {
    "R1": "Models read prompt and response together",
    "R2": "Prompts cut or padded to one width",
    "R3": "Padding is known by its place, never by equality with the end-of-text token",
    "R4": "Padding on the left, positions counted by the mask in every forward pass",
    "R5": "Prompts end where a sentence or a clause ends",
    "R6": "Strings are joined first, then tokenised",
    "R7": "Prompts in a new order each pass, with a seed for each process",
    "R8": "Reward head drawn from N(0, 1/√(d+1)), zero bias",
    "R9": "Reward model learns -log σ(chosen - rejected) in one pass",
    "R10": "The score is read at the last real token",
    "R11": "Rewards have mean 0 and std 1 on samples of the first policy; gain and bias are saved with the model",
    "R12": "Accuracy of the reward model on pairs that it has not seen",
    "R13": "Supervised loss counts the end-of-text token and no padding",
    "R14": "Responses sampled from softmax(logits / T) alone, without top-k or top-p",
    "R15": "The same temperature in every log-probability",
    "R16": "Responses cut at the stop token",
    "R17": "Responses without a stop token are punished",
    "R18": "No dropout anywhere",
    "R19": "The reference policy never changes",
    "R20": "Value network with a head that starts at zero, or a copy of the reward model",
    "R21": "Reward of a token is -β(log π - log π_ref); the score comes with the last one",
    "R22": "β adapted to a target KL, in proportion to the miss or by halves and doubles",
    "R23": "Rewards scaled to std 1, their mean kept",
    "R24": "γ = 1, λ = 0.95, value 0 after the last token; targets from advantages before whitening",
    "R25": "Advantages whitened under the mask",
    "R26": "Epochs in new orders; micro-batches accumulate into one step",
    "R27": "Clip range 0.2 for ratio and value, value weight 0.1, no entropy bonus",
    "R28": "Small learning rate, linear to 0; ε 1e-5",
    "R29": "Adam's ε placed as TensorFlow places it",
    "R30": "Metrics as means under the mask; samples shown",
    "R31": "Evaluated by a judge other than the reward model, and against KL",
}
DPO = {
    "D1": "Loss -log σ(β·h) of h = log π/π_ref(chosen) - log π/π_ref(rejected), by logsigmoid",
    "D2": "A log-probability is the sum over the answer's tokens with the end, without prompt and padding",
    "D3": "Tokens and mask shifted together: each token has its probability from the state before it",
    "D4": "The reference is frozen and another object than the policy",
    "D5": "At the start every margin is 0 and the loss ln 2, which a self-check sees to",
    "D6": "β is 0.1",
    "D7": "Label smoothing: conservative, and robust without bias",
    "D8": "IPO: (h - 1/2β)², h of sums over tokens unless --length-normalize",
    "D10": "Log-ratios divided by the answers' lengths, by flag",
    "D11": "Both texts of a pair begin with the same prompt tokens",
    "D12": "Strings joined, then tokenised; the prompt's own length is its mask",
    "D13": "A prompt keeps its end, and no answer is empty",
    "D14": "Chosen and rejected in one pass score as in two",
    "D15": "Logarithms in float32",
    "D16": "Reference log-probabilities made once, equal to fresh ones",
    "D17": "Rewards of chosen and rejected answers logged apart; chosen ones usually fall, too",
    "D18": "A margin above 10 of rewards β·h is said: hard labels ask for more of it without end",
    "D19": "One pass, a small step size that rises first and then falls",
    "D20": "Hard labels have no finite optimum, soft ones π_ref·exp(r/β)",
    "D21": "Judged by samples: gold and the KL to the reference",
    "D22": "Log-probabilities of π_ref for what was compared are logged at the start",
}
GRPO = {
    "G1": "A group is G answers to one prompt, one after the other; equal prompts are two groups",
    "G2": "Baseline: the mean of the group; one advantage for all tokens of an answer",
    "G3": "Advantages divided by a biased std of the group or the batch, by flag",
    "G4": "Equal returns have advantages of exactly 0",
    "G5": "Groups of equal returns stay in the loss's denominator",
    "G6": "Groups have at least two answers",
    "G7": "A mean that includes the answer shortens the gradient by (G - 1) / G",
    "G8": "Ratio of each token, both of its log-probabilities by the same network",
    "G9": "Ratio of a whole answer (GSPO)",
    "G10": "One step a batch: loss 0 and the clip idle, the gradient's norm shows that it learns",
    "G11": "Clip ranges below and above apart",
    "G12": "Ratio bounded where the advantage is negative",
    "G13": "Loss: mean over tokens, mean of answers' means, or sum over a constant",
    "G14": "The same loss under micro-batches, processes and padding",
    "G15": "KL in the loss named by its gradient: k3 forward, ratio·k3 reverse",
    "G16": "The reference is frozen",
    "G17": "Sampler and scorer are one distribution",
    "G18": "The end token is trained",
    "G19": "Answers that are cut off are scored, less a penalty",
    "G20": "No dropout anywhere",
    "G21": "Verifiable answers: the whole answer, nothing around it",
    "G22": "Several rewards: weighted sum before the baseline",
    "G23": "Advantages are not whitened again",
    "G24": "Dead groups drawn again",
    "G26": "Greedy accuracy and pass@k on held-out prompts",
    "G27": "Dead groups, clip low and high, lengths that win are logged",
    "G28": "Step size by the model's size",
    "G30": "Exact resume: generators restarted in each iteration, prompts by its number",
    "L1": "RLOO: baseline is the mean of the others",
    "L2": "k1, summed over the answer, in the return before the baseline",
    "L3": "An answer is one action: its log-probability is the sum over tokens",
    "L4": "No division by a std",
    "L5": "At least two answers to a prompt",
}
CATALOGUE = PPO | LSTM | TRPO | PENALTY | RLHF | DPO | GRPO
NOT_DONE: dict[str, str] = {  # number -> why no script has it
    "G9": "not done: `--loss-norm` weighs whole answers, ratios are of tokens",
    "G22": "not done: there is one reward",
    "G24": "not done: dead groups are logged, so that the share of prompts that teach nothing stays visible",
    "G26": "evaluations sample: gold of `--task reverse` is pass@1, unbiased",
    "G28": "not done: `--learning-rate` is that of the built-in tasks",
}
ELEMENTS = {  # what has a name instead of a number: script and functions
    "TRPO-surrogate": ("trpo", "surrogate", "update_policy"),
    "TRPO-FVP": ("trpo", "fisher_vector_product", "update_policy"),
    "TRPO-CG": ("trpo", "conjugate_gradient"),
    "TRPO-step": ("trpo", "natural_step"),
    "TRPO-search": ("trpo", "line_search", "kl", "update_policy"),
    "TRPO-degenerate": ("trpo", "conjugate_gradient", "natural_step", "line_search", "update_policy", "report"),
    "LSTM-j": ("ppo_lstm", "step"),
    "LSTM-k": ("ppo_lstm", "valid_actions"),
    "LSTM-l": ("ppo_lstm", "valid_actions"),
    "LSTM-m": ("ppo_lstm", "act"),
    "PEN-KL": ("ppo_penalty", "kl_divergence"),
    "PEN-loss": ("ppo_penalty", "penalized_surrogate_loss", "ppo_loss"),
    "PEN-beta": ("ppo_penalty", "update_beta", "train"),
    "PEN-old": ("ppo_penalty", "train", "ppo_loss"),
}

SHORT = {
    "ppo_atari": "atari",
    "ppo_continuous": "continuous",
    "ppo_discrete": "discrete",
    "ppo_lstm": "lstm",
    "ppo_penalty": "penalty",
    "trpo": "trpo",
    "rlhf_ppo_gpt2": "rlhf",
    "grpo_gpt2": "grpo",
    "dpo_gpt2": "dpo",
}
DIFFERENT = """## What differs from the code that people copy

- A time limit bootstraps from the true last observation (`--no-bootstrap-truncated` counts it as death, as
  published). The discounted return that rewards are scaled by starts anew with each episode; its spread is of all.
- Every stored row is a real transition: environments restart within the step, and the last observation is kept apart.
- The value loss is clipped [9] in `ppo_continuous.py`, `ppo_discrete.py`, `ppo_lstm.py`, `ppo_atari.py` and
  `rlhf_ppo_gpt2.py` only; `ppo_penalty.py` and `trpo.py` have the plain squared error.
- Losses are means over all minibatches, not those of the last one. `--target-kl` stops before the step that would go
  on.
- Advantages are divided by the biased standard deviation, so that a minibatch of one is no NaN. TRPO, which has no
  minibatches of them, normalises those of the whole batch.
- TRPO accepts a step only if the surrogate improves and the mean KL(old‖new) over the whole batch is within δ;
  otherwise the old parameters come back bit for bit. Damping makes steps shorter than δ asks: over a million steps of
  HalfCheetah, Hopper and Walker2d the mean KL of an update was 0.74 to 0.89 of it. SB3-contrib's KL is a mean over the
  action components, too: at the same δ its steps are those of a δ as many times larger as there are components.
- RLHF: padding is known from lengths and never from token equality, so texts may hold the end token; GPT-2's dropout
  is off; sampling is the whole softmax; the penalty for a missing end is subtracted from the score (published code
  replaces the score); rewards are not whitened unless `--whiten-rewards` asks for it, as a kept mean rewards length.
- GRPO: no division by a std unless `--scale` asks for it; the KL is k1 in the return, or in the loss ratio·k3, whose
  gradient is that of KL(π‖π_ref) (published: k3, which pulls along that of KL(π_ref‖π): `--kl-gradient forward`).
- DPO: a token that spans the joint of prompt and answer belongs to the answer, in both texts of a pair; IPO takes sums
  over tokens as eq. 7 does (some libraries take means: `--length-normalize`); pairs of equal answers are left out.
- The emulator presses FIRE first and then plays no-ops, 0 to 28 of them (29 in games without FIRE), its own reading
  of details 14 and 17: the agent takes over at different moments, but the first ball of every game of Breakout flies
  the same way. A new game's stack begins with black frames. After a lost life one FIRE goes before the agent's next
  step, and the stack of frames goes on.
"""


def scripts() -> list[Path]:
    return sorted(path for path in ROOT.glob("*.py"))


def marks(path: Path) -> dict[str, list[str]]:
    """Mark -> qualified names of the functions, classes and constants whose comments or docstrings bear it."""
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
            elif isinstance(child, ast.AnnAssign) and isinstance(node, ast.Module):
                spans.append((child.lineno, child.end_lineno or 0, ast.unparse(child.target)))

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


def places() -> dict[str, dict[str, list[str]]]:
    """Mark -> function -> scripts in which it bears the mark; raises KeyError for an element whose function is gone."""
    where: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in scripts():
        for mark, names in marks(path).items():
            for name in names:
                where[mark][name].append(path.stem)
    for mark, (script, *functions) in ELEMENTS.items():
        tree = ast.parse((ROOT / f"{script}.py").read_text())
        missing = {*functions} - {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        if missing:
            raise KeyError(f"{script}.py has no {missing}")
        where[mark] = {name: [script] for name in functions}
    return where


def row(mark: str, what: str, where: dict[str, list[str]], claims: list[str]) -> str:
    """One line of a table: the first function is a link to the first script that has it."""
    functions = [f"`{name}`" for name in where]
    having = dict.fromkeys(script for names in where.values() for script in names)
    if functions:
        functions[0] = f"[{functions[0]}]({next(iter(having))}.py)"
    places = ", ".join(functions) or NOT_DONE[mark]
    others = f" and {len(claims) - 1} more" if len(claims) > 1 else ""
    test = f"`{claims[0].partition('::')[2]}`{others}" if claims else "-"
    mutants = sum(len(mutant.scripts.split()) for mutant in MUTANTS if mutant.detail == mark)
    cells = [mark, what, places, ", ".join(SHORT[script] for script in having) or "-", test, str(mutants or "-")]
    return f"| {' | '.join(cells)} |"


def table(catalogue: dict[str, str], where: dict[str, dict[str, list[str]]], claims: dict[str, list[str]]) -> str:
    head = ["| detail | what | where | scripts | tests that fail without it | mutants |", "|---|---|---|---|---|---|"]
    return "\n".join(head + [row(mark, what, where.get(mark, {}), claims[mark]) for mark, what in catalogue.items()])


def text() -> str:
    where, claims = places(), tests()
    return f"""# The implementation details, where they are, and what would notice their loss

{DIFFERENT}
## How to read the tables

A mark such as `[7]` in a script stands on the line that does detail 7. The tests that claim it are those that
`grep -rn 'detail("7")' tests` finds. A mutant is a small change to a script that takes the detail away;
`pytest -m mutation` makes each of them in a copy and fails unless a test that claims the detail does. This file is
made by `python tests/details.py`; a test fails when it is stale.

## PPO

Numbers as in Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization".

{table(PPO, where, claims)}

## What the list leaves unsaid of recurrent and masked policies

{table(LSTM, where, claims)}

## The KL penalty

{table(PENALTY, where, claims)}

## TRPO

{table(TRPO, where, claims)}

## RLHF with PPO

After Huang et al. 2023, "The N Implementation Details of RLHF with PPO", and its sequel on summaries of 2024.

{table(RLHF, where, claims)}

## GRPO and RLOO

After arXiv:2402.03300 (GRPO), 2503.20783 (no std, a constant), 2503.14476 (clip high), 2402.14740 (RLOO) and 2510.01555
(estimators of the KL).

{table(GRPO, where, claims)}

## DPO

After arXiv:2305.18290, 2310.12036 (IPO) and 2403.00409 (robust labels); D9 is not used.

{table(DPO, where, claims)}
"""


if __name__ == "__main__":
    (ROOT / "DETAILS.md").write_text(text())
