# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "tensorboard==2.21.0", "torch==2.13.0", "tqdm==4.70.1", "transformers==5.24.0", "tyro==1.0.17"]
# ///
"""Reinforcement learning from human feedback with PPO (RLHF, arXiv:1909.08593, arXiv:2203.02155) on a GPT-2.

    supervised fine-tuning: π_ref imitates texts                        2203.02155 §3.5    sft_loss
    reward model: r fits comparisons of two answers of π_ref            1909.08593 eq. 1   preference_loss
    for iteration = 1, 2, ...                                           1909.08593 §2      train
        answer prompts with π_old                                       sample_responses
        per token: -β·log(π_old/π_ref); at the end of the answer: + r   1909.08593 eq. 2   token_rewards
        advantage estimates over tokens, whitened                       1707.06347 eq. 11  rollout
        for K epochs of minibatches: ascend L^CLIP - c1·L^VF            1707.06347 eq. 9   update, ppo_loss
        adapt β                                                         1909.08593 §2.2    BetaController

    python rlhf_ppo_gpt2.py                                          the built-in task, whole, without a network
    python rlhf_ppo_gpt2.py --model gpt2 --prompts prompts.jsonl --preferences pairs.jsonl
    python rlhf_ppo_gpt2.py --resume runs/FOLDER                     go on after an interruption, exactly
    python rlhf_ppo_gpt2.py --evaluate runs/FOLDER                   answer prompts with the saved policy

[Rn] marks detail n of RLHF with PPO, [n] detail n of PPO (DETAILS.md); eq. and § without a number are 1707.06347's.
Shapes: B = responses of this process, P = prompt columns, R = response columns, V = vocabulary, d = width.
An action is a token, an episode a response, log-probabilities are in nats.
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
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm


@dataclass
class Args:
    """RLHF with PPO on a GPT-2. All that a run writes goes into one new folder under --run-dir."""

    preset: Literal["default", "smoke"] = "default"  # smoke: the built-in task in about a minute, too short to learn
    model: str | None = None  # GPT-2 of the hub or a folder; without it a small new one learns the built-in task
    prompts: str | None = None  # JSONL with "prompt", or hf:dataset:split
    preferences: str | None = None  # JSONL with "prompt", "chosen", "rejected", or hf:dataset:split
    reward_model: str | None = None  # folder of a finished reward model, in place of --preferences
    sft: str | None = None  # JSONL with "prompt", "response", or hf:dataset:split; without it --model is not fine-tuned
    prompt_length: int = 64  # longest prompt in tokens; of a longer one the end stays
    response_length: int = 24  # most tokens of a response (R)
    temperature: float = 1.0  # softmax(logits / T), in sampling and in every log-probability
    sft_size: int = 20_000  # texts that the built-in task is learnt from
    sft_learning_rate: float = 1e-3  # Adam step size of supervised fine-tuning
    num_pairs: int = 16_000  # comparisons of two answers that the built-in annotators make
    reward_learning_rate: float = 3e-4  # Adam step size of the reward model
    fit_batch_size: int = 32  # texts or pairs per step of both
    total_episodes: int | float = 10_240  # responses to train PPO on
    batch_size: int = 128  # responses per iteration, over all processes
    num_minibatches: int = 4  # minibatches per epoch; divides the responses of each process
    micro_batch_size: int | None = None  # responses per forward pass, which only accumulates; default a minibatch
    update_epochs: int = 4  # epochs per iteration (K)
    learning_rate: float = 3e-4  # Adam step size of policy and value
    anneal_lr: bool = True  # bring the step size linearly to 0
    adam_eps: float = 1e-5  # Adam's ε, placed as TensorFlow does
    gamma: float = 1.0  # discount γ in [0, 1] per token
    gae_lambda: float = 0.95  # GAE λ in [0, 1]
    clip_coef: float = 0.2  # clip range ε of the ratio
    clip_vloss: bool = True  # clip the value loss with the same ε
    vf_coef: float = 0.1  # value loss coefficient c1
    max_grad_norm: float = 1.0  # largest global L2 norm of the gradient
    target_kl: float | None = None  # end an iteration's epochs once kl/old passes 1.5 times this (nats per token)
    beta: float = 0.15  # coefficient β of the KL to the reference, at first; 0 cuts the leash
    beta_controller: Literal["fixed", "proportional", "doubling"] = "fixed"  # how β follows --kl-target
    kl_target: float = 6.0  # KL to the reference that an adaptive β aims at (nats per response)
    kl_horizon: float = 10_000  # responses in which a proportional β can react
    value_model: Literal["separate", "head"] = "separate"  # copy of the reward model, or head on the policy's trunk
    whiten_rewards: bool = False  # divide token rewards by their std, mean kept, as published; favours long answers
    missing_eos_penalty: float = 1.0  # subtracted from the score of a response that did not end
    best_of_n: int = 0  # also show the reference's best of 1, 2, 4, ... n answers by the reward model
    self_check: bool = True  # test sampler, padding, ratio and reward model before PPO starts
    min_accuracy: float = 0.55  # the self-check's floor for the reward model's accuracy on held-out pairs
    seed: int = 1  # seed of every generator
    device: str = "auto"  # auto (CUDA if there is one), cpu, cuda, cuda:1 or mps
    cuda: bool = True  # --no-cuda means cpu
    torch_deterministic: bool = True  # deterministic cuDNN kernels; --no-... lets cuDNN choose the fastest
    compile: bool = False  # torch.compile of the networks' blocks
    bf16: bool = False  # PPO's networks in bfloat16 (autocast), other matrix products in TF32
    exp_name: str = "rlhf_ppo_gpt2"  # name of the experiment, part of the folder's name
    run_dir: str = "runs"  # where run folders are made
    checkpoint_every: int = 20  # iterations; 0 never
    eval_every: int = 10  # iterations between evaluations on held-out prompts; 0 only before and after
    resume: str | None = None  # run folder to go on with; its flags are the defaults
    evaluate: str | None = None  # run folder whose policy answers, without training
    eval_episodes: int = 256  # responses of an evaluation
    track: bool = False  # mirror TensorBoard to Weights & Biases
    wandb_project_name: str = "ppo"  # W&B project
    wandb_entity: str | None = None  # W&B team


SMOKE = dict(sft_size=4_000, num_pairs=1_000, total_episodes=512, batch_size=64, eval_episodes=64, min_accuracy=0.5)


# The built-in task: one-line opinions about films, in a grammar whose words fall into categories.
WORDS = {
    "H": "well yes", "O": "honestly overall frankly", "D": "the", "N": "film plot music acting ending", "I": "it",
    "V": "was felt seemed looked", "G": "not never", "X": "very really quite", "C": "and but",
    "+": "great good lovely warm clever moving fresh bright", "-": "bad dull weak cold slow boring flat ugly",
    "0": "long short loud quiet new old",
}  # fmt: skip
CATEGORY = {word: category for category, words in WORDS.items() for word in words.split()}
FOLLOWS = {  # what may come next; a dot is the end
    "": "HODI", "H": "ODI", "O": "DI", "D": "N", "N": "V", "I": "V", "V": "GX+-0", "G": "X+-0", "X": "+-0",
    "+": "C.", "-": "C.", "0": "C.", "C": "DIGX+-0",
}  # fmt: skip


def opinion(rng: random.Random) -> list[str]:
    """A sentence of the grammar as words, each adjective used once: what people write, and so what SFT learns."""
    words, category = list[str](), ""
    while (category := rng.choice(FOLLOWS[category])) != ".":
        words.append(rng.choice(WORDS[category].split()))
    adjectives = [word for word in words if CATEGORY[word] in "+-0"]
    return words if len(adjectives) == len(set(adjectives)) and len(words) < 24 else opinion(rng)


def judge(text: str, ended: bool) -> float:
    """The gold score in [-3, 3], hidden from training: what a text means, less 1 for each fault of form.

    Meaning is a bounded sum over distinct adjectives, turned round by a negation and stronger by an intensifier.
    Faults are breaks of the grammar, repeated adjectives and a missing end; people make none, so none is ever compared.
    """
    meaning, faults, seen, category, weight = 0.0, float(not ended), set[str](), "", 1.0
    for word in [*text.split(), "."] if ended else text.split():
        before, category = category, CATEGORY.get(word, word)
        faults += category not in FOLLOWS.get(before, "")
        weight *= {"G": -1.0, "X": 1.5}.get(category, 1.0)
        if category in ("+", "-", "0"):
            faults += word in seen
            meaning += weight * {"+": 1, "-": -1, "0": 0}[category] * (word not in seen)
            seen.add(word)
            weight = 1.0
    return float(np.clip(3 * np.tanh(meaning / 3) - faults, -3, 3))


@dataclass
class Responses:
    """B prompts, padded on the left to P columns, and their answers of up to R tokens."""

    tokens: Tensor  # int64 [B, P + R]
    mask: Tensor  # bool [B, P + R], true on real tokens; known from lengths alone [R3]
    prompt_columns: int  # P
    ended: Tensor  # bool [B], whether the last token is the end

    def texts(self) -> list[list[int]]:
        """Prompt and response together [R1], without padding."""
        return [row[real].tolist() for row, real in zip(self.tokens, self.mask, strict=True)]

    @property
    def actions(self) -> Tensor:  # [B, R]
        return self.tokens[:, self.prompt_columns :]

    @property
    def real(self) -> Tensor:  # bool [B, R]
        return self.mask[:, self.prompt_columns :]

    def rows(self, index: Tensor) -> Responses:
        """Some of them, without columns that are padding in all; prompts lose some on the left, answers on the right."""
        mask = self.mask[index]
        used = mask.any(0).nonzero()
        cut = slice(int(used[0]), int(used[-1]) + 1)
        return Responses(self.tokens[index, cut], mask[:, cut], self.prompt_columns - cut.start, self.ended[index])


def attention_inputs(mask: Tensor) -> dict[str, Tensor]:
    """What a GPT-2 must be told about padding: whom each token may see, and its position among real tokens [R4]."""
    causal = torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool, device=mask.device).tril()
    itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)  # or padding would attend to nothing: NaN
    visible = (causal & mask[:, None, :]) | itself
    return {"attention_mask": visible[:, None], "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)}


def hidden_states(model: Any, tokens: Tensor, mask: Tensor, bf16: bool = False) -> Tensor:
    """The last layer [B, T, d] of a GPT-2's trunk over tokens and mask [B, T]; 0 where no token is.

    Padding costs as much as text, so several texts share a row, each seeing itself alone, as it would in a row of its own.
    """
    text = torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)[mask]  # of each real token
    row = text // max(1, 256 // mask.shape[1])
    place = torch.arange(len(row), device=row.device) - torch.searchsorted(row, row)  # within its row
    packed = torch.zeros(3, int(row[-1]) + 1, int(place.max()) + 1, dtype=torch.long, device=mask.device)
    packed[:, row, place] = torch.stack([tokens[mask], (mask.cumsum(1) - 1)[mask], text + 1])  # [R4]
    together = packed[2][:, :, None] == packed[2][:, None, :]
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
        causal = together.tril()[:, None]
        trunk = model.transformer(packed[0], position_ids=packed[1], attention_mask=causal, use_cache=False)
    states = trunk.last_hidden_state.new_zeros(*mask.shape, trunk.last_hidden_state.shape[-1])
    states[mask] = trunk.last_hidden_state[row, place]
    return states.float()


def read_score(model: Any, states: Tensor) -> Tensor:
    """Normalised score [...] of a reward or value model at hidden states [..., d]; gain and bias lie in its config."""
    return model.score(states).squeeze(-1) * model.config.reward_gain + model.config.reward_bias


def reward_scores(model: nn.Module, tokens: Tensor, mask: Tensor, bf16: bool = False) -> Tensor:
    """The reward model's r(x, y) [B]: it reads prompt and response together [R1], the score is at the last token [R10]."""
    last = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
    return read_score(model, hidden_states(model, tokens, mask, bf16)[torch.arange(len(last)), last])


class Agent(nn.Module):
    """The policy and its value function: a copy of the reward model, or a zero head on the policy's trunk [R20]."""

    def __init__(self, policy: Any, value: nn.Module | None, bf16: bool = False):
        super().__init__()
        self.policy, self.bf16 = policy, bf16
        self.shared, self.value = value is None, value or nn.Linear(policy.config.n_embd, 1).to(policy.device)
        for parameter in self.value.parameters() if self.shared else ():
            nn.init.zeros_(parameter)

    def forward(self, responses: Responses) -> tuple[Tensor, Tensor]:
        """Policy states [B, R, d] and values [B, R] from which each response token was, or is to be, chosen."""
        before = slice(responses.prompt_columns - 1, -1)
        states = hidden_states(self.policy, responses.tokens, responses.mask, self.bf16)[:, before]
        if self.shared:
            return states, self.value(states).squeeze(-1)
        value_states = hidden_states(self.value, responses.tokens, responses.mask, self.bf16)[:, before]
        return states, read_score(self.value, value_states)


def log_softmax(policy: Any, states: Tensor, temperature: float) -> Tensor:
    """log π(·|s) [n, V] for states [n, d]: softmax(logits / T) and nothing else [R14] [R15]."""
    return (policy.lm_head(states).float() / temperature).log_softmax(-1)


def token_logprobs(policy: Any, states: Tensor, actions: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log π(a|s) and entropy, both [n], for states [n, d] and actions [n], a piece at a time.

    What has V columns is never kept: the backward pass makes it anew for each piece.
    """

    def piece(states: Tensor, actions: Tensor) -> Tensor:
        logp = log_softmax(policy, states, temperature)
        with torch.no_grad():
            entropy = -(logp.exp() * logp).sum(-1)
        return torch.stack([logp.gather(-1, actions[:, None]).squeeze(-1), entropy])

    size = max(1, 2**24 // policy.config.vocab_size)
    pairs = zip(states.split(size), actions.split(size), strict=True)
    logprobs, entropy = torch.cat([checkpoint(piece, s, a, use_reentrant=False) for s, a in pairs], 1)
    return logprobs, entropy.detach()


@torch.no_grad()
def sample_responses(policy: Any, prompts: list[list[int]], length: int, temperature: float, eos: int,
                     bf16: bool = False) -> tuple[Responses, Tensor]:  # fmt: skip
    """Answer each prompt with up to `length` tokens drawn from softmax(logits / T), whole [R14]; the end stops it [R16].

    Returns the responses and the log-probabilities [B, R] with which their tokens were drawn.
    """
    tokens, mask = pad_left(prompts, policy.device)
    inputs, cache, columns = attention_inputs(mask), None, tokens.shape[1]
    step, rows = tokens, torch.arange(len(tokens), device=tokens.device)
    tokens, mask = (nn.functional.pad(x, (0, length)) for x in (tokens, mask))
    logprobs = torch.zeros(len(tokens), length, device=tokens.device)
    for column in range(columns, columns + length):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
            out = policy.transformer(step, cache=cache, use_cache=True, **inputs)
        cache = out.cache
        logp = log_softmax(policy, out.last_hidden_state[:, -1].float(), temperature)
        require_finite(logp[:, 0], "a log-probability of the policy")
        step = torch.multinomial(logp.exp(), 1)
        tokens[rows, column], mask[rows, column] = step[:, 0], True
        logprobs[rows, column - columns] = logp.gather(1, step)[:, 0]
        going = (step[:, 0] != eos).nonzero()[:, 0]
        if len(going) < len(rows):  # who has ended leaves the batch
            cache.batch_select_indices(going)
            rows, step = rows[going], step[going]
        if not len(rows):
            break
        seen = mask[rows, : column + 1]
        inputs = {"attention_mask": seen[:, None, None], "position_ids": seen.sum(1, keepdim=True) - 1}
    ended = torch.ones_like(mask[:, 0]).index_fill(0, rows, False)
    end = column + 1
    return Responses(tokens[:, :end], mask[:, :end], columns, ended), logprobs[:, : end - columns]


def sft_loss(policy: Any, texts: list[list[int]]) -> Tensor:
    """Mean cross-entropy of each next token, the end included, padding not [R13]; a scalar."""
    tokens, mask = pad_left(texts, policy.device)
    known = mask[:, :-1]  # padding lies on the left: whoever is real has a real successor
    states = hidden_states(policy, tokens, mask)[:, :-1]
    return -token_logprobs(policy, states[known], tokens[:, 1:][known], 1.0)[0].mean()


def preference_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log σ(r(x, chosen) - r(x, rejected)) [R9] (1909.08593 eq. 1 for two answers) of scores [B]; a scalar."""
    return -nn.functional.logsigmoid(chosen - rejected).mean()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x where the mask, of the same shape, is true, over all processes; what lies elsewhere, NaN too, stays out."""
    total, count = global_mean(torch.stack([x[mask].sum(), mask.sum().to(x.dtype)]))
    return total / count


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """x with variance 1 under the mask, and mean 0 unless `shift_mean` is off [R23] [R25]; 0 elsewhere; any shape."""
    mean = masked_mean(x, mask)
    white = (x - mean) / (masked_mean((x - mean).square(), mask) + 1e-8).sqrt()
    return torch.where(mask, white if shift_mean else white + mean, 0.0)


def token_rewards(scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, real: Tensor, beta: float) -> Tensor:
    """-β·(log π - log π_ref) at each real token, and the score [B] at the last one [R21] (1909.08593 eq. 2); [B, R]."""
    rewards = torch.where(real, -beta * (logprobs - ref_logprobs), 0.0)
    rewards[torch.arange(len(scores)), real.sum(1) - 1] += scores
    return rewards


def compute_gae(rewards: Tensor, values: Tensor, next_values: Tensor, terminations: Tensor, dones: Tensor, gamma: float,
                gae_lambda: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Generalised advantage estimation [5] (arXiv:1506.02438, eq. 16) and the TD(λ) targets of the value.

    All are [T, N]. `next_values[t]` is V of the state that step t led to: at an episode end the final observation, not
    the first of the next episode. A time limit (done, not terminated) still bootstraps, as the task would have gone on.
    """
    deltas = rewards + gamma * next_values * (1 - terminations) - values
    decays = gamma * gae_lambda * (1 - dones)  # 0 cuts the sum at every episode end
    advantages, running = torch.empty_like(deltas), torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = running = deltas[t] + decays[t] * running
    return advantages, advantages + values


@torch.no_grad()
def rollout(args: Args, agent: Agent, reference: Any, score: Callable[[Responses], Tensor], prompts: list[list[int]],
            eos: int, beta: float) -> tuple[Responses, Tensor, dict[str, Tensor]]:  # fmt: skip
    """Answer the prompts, judge the answers, estimate advantages.

    Returns the responses, what the update needs of them [4, B, R] (log-probabilities, advantages, returns, values, in
    that order, 0 where no token is), and figures [B] of each response. `score` gives r(x, y) [B].
    """
    responses, _ = sample_responses(agent.policy, prompts, args.response_length, args.temperature, eos, args.bf16)
    real = responses.real
    logprobs, ref_logprobs, exact_kl, values = per_token = torch.zeros(4, *real.shape, device=real.device)
    for index in torch.arange(len(real), device=real.device).split(args.micro_batch_size or len(real)):
        part = responses.rows(index)
        states, part_values = agent(part)
        ref_states = hidden_states(reference, part.tokens, part.mask, args.bf16)[:, part.prompt_columns - 1 : -1]
        compared = compare(agent.policy, reference, states[part.real], ref_states[part.real],
                           part.actions[part.real], args.temperature)  # fmt: skip
        wide = torch.zeros(4, len(index), real.shape[1], device=real.device)
        wide[:, :, : part.real.shape[1]][:, part.real] = torch.cat([compared, part_values[part.real][None]])
        per_token[:, index] = wide
    raw_scores = score(responses)
    require_finite(raw_scores, "a score of the reward model")
    scores = raw_scores - args.missing_eos_penalty * ~responses.ended  # [R17]
    rewards = token_rewards(scores, logprobs, ref_logprobs, real, beta)
    rewards = masked_whiten(rewards, real, shift_mean=False) if args.whiten_rewards else rewards  # [R23]
    next_values = nn.functional.pad(values[:, 1:], (0, 1))  # 0 after the last token [R24]
    ends = 1.0 - nn.functional.pad(real[:, 1:], (0, 1)).float()
    gae = compute_gae(rewards.T, values.T, next_values.T, ends.T, ends.T, args.gamma, args.gae_lambda)
    advantages, returns = masked_whiten(gae[0].T, real), gae[1].T  # [R25] whitened once the returns are made
    logratio = logprobs - ref_logprobs  # the KL's estimators k1, k2, k3: means over samples of π
    figures = {
        "proxy": raw_scores, "score": scores, "length": real.sum(1).float(), "ended": responses.ended.float(),
        "kl/ref": logratio.sum(1), "kl/ref_k2": 0.5 * logratio.square().sum(1),
        "kl/ref_k3": ((-logratio).exp() - 1 + logratio).sum(1), "kl/ref_exact": exact_kl.sum(1),
        "return": scores - beta * logratio.sum(1),
    }  # fmt: skip
    return responses, torch.stack([logprobs, advantages, returns, values]), figures


def compare(policy: Any, reference: Any, states: Tensor, ref_states: Tensor, actions: Tensor, temperature: float) -> Tensor:  # fmt: skip
    """log π(a|s), log π_ref(a|s) and the exact KL(π(·|s)‖π_ref(·|s)) over all tokens; states [n, d], actions [n]; [3, n]."""
    parts, size = list[Tensor](), max(1, 2**24 // policy.config.vocab_size)
    for s, ref_s, a in zip(states.split(size), ref_states.split(size), actions.split(size), strict=True):
        logp, ref_logp = log_softmax(policy, s, temperature), log_softmax(reference, ref_s, temperature)
        taken = [x.gather(-1, a[:, None]).squeeze(-1) for x in (logp, ref_logp)]
        parts.append(torch.stack([*taken, (logp.exp() * (logp - ref_logp)).sum(-1)]))
    return torch.cat(parts, 1)


def minibatches(size: int, count: int, epochs: int, device: torch.device) -> Iterator[Tensor]:
    """Indices [size / count], in a new order each epoch; an epoch uses every sample exactly once [6]."""
    for _ in range(epochs):
        yield from torch.randperm(size, device=device).split(size // count)


def clipped_surrogate_loss(logratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """-L^CLIP [8] (eq. 7) of logratio = log π(a|s) - log π_old(a|s) and advantages, both [B]; a scalar."""
    ratio = logratio.exp()  # the min drops the gradient only beyond ε in the helpful direction, never on the way back
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages).mean()


def value_loss(new_values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float | None) -> Tensor:
    """L^VF [9]: half the mean squared error, or of the worse of the value and its clipped move; all [B], a scalar."""
    errors = (new_values - returns).square()
    if clip_coef is not None:
        clipped = old_values + (new_values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (clipped - returns).square())
    return 0.5 * errors.mean()


def ppo_loss(args: Args, agent: Agent, responses: Responses, per_token: Tensor) -> tuple[Tensor, Tensor]:
    """-L^CLIP + c1·L^VF [R27] (1707.06347 eq. 9) over the real tokens, which alone are looked at, and STATS [R30].

    `per_token` [4, B, R] is as `rollout` returns it.
    """
    real = responses.real
    logprobs, advantages, returns, values = per_token[:, :, : real.shape[1]][:, real]  # [n] each
    states, new_values = agent(responses)
    new_logprobs, entropy = token_logprobs(agent.policy, states[real], responses.actions[real], args.temperature)
    logratio = new_logprobs - logprobs
    policy_loss = clipped_surrogate_loss(logratio, advantages, args.clip_coef)
    v_loss = value_loss(new_values[real], values, returns, args.clip_coef if args.clip_vloss else None)
    loss = policy_loss + args.vf_coef * v_loss
    with torch.no_grad():  # KL(π_old‖π) is estimated by the means of -log r and of (r - 1) - log r, which is never < 0
        clipfrac = (logratio.expm1().abs() > args.clip_coef).float().mean()
        kls = -logratio.mean(), (logratio.expm1() - logratio).mean()
        return loss, torch.stack([v_loss, policy_loss, entropy.mean(), *kls, clipfrac])


def update(args: Args, agent: Agent, optimizer: torch.optim.Optimizer, loss_fn: Callable[..., tuple[Tensor, Tensor]],
           responses: Responses, per_token: Tensor) -> tuple[list[Tensor], int, int]:  # fmt: skip
    """K epochs over the responses [R26]; returns the STATS of each minibatch, the steps taken and the steps skipped."""
    history, skipped = list[Tensor](), 0
    group, parameters = optimizer.param_groups[0], list(agent.parameters())
    for index in minibatches(len(responses.tokens), args.num_minibatches, args.update_epochs, per_token.device):
        tokens = global_mean(responses.real[index].sum().float())  # so that each counts the same, wherever it is
        optimizer.zero_grad()
        stats = torch.zeros(len(STATS), device=per_token.device)
        for micro in index.split(args.micro_batch_size or len(index)):  # only accumulates [R26]
            part = responses.rows(micro)
            loss, part_stats = loss_fn(args, agent, part, per_token[:, micro])
            share = part.real.sum() / tokens
            (loss * share).backward()
            stats += part_stats.detach() * share
        stats = global_mean(stats)
        if args.target_kl is not None and stats[4] > 1.5 * args.target_kl:
            break  # [S3] before the step that would go on
        average_gradients(agent)
        norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)  # [11]
        if not (norm.isfinite() and stats.isfinite().all()):
            skipped += 1
            continue
        group["steps"] = group.get("steps", 0) + 1  # a checkpoint keeps it, too
        group["eps"] = args.adam_eps / (1 - group["betas"][1] ** group["steps"]) ** 0.5  # [R29]
        optimizer.step()
        history.append(stats)
    return history, len(history), skipped


def update_beta(beta: float, kl: float, target_kl: float) -> float:
    """β of the next iteration (§4): half if KL < target / 1.5, double if KL > 1.5 target; kept within [1e-4, 1e4], 0 stays."""
    factor = 0.5 if kl < target_kl / 1.5 else 2.0 if kl > 1.5 * target_kl else 1.0
    return min(max(beta * factor, 1e-4), 1e4) if beta else 0.0


def proportional_beta(beta: float, kl: float, target_kl: float, horizons: float) -> float:
    """β(1 + e·`horizons`) with e = KL / target - 1 within ±0.2 [R22] (1909.08593 §2.2), kept as above; `horizons` is n / horizon ≤ 1."""
    return min(max(beta * (1 + min(max(kl / target_kl - 1, -0.2), 0.2) * horizons), 1e-4), 1e4) if beta else 0.0


def train_reward_model(args: Args, task: Task, reference: Any) -> Any:
    """A reward model that starts as the reference with a new head; its accuracy, gain and bias go into its config."""
    model = as_scorer(reference)
    nn.init.normal_(model.score.weight, std=(model.config.n_embd + 1) ** -0.5)  # [R8]; it has no bias
    pairs = task.pairs or annotate(args, task, reference)
    pairs = random.sample(pairs, len(pairs))  # files may be sorted
    held_out, rest = pairs[: -(-len(pairs) // 10)], pairs[-(-len(pairs) // 10) :]
    loss = lambda batch: (preference_loss(*pair_scores(model, batch)), len(batch))
    fit(args, model, loss, rest, args.reward_learning_rate)
    model.config.reward_model_accuracy = accuracy(model, held_out)  # [R12]
    return model


def train(args: Args) -> dict[str, float]:
    """The three stages; returns the last metrics. Raises UsageError before anything is written, and by the self-check."""
    device = start(args)
    task, policy = load_task(args, device)
    run = Run(args, device)
    reference = run.stage("sft", lambda: fine_tune(args, task, policy), task)
    reward_model = run.stage("reward_model", lambda: make_reward_model(args, task, reference), task)
    agent = make_agent(args, reference, reward_model)
    for frozen in (reference, reward_model):
        frozen.requires_grad_(False)  # [R19]
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=args.adam_eps, fused=True)  # [3] [R28]
    leash = Leash(args.beta)
    run.restore(agent=agent, optimizer=optimizer, leash=leash)
    score = lambda responses: reward_scores(reward_model, responses.tokens, responses.mask, args.bf16)
    run.compile(agent)
    judged = lambda: measure(args, task, agent, reference, score)
    if not run.first:
        self_check(args, task, agent, reference, reward_model, score)
        best_of_n(args, run, task, reference, score)
        run.report(0, judged())

    for iteration in range(run.first, run.last):
        reseed(args.seed, iteration)
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - args.anneal_lr * iteration / run.last)  # [4]
        prompts = prompt_batch(task.prompts, iteration, args.batch_size, args.seed)
        begin = time.time()
        responses, per_token, figures = rollout(args, agent, reference, score, prompts, task.eos, leash.beta)
        middle = time.time()
        history, updates, skipped = update(args, agent, optimizer, ppo_loss, responses, per_token)
        end = time.time()
        figures |= {"gold": task.gold(responses).to(device)} if task.judge else {}  # [R31] to look at, no more
        metrics = dict(zip(STATS, torch.stack(history or [torch.full((len(STATS),), np.nan)]).mean(0), strict=True))
        for name, values in figures.items():
            mean, square = global_mean(torch.stack([values.mean(), values.square().mean()]))
            metrics[TAGS.get(name, name)] = mean
            if name.startswith("kl/"):
                metrics[f"{name}_se"] = ((square - mean.square()).clamp(min=0) / args.batch_size).sqrt()
        _, _, returns, values = per_token[:, responses.real]
        metrics["losses/explained_variance"] = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
        tokens = float(responses.real.sum())
        metrics |= {"charts/beta": leash.beta, "charts/updates": updates, "charts/skipped_updates": skipped,
                    "charts/rollout_tokens_per_second": WORLD * tokens / (middle - begin),
                    "charts/update_tokens_per_second": WORLD * tokens * (updates + skipped) / args.num_minibatches / (end - middle)}  # fmt: skip
        leash.adapt(args, float(metrics["kl/ref"]))
        if iteration + 1 == run.last or (args.eval_every and (iteration + 1) % args.eval_every == 0):
            run.report(iteration + 1, judged())
        run.end_iteration(metrics)
    return run.finish(agent.policy, task)


# ------------------------------------------------------------------------------------------------------------ Plumbing

RANK, WORLD, LOCAL_RANK = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
STATS = "losses/value_loss losses/policy_loss losses/entropy kl/old_k1 kl/old losses/clipfrac".split()
TAGS = {k: f"charts/{k}" for k in ("proxy", "score", "gold", "ended")}
TAGS |= {"return": "charts/episodic_return", "length": "charts/episodic_length"}
EVALUATED = "gold proxy kl/ref kl/ref_exact length ended".split()
POSITIVE = """prompt_length response_length temperature sft_size num_pairs fit_batch_size batch_size num_minibatches
    micro_batch_size update_epochs adam_eps max_grad_norm target_kl kl_target kl_horizon eval_episodes""".split()
FRACTIONS = "gamma gae_lambda min_accuracy".split()
PACKAGES = {"track": "wandb"}  # what a flag needs
MAY_CHANGE = """total_episodes device cuda checkpoint_every eval_every resume evaluate eval_episodes self_check min_accuracy
    track
    wandb_project_name wandb_entity""".split()  # with --resume; any other would make it another run


class UsageError(Exception):
    """A wrong flag, environment or file, in one sentence that says what to do; `main` exits with status 2."""


def require(condition: object, sentence: str) -> None:
    if not condition:
        raise UsageError(sentence)


def require_finite(x: Tensor, what: str) -> None:
    if not x.isfinite().all():
        raise FloatingPointError(f"{what} is not finite; lower the learning rates")


def check_args(args: Args) -> None:
    """Raises UsageError for flags that cannot work."""
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')} {value}"
        if isinstance(value, int | float):
            require(0 <= value < float("inf"), f"{flag} must be a number that is finite and not negative")
            require(value > 0 or name not in POSITIVE, f"{flag} must be greater than 0")
            require(value <= 1 or name not in FRACTIONS, f"{flag} must lie in [0, 1]")
        package = PACKAGES.get(name) if value else None
        package = "datasets" if str(value).startswith("hf:") else package
        require(not package or find_spec(package), f"{flag} needs a package: pip install {package}")
    require(args.seed < 2**63, f"--seed {args.seed} must be below 2^63")
    if args.model:
        require(args.prompts, "--model needs --prompts FILE to answer")
        require(bool(args.preferences) != bool(args.reward_model),
                "--model needs either --preferences FILE to learn from or --reward-model FOLDER")  # fmt: skip
    for name in ("prompts", "preferences", "reward_model", "sft"):
        require(args.model or not getattr(args, name), f"--{name.replace('_', '-')} needs --model")
    if args.evaluate:
        return require(WORLD == 1, "--evaluate answers in one process")
    require(args.batch_size % WORLD == 0, f"--batch-size {args.batch_size} must be a multiple of the {WORLD} processes")
    require(args.beta_controller != "proportional" or args.kl_horizon >= args.batch_size,
            f"--kl-horizon {args.kl_horizon} must be at least batch-size = {args.batch_size}")  # fmt: skip
    pairs = f"--num-pairs {args.num_pairs} must be at least {2 * WORLD}, as some are held out"
    require(args.num_pairs >= 2 * WORLD, pairs)
    require(args.fit_batch_size >= WORLD, f"--fit-batch-size {args.fit_batch_size} must be at least {WORLD}")
    require(args.batch_size // WORLD % args.num_minibatches == 0, f"--num-minibatches {args.num_minibatches} must divide"
            f" batch-size = {args.batch_size // WORLD} in each process")  # fmt: skip
    require(args.total_episodes >= args.batch_size, f"--total-episodes {args.total_episodes} must be at least"
            f" batch-size = {args.batch_size}, one iteration")  # fmt: skip


def start(args: Args) -> torch.device:
    """Check the flags, set torch up and join the other processes, if any; returns the device of this one."""
    import ctypes

    check_args(args)
    name = "cpu" if args.device == "auto" and not (args.cuda and torch.cuda.is_available()) else args.device
    try:
        device = torch.device(f"cuda:{LOCAL_RANK}" if name in ("auto", "cuda") else name)
        if device.type not in ("cpu", "cuda", "mps") or (device.type == "cuda" and not args.cuda):
            raise RuntimeError("it must be auto, cpu, cuda, cuda:N or mps, and not CUDA together with --no-cuda")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {args.device} does not work here: {str(error).splitlines()[0]}") from None
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.benchmark = not args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = args.bf16
    torch.set_float32_matmul_precision("high" if args.bf16 else "highest")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    libc: Any = ctypes.CDLL(None) if os.name == "posix" else None
    if hasattr(libc, "mallopt"):  # glibc hands freed memory back, though the next minibatch needs as much: keep it
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, as large as it may be
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
    if WORLD > 1 and not dist.is_initialized():
        # Imported later, by Adam, its default arguments would keep the group and its threads alive into the exit.
        from torch.distributed.nn import functional  # noqa: F401

        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def reseed(seed: int, iteration: int) -> int:
    """Restart every generator from these two numbers and the rank; returns a seed for the environments."""
    words = np.random.SeedSequence((seed, iteration, RANK)).generate_state(4).tolist()
    random.seed(words[0])
    np.random.seed(words[1])
    torch.manual_seed(words[2])
    return words[3]


def global_mean(x: Tensor) -> Tensor:
    """Mean of `x` over the processes; `x` itself when there is one."""
    if WORLD > 1:
        dist.all_reduce(x := x / WORLD)
    return x


def average_gradients(agent: nn.Module) -> None:
    """The mean over the processes [S2], so that K of them step as one would on all their samples."""
    if WORLD > 1:
        grads = [p.grad for p in agent.parameters() if p.grad is not None]
        means = global_mean(torch.cat([grad.reshape(-1) for grad in grads])).split([grad.numel() for grad in grads])
        for grad, mean in zip(grads, means, strict=True):
            grad.copy_(mean.view(grad.shape))


@dataclass
class Task:
    """What is to be learnt: token lists, and for the built-in task a judge that training never sees."""

    tokenizer: Any
    prompts: list[list[int]]
    held_out: list[list[int]]  # prompts of evaluations
    texts: list[list[int]]  # for supervised fine-tuning, each with its end
    pairs: list[tuple[list[int], list[int]]]  # (chosen, rejected); the built-in task draws them later
    judge: Callable[[str, bool], float] | None

    @property
    def eos(self) -> int:
        return self.tokenizer.eos_token_id

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode([t for t in tokens if t != self.eos])

    def gold(self, responses: Responses) -> Tensor:
        """Gold scores [B] of the built-in judge."""
        assert self.judge
        both = zip(responses.texts(), responses.ended.tolist(), strict=True)
        return torch.tensor([self.judge(self.decode(text), ended) for text, ended in both])


def load_task(args: Args, device: torch.device) -> tuple[Task, Any]:
    """The task and the model that starts; raises UsageError if a file, model or length will not do."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(args.seed)  # the same weights in every process
    if args.model is None:
        task = builtin_task(args)
        longest = max(map(len, task.prompts + task.held_out))
        short = f"--prompt-length {args.prompt_length}: the built-in prompts need {longest}"
        require(args.prompt_length >= longest, short)
        room = max(args.prompt_length + args.response_length, *map(len, task.texts))
        config = transformers.GPT2Config(
            vocab_size=len(task.tokenizer), n_positions=room, n_embd=128, n_layer=2, n_head=4, bos_token_id=task.eos,
            eos_token_id=task.eos, pad_token_id=task.tokenizer.pad_token_id)  # fmt: skip
        policy = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa")
    else:
        policy = load_model(args.model, transformers.AutoModelForCausalLM, "--model")
        task = file_task(args, load_model(args.model, transformers.AutoTokenizer, "--model"))
        policy.config.sft_loss = None  # that of another run, perhaps
        size = policy.config.vocab_size
        large = f"--model {args.model}: its tokenizer has more tokens than the model's {size}"
        require(len(task.tokenizer) <= size, large)
    check_room(args, policy)
    return task, still(policy).to(device)


def check_room(args: Args, policy: Any) -> None:
    room, needed = policy.config.n_positions, args.prompt_length + args.response_length
    require(needed <= room, f"--prompt-length + --response-length = {needed} exceeds the model's {room} positions")


def still(model: Any) -> Any:
    """Without dropout, in every mode and when saved [R18]: with it, no ratio would be 1 before the first update.

    GPT-2's activation, which transformers writes out in seven operations, becomes the same one in a single kernel.
    """
    model.config.update({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if model.config.activation_function == "gelu_new":
        model.config.activation_function = "gelu_pytorch_tanh"
        for block in model.transformer.h:
            block.mlp.act = nn.GELU(approximate="tanh")
    return model.eval()


def load_stage(folder: Path, device: torch.device) -> Any:
    """A model that a run has saved in its folder."""
    from transformers import GPT2ForSequenceClassification, GPT2LMHeadModel

    kind = GPT2ForSequenceClassification if folder.name == "reward_model" else GPT2LMHeadModel
    return still(kind.from_pretrained(folder, attn_implementation="sdpa")).to(device)


def load_model(name: str, kind: Any, flag: str) -> Any:
    """A GPT-2 or tokenizer from a folder, the hub's cache or the hub, in float32 whatever the file says."""
    import transformers
    from huggingface_hub import HfApi

    tokenizer = kind is transformers.AutoTokenizer
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa", "output_loading_info": True}
    options = {} if tokenizer else options
    local = Path(name).is_dir()
    try:
        try:
            loaded = kind.from_pretrained(name, local_files_only=True, **options)
        except OSError:
            if local:
                raise
            HfApi().model_info(name, timeout=10)  # without a network, from_pretrained would try for minutes
            loaded = kind.from_pretrained(name, **options)
    except Exception as error:
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        fault = (
            "is a folder that holds no such model or tokenizer"
            if local
            else "can neither be found here nor be downloaded; give a folder that save_pretrained or `hf download"
            f" {name} --local-dir FOLDER` has made"
        )
        raise UsageError(f"{flag} {name} {fault} ({reason})") from None
    if tokenizer:
        return loaded
    loaded, found = loaded
    kind_of = loaded.config.model_type
    require(kind_of == "gpt2", f"{flag} {name} is a {kind_of}; this script takes GPT-2 models")
    amiss = "score.weight" in found["missing_keys"] or "score.weight" in found["unexpected_keys"]
    is_no = "no reward model" if flag == "--reward-model" else "a reward model, which writes no text"
    require(not amiss, f"{flag} {name} is {is_no}")
    return loaded


def read_rows(source: str, flag: str, *keys: str) -> list[list[str]]:
    """The strings under `keys` in each row of a JSONL file or of hf:dataset:split."""
    number = 0
    try:
        if source.startswith("hf:"):
            from datasets import load_dataset

            name, _, split = source.removeprefix("hf:").partition(":")
            rows = list(load_dataset(name, split=split or "train"))
        else:  # a line ends with a line feed alone: JSON strings may hold all other separators
            rows = [line for line in Path(source).read_text(encoding="utf-8-sig").split("\n") if line.strip()]
        require(rows, f"{flag} {source} is empty")
        texts = list[list[str]]()
        for row in rows:
            number += 1
            row = json.loads(row) if isinstance(row, str) else row
            texts.append([row[key] for key in keys])
            require(
                all(isinstance(text, str) and text for text in texts[-1]),
                f"{', '.join(keys)} must be strings with text",
            )
        return texts
    except Exception as error:
        where = f", row {number}" if number else ""
        reason = str(error) if isinstance(error, UsageError) else f"{type(error).__name__} {error}".splitlines()[0]
        raise UsageError(f"{flag} {source}{where} cannot be used as rows with {', '.join(keys)}: {reason}") from None


def file_task(args: Args, tokenizer: Any) -> Task:
    """Prompts, comparisons and texts from files, strings joined before they are made tokens [R6]."""
    require(tokenizer.eos_token_id is not None, f"--model {args.model}: its tokenizer has no end-of-text token")
    longest = args.prompt_length + args.response_length
    cut = dict.fromkeys(("prompts", "texts"), 0)

    def tokens(text: str, what: str, limit: int) -> list[int]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        cut[what] += len(ids) > limit
        return ids[-limit:]  # [R2] what a prompt ends with matters most, and it ends where its author ended it [R5]

    whole = lambda text: tokens(text + tokenizer.eos_token, "texts", longest)
    rows = read_rows(args.prompts or "", "--prompts", "prompt")
    prompts = [tokens(text, "prompts", args.prompt_length) for (text,) in rows]
    pairs = read_rows(args.preferences, "--preferences", "prompt", "chosen", "rejected") if args.preferences else []
    require(len(pairs) != 1, f"--preferences {args.preferences} needs at least two rows, as one is held out")
    texts = read_rows(args.sft, "--sft", "prompt", "response") if args.sft else []
    held_out = prompts[-(len(prompts) // 10) :] if len(prompts) >= 10 else prompts
    task = Task(tokenizer, prompts[: -len(held_out)] or prompts, held_out, [whole(a + b) for a, b in texts],
                [(whole(a + b), whole(a + c)) for a, b, c in pairs], None)  # fmt: skip
    if any(cut.values()) and not RANK:
        print(f"longer than --prompt-length {args.prompt_length} and cut at the start: {cut['prompts']} prompts;"
              f" longer than {longest} tokens: {cut['texts']} texts", file=sys.stderr)  # fmt: skip
    return task


def builtin_task(args: Args) -> Task:
    """Opinions of the grammar; a prompt is the beginning of one, up to the first verb at most [R5]."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<end>", "<pad>", *CATEGORY])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<pad>")
    rng = random.Random(args.seed)
    heads = [opinion(rng) for _ in range(4_000)]
    heads = [words[: next(i for i, word in enumerate(words) if CATEGORY[word] == "V") + 1] for words in heads]
    starts = sorted({tuple(head[: rng.randint(1, len(head))]) for head in heads})
    rng.shuffle(starts)
    prompts = [[vocabulary[word] for word in start if CATEGORY[start[-1]] != "D"] for start in starts]
    prompts = [prompt for prompt in prompts if prompt]
    texts = [[vocabulary[word] for word in opinion(rng)] + [0] for _ in range(args.sft_size)]
    return Task(tokenizer, prompts[64:], prompts[:64], texts, [], judge)


def prompt_batch(prompts: list[list[int]], iteration: int, size: int, seed: int) -> list[list[int]]:
    """This process's share of the prompts of an iteration: all in turn, in a new order each pass [R7]."""
    places = range(iteration * size + RANK, (iteration + 1) * size, WORLD)
    passes = {i // len(prompts) for i in places}
    orders = {p: np.random.default_rng((seed, p)).permutation(len(prompts)) for p in passes}
    return [prompts[orders[i // len(prompts)][i % len(prompts)]] for i in places]


def pad_left(texts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token lists to tokens and mask [B, longest], padding on the left [R4] [R2]; a padding token may be any."""
    lengths = torch.tensor([len(text) for text in texts])
    width = int(lengths.max())
    mask = torch.arange(width) >= width - lengths[:, None]
    tokens = torch.zeros(mask.shape, dtype=torch.long)
    tokens[mask] = torch.tensor([token for text in texts for token in text])
    return tokens.to(device), mask.to(device)


def as_scorer(policy: Any) -> Any:
    """A GPT2ForSequenceClassification with the policy's trunk."""
    from transformers import GPT2ForSequenceClassification

    config = copy.deepcopy(policy.config)
    config.num_labels, config.reward_gain, config.reward_bias = 1, 1.0, 0.0
    model = GPT2ForSequenceClassification._from_config(config, attn_implementation="sdpa")
    model.transformer.load_state_dict(policy.transformer.state_dict())
    return still(model).to(policy.device)


class Leash:
    """The coefficient β and how it follows the KL to the reference."""

    def __init__(self, beta: float):
        self.beta = beta

    def adapt(self, args: Args, kl: float) -> None:
        if args.beta_controller == "proportional":
            self.beta = proportional_beta(self.beta, kl, args.kl_target, args.batch_size / args.kl_horizon)
        elif args.beta_controller == "doubling":
            self.beta = update_beta(self.beta, kl, args.kl_target)

    def state_dict(self) -> dict[str, float]:
        return {"beta": self.beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.beta = float(state["beta"])


def fit(args: Args, model: nn.Module, loss: Callable[[list[Any]], tuple[Tensor, int]], samples: list[Any], lr: float) -> float:  # fmt: skip
    """One pass over the samples in a random order, the step size linear to 0; returns the mean loss of the last tenth.

    `loss` gives the mean over a list of samples, and over how many tokens or pairs that is.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr, eps=1e-5)
    steps, losses = max(1, len(samples) // args.fit_batch_size), list[Tensor]()
    require(len(samples) >= WORLD, f"{len(samples)} texts or pairs are too few for {WORLD} processes")
    order = torch.randperm(len(samples)).tensor_split(steps)
    for step, index in enumerate(tqdm(order, leave=False, disable=RANK > 0 or not sys.stderr.isatty())):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        mean, size = loss([samples[i] for i in index[RANK::WORLD].tolist()])
        part = mean * (size / global_mean(torch.tensor(float(size), device=mean.device)))  # each counts the same
        optimizer.zero_grad()
        part.backward()
        average_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        losses.append(global_mean(part.detach()))
        require_finite(losses[-1], f"the loss of step {step + 1} of this stage")
    return float(torch.stack(losses[-(steps // 10) - 1 :]).mean())


def fine_tune(args: Args, task: Task, policy: Any) -> Any:
    """The model after supervised fine-tuning on the task's texts, if it has any."""
    if task.texts:
        loss = lambda batch: (sft_loss(policy, batch), sum(len(text) - 1 for text in batch))
        policy.config.sft_loss = fit(args, policy, loss, task.texts, args.sft_learning_rate)
    return policy


def annotate(args: Args, task: Task, reference: Any) -> list[tuple[list[int], list[int]]]:
    """Pairs (chosen, rejected) of two answers of π_ref each, chosen with P = σ(3·difference in gold) (Bradley-Terry)."""
    pairs = list[tuple[list[int], list[int]]]()
    while len(pairs) < args.num_pairs:
        prompts = random.choices(task.prompts, k=min(512, args.num_pairs - len(pairs)))
        two = [
            sample_responses(reference, prompts, args.response_length, args.temperature, task.eos)[0] for _ in range(2)
        ]
        gold, other_gold = (task.gold(responses) for responses in two)
        prefers = torch.rand(len(prompts)) < (3 * (gold - other_gold)).sigmoid()
        texts = zip(*(responses.texts() for responses in two), prefers.tolist(), strict=True)
        pairs += [(a, b) if first else (b, a) for a, b, first in texts]
    return pairs


def pair_scores(model: nn.Module, pairs: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Scores of the chosen and of the rejected texts of n pairs, [n] each, in one pass."""
    tokens, mask = pad_left([text for pair in pairs for text in pair], next(model.parameters()).device)
    chosen, rejected = reward_scores(model, tokens, mask).view(-1, 2).unbind(1)
    return chosen, rejected


@torch.no_grad()
def accuracy(model: nn.Module, pairs: list[tuple[list[int], list[int]]]) -> float:
    """The share of pairs of which the model scores the chosen text higher."""
    scores = [torch.stack(pair_scores(model, pairs[i : i + 64])) for i in range(0, len(pairs), 64)]
    chosen, rejected = torch.cat(scores, 1)
    return float((chosen > rejected).float().mean())


def normalize_reward(args: Args, task: Task, reference: Any, model: Any) -> None:
    """Set gain and bias so that the scores of the start policy's answers have mean 0 and standard deviation 1 [R11]."""
    model.config.reward_gain, model.config.reward_bias = 1.0, 0.0  # whatever another run has set
    prompts = random.choices(task.prompts, k=512)
    responses, _ = sample_responses(reference, prompts, args.response_length, args.temperature, task.eos, args.bf16)
    with torch.no_grad():
        raw = reward_scores(model, responses.tokens, responses.mask, args.bf16)
    gain = 1 / (float(raw.std()) + 1e-8)
    model.config.reward_gain, model.config.reward_bias = gain, -gain * float(raw.mean())


def make_agent(args: Args, reference: Any, reward_model: Any) -> Agent:
    """The policy starts as a copy of the reference, the value as --value-model says."""
    value = copy.deepcopy(reward_model) if args.value_model == "separate" else None
    return Agent(copy.deepcopy(reference), value, args.bf16)


def make_reward_model(args: Args, task: Task, reference: Any) -> Any:
    """The reward model of --reward-model, or a new one that has learnt from comparisons; normalised either way."""
    from transformers import AutoModelForSequenceClassification

    if args.reward_model is None:
        model = train_reward_model(args, task, reference)
    else:
        model = still(load_model(args.reward_model, AutoModelForSequenceClassification, "--reward-model"))
        model.to(reference.device)
        same = model.config.num_labels == 1 and model.config.vocab_size == reference.config.vocab_size
        require(same, f"--reward-model {args.reward_model} must have one label and the model's own vocabulary")
    normalize_reward(args, task, reference, model)
    return model


def measure(
    args: Args, task: Task, agent: Agent, reference: Any, score: Callable[[Responses], Tensor]
) -> dict[str, Any]:
    """Means over --eval-episodes answers to held-out prompts, always with the same random numbers, and four answers."""
    torch.manual_seed(args.seed)
    prompts = [task.held_out[i % len(task.held_out)] for i in range(args.eval_episodes)]
    responses, _, figures = rollout(args, agent, reference, score, prompts, task.eos, 0.0)
    if task.judge:
        figures["gold"] = task.gold(responses)
    means = {k: float(figures[k].mean()) for k in EVALUATED if k in figures}
    answers = [(prompts[i], responses.actions[i][responses.real[i]]) for i in range(min(4, len(prompts)))]
    return means | {"texts": [(task.decode(prompt), task.tokenizer.decode(answer)) for prompt, answer in answers]}


def describe(figures: dict[str, Any]) -> str:
    gold = f"gold {figures['gold']:+.2f}, " if "gold" in figures else ""
    return (f"{gold}proxy {figures['proxy']:+.2f}, KL to the reference {figures['kl/ref']:.2f} nats per response,"
            f" length {figures['length']:.1f}, ended {figures['ended']:.2f}")  # fmt: skip


def self_check(args: Args, task: Task, agent: Agent, reference: Any, reward_model: Any,
               score: Callable[[Responses], Tensor]) -> None:  # fmt: skip
    """What must hold before the first update; raises UsageError with the likely cause of what does not."""
    if not args.self_check:
        return
    accuracy, tolerance = (
        getattr(reward_model.config, "reward_model_accuracy", 1.0),
        0.2 if args.bf16 else 1e-3 / min(args.temperature, 1),
    )
    require(accuracy >= args.min_accuracy, f"self-check: the reward model ranks only {accuracy:.0%} of held-out pairs"
            f" right, below --min-accuracy {args.min_accuracy}: give it more comparisons")  # fmt: skip
    prompts = sorted(task.prompts, key=len)
    prompts = [prompts[0], prompts[-1], *random.choices(prompts, k=14)]
    with torch.no_grad():
        torch.manual_seed(args.seed)
        responses, sampled = sample_responses(
            agent.policy, prompts, args.response_length, args.temperature, task.eos, args.bf16
        )
        torch.manual_seed(args.seed)
        again, per_token, figures = rollout(args, agent, reference, score, prompts, task.eos, args.beta)
        real, logprobs = again.real, per_token[0]
        require(torch.equal(responses.tokens, again.tokens), "self-check: the same seed gives other answers")
        difference = (sampled - logprobs)[real].abs().max()
        require(difference < tolerance, f"self-check: sampler and scorer differ by {difference:.2g} nats: temperature,"
                " filters, precision or position ids are not the same in both")  # fmt: skip
        kl = figures["kl/ref_exact"].abs().max()
        require(kl < tolerance, f"self-check: the KL to the reference is {kl:.2g} nats before the first update: policy and"
                " reference are not the same, or dropout is on")  # fmt: skip
        for i in (0, 1):
            alone = again.rows(torch.tensor([i], device=real.device))
            states, values = agent(alone)
            new, _ = token_logprobs(agent.policy, states[alone.real], alone.actions[alone.real], args.temperature)
            difference = (new - logprobs[i][real[i]]).abs().max()
            shift = (values[alone.real] - per_token[3][i][real[i]]).abs().max()
            require(max(difference, shift) < tolerance, f"self-check: beside other prompts an answer's log-probabilities"
                    f" change by {difference:.2g} nats and its values by {shift:.2g}: padding is seen or shifts positions,"
                    " or the first ratio is not 1")  # fmt: skip
        last = again.tokens[torch.arange(len(real)), again.prompt_columns + real.sum(1).cpu() - 1]
        ends = ((again.actions == task.eos) & real).sum(1)
        require(torch.equal(last == task.eos, again.ended) and torch.equal(ends, again.ended.long()),
                "self-check: the end token of a response is not its last real token")  # fmt: skip


def best_of_n(args: Args, run: Run, task: Task, reference: Any, score: Callable[[Responses], Tensor]) -> None:
    """Show what picking the best of n answers by the reward model gives, at KL = log n - (n - 1) / n."""
    if not args.best_of_n:
        return
    torch.manual_seed(args.seed)
    proxies, golds = list[Tensor](), list[Tensor]()
    prompts = task.held_out[: args.eval_episodes]
    for _ in range(args.best_of_n):
        responses, _ = sample_responses(reference, prompts, args.response_length, args.temperature, task.eos, args.bf16)
        with torch.no_grad():
            proxies.append(score(responses).cpu())
        golds.append(task.gold(responses) if task.judge else torch.full_like(proxies[-1], np.nan))
    proxy, gold, n = torch.stack(proxies), torch.stack(golds), 1
    while n <= args.best_of_n:
        whole = args.best_of_n // n * n
        groups, group_golds = (x[:whole].unflatten(0, (-1, n)) for x in (proxy, gold))  # [groups, n, prompts]
        best = groups.argmax(1, keepdim=True)
        figures = {"proxy": groups.gather(1, best).mean(), "gold": group_golds.gather(1, best).mean(),
                   "kl": torch.tensor(np.log(n) - (n - 1) / n)}  # fmt: skip
        run.note({f"best_of_n/{k}": float(v) for k, v in figures.items() if not v.isnan()}, n)
        run.say(f"best of {n}: " + ", ".join(f"{k} {float(v):+.2f}" for k, v in figures.items() if not v.isnan()))
        n *= 2


def health(metrics: dict[str, float], max_kl: float) -> Iterator[tuple[str, str]]:
    """(metric, sentence) for each one outside its healthy range: what it means and what to do."""
    noise = 4 * metrics.get("kl/ref_se", 0.0)
    for name, low, high, meaning in (
        ("losses/clipfrac", 0, 0.5, "most gradients are switched off; lower --learning-rate or --update-epochs"),
        ("kl/old", -1, max_kl, "the policy moves too far at once; lower --learning-rate or --update-epochs"),
        ("kl/ref", -noise - 1e-3, 1e9, "a KL below 0 means that answers are not drawn from the policy that is scored"),
        ("kl/ref", -1e9, 25, "the policy has left the texts that the reward model knows; raise --beta"),
        ("losses/entropy", 0.01, 1e9, "the policy hardly explores any more; raise --beta"),
        ("losses/explained_variance", 0, 1, "values are worse than a constant; lower --learning-rate, raise --vf-coef"),
        ("charts/ended", 0.5, 1, "most responses do not end; raise --response-length or --missing-eos-penalty"),
        ("charts/skipped_updates", 0, 0, "steps skipped, as loss or gradient was not finite; the weights are unharmed"),
    ):
        value = metrics.get(name, float("nan"))
        if value < low or value > high:
            yield f"{name} {meaning}", f"{name} is {value:.3g}: {meaning}"


class Run:
    """Folder, log, progress, models and checkpoints of a run; only the first process writes.

    `parts` is what a checkpoint holds beside numbers: objects with `state_dict` and `load_state_dict`.
    """

    def __init__(self, args: Args, device: torch.device):
        self.args, self.device, self.start_time, self.line_time = args, device, time.time(), 0.0
        self.parts, self.metrics, self.said = dict[str, Any](), dict[str, float](), set[str]()
        self.iteration = self.first = 0
        self.last = int(args.total_episodes) // args.batch_size
        self.scores, self.peak = deque[float](maxlen=100), (-float("inf"), 0.0)
        self.known = Path(args.resume) if args.resume else None  # where finished stages lie
        if RANK:
            return
        from torch.utils.tensorboard import SummaryWriter

        if args.resume:
            self.folder = Path(args.resume).absolute()
        else:  # characters that no file system minds; unique also among runs that start in the same second
            task = Path(args.model).name if args.model else "opinions"
            name = re.sub(r"[^\w.-]+", "-", f"{task}__{args.exp_name}__{args.seed}__{time.strftime('%y%m%d-%H%M%S')}_")
            try:
                os.makedirs(args.run_dir, exist_ok=True)
                self.folder = Path(tempfile.mkdtemp(prefix=name, dir=args.run_dir)).absolute()
            except OSError as error:
                raise UsageError(f"--run-dir {args.run_dir} cannot hold run folders: {error}") from None
        (self.folder / "args.tmp").write_text(json.dumps(asdict(replace(args, resume=None)), indent=2))
        (self.folder / "args.tmp").replace(self.folder / "args.json")
        if args.track:
            import wandb

            wandb.init(project=args.wandb_project_name, entity=args.wandb_entity, id=self.folder.name, resume="allow",
                       config=asdict(args), sync_tensorboard=True)  # fmt: skip
        if (self.folder / "checkpoint.pt").exists():  # or no step has been logged that will stand
            self.iteration, *_ = restore(str(self.folder), torch.device("cpu"))
        step = self.iteration * args.batch_size
        self.writer = SummaryWriter(str(self.folder), purge_step=step + bool(step), flush_secs=30)
        self.writer.add_text("args", "".join(f"    {k} = {v}\n" for k, v in vars(args).items()))
        steps = self.last * args.batch_size
        self.bar = tqdm(total=steps, initial=step, unit="response", disable=not sys.stderr.isatty())
        atexit.register(self.close)  # also after an interrupt or an error
        self.folder.chmod(0o755)
        self.say(f"run folder: {self.folder}")

    def say(self, text: str) -> None:
        if not RANK:
            self.bar.write(text)
            sys.stdout.flush()

    def note(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items() if not RANK else ():
            self.writer.add_scalar(name, value, step)

    def stage(self, name: str, make: Callable[[], Any], task: Task) -> Any:
        """The model in the run's folder `name`, else what `make` gives, saved there whole or not at all."""
        if self.known and (self.known / name).exists():
            model = load_stage(self.known / name, self.device)
        else:
            random.seed(self.args.seed)  # the same in every process
            torch.manual_seed(self.args.seed)
            model = make()
            self.save_model(name, model, task)
        figure = {"sft": "loss", "reward_model": "accuracy"}[name]
        value = getattr(model.config, f"{name}_{figure}", None)
        self.note({f"{name}/{figure}": value} if value is not None and not self.iteration else {}, 0)
        self.say(f"{name}: " + ("as given" if value is None else f"{figure} {value:.3f}"))
        return model

    def save_model(self, name: str, model: Any, task: Task) -> None:
        """A folder that transformers opens, written aside and renamed."""
        for p in model.parameters():
            require_finite(p.detach(), f"a weight of {name}")
        if RANK:
            return
        aside = self.folder / f"{name}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        if hasattr(model, "generation_config"):  # so that generate() samples as in training
            model.generation_config.update(do_sample=True, top_k=0, top_p=1.0, temperature=self.args.temperature,
                                           max_new_tokens=self.args.response_length)  # fmt: skip
        try:
            model.save_pretrained(aside)
            task.tokenizer.save_pretrained(aside)
            shutil.rmtree(self.folder / name, ignore_errors=True)
            aside.replace(self.folder / name)
        except Exception as error:  # safetensors has one of its own for a full disk
            shutil.rmtree(aside, ignore_errors=True)
            raise OSError(f"{self.folder / name} could not be written ({error})") from error

    def restore(self, **parts: Any) -> None:
        """Name what checkpoints hold, and load it when the run goes on from one."""
        self.parts, args = parts, self.args
        if args.resume and any(Path(args.resume, name).exists() for name in ("checkpoint.pt", "policy")):
            self.iteration, scores, world = restore(args.resume, self.device, **parts)
            require(world == WORLD, f"--resume {args.resume} needs as many processes as before, {world}, not {WORLD}")
            self.scores.extend(scores)
        self.first, self.start_time = self.iteration, time.time()
        if self.first >= self.last:
            self.say("this run is finished, nothing is left to train; a larger --total-episodes goes on with it")
        self.say(f"PPO on {self.device}, response {self.first * args.batch_size:,} to {self.last * args.batch_size:,} of"
                 f" {int(args.total_episodes):,} by {args.batch_size:,}")  # fmt: skip

    def compile(self, agent: Any) -> None:
        models = [agent.policy] if agent.shared else [agent.policy, agent.value]
        for block in [block for model in models for block in model.transformer.h] if self.args.compile else ():
            block.compile(dynamic=True)

    def report(self, iteration: int, figures: dict[str, Any]) -> None:
        """Print and log an evaluation; before and after training also answers; say when the proxy parts from the gold."""
        step = iteration * self.args.batch_size
        self.say(f"step {step:,}: {describe(figures)}")
        for prompt, answer in figures["texts"] if iteration in (0, self.last) else ():
            self.say(f"    {prompt} | {answer}")
        self.note({f"eval/{k.replace('/', '_')}": v for k, v in figures.items() if k != "texts"}, step)
        gold, proxy = figures.get("gold", -float("inf")), figures["proxy"]
        if gold >= self.peak[0]:
            self.peak = gold, proxy
        elif gold < self.peak[0] - 1 and proxy > self.peak[1] and "gold" not in self.said:
            self.said.add("gold")
            self.say(f"step {step:,}: the proxy has risen to {proxy:+.2f} while gold fell from {self.peak[0]:+.2f} to {gold:+.2f}:"
                     " the reward model is over-optimised; raise --beta or stop earlier")  # fmt: skip

    def end_iteration(self, metrics: dict[str, Any]) -> None:
        """Log, and write a checkpoint when it is due."""
        stacked = torch.stack([torch.as_tensor(x, dtype=torch.float32, device=self.device) for x in metrics.values()])
        self.metrics = dict(zip(metrics, global_mean(stacked).tolist(), strict=True))
        self.iteration += 1
        step, trained = self.iteration * self.args.batch_size, (self.iteration - self.first) * self.args.batch_size
        self.scores.append(self.metrics["charts/episodic_return"])
        self.metrics["charts/learning_rate"] = self.parts["optimizer"].param_groups[0]["lr"]
        self.metrics["charts/SPS"] = trained / (time.time() - self.start_time)
        if not RANK:
            self.note(self.metrics, step)
            self.show(step)
        every = self.args.checkpoint_every
        if every and (self.iteration % every == 0 or self.iteration == self.last):
            self.save("checkpoint.pt", **self.parts)

    def show(self, step: int) -> None:
        """Move the progress bar (without a terminal: a line every ten seconds); give each health warning once."""
        text = f"proxy {self.metrics['charts/proxy']:+.2f}, KL {self.metrics['kl/ref']:.2f}, beta {self.metrics['charts/beta']:.3g}"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(self.args.batch_size)
        if self.bar.disable and (time.time() > self.line_time + 10 or self.iteration == self.last):
            self.line_time = time.time()
            print(f"step {step:,}, {text}, {self.metrics['charts/SPS']:.0f} responses/s", flush=True)
        for name, warning in health(self.metrics, 1.5 * (self.args.target_kl or 0.1)):
            if (self.iteration > 10 or "skipped" in name) and name not in self.said:
                self.said.add(name)
                self.bar.write(f"step {step:,}: {warning}")

    def save(self, name: str, **parts: Any) -> None:
        """Write a file whole or not at all: aside, to the disk, then renamed. It holds tensors, numbers and strings."""
        weights = torch.cat([p.detach().reshape(-1) for p in self.parts["agent"].parameters()])
        if not weights.isfinite().all():
            raise FloatingPointError(f"weights are not finite after iteration {self.iteration}; {name} was not written")
        if WORLD > 1:
            low, high = weights.clone(), weights.clone()
            dist.all_reduce(low, dist.ReduceOp.MIN)
            dist.all_reduce(high, dist.ReduceOp.MAX)
            if not torch.equal(low, high):
                raise FloatingPointError("the processes hold different weights; nothing was saved")
        if RANK:
            return
        state = {key: part.state_dict() for key, part in parts.items()}
        aside = self.folder / f"{name}.tmp"
        try:
            with open(aside, "wb") as file:
                numbers = {"iteration": self.iteration, "scores": list(self.scores), "processes": WORLD}
                torch.save(state | numbers, file)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(self.folder / name)
        except (OSError, RuntimeError) as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # which torch reports as a file that ends too early
                raise KeyboardInterrupt from None
            raise OSError(f"{self.folder / name} could not be written and is as it was before ({error})") from error
        finally:
            aside.unlink(missing_ok=True)

    def finish(self, policy: Any, task: Task) -> dict[str, float]:
        """Save the policy and close the run; returns the last metrics."""
        self.save_model("policy", policy, task)
        if not RANK:
            atexit.unregister(self.close)
            self.close()
        return self.metrics | {"global_step": self.iteration * self.args.batch_size}

    def close(self) -> None:
        self.bar.close()
        self.writer.close()
        state = "finished" if self.iteration >= self.last else "not finished: --resume goes on with it"
        print(f"run folder: {self.folder} ({state})", flush=True)


def restore(folder: str, device: torch.device, **parts: Any) -> tuple[int, list[float], int]:
    """Load a checkpoint into `parts`; returns its iteration, latest scores and number of processes. Executes nothing."""
    path = Path(folder, "checkpoint.pt" if Path(folder, "checkpoint.pt").exists() else "model.pt")
    require(path.exists(), f"{folder} holds no checkpoint.pt yet")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        for key, part in parts.items():
            part.load_state_dict(state[key])
        return int(state["iteration"]), [float(score) for score in state["scores"]], int(state["processes"])
    except Exception as error:
        sentence = f"{path} is no checkpoint of this script and run: {type(error).__name__} {error}"
        raise UsageError(sentence.splitlines()[0]) from None


def evaluate(args: Args) -> list[float]:
    """Means over --eval-episodes answers of the policy saved in the folder --evaluate, printed; returns [proxy] or [proxy, gold]."""
    device, folder = start(args), str(args.evaluate)
    task, _ = load_task(args, device)
    try:
        reference, reward_model = (load_stage(Path(folder, name), device) for name in ("sft", "reward_model"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} holds no sft and reward_model folder yet: {str(error).splitlines()[0]}") from None
    check_room(args, reference)
    agent = make_agent(args, reference, reward_model)
    if Path(folder, "policy").exists() and not Path(folder, "checkpoint.pt").exists():  # of --checkpoint-every 0
        agent.policy = load_stage(Path(folder, "policy"), device)
    else:
        restore(folder, device, agent=agent)
    score = lambda responses: reward_scores(reward_model, responses.tokens, responses.mask, args.bf16)
    figures = measure(args, task, agent, reference, score)
    print(f"{folder}: {describe(figures)} over {args.eval_episodes} sampled responses")
    for prompt, answer in figures["texts"]:
        print(f"    {prompt} | {answer}")
    return [figures[k] for k in ("proxy", "gold") if k in figures]


def absolute(args: Args) -> Args:
    """With paths that a resumed run finds from any folder."""
    for name in ("model", "prompts", "preferences", "reward_model", "sft"):
        path = getattr(args, name)
        if path and Path(path).exists():
            setattr(args, name, str(Path(path).absolute()))
    return args


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line; a preset, or with --resume or --evaluate the flags of that run, give the defaults."""
    args = tyro.cli(Args, args=argv)
    folder = args.resume or args.evaluate
    require(not (args.resume and args.evaluate), "--resume and --evaluate exclude each other")
    if folder is None:
        smoke = Args(**SMOKE)  # type: ignore[arg-type]
        return absolute(args if args.preset == "default" else tyro.cli(Args, args=argv, default=smoke))
    try:
        saved = Args(**json.loads(Path(folder, "args.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{folder} is no run folder of this script: {error}") from None
    args = absolute(tyro.cli(Args, args=argv, default=saved))
    changed = [k.replace("_", "-") for k, v in vars(args).items() if k not in MAY_CHANGE and v != getattr(saved, k)]
    require(args.evaluate or not changed, f"--resume cannot change the run's own --{', --'.join(changed)}")
    return args


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave as after Ctrl-C
    try:
        args = parse_args()
        evaluate(args) if args.evaluate else train(args)
        for sign in (signal.SIGINT, signal.SIGTERM):  # all is written, and the exit is no interruption
            signal.signal(sign, signal.SIG_IGN)
    except (EOFError, ConnectionError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not (WORLD > 1 and re.search("gloo|nccl", str(error), re.I)):
            raise
        sys.exit(f"error: a process on which this one depends has died: {' '.join(repr(error).split())}")
    except (UsageError, FloatingPointError, OSError, KeyboardInterrupt) as error:
        print(f"error: {' '.join(str(error).split()) or 'interrupted'}", file=sys.stderr)
        sys.exit({UsageError: 2, KeyboardInterrupt: 130}.get(type(error), 1))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
