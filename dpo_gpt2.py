# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "filelock==4.3.1",
#     "numpy==2.4.6",
#     "tensorboard==2.21.0",
#     "torch==2.13.0",
#     "tqdm==4.70.1",
#     "transformers==5.24.0",
#     "tyro==1.0.17",
# ]
# ///
"""Direct preference optimisation (DPO, arXiv:2305.18290) of a GPT-2: learning from comparisons without a reward model.

    supervised fine-tuning: π_ref imitates texts                        §3        sft_loss
    comparisons: people choose between two answers to a prompt          eq. 1     annotate, or --preferences
    log π_ref(y|x) of every answer, once                                §4        compare
    for iteration = 1, 2, ...                                           §4        train
        h = log π/π_ref of the chosen answer - that of the rejected     eq. 7     dpo_loss
        descend -log σ(β·h), or what --loss says                        eq. 7     margin_loss, update

    python dpo_gpt2.py                                          the built-in task, whole, without a network
    python dpo_gpt2.py --model gpt2 --prompts prompts.jsonl --preferences pairs.jsonl
    python dpo_gpt2.py --resume runs/FOLDER                     go on after an interruption, exactly
    python dpo_gpt2.py --evaluate runs/FOLDER                   answer prompts with the saved policy

The reward is β·log π/π_ref (eq. 5): no reward model, no value function, and no sampling while the policy learns.
[Dn] marks detail n of DPO, [Rn] of RLHF with PPO, [n] of PPO (DETAILS.md); eq. and § without a number are 2305.18290's.
Shapes: B = texts, n = pairs of them, T = their columns, of which P for prompts and R for responses, V = vocabulary.
A text is a prompt x and an answer (response) y; log-probabilities are in nats.
"""

from __future__ import annotations

import atexit
import copy
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import uuid
import zipfile
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from filelock import FileLock
from torch import Tensor
from tqdm import tqdm

Texts = list[list[int]]  # tokens of each


@dataclass
class Args:
    """DPO on a GPT-2. All that a run writes goes into one new folder under --run-dir."""

    model: str | None = None  # GPT-2 of the hub or a folder; without it a small new one learns the built-in task
    prompts: str | None = None  # JSONL with "prompt", or hf:dataset:split, to answer in evaluations
    preferences: str | None = None  # JSONL with "prompt", "chosen", "rejected", or hf:dataset:split
    sft: str | None = None  # JSONL with "prompt", "response", or hf:dataset:split; without it --model is not fine-tuned
    prompt_length: int = 64  # longest prompt in tokens; of a longer one the end stays
    response_length: int = 24  # most tokens of a response (R)
    temperature: float = 1.0  # softmax(logits / T), in sampling and in every log-probability
    sft_size: int = 20_000  # texts that the built-in task is learnt from
    sft_learning_rate: float = 1e-3  # Adam step size of supervised fine-tuning
    num_pairs: int = 16_000  # comparisons of two answers that the built-in annotators make
    soft_labels: bool = False  # the built-in annotators give the probability of their choice in place of a choice
    fit_batch_size: int = 32  # texts per step of supervised fine-tuning
    total_episodes: int | float | None = None  # comparisons to train DPO on; default one pass over all not held out
    batch_size: int = 64  # comparisons per iteration, which is one step, over all processes
    micro_batch_size: int | None = None  # comparisons per forward pass, which only accumulates; default all
    learning_rate: float = 3e-4  # Adam step size of the policy
    anneal_lr: bool = True  # bring the step size linearly to 0
    warmup: float = 0.1  # share of the run in [0, 1] over which the step size rises
    loss: Literal["sigmoid", "robust", "ipo"] = "sigmoid"  # DPO; the same unbiased by wrong labels; a square
    beta: float = 0.1  # coefficient β of the KL to the reference
    label_smoothing: float = 0.0  # probability in [0, 0.5) that a label is wrong
    length_normalize: bool = False  # divide the log-ratio of each answer by its length in tokens
    max_grad_norm: float = 1.0  # largest global L2 norm of the gradient
    self_check: bool = True  # test sampler, scorer and reference before DPO starts
    seed: int = 1  # seed of every generator
    device: str = "auto"  # auto (CUDA if there is one), cpu, cuda, cuda:1 or mps
    cuda: bool = True  # --no-cuda means cpu
    torch_deterministic: bool = True  # deterministic cuDNN kernels; --no-... lets cuDNN choose the fastest
    compile: bool = False  # torch.compile of the network's blocks
    bf16: bool = False  # DPO's networks in bfloat16 (autocast), other matrix products in TF32
    exp_name: str = "dpo_gpt2"  # name of the experiment, part of the folder's name
    run_dir: str = "runs"  # where run folders are made
    checkpoint_every: int = 50  # iterations; 0 only at the end
    eval_every: int = 25  # iterations between evaluations on held-out prompts and pairs; 0 only before and after
    resume: str | None = None  # run folder to go on with; its flags are the defaults
    evaluate: str | None = None  # run folder whose policy answers, without training
    eval_episodes: int = 256  # responses of an evaluation
    track: bool = False  # mirror TensorBoard to Weights & Biases
    wandb_project_name: str = "ppo"  # W&B project
    wandb_entity: str | None = None  # W&B team


class Responses(NamedTuple):
    """B prompts, padded on the left to P columns, and their answers of up to R tokens."""

    tokens: Tensor  # int64 [B, P + R]
    mask: Tensor  # bool [B, P + R], true on real tokens; known from lengths alone [R3]
    prompt_columns: int  # P
    ended: Tensor  # bool [B], whether the last token is the end

    def texts(self) -> Texts:
        """Prompt and response together [R1], without padding."""
        return [row[real].tolist() for row, real in zip(self.tokens, self.mask, strict=True)]

    @property
    def answers(self) -> Tensor:  # bool [B, P + R], true on real tokens of the answer
        return nn.functional.pad(self.mask[:, self.prompt_columns :], (self.prompt_columns, 0))


class Comparison(NamedTuple):
    """A prompt and two texts that begin with it, as tokens."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    label: float = 1.0  # probability that the chosen one is the better one


class Pairs(NamedTuple):
    """n comparisons; the second dimension is chosen and rejected."""

    tokens: Tensor  # int64 [n, 2, T], padded on the left
    mask: Tensor  # bool [n, 2, T], true on real tokens
    answers: Tensor  # bool [n, 2, T], true on those of the answer
    labels: Tensor  # [n]
    ref_logprobs: Tensor  # log π_ref(y|x) [n, 2], once `compare` has made them

    def rows(self, index: Tensor | slice) -> Pairs:
        return Pairs(*(x[index] for x in self))


def attention_inputs(mask: Tensor) -> dict[str, Tensor]:
    """What a GPT-2 must be told about padding: whom each token may see, and its position among real tokens [R4]."""
    itself = torch.eye(mask.shape[1], device=mask.device).bool()  # or padding would attend to nothing: NaN
    causal = torch.ones_like(itself).tril()
    visible = (causal & mask[:, None, :]) | itself
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    return {"attention_mask": visible[:, None], "position_ids": positions}


def log_softmax(policy: Any, states: Tensor, temperature: float) -> Tensor:
    """log π(·|s) [n, V] for states [n, d]: softmax(logits / T) and nothing else [R14] [R15]."""
    return (policy.lm_head(states).float() / temperature).log_softmax(-1)


def next_logprobs(args: Args, policy: Any, tokens: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """log π of each token from those before it [B, T - 1], in float32 [D15]; 0 where no token is. Both are [B, T]."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=args.bf16):
        trunk = policy.transformer(tokens, **attention_inputs(mask), use_cache=False)
    known = mask[:, :-1]  # padding lies on the left: whoever is real has a real successor
    logp = log_softmax(policy, trunk.last_hidden_state[:, :-1][known].float(), temperature)
    taken = logp.gather(1, tokens[:, 1:][known][:, None])  # [D3]
    return taken.new_zeros(known.shape).masked_scatter(known, taken)


def sft_loss(args: Args, policy: Any, texts: Texts) -> Tensor:
    """Mean cross-entropy of each next token, the end included, padding not [R13]; a scalar."""
    tokens, mask = pad_left(texts, policy.device)
    count = global_mean(mask[:, :-1].sum().float())  # of each process, so that each token counts the same
    return -next_logprobs(args, policy, tokens, mask, 1.0).sum() / count


def answer_logprobs(args: Args, policy: Any, tokens: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
    """log π(y|x) [B]: a sum over an answer's tokens, the end among them, without prompt and padding [D2].

    All are [B, T]; so many texts are read at a time as in fine-tuning.
    """
    sums = []
    for part in torch.arange(len(tokens)).split(2 * args.fit_batch_size):
        logprobs = next_logprobs(args, policy, tokens[part], mask[part], args.temperature) * answers[part, 1:]
        sums.append(logprobs.sum(1))
    return torch.cat(sums)


def pad_pairs(comparisons: list[Comparison], device: torch.device) -> Pairs:
    """Tensors of some comparisons.

    The prompt's own tokens are known from the prompt alone [D12] and are the same in both texts [D11]: a token that
    spans the joint belongs to the answer, and none is empty [D13]. What follows nothing has no probability.
    """
    texts = [text for pair in comparisons for text in (pair.chosen, pair.rejected)]
    tokens, mask = pad_left(texts, device)
    shared = [max(1, len(os.path.commonprefix(pair[:3]))) for pair in comparisons]
    before = torch.tensor(shared, device=device).repeat_interleave(2)
    answers = mask & (mask.cumsum(1) > before[:, None])
    labels = torch.tensor([pair.label for pair in comparisons], device=device)
    both = (x.view(len(labels), 2, -1) for x in (tokens, mask, answers))
    return Pairs(*both, labels, labels.new_zeros(len(labels), 2))  # type: ignore[call-arg]


def pair_logprobs(args: Args, policy: Any, pairs: Pairs) -> Tensor:
    """log π(y|x) [n, 2] of both answers, which are read together [D14]."""
    texts = (x.flatten(0, 1) for x in (pairs.tokens, pairs.mask, pairs.answers))
    return answer_logprobs(args, policy, *texts).view(-1, 2)


@torch.no_grad()
def compare(args: Args, task: Task, reference: Any) -> tuple[Pairs, Pairs]:
    """Held-out pairs and the others: the task's, or the annotators', in a random order, which is always the same.

    Each has log π_ref of its answers, made once [D16].
    """
    random.seed(args.seed)  # the same in every process and in a run that goes on
    torch.manual_seed(args.seed)
    comparisons = task.comparisons or annotate(args, task, reference)
    pairs = pad_pairs(random.sample(comparisons, len(comparisons)), reference.device)  # files may be sorted
    pairs = pairs._replace(ref_logprobs=pair_logprobs(args, reference, pairs))
    tenth = len(comparisons) // 10
    return pairs.rows(slice(tenth)), pairs.rows(slice(tenth, None))


def margin_loss(args: Args, margins: Tensor, labels: Tensor) -> Tensor:
    """Loss [B] of margins h = log π/π_ref(chosen) - log π/π_ref(rejected) and probabilities p of the choice, both [B].

        sigmoid   -p·log σ(βh) - (1 - p)·log σ(-βh)       eq. 7 [D1], where p = 1
        ipo       p·(h - 1/2β)² + (1 - p)·(h + 1/2β)²     2310.12036 eq. 17 [D8], h of sums as in eq. 7

    A hard label, p = 1, has no finite optimum of eq. 7 whatever β is; p = σ(r(chosen) - r(rejected)) has that of
    RLHF, π_ref·exp(r/β) [D20]. With --label-smoothing ε, p is what remains of it where ε of the labels are wrong; with
    --loss robust p makes up for them: the mean over wrong labels is the loss of right ones (2403.00409) [D7].
    """
    epsilon = args.label_smoothing
    informed = 1 - 2 * epsilon
    p = (labels - epsilon) / informed if args.loss == "robust" else epsilon + informed * labels
    if args.loss == "ipo":
        best = 0.5 / args.beta
        right, wrong = (margins - best).square(), (margins + best).square()
    else:
        rewards = args.beta * margins
        right, wrong = -nn.functional.logsigmoid(rewards), -nn.functional.logsigmoid(-rewards)
    return p * right + (1 - p) * wrong


def dpo_loss(args: Args, policy: Any, pairs: Pairs) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss of pairs (eq. 7), whose β is 0.1 by default [D6], and debug variables.

    Rewards are β·log π/π_ref (eq. 5). Only their margin is trained: that of chosen answers usually falls, too [D17].
    """
    logratios = pair_logprobs(args, policy, pairs) - pairs.ref_logprobs
    if args.length_normalize:
        logratios = logratios / pairs.answers.sum(2)  # [D10]
    chosen, rejected = logratios.unbind(1)
    loss = margin_loss(args, chosen - rejected, pairs.labels).mean()
    return loss, {
        "losses/policy_loss": loss,
        "rewards/chosen": args.beta * chosen.mean(),
        "rewards/rejected": args.beta * rejected.mean(),
        "rewards/margin": args.beta * (chosen - rejected).mean(),  # [D18] HEALTHY says when it means nothing any more
        "rewards/accuracy": (chosen > rejected).float().mean(),
    }


def update(args: Args, policy: Any, optimizer: torch.optim.Optimizer, pairs: Pairs, index: Tensor) -> dict[str, Any]:
    """One step on the pairs at these places; returns the debug variables."""
    optimizer.zero_grad()
    stats: dict[str, Any] = {}
    for micro in index.split(args.micro_batch_size or len(index)):  # only accumulates [R26]
        loss, part_stats = dpo_loss(args, policy, pairs.rows(micro))
        share = len(micro) / len(index)
        (loss * share).backward()
        for name, x in part_stats.items():
            stats[name] = stats.get(name, 0) + x.detach() * share
    average_gradients(policy)
    stats["losses/grad_norm"] = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)  # [11]
    optimizer.step()
    return stats


def train(args: Args) -> dict[str, float]:
    """Fine-tuning, comparisons, DPO; returns the last metrics. Raises UsageError and RunError."""
    device = start(args)
    task, policy = load_task(args, device)
    count = len(task.comparisons) or args.num_pairs
    args.total_episodes = int(args.total_episodes or count - count // 10)  # one pass
    run = Run(args, device, task.tokenizer)

    # Fine-tune the reference, have its answers compared
    reference = run.stage("sft", "loss", lambda: fine_tune(args, task, policy))
    reference.requires_grad_(False)
    policy = copied(args, reference)  # [D4]
    held_out, pairs = compare(args, task, reference)
    look = lambda: measure(args, task, policy, reference, held_out)

    # Go on where a checkpoint is, or look at what DPO starts from
    optimizer = torch.optim.Adam(policy.parameters(), args.learning_rate, eps=1e-5, fused=True)  # [3]
    run.begin(agent=policy, optimizer=optimizer)
    if run.first == 0:
        means, answers = look()
        if args.self_check:
            self_check(args, means)  # [D5] no margin and no KL yet
        run.report(0, means, answers)  # [D21] and how likely π_ref makes what was compared [D22]

    for iteration in range(run.first, run.last):
        reseed(args.seed, iteration)
        rate = args.learning_rate * min(1, (iteration + 1) / max(1, args.warmup * run.last))  # [D19]
        if args.anneal_lr:
            rate *= 1 - iteration / run.last  # [4]
        optimizer.param_groups[0]["lr"] = rate

        # Update the policy on the next pairs
        index = pair_batch(len(pairs.labels), iteration, args.batch_size, args.seed)
        metrics = update(args, policy, optimizer, pairs, index)

        # Log, look at the policy and save
        if iteration + 1 == run.last or (iteration + 1) % run.eval_every == 0:
            metrics |= run.report(iteration + 1, *look())
        run.end_iteration(metrics)
    return run.finish()


# ---------------------------------------------------------------------------------------------------------------- Task

# The built-in one: one-line opinions about films, in a grammar whose words fall into categories
WORDS = {
    "H": "well yes",
    "O": "honestly overall frankly",
    "D": "the",
    "N": "film plot music acting ending",
    "I": "it",
    "V": "was felt seemed looked",
    "G": "not never",
    "X": "very really quite",
    "C": "and but",
    "+": "great good lovely warm clever moving fresh bright",
    "-": "bad dull weak cold slow boring flat ugly",
    "0": "long short loud quiet new old",
}
CATEGORY = {word: category for category, words in WORDS.items() for word in words.split()}
FOLLOWS = {  # what may come next; a dot is the end
    "": "HODI",
    "H": "ODI",
    "O": "DI",
    "D": "N",
    "N": "V",
    "I": "V",
    "V": "GX+-0",
    "G": "X+-0",
    "X": "+-0",
    "+": "C.",
    "-": "C.",
    "0": "C.",
    "C": "DIGX+-0",
}
MEANING = {"+": 1.0, "-": -1.0, "0": 0.0}


def opinion(rng: random.Random) -> list[str]:
    """A sentence of the grammar as words, each adjective used once: what people write, and so what SFT learns."""
    words = []
    category = rng.choice(FOLLOWS[""])
    while category != ".":
        words.append(rng.choice(WORDS[category].split()))
        category = rng.choice(FOLLOWS[category])
    adjectives = [word for word in words if CATEGORY[word] in MEANING]
    distinct = len(adjectives) == len(set(adjectives))
    return words if distinct and len(words) < 24 else opinion(rng)


def judge(text: str, ended: bool) -> float:
    """The gold score in [-3, 3], hidden from training: what a text means, less 1 for each fault of form.

    Meaning is a bounded sum over distinct adjectives, turned round by a negation and stronger by an intensifier.
    Faults are breaks of the grammar, repeated adjectives and a missing end; people make none, so none is ever compared.
    """
    words = text.split()
    faults = 1
    if ended:
        words.append(".")
        faults = 0
    meaning, weight = 0.0, 1.0
    before = ""
    seen = set()
    for word in words:
        category = CATEGORY.get(word, word)
        if category not in FOLLOWS.get(before, ""):
            faults += 1
        before = category
        if category == "G":
            weight *= -1
        elif category == "X":
            weight *= 1.5
        elif category in MEANING:
            if word in seen:
                faults += 1
            else:
                meaning += weight * MEANING[category]
            seen.add(word)
            weight = 1.0
    score = 3 * np.tanh(meaning / 3) - faults
    return float(np.clip(score, -3, 3))


@dataclass
class Task:
    """What is to be learnt: token lists, and for the built-in task a judge that training never sees."""

    tokenizer: Any
    prompts: Texts  # of comparisons
    held_out: Texts  # prompts of evaluations
    texts: Texts  # for supervised fine-tuning, each with its end
    comparisons: list[Comparison]  # the built-in task draws them later
    judge: Callable[[str, bool], float] | None

    @property
    def eos(self) -> int:
        return self.tokenizer.eos_token_id

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode([t for t in tokens if t != self.eos])

    def gold(self, responses: Responses) -> Tensor:
        """Gold scores [B] of the built-in judge [R31], to look at, no more."""
        assert self.judge
        both = zip(responses.texts(), responses.ended.tolist(), strict=True)
        return torch.tensor([self.judge(self.decode(text), ended) for text, ended in both])


def builtin_task(args: Args) -> Task:
    """Opinions of the grammar; a prompt is the beginning of one, up to the first verb at most [R5]."""
    tokenizer = word_tokenizer()
    ids = tokenizer.get_vocab()
    rng = random.Random(args.seed)
    heads = []
    for _ in range(4_000):
        words = opinion(rng)
        verb = next(i for i, word in enumerate(words) if CATEGORY[word] == "V")
        heads.append(words[: verb + 1])
    heads = [head[: rng.randint(1, len(head))] for head in heads]
    starts = sorted(set(map(tuple, heads)))
    rng.shuffle(starts)
    prompts = [[ids[word] for word in start] for start in starts if CATEGORY[start[-1]] != "D"]
    texts = [[ids[word] for word in opinion(rng)] + [tokenizer.eos_token_id] for _ in range(args.sft_size)]
    return Task(tokenizer, prompts[64:], prompts[:64], texts, [], judge)


def encode(args: Args, tokenizer: Any, cut: list[str], prompt: str, response: str = "") -> list[int]:
    """Tokens of prompt and response, whose strings are joined first [R6]: at most --prompt-length of the prompt's end
    [R2], and of the response's beginning what fits. A prompt of which not all is kept is added to `cut`."""
    ids, ids_before = tokenizer([prompt + response, prompt], add_special_tokens=False)["input_ids"]
    start = max(0, len(ids_before) - args.prompt_length)  # what a prompt ends with matters most [R5]
    kept = ids[start : start + args.prompt_length + args.response_length]
    if len(kept) < len(ids):
        cut.append(prompt)
    return kept


def pair_batch(count: int, iteration: int, size: int, seed: int) -> Tensor:
    """Indices of this process's share of the pairs of an iteration: all in turn, in a new order each pass [R7]."""
    first = iteration * size
    passes = range(first // count, (first + size) // count + 1)  # which an iteration may touch
    orders = [np.random.default_rng((seed, p)).permutation(count) for p in passes]
    places = np.arange(first % count, first % count + size)[RANK::WORLD]
    return torch.from_numpy(np.concatenate(orders)[places])


def pad_left(texts: Texts, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token lists to tokens and mask [B, longest], padding on the left [R4] [R2]; a padding token may be any."""
    lengths = torch.tensor([len(text) for text in texts])
    width = int(lengths.max())
    mask = torch.arange(width) >= width - lengths[:, None]
    tokens = torch.zeros(mask.shape, dtype=torch.long)
    tokens[mask] = torch.tensor([token for text in texts for token in text])
    return tokens.to(device), mask.to(device)


NETWORK: dict[str, Any] = {  # of every model
    "resid_pdrop": 0.0,  # [R18] with dropout no ratio would be 1 before the first update
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "attn_implementation": "sdpa",
}


# ------------------------------------------------------------------------------------------------------------ Plumbing

# --- Flags and start

RANK = int(os.environ.get("RANK", 0))  # of this process, as torchrun says
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))  # on this machine
WORLD = int(os.environ.get("WORLD_SIZE", 1))  # number of processes
POSITIVE = """prompt_length response_length temperature sft_size num_pairs fit_batch_size total_episodes batch_size
    micro_batch_size beta max_grad_norm eval_episodes""".split()
MAY_CHANGE = set(  # with --resume
    """model prompts preferences sft total_episodes device cuda checkpoint_every eval_every run_dir resume evaluate
    eval_episodes self_check track wandb_project_name wandb_entity""".split()
)


class UsageError(Exception):
    """A wrong flag, environment or file, in one sentence that says what to do; `main` exits with status 2."""


class RunError(Exception):
    """What ends a run midway: weights that are not finite, a full disk; `main` exits with status 1."""


def require(condition: object, sentence: str) -> None:
    if not condition:
        raise UsageError(sentence)


def require_finite(x: Tensor, what: str) -> None:
    if not x.isfinite().all():
        raise RunError(f"{what} is not finite; lower the learning rates")


def check_args(args: Args) -> None:
    """Raises UsageError for flags that cannot work."""
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')} {value}"
        if isinstance(value, int | float):
            require(0 <= value < 2**63, f"{flag} must be a number in [0, 2^63)")
            require(value > 0 or name not in POSITIVE, f"{flag} must be greater than 0")
        if str(value).startswith("hf:"):
            require(find_spec("datasets"), f"{flag} needs a package: pip install datasets")
    own = {bool(args.model), bool(args.prompts), bool(args.preferences)}
    require(len(own) == 1, "--model, --prompts FILE and --preferences FILE need each other")
    require(args.model or not args.sft, "--sft needs --model")
    require(not (args.model and args.soft_labels), "--soft-labels is for the built-in annotators, not for --model")
    require(args.warmup <= 1, f"--warmup {args.warmup} must lie in [0, 1]")
    require(args.label_smoothing < 0.5, f"--label-smoothing {args.label_smoothing} must lie in [0, 0.5)")
    require(args.batch_size % WORLD == 0, f"--batch-size must be a multiple of the {WORLD} processes")


def start(args: Args) -> torch.device:
    """Check the flags, set torch up and join the other processes, if any; returns the device of this one."""
    check_args(args)
    name = args.device if args.cuda else "cpu"
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(f"cuda:{LOCAL_RANK}" if name == "cuda" else name)
        torch.zeros(1, device=device)
    except Exception as error:
        raise UsageError(f"--device {args.device} does not work here: {str(error).splitlines()[0]}") from None
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.set_float32_matmul_precision("high" if args.bf16 else "highest")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if WORLD > 1:
        from torch.distributed.nn import functional  # noqa: F401  # if Adam did it, the group would outlive the exit

        dist.init_process_group()  # gloo for tensors in memory, NCCL for those of CUDA
    return device


def reseed(seed: int, iteration: int) -> int:
    """Restart every generator from these two numbers and the rank; returns a seed for the environments."""
    seed = int(np.random.SeedSequence((seed, iteration, RANK)).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


# --- Models and files


def load_task(args: Args, device: torch.device) -> tuple[Task, Any]:
    """The task and the model that starts; raises UsageError if a file, model or length will not do."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(args.seed)  # the same weights in every process
    if args.model:
        policy = load_model(args.model, transformers.AutoModelForCausalLM, "--model")
        task = file_task(args, load_model(args.model, transformers.AutoTokenizer, "--model"))
        policy.config.sft_loss = None  # that of another run, perhaps
        size = policy.config.vocab_size
        require(
            len(task.tokenizer) <= size,
            f"--model {args.model}: its tokenizer has {len(task.tokenizer)} tokens, the model {size}",
        )
    else:
        task = builtin_task(args)
        require(args.prompt_length >= 5, "--prompt-length must be at least 5, as the built-in prompts have so many")
        config = transformers.GPT2Config(
            vocab_size=len(task.tokenizer),
            n_positions=max(args.prompt_length + args.response_length, *map(len, task.texts)),
            n_embd=128,
            n_layer=2,
            n_head=4,
            bos_token_id=task.eos,
            eos_token_id=task.eos,
            pad_token_id=task.tokenizer.pad_token_id,
            activation_function="gelu_pytorch_tanh",  # GPT-2's own in one kernel, where "gelu_new" takes seven
            **NETWORK,
        )
        policy = transformers.GPT2LMHeadModel._from_config(config)
    check_room(args, policy)
    return task, policy.to(device)


def check_room(args: Args, policy: Any) -> None:
    room = policy.config.n_positions
    needed = args.prompt_length + args.response_length
    require(needed <= room, f"--prompt-length + --response-length = {needed} exceeds the model's {room} positions")


def word_tokenizer() -> Any:
    """A token for each word of the grammar."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<end>", "<pad>", *CATEGORY])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<pad>")


def load_stage(folder: Path, device: torch.device) -> Any:
    """A model that a run has saved in its folder."""
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(folder, **NETWORK).to(device)  # type: ignore[arg-type]


def load_model(name: str, kind: Any, flag: str) -> Any:
    """A GPT-2 or tokenizer from a folder, the hub's cache or the hub, in float32 whatever the file says."""
    import transformers
    from huggingface_hub import HfApi

    options: dict[str, Any] = {}
    if kind is not transformers.AutoTokenizer:
        options = NETWORK | {"dtype": torch.float32, "output_loading_info": True}
    try:
        try:
            loaded = kind.from_pretrained(name, local_files_only=True, **options)
        except OSError:
            HfApi().model_info(name, timeout=10)  # without a network, from_pretrained would try for minutes
            loaded = kind.from_pretrained(name, **options)
    except Exception as error:
        raise UsageError(
            f"{flag} {name} cannot be loaded ({type(error).__name__}): it must be the folder of a model, which"
            " `hf download NAME --local-dir FOLDER` makes where there is a network"
        ) from None
    if not options:
        return loaded
    model, found = loaded
    family = model.config.model_type
    require(family == "gpt2", f"{flag} {name} is a {family}; this script takes GPT-2 models")
    require(
        "score.weight" not in (*found["missing_keys"], *found["unexpected_keys"]),
        f"{flag} {name} is the wrong kind: a model that writes text has no score, a reward model one",
    )
    return model


def read_rows(source: str | None, flag: str, *keys: str) -> list[list[str]]:
    """The strings under `keys` in each row of a JSONL file or of hf:dataset:split; none without a source."""
    if source is None:
        return []
    try:
        if source.startswith("hf:"):
            from datasets import load_dataset

            name, _, split = source.removeprefix("hf:").partition(":")
            rows = list(load_dataset(name, split=split or "train"))
        else:  # a line ends with a line feed alone: JSON strings may hold all other separators
            lines = Path(source).read_text(encoding="utf-8-sig").split("\n")
            rows = [json.loads(line) for line in lines if line.strip()]
        texts = []
        for number, row in enumerate(rows, 1):
            strings = [row.get(key) for key in keys]
            require(all(isinstance(x, str) for x in strings), f"row {number} has {row}")
            if all(strings):
                texts.append(strings)
        require(texts, "it is empty")
        if len(texts) < len(rows):
            print(f"{flag} {source}: {len(rows) - len(texts)} rows with an empty string are left out", file=sys.stderr)
        return texts
    except Exception as error:
        raise UsageError(f"{flag} {source} must have strings {', '.join(keys)} in each row: {error!r}") from None


def file_task(args: Args, tokenizer: Any) -> Task:
    """Prompts, comparisons and texts from files."""
    end = tokenizer.eos_token
    require(end and len(tokenizer) > 1, f"--model {args.model} has no tokenizer, or one without end-of-text token")
    cut: list[str] = []
    whole = lambda prompt, response: encode(args, tokenizer, cut, prompt, response.removesuffix(end) + end)
    prompts = [encode(args, tokenizer, cut, *row) for row in read_rows(args.prompts, "--prompts", "prompt")]
    rows = read_rows(args.preferences, "--preferences", "prompt", "chosen", "rejected")
    pairs = [Comparison(encode(args, tokenizer, [], x), whole(x, chosen), whole(x, other)) for x, chosen, other in rows]
    pairs = [pair for pair in pairs if pair.chosen != pair.rejected]
    require(len(prompts) > 1, f"--prompts {args.prompts} needs at least two rows, as one is held out")
    require(len(pairs) > 9, f"--preferences {args.preferences} needs at least ten rows that differ, as one is held out")
    texts = [whole(*row) for row in read_rows(args.sft, "--sft", "prompt", "response")]
    tenth = -(-len(prompts) // 10)
    if RANK == 0 and (cut or len(pairs) < len(rows)):
        equal = len(rows) - len(pairs)
        print(f"too long and cut: {len(cut)} prompts or texts; equal and left out: {equal} pairs", file=sys.stderr)
    return Task(tokenizer, prompts[:-tenth], prompts[-tenth:], texts, pairs, None)


def copied(args: Args, reference: Any) -> Any:
    """The policy starts as a copy of the reference."""
    policy = copy.deepcopy(reference).requires_grad_(True)
    if args.compile:
        for block in policy.transformer.h:
            block.compile(dynamic=True)
    return policy


# --- Fitting


def fine_tune(args: Args, task: Task, policy: Any) -> Any:
    """The model after one pass over the task's texts, if any, in a random order, the step size linear to 0."""
    optimizer = torch.optim.Adam(policy.parameters(), args.sft_learning_rate, eps=1e-5)
    order = torch.randperm(len(task.texts)).split(args.fit_batch_size) if task.texts else ()
    for step, index in enumerate(tqdm(order, leave=False, disable=RANK > 0 or None)):
        optimizer.param_groups[0]["lr"] = args.sft_learning_rate * (1 - step / len(order))
        loss = sft_loss(args, policy, [task.texts[i] for i in index[RANK::WORLD].tolist()])
        optimizer.zero_grad()
        loss.backward()
        average_gradients(policy)
        nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
        optimizer.step()
        policy.config.sft_loss = float(global_mean(loss.detach()))
    return policy


def annotate(args: Args, task: Task, reference: Any) -> list[Comparison]:
    """Pairs of two different answers of π_ref, chosen with P = σ(3·difference in gold) (Bradley-Terry, eq. 1)."""
    pairs: list[Comparison] = []
    for _ in range(9 + args.num_pairs):
        prompts = random.choices(task.prompts, k=min(512, args.num_pairs))
        one, other = (sample_responses(args, reference, prompts, task.eos)[0] for _ in range(2))
        p = (3 * (task.gold(one) - task.gold(other))).sigmoid()
        labels = p if args.soft_labels else (torch.rand(len(p)) < p).float()
        for prompt, a, b, label in zip(prompts, one.texts(), other.texts(), labels.tolist(), strict=True):
            pair = Comparison(prompt, a, b, label) if label >= 0.5 else Comparison(prompt, b, a, 1 - label)
            if a != b:
                pairs.append(pair)
        if len(pairs) >= args.num_pairs:
            return pairs[: args.num_pairs]
    raise UsageError("the reference gives one answer to each prompt; raise --temperature")


# --- Processes


def global_mean(x: Tensor) -> Tensor:
    """Mean of `x` over the processes; `x` itself when there is one."""
    if WORLD > 1:
        x = x / WORLD
        dist.all_reduce(x)
    return x


def average_gradients(agent: nn.Module) -> None:
    """The mean over the processes [S2], so that K of them step as one would on all their samples."""
    for p in agent.parameters():
        if p.grad is not None:
            p.grad = global_mean(p.grad)


# --- Looks at the policy


@torch.no_grad()
def sample_responses(args: Args, policy: Any, prompts: Texts, eos: int) -> tuple[Responses, Tensor]:
    """Answer each prompt with up to R tokens drawn from softmax(logits / T), whole [R14], or to the end [R16].

    Returns the responses and the log-probabilities [B, R] with which their tokens were drawn.
    """
    step, known = pad_left(prompts, policy.device)
    inputs = attention_inputs(known)
    columns = step.shape[1]
    rows = torch.arange(len(step), device=step.device)  # those that go on
    tokens = nn.functional.pad(step, (0, args.response_length))
    mask = nn.functional.pad(known, (0, args.response_length))
    logprobs = torch.zeros(len(tokens), args.response_length, device=tokens.device)
    cache = None
    for column in range(columns, columns + args.response_length):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=args.bf16):
            out = policy.transformer(step, cache=cache, use_cache=True, **inputs)
        cache = out.cache
        logp = log_softmax(policy, out.last_hidden_state[:, -1].float(), args.temperature)
        require_finite(logp[:, 0], "a log-probability of the policy")
        step = torch.multinomial(logp.exp(), 1)
        tokens[rows, column] = step[:, 0]
        mask[rows, column] = True
        logprobs[rows, column - columns] = logp.gather(1, step)[:, 0]
        going = (step[:, 0] != eos).nonzero()[:, 0]
        if len(going) < len(rows):  # who has ended leaves the batch
            cache.batch_select_indices(going)
            rows = rows[going]
            step = step[going]
        if not len(rows):
            break
        seen = mask[rows, : column + 1]
        positions = seen.sum(1, keepdim=True) - 1
        inputs = {"attention_mask": seen[:, None, None], "position_ids": positions}
    ended = torch.ones_like(mask[:, 0]).index_fill(0, rows, False)
    end = column + 1
    responses = Responses(tokens[:, :end], mask[:, :end], columns, ended)
    return responses, logprobs[:, : end - columns]


@torch.no_grad()
def measure(args: Args, task: Task, policy: Any, reference: Any, held_out: Pairs) -> tuple[dict[str, float], list[str]]:
    """Means over held-out pairs, and over --eval-episodes answers to held-out prompts, always with the same random
    numbers; and four answers."""
    torch.manual_seed(args.seed)
    prompts = [task.held_out[i % len(task.held_out)] for i in range(args.eval_episodes)]
    responses, sampled = sample_responses(args, policy, prompts, task.eos)
    ref_logprobs = answer_logprobs(args, reference, responses.tokens, responses.mask, responses.answers)
    _, stats = dpo_loss(args, policy, held_out)
    figures = {
        "kl_ref": sampled.sum(1) - ref_logprobs,
        "length": responses.answers.sum(1),
        "ended": responses.ended,
        "ref_chosen": held_out.ref_logprobs[:, 0],
        "ref_rejected": held_out.ref_logprobs[:, 1],
    }
    figures |= {tag.partition("/")[2]: x for tag, x in stats.items()}
    if task.judge:
        figures["gold"] = task.gold(responses)
    means = {name: float(x.float().mean()) for name, x in figures.items()}
    answers = []
    for prompt, text in zip(prompts[:4], responses.texts(), strict=False):
        answers.append(f"    {task.decode(prompt)} | {task.tokenizer.decode(text[len(prompt) :])}")
    return means, answers


def describe(means: dict[str, float]) -> str:
    gold = f"gold {means['gold']:+.2f}, " if "gold" in means else ""
    return (
        f"{gold}accuracy {means['accuracy']:.2f} on held-out pairs, KL to the reference {means['kl_ref']:.2f} nats per"
        f" response, length {means['length']:.1f}, ended {means['ended']:.2f}"
    )


def self_check(args: Args, means: dict[str, float]) -> None:
    """What must hold before the first update; raises UsageError with the likely cause of what does not."""
    tolerance = 0.2 if args.bf16 else 1e-3 / min(args.temperature, 1)
    for name in ("kl_ref", "margin"):
        require(
            abs(means[name]) < tolerance,
            f"self-check: {name} is {means[name]:.2g} before the first update: sampler, policy and reference have"
            " another temperature, other filters or position ids, or dropout",
        )


# --- Log and checkpoints

HEALTHY = (  # metric, its healthy range, and what it means to leave it
    ("rewards/chosen", -2, 10, "chosen answers are less likely than at first, too; usual, as only the margin counts"),
    ("rewards/margin", -2, 10, "hard labels know no end: unless eval/accuracy still rises, stop, or smooth the labels"),
    ("eval/kl_ref", -2, 25, "below 0 answers are not drawn from the policy that is scored; far above, raise --beta"),
    ("eval/ended", 0.5, 1, "most responses do not end; raise --response-length or --beta"),
)


class Run:
    """Folder, log, progress, models and checkpoints of a run; only the first process writes.

    `parts` is what a checkpoint holds beside numbers: objects with `state_dict` and `load_state_dict`.
    """

    def __init__(self, args: Args, device: torch.device, tokenizer: Any):
        self.args = args
        self.device = device
        self.tokenizer = tokenizer
        self.batch_size = args.batch_size
        self.last = int(args.total_episodes or 0) // self.batch_size
        self.every = args.checkpoint_every or self.last
        self.eval_every = args.eval_every or self.last
        saved = load_checkpoint(args.resume) if args.resume else {}
        world = saved.get("world", WORLD)
        require(world == WORLD, f"--resume needs as many processes as before, {world}")
        self.first = saved.get("iteration", 0)
        require(
            self.last > self.first,
            f"--total-episodes must be at least {(self.first + 1) * self.batch_size:,}:"
            f" {self.first * self.batch_size:,} are done, and one iteration has {self.batch_size:,}",
        )
        self.iteration = self.saved = self.first
        self.scores = deque(saved.get("scores", ()), maxlen=100)
        self.warned = set[str]()
        self.stopping = False
        for sign in signal.SIGINT, signal.SIGTERM:
            signal.signal(sign, signal.default_int_handler)  # a stage ends at once, and those before are saved
        if RANK == 0:
            self.open()

    def open(self) -> None:
        """Take a folder that no other process writes to, and start its log; raises UsageError."""
        from torch.utils.tensorboard import SummaryWriter

        args = self.args
        task = Path(args.model).name if args.model else "opinions"
        unique = f"{task}__{args.exp_name}__{args.seed}__{time.strftime('%y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        name = re.sub(r"[^\w.-]+", "-", unique)
        self.folder = Path(args.resume or f"{args.run_dir}/{name}").absolute()
        try:
            if args.track:
                import wandb
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(self.folder / "lock", timeout=0)
            self.lock.acquire()
            (self.folder / "args.json").write_text(json.dumps(asdict(args), indent=2))
        except Exception as error:
            raise UsageError(f"{self.folder} cannot be used, by another process perhaps, or --track: {error}") from None
        if args.track:
            wandb.init(
                project=args.wandb_project_name,
                entity=args.wandb_entity,
                id=self.folder.name,
                dir=self.folder,
                resume="allow",
                config=asdict(args),
                sync_tensorboard=True,
            )
        step = self.first * self.batch_size
        self.writer = SummaryWriter(self.folder, purge_step=step + 1 if step else 0)
        self.bar = tqdm(total=self.last * self.batch_size, initial=step, unit="pair", disable=None)
        atexit.register(self.close)  # also after an error
        self.bar.write(
            f"run folder: {self.folder}\nDPO on {self.device}, step {step:,} to {self.last * self.batch_size:,} of"
            f" {args.total_episodes:,} by {self.batch_size:,}, saved every {self.every} iterations and at Ctrl-C"
        )
        if not args.resume:
            self.save("checkpoint.pt", ())  # the flags, to go on with after a stage

    def say(self, text: str) -> None:
        if RANK == 0:
            self.bar.write(text)

    def note(self, figures: dict[str, float], step: int) -> None:
        if RANK == 0:
            for name, value in figures.items():
                self.writer.add_scalar(name, value, step)

    def stage(self, name: str, figure: str, make: Callable[[], Any]) -> Any:
        """The model in the folder `name` of a run that goes on, else what `make` gives, saved there."""
        folder = Path(self.args.resume or "", name)
        if self.args.resume and folder.exists():
            model = load_stage(folder, self.device)
        else:
            random.seed(self.args.seed)  # the same in every process
            torch.manual_seed(self.args.seed)
            model = make()
            self.save_model(name, model)
        value = getattr(model.config, f"{name}_{figure}", None)
        if value is not None:
            self.say(f"{name}: {figure} {value:.3f}")
            if self.first == 0:
                self.note({f"{name}/{figure}": value}, 0)
        return model

    def save_model(self, name: str, model: Any) -> None:
        """A folder that transformers opens, written aside and renamed."""
        from transformers import GenerationConfig

        for parameter in model.parameters():
            require_finite(parameter, f"a weight of {name}")
        if RANK > 0:
            return
        model.generation_config = GenerationConfig(  # so that generate() samples as in training
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=self.args.temperature,
            max_new_tokens=self.args.response_length,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        aside = self.folder / f"{name}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            model.save_pretrained(aside)
            self.tokenizer.save_pretrained(aside)
            shutil.rmtree(self.folder / name, ignore_errors=True)
            aside.replace(self.folder / name)
        except Exception as error:  # safetensors has one of its own for a full disk
            raise RunError(f"{self.folder / name} could not be written ({error})") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def begin(self, **parts: Any) -> None:
        """Name what checkpoints hold, and load it when the run goes on from one; from here on a signal waits."""
        self.parts = parts
        if self.first > 0:
            load_checkpoint(str(self.args.resume), **parts)
        self.start_time = time.time()
        for sign in signal.SIGINT, signal.SIGTERM:
            signal.signal(sign, self.stop)

    def stop(self, *_: Any) -> None:
        """End with this iteration, saved; at the second signal at once."""
        if self.stopping:
            raise KeyboardInterrupt
        self.stopping = True
        if RANK == 0:
            self.bar.write("interrupted: this iteration is finished and saved first; once more leaves at once")

    def report(self, iteration: int, means: dict[str, float], answers: list[str]) -> dict[str, float]:
        """Print an evaluation, before and after training also answers; returns its figures, which `log` writes."""
        step = iteration * self.batch_size
        self.say(f"step {step:,}: {describe(means)}")
        if iteration in (0, self.last):
            self.say("\n".join(answers))
        figures = {f"eval/{name}": x for name, x in means.items()}
        if iteration == 0:
            self.note(figures, 0)
        return figures

    def end_iteration(self, metrics: dict[str, Any]) -> None:
        """Log, and save when it is due; raises RunError if not all is finite, KeyboardInterrupt after `stop`."""
        means = global_mean(torch.tensor(list(metrics.values())))
        self.metrics = dict(zip(metrics, means.tolist(), strict=True))
        if not all(x.isfinite().all() for x in self.parts["agent"].state_dict().values()):
            raise RunError(
                f"agent is not finite after iteration {self.iteration + 1}, which is not saved; lower --learning-rate"
            )
        stopping = global_mean(torch.tensor(float(self.stopping))) > 0  # whichever process got the signal
        self.scores.append(self.metrics["rewards/accuracy"])
        self.iteration += 1
        if RANK == 0:
            self.log()
            if self.iteration == self.last:
                self.save_model("policy", self.parts["agent"])
            if stopping or self.iteration == self.last or self.iteration % self.every == 0:
                self.save("checkpoint.pt", self.parts)
        if stopping and self.iteration < self.last:
            raise KeyboardInterrupt

    def log(self) -> None:
        """Write to TensorBoard, move the progress bar (without a terminal a line), warn once each."""
        step = self.iteration * self.batch_size
        self.metrics["charts/learning_rate"] = self.parts["optimizer"].param_groups[0]["lr"]
        self.metrics["charts/SPS"] = (self.iteration - self.first) * self.batch_size / (time.time() - self.start_time)
        self.note(self.metrics, step)
        text = (
            f"loss {self.metrics['losses/policy_loss']:.3f}, accuracy {self.metrics['rewards/accuracy']:.2f},"
            f" margin {self.metrics['rewards/margin']:+.2f}"
        )
        self.bar.set_postfix_str(text)
        self.bar.update(self.batch_size)
        if self.bar.disable:  # no terminal
            self.bar.write(f"step {step:,}, {text}, {self.metrics['charts/SPS']:.0f} pairs/s")
        for name, low, high, meaning in HEALTHY:
            value = self.metrics.get(name, low)
            if (value < low or value > high) and self.iteration > 10 and name not in self.warned:
                self.warned.add(name)
                self.bar.write(f"step {step:,}: {name} is {value:.3g}: {meaning}")

    def save(self, name: str, parts: Any) -> None:
        """Write a file whole or not at all: aside, then renamed. It holds tensors, numbers and strings."""
        state = {key: self.parts[key].state_dict() for key in parts} | {
            "iteration": self.iteration,
            "scores": list(self.scores),
            "world": WORLD,
            "args": asdict(self.args),
        }
        aside = self.folder / f"{name}.tmp"
        try:
            self.writer.flush()  # the log knows all that a checkpoint does
            torch.save(state, aside)
            aside.replace(self.folder / name)
        except Exception as error:
            raise RunError(f"{self.folder / name} could not be written and is as it was ({error})") from error
        finally:
            aside.unlink(missing_ok=True)
        self.saved = self.iteration

    def finish(self) -> dict[str, float]:
        """Close the run; returns the last metrics."""
        if RANK == 0:
            self.close()
        return self.metrics | {"global_step": self.iteration * self.batch_size}

    def close(self) -> None:
        atexit.unregister(self.close)
        self.bar.close()
        self.writer.close()
        self.lock.release()
        left = f"not finished: --resume goes on from step {self.saved * self.batch_size:,}"
        print(f"run folder: {self.folder} ({left if self.iteration < self.last else 'finished'})", flush=True)


def load_checkpoint(folder: str, **parts: Any) -> dict[str, Any]:
    """What the checkpoint of a run folder holds, loaded into `parts`, too. Executes nothing. Raises UsageError."""
    path = Path(folder, "checkpoint.pt")
    try:
        assert not zipfile.ZipFile(path).testzip()  # or a bit has changed
        state = torch.load(path, map_location="cpu", weights_only=True)
        for key, part in parts.items():
            part.load_state_dict(state[key])
        state["args"] = Args(**state["args"])
        return state
    except Exception as error:
        raise UsageError(f"{path} is no whole checkpoint of this script ({type(error).__name__})") from None


# --- Evaluation


def evaluate(args: Args) -> dict[str, float]:
    """Means over --eval-episodes answers of the policy saved in the folder --evaluate, printed."""
    device = start(args)
    folder = str(args.evaluate)
    require(load_checkpoint(folder)["iteration"], f"{folder} holds no trained policy yet")
    task, _ = load_task(args, device)
    reference = load_stage(Path(folder, "sft"), device)
    check_room(args, reference)
    policy = copied(args, reference)
    load_checkpoint(folder, agent=policy)
    held_out, _ = compare(args, task, reference)
    means, answers = measure(args, task, policy, reference, held_out)
    print(f"{folder}: {describe(means)} over {args.eval_episodes} sampled responses")
    print("\n".join(answers))
    return means


# --- Main


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line; with --resume or --evaluate, the flags of that run are the defaults."""
    args = tyro.cli(Args, args=argv)
    folder = args.resume or args.evaluate
    if not folder:
        return args
    saved = load_checkpoint(folder)["args"]
    args = tyro.cli(Args, args=argv, default=saved)
    changed = {name for name, _ in asdict(args).items() - asdict(saved).items()} - MAY_CHANGE
    require(args.evaluate or not changed, f"--resume cannot change the run's own {', '.join(sorted(changed))}")
    return args


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]  # said at once
    try:
        args = parse_args()
        if args.evaluate:
            evaluate(args)
        else:
            train(args)
    except (UsageError, RunError, KeyboardInterrupt, ModuleNotFoundError) as error:
        print(f"error: {' '.join(str(error).split()) or 'interrupted'}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RunError) else 130 if isinstance(error, KeyboardInterrupt) else 2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for sign in signal.SIGINT, signal.SIGTERM:
            signal.signal(sign, signal.SIG_IGN)  # what is over ends with its own status


if __name__ == "__main__":
    main()
