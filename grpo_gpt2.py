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
"""GRPO (arXiv:2402.03300) or RLOO (arXiv:2402.14740) on a GPT-2: answers to one prompt are compared with each other.

    supervised fine-tuning: π_ref imitates texts                        2203.02155 §3.5    sft_loss
    reward model: r fits comparisons of two answers of π_ref            1909.08593 eq. 1   preference_loss
    for iteration = 1, 2, ...                                           2402.03300 alg. 1  train
        answer each prompt G times with π_old                           2402.03300 §4.1    sample_responses
        return of an answer: r - β·log(π_old/π_ref)                     1909.08593 eq. 2   rollout
        advantage: the return less the mean of its group                2402.03300 §4.1    group_advantages
        for μ epochs of minibatches: ascend the clipped surrogate       1707.06347 eq. 7   update, grpo_loss

    python grpo_gpt2.py                                          the built-in task, whole, without a network
    python grpo_gpt2.py --task reverse                           answers are right or wrong: no reward model
    python grpo_gpt2.py --baseline rloo --loss-norm constant     RLOO
    python grpo_gpt2.py --model gpt2 --prompts prompts.jsonl --preferences pairs.jsonl
    python grpo_gpt2.py --resume runs/FOLDER                     go on after an interruption, exactly
    python grpo_gpt2.py --evaluate runs/FOLDER                   answer prompts with the saved policy

[Rn] marks detail n of RLHF with PPO, [n] detail n of PPO (DETAILS.md); eq. and § without a number are 1707.06347's.
[Gn] and [Ln] mark details of GRPO and of RLOO; the B responses are groups of G, one after the other.
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
import time
import uuid
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
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
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

Texts = list[list[int]]  # tokens of each
Pairs = list[tuple[list[int], list[int]]]  # (chosen, rejected)


@dataclass
class Args:
    """GRPO and RLOO on a GPT-2. All that a run writes goes into one new folder under --run-dir."""

    task: Literal["opinions", "reverse"] = "opinions"  # built in: to be liked, or to write a string backwards
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
    total_episodes: int | float = 10_240  # responses to train the policy on
    batch_size: int = 128  # responses per iteration, over all processes
    group_size: int = 8  # responses to one prompt (G)
    baseline: Literal["mean", "rloo"] = "mean"  # mean return of the group, or of the others in it
    scale: Literal["none", "group", "batch"] = "none"  # divide advantages by a std; a group's favours extreme prompts
    loss_norm: Literal["token", "sequence", "constant"] = "token"  # mean of tokens, of responses' means, or sum / (B R)
    num_minibatches: int = 4  # minibatches per epoch; divides the responses of each process
    micro_batch_size: int | None = None  # responses per forward pass, which only accumulates; default a minibatch
    inner_steps: int = 4  # epochs per iteration (μ); with one step in all the loss is 0 and the clip idle
    learning_rate: float = 3e-4  # Adam step size of the policy
    anneal_lr: bool = True  # bring the step size linearly to 0
    adam_eps: float = 1e-5  # Adam's ε
    clip_low: float = 0.2  # the ratio is clipped at 1 - this
    clip_high: float = 0.2  # and at 1 + this; 0.28 leaves more room to what was unlikely
    max_ratio: float = 10.0  # no ratio counts as more, which bounds the loss where the advantage is negative
    max_grad_norm: float = 1.0  # largest global L2 norm of the gradient
    target_kl: float | None = None  # end an iteration's epochs once kl/old passes 1.5 times this (nats per token)
    beta: float = 0.15  # coefficient β of the KL to the reference; 0 cuts the leash
    kl_in: Literal["reward", "loss", "off"] = "reward"  # k1 in the return, an estimator in the loss, or nowhere
    kl_gradient: Literal["reverse", "forward"] = "reverse"  # of the loss's: ∇KL(π‖π_ref), or as published ∇KL(π_ref‖π)
    missing_eos_penalty: float = 1.0  # subtracted from the score of a response that did not end
    self_check: bool = True  # test sampler, ratio and reward model before the first update
    min_accuracy: float = 0.55  # the self-check's floor for the reward model's accuracy on held-out pairs
    seed: int = 1  # seed of every generator
    device: str = "auto"  # auto (CUDA if there is one), cpu, cuda, cuda:1 or mps
    cuda: bool = True  # --no-cuda means cpu
    torch_deterministic: bool = True  # deterministic cuDNN kernels; --no-... lets cuDNN choose the fastest
    compile: bool = False  # torch.compile of the networks' blocks
    bf16: bool = False  # the networks in bfloat16 (autocast), other matrix products in TF32
    exp_name: str = "grpo_gpt2"  # name of the experiment, part of the folder's name
    run_dir: str = "runs"  # where run folders are made
    checkpoint_every: int = 20  # iterations; 0 only at the end
    eval_every: int = 10  # iterations between evaluations on held-out prompts; 0 only before and after
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
    def actions(self) -> Tensor:  # [B, R]
        return self.tokens[:, self.prompt_columns :]

    @property
    def real(self) -> Tensor:  # bool [B, R]
        return self.mask[:, self.prompt_columns :]

    def rows(self, index: Tensor) -> Responses:
        """Some of them, without columns that are padding in all: of prompts on the left, of answers on the right."""
        mask = self.mask[index]
        used = mask.any(0).nonzero()
        first, end = int(used[0]), int(used[-1]) + 1
        tokens = self.tokens[index, first:end]
        columns = self.prompt_columns - first
        return Responses(tokens, mask[:, first:end], columns, self.ended[index])


def attention_inputs(mask: Tensor) -> dict[str, Tensor]:
    """What a GPT-2 must be told about padding: whom each token may see, and its position among real tokens [R4]."""
    itself = torch.eye(mask.shape[1], device=mask.device).bool()  # or padding would attend to nothing: NaN
    causal = torch.ones_like(itself).tril()
    visible = (causal & mask[:, None, :]) | itself
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    return {"attention_mask": visible[:, None], "position_ids": positions}


def hidden_states(model: Any, tokens: Tensor, mask: Tensor, bf16: bool = False) -> Tensor:
    """The last layer [B, T, d] of a GPT-2's trunk over tokens and mask [B, T]; 0 where no token is.

    Padding costs as much as text, so several texts share a row, each seeing itself alone. Of T = 4, two in a row:

        tokens  . . a b    ->    packed  a b c d e    positions  0 1 0 1 2    texts  1 1 2 2 2
                . c d e
    """
    text, _ = mask.nonzero().T  # of each real token
    row = text // max(1, 256 // mask.shape[1])
    first = torch.searchsorted(row, row)  # token of its row
    place = torch.arange(len(row), device=row.device) - first
    size = int(row[-1]) + 1, int(place.max()) + 1
    packed, positions, texts = tokens.new_zeros(3, *size)
    packed[row, place] = tokens[mask]
    positions[row, place] = (mask.cumsum(1) - 1)[mask]  # [R4]
    texts[row, place] = text + 1
    together = texts[:, :, None] == texts[:, None, :]
    causal = together.tril()[:, None]
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
        trunk = model.transformer(packed, position_ids=positions, attention_mask=causal, use_cache=False)
    last = trunk.last_hidden_state
    states = last.new_zeros(*mask.shape, last.shape[-1])
    states[mask] = last[row, place]
    return states.float()


def read_score(model: Any, states: Tensor) -> Tensor:
    """Normalised score [...] of a reward or value model at hidden states [..., d]; gain and bias lie in its config."""
    return model.score(states).squeeze(-1) * model.config.reward_gain + model.config.reward_bias


def reward_scores(model: Any, tokens: Tensor, mask: Tensor, bf16: bool = False) -> Tensor:
    """The reward model's r(x, y) [B]: it reads prompt and response [R1], and the score is at the last token [R10]."""
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    last = (mask * columns).argmax(1)
    states = hidden_states(model, tokens, mask, bf16)
    return read_score(model, states[torch.arange(len(last)), last])


class Agent(nn.Module):
    """The policy, whose weights start as the reference's."""

    def __init__(self, policy: Any, bf16: bool = False):
        super().__init__()
        self.bf16 = bf16
        self.policy = policy

    def forward(self, responses: Responses) -> Tensor:
        """Policy states [B, R, d] from which each response token was, or is to be, chosen."""
        before = slice(responses.prompt_columns - 1, -1)
        return hidden_states(self.policy, responses.tokens, responses.mask, self.bf16)[:, before]


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
        taken = logp.gather(-1, actions[:, None]).squeeze(-1)
        return torch.stack([taken, entropy])

    size = max(1, 2**24 // policy.config.vocab_size)
    pairs = zip(states.split(size), actions.split(size), strict=True)
    logprobs, entropy = torch.cat([checkpoint(piece, *pair, use_reentrant=False) for pair in pairs], 1)
    return logprobs, entropy.detach()


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


def sft_loss(policy: Any, texts: Texts) -> Tensor:
    """Mean cross-entropy of each next token, the end included, padding not [R13]; a scalar."""
    tokens, mask = pad_left(texts, policy.device)
    known = mask[:, :-1]  # padding lies on the left: whoever is real has a real successor
    states = hidden_states(policy, tokens, mask)[:, :-1]
    logprobs, _ = token_logprobs(policy, states[known], tokens[:, 1:][known], 1.0)
    return -logprobs.mean()


def preference_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log σ(r(x, chosen) - r(x, rejected)) [R9] (1909.08593 eq. 1 for two answers) of scores [B]; a scalar."""
    return -nn.functional.logsigmoid(chosen - rejected).mean()


def group_advantages(returns: Tensor, group_size: int, baseline: str, scale: str) -> Tensor:
    """Returns [B] less the baseline of their group [G2], divided by a biased std if asked [G3], in RLOO never [L4].

    The mean of the others [L1], of at least one [L5] [G6], makes the gradient unbiased; that of all shortens it by
    (G - 1) / G [G7], no more.
    """
    groups = returns.view(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if baseline == "rloo":
        advantages = advantages * group_size / (group_size - 1)
    if scale == "group":
        advantages = advantages / (groups.std(1, correction=0, keepdim=True) + 1e-4)
    elif scale == "batch":
        variance = global_mean((groups - global_mean(groups.mean())).square().mean())
        advantages = advantages / (variance.sqrt() + 1e-4)
    equal = torch.isclose(groups, groups[:, :1]).all(1, keepdim=True)
    return torch.where(equal, 0.0, advantages).flatten()  # [G4] whatever is rounded


class Rollout(NamedTuple):
    """Answers and what the update needs of them."""

    responses: Responses
    sampled: Tensor  # the log-probabilities [B, R] with which tokens were drawn
    per_token: dict[str, Tensor]  # logprobs, ref_logprobs, then advantages [B, R], 0 where no token is
    figures: dict[str, Tensor]  # what a run logs the mean of: tag -> [B], one of each response


Answer = Callable[[Texts], Rollout]


def score_tokens(args: Args, agent: Agent, reference: Any, responses: Responses) -> dict[str, Tensor]:
    """log π(a|s), log π_ref(a|s), the exact KL(π(·|s)‖π_ref(·|s)): each [B, R], 0 where no token is."""
    real = responses.real
    parts = []
    rows = torch.arange(len(real), device=real.device)
    few = max(1, 2**24 // (agent.policy.config.vocab_size * real.shape[1]))  # so that what has V columns stays small
    for index in rows.split(args.micro_batch_size or few):
        part = responses.rows(index)
        states = agent(part)
        ref_states = hidden_states(reference, part.tokens, part.mask, args.bf16)[:, part.prompt_columns - 1 : -1]
        logp = log_softmax(agent.policy, states[part.real], args.temperature)
        ref_logp = log_softmax(reference, ref_states[part.real], args.temperature)
        taken = part.actions[part.real][:, None]
        scored = {
            "logprobs": logp.gather(1, taken)[:, 0],
            "ref_logprobs": ref_logp.gather(1, taken)[:, 0],
            "exact_kl": (logp.exp() * (logp - ref_logp)).sum(1),
        }
        parts.append(scored)
    per_token = {}
    for name in parts[0]:
        per_token[name] = torch.zeros(real.shape, device=real.device)
        per_token[name][real] = torch.cat([part[name] for part in parts])
    return per_token


@torch.no_grad()
def rollout(
    args: Args,
    agent: Agent,
    reference: Any,
    score: Callable[[Responses], Tensor],
    prompts: Texts,
    eos: int,
) -> Rollout:
    """Answer the prompts and judge the answers; `score` gives r(x, y) [B]."""
    responses, sampled = sample_responses(args, agent.policy, prompts, eos)
    real = responses.real
    tokens = score_tokens(args, agent, reference, responses)
    logratio = tokens["logprobs"] - tokens["ref_logprobs"]  # the KL's estimators k1, k2, k3: means over samples of π
    raw_scores = score(responses)
    require_finite(raw_scores, "a score of the reward model")
    scores = torch.where(responses.ended, raw_scores, raw_scores - args.missing_eos_penalty)  # [R17] [G19]
    returns = scores - args.beta * logratio.sum(1) if args.kl_in == "reward" else scores  # [L2] before any baseline
    per_token = {name: tokens[name] for name in ("logprobs", "ref_logprobs")}
    figures = {
        "charts/proxy": raw_scores,
        "charts/score": scores,
        "charts/episodic_return": returns,
        "charts/episodic_length": real.sum(1).float(),
        "charts/ended": responses.ended.float(),
        "kl/ref": logratio.sum(1),
        "kl/ref_k2": 0.5 * logratio.square().sum(1),
        "kl/ref_k3": ((-logratio).exp() - 1 + logratio).sum(1),
        "kl/ref_exact": tokens["exact_kl"].sum(1),
    }
    return Rollout(responses, sampled, per_token, figures)


def minibatches(size: int, count: int, epochs: int, device: torch.device) -> Iterator[Tensor]:
    """Indices [size / count], in a new order each epoch; an epoch uses every sample exactly once [6]."""
    for _ in range(epochs):
        yield from torch.randperm(size, device=device).split(size // count)


def clipped_surrogate(
    logratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, max_ratio: float
) -> Tensor:
    """-min(r·Â, clip(r, 1 - low, 1 + high)·Â) [8] (eq. 7) [G11] of r = π/π_old, here its log, and Â; all [n]."""
    ratio = logratio.exp().clamp(max=max_ratio)  # [G12] where Â < 0 nothing else bounds it
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.min(ratio * advantages, clipped * advantages)


def kl_penalty(logratio: Tensor, ref_logratio: Tensor, gradient: str) -> Tensor:
    """k3 of log(π/π_ref) [n], with the gradient of KL(π_ref‖π); times π/π_old with that of KL(π‖π_ref) [G15]; [n].

    On samples of π k2 would have the latter, too; k1, which is right in a return, has none at all.
    """
    k3 = (-ref_logratio).expm1() + ref_logratio
    return k3 if gradient == "forward" else logratio.exp() * k3


def token_weights(real: Tensor, tokens: Tensor, loss_norm: str, response_length: int) -> Tensor:
    """What each token of a minibatch counts in a mean over its tokens [G13], so many a process; real [B, R]; [B, R].

    By a constant, a response moves along the gradient of its log-probability, the sum over its tokens [L3]. The same in
    micro-batches, processes and wider padding [G14]. Groups of equal returns count, too [G5].
    """
    if loss_norm == "token":
        return real.float()
    length = real.sum(1, keepdim=True) if loss_norm == "sequence" else response_length
    return real * tokens / (len(real) * length)


def grpo_loss(
    args: Args, agent: Agent, responses: Responses, per_token: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate, negated, and if it is there β·KL (2402.03300 eq. 3): a weighted mean over the real tokens,
    and debug variables. Means of -log r and r - 1 - log r estimate KL(π_old‖π) [R30].
    """
    real = responses.real
    old = {name: x[:, : real.shape[1]][real] for name, x in per_token.items()}  # [n]
    states = agent(responses)  # [G18] of all tokens, the end is one; scored as they were drawn [G17]
    new_logprobs, entropy = token_logprobs(agent.policy, states[real], responses.actions[real], args.temperature)
    logratio = new_logprobs - old["logprobs"]  # [G8] both by the same network
    losses = clipped_surrogate(logratio, old["advantages"], args.clip_low, args.clip_high, args.max_ratio)
    if args.kl_in == "loss":
        ref_logratio = new_logprobs - old["ref_logprobs"]
        losses = losses + args.beta * kl_penalty(logratio, ref_logratio, args.kl_gradient)
    loss = (losses * old["weights"]).mean()
    change = logratio.expm1()
    low, high = change < -args.clip_low, change > args.clip_high
    stats = {
        "losses/policy_loss": loss,
        "losses/entropy": entropy.mean(),
        "losses/clipfrac": (low | high).float().mean(),
        "losses/clipfrac_low": low.float().mean(),  # [G27]
        "losses/clipfrac_high": high.float().mean(),
        "kl/old_k1": -logratio.mean(),
        "kl/old": (logratio.expm1() - logratio).mean(),
    }
    return loss, stats


def update(
    args: Args,
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    responses: Responses,
    per_token: dict[str, Tensor],
) -> list[dict[str, Tensor]]:
    """μ epochs over the responses [R26]; returns the debug variables of each minibatch."""
    history = []
    per_token = per_token | {"weights": responses.real.float()}
    for index in minibatches(len(responses.tokens), args.num_minibatches, args.inner_steps, responses.tokens.device):
        tokens = global_mean(responses.real[index].sum().float())  # so that each counts the same, wherever it is
        weights = token_weights(responses.real[index], tokens, args.loss_norm, args.response_length)
        per_token["weights"][index] = weights
        optimizer.zero_grad()
        stats: dict[str, Any] = {}
        for micro in index.split(args.micro_batch_size or len(index)):  # only accumulates [R26]
            part = responses.rows(micro)
            part_tokens = {name: x[micro] for name, x in per_token.items()}
            loss, part_stats = grpo_loss(args, agent, part, part_tokens)
            share = part.real.sum() / tokens
            (loss * share).backward()
            for name, x in part_stats.items():
                stats[name] = stats.get(name, 0) + x.detach() * share
        average_gradients(agent)
        stats["losses/grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)  # [11] [G10]
        history.append({name: global_mean(x) for name, x in stats.items()})
        if args.target_kl is not None and history[-1]["kl/old"] > 1.5 * args.target_kl:
            break  # [S3] before the step that would go on
        optimizer.step()
    return history


def train_reward_model(args: Args, task: Task, reference: Any) -> Any:
    """A reward model that starts as the reference with a new head; its accuracy, gain and bias go into its config."""
    model = as_scorer(reference)
    nn.init.normal_(model.score.weight, std=(model.config.n_embd + 1) ** -0.5)  # [R8]; it has no bias
    pairs = task.pairs or annotate(args, task, reference)
    pairs = random.sample(pairs, len(pairs))  # files may be sorted
    tenth = -(-len(pairs) // 10)
    held_out, rest = pairs[:tenth], pairs[tenth:]
    loss = lambda batch: (preference_loss(*pair_scores(model, batch)), len(batch))
    fit(args, model, loss, rest, args.reward_learning_rate)
    model.config.reward_model_accuracy = accuracy(model, held_out)  # [R12]
    return model


def train(args: Args) -> dict[str, float]:
    """The three stages; returns the last metrics. Raises UsageError, also by the self-check, and RunError."""
    device = start(args)
    task, policy = load_task(args, device)
    if not args.resume:
        load_reward_model(args, task)  # what is wrong with it is found before anything is written
    run = Run(args, device, task.tokenizer)

    # Fine-tune the reference, fit the reward model
    reference = run.stage("sft", "loss", lambda: fine_tune(args, task, policy))
    reward_model = None
    if args.task == "opinions":
        reward_model = run.stage("reward_model", "accuracy", lambda: make_reward_model(args, task, reference))
    agent = make_agent(args, reference)
    for frozen in filter(None, (reference, reward_model)):
        frozen.requires_grad_(False)  # [R19] [G16]
    answer = answers_of(args, task, agent, reference, reward_model)  # by rollout

    # Go on where a checkpoint is, or look at what training starts from
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=args.adam_eps, fused=True)  # [3] [R28]
    run.begin(agent=agent, optimizer=optimizer)
    if run.first == 0:
        if args.self_check:
            self_check(args, task, agent, reference, reward_model)
        run.report(0, *measure(args, task, answer))

    for iteration in range(run.first, run.last):
        reseed(args.seed, iteration)  # [G30]
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / run.last)  # [4]

        # Answer each prompt G times, compare the answers
        prompts = prompt_batch(task.prompts, iteration, args.batch_size // args.group_size, args.seed)
        answered = answer([prompt for prompt in prompts for _ in range(args.group_size)])  # [G1]
        returns = answered.figures["charts/episodic_return"]
        advantages = group_advantages(returns, args.group_size, args.baseline, args.scale)
        answered.per_token["advantages"] = advantages[:, None] * answered.responses.real  # [G23] as they are
        groups = advantages.view(-1, args.group_size)
        answered.figures["charts/dead_groups"] = (groups == 0).all(1).float()  # [G27] those of equal returns

        # Update the policy
        history = update(args, agent, optimizer, answered.responses, answered.per_token)

        # Log and save
        metrics = summarize(args, answered, history)
        gains = advantages * answered.figures["charts/episodic_length"]
        metrics["charts/length_gain"] = global_mean(gains.mean())  # [G27] above 0 where long ones win
        if iteration + 1 == run.last or (iteration + 1) % run.eval_every == 0:
            run.report(iteration + 1, *measure(args, task, answer))
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
    prompts: Texts
    held_out: Texts  # prompts of evaluations
    texts: Texts  # for supervised fine-tuning, each with its end
    pairs: Pairs  # the built-in task draws them later
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
    tokenizer = word_tokenizer([*CATEGORY])
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


LETTERS = "abcdefgh"


def backwards(text: str, ended: bool) -> float:
    """1 for letters, "=", the same letters backwards and the end, 0 for all else [G21]: the reward and its judge."""
    letters, _, answer = text.partition(" =")
    return float(ended and answer.split() == letters.split()[::-1])


def encode(args: Args, tokenizer: Any, cut: list[str], prompt: str, response: str = "") -> list[int]:
    """Tokens of prompt and response, whose strings are joined first [R6]: at most --prompt-length of the prompt's end
    [R2], and of the response's beginning what fits. A prompt of which not all is kept is added to `cut`."""
    ids, ids_before = tokenizer([prompt + response, prompt], add_special_tokens=False)["input_ids"]
    start = max(0, len(ids_before) - args.prompt_length)  # what a prompt ends with matters most [R5]
    kept = ids[start : start + args.prompt_length + args.response_length]
    if len(kept) < len(ids):
        cut.append(prompt)
    return kept


def prompt_batch(prompts: Texts, iteration: int, size: int, seed: int) -> Texts:
    """This process's share of the prompts of an iteration: all in turn, in a new order each pass [R7]."""
    places = range(iteration * size + RANK, (iteration + 1) * size, WORLD)
    passes = {i // len(prompts) for i in places}
    orders = {p: np.random.default_rng((seed, p)).permutation(len(prompts)) for p in passes}
    return [prompts[orders[i // len(prompts)][i % len(prompts)]] for i in places]


def pad_left(texts: Texts, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token lists to tokens and mask [B, longest], padding on the left [R4] [R2]; a padding token may be any."""
    lengths = torch.tensor([len(text) for text in texts])
    width = int(lengths.max())
    mask = torch.arange(width) >= width - lengths[:, None]
    tokens = torch.zeros(mask.shape, dtype=torch.long)
    tokens[mask] = torch.tensor([token for text in texts for token in text])
    return tokens.to(device), mask.to(device)


def normalize_reward(args: Args, task: Task, reference: Any, model: Any) -> None:
    """Set gain and bias so that the scores of the start policy's answers have mean 0 and standard deviation 1 [R11]."""
    model.config.update({"reward_gain": 1.0, "reward_bias": 0.0})  # whatever another run has set
    prompts = random.choices(task.prompts, k=512)
    responses, _ = sample_responses(args, reference, prompts, task.eos)
    with torch.no_grad():
        raw = reward_scores(model, responses.tokens, responses.mask, args.bf16)
    gain = 1 / (float(raw.std()) + 1e-8)
    bias = -gain * float(raw.mean())
    model.config.update({"reward_gain": gain, "reward_bias": bias})


NETWORK: dict[str, Any] = {  # of every model
    "resid_pdrop": 0.0,  # [R18] [G20] with dropout no ratio would be 1 before the first update
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "attn_implementation": "sdpa",
}


# ------------------------------------------------------------------------------------------------------------ Plumbing

# --- Flags and start

RANK = int(os.environ.get("RANK", 0))  # of this process, as torchrun says
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))  # on this machine
WORLD = int(os.environ.get("WORLD_SIZE", 1))  # number of processes
POSITIVE = """prompt_length response_length temperature sft_size num_pairs fit_batch_size batch_size num_minibatches
    micro_batch_size inner_steps max_ratio adam_eps max_grad_norm target_kl eval_episodes""".split()
FRACTIONS = "clip_low min_accuracy".split()
MAY_CHANGE = set(  # with --resume
    """model prompts preferences reward_model sft total_episodes device cuda checkpoint_every eval_every run_dir resume
    evaluate eval_episodes self_check min_accuracy track wandb_project_name wandb_entity""".split()
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
            require(value <= 1 or name not in FRACTIONS, f"{flag} must lie in [0, 1]")
        if str(value).startswith("hf:"):
            require(find_spec("datasets"), f"{flag} needs a package: pip install datasets")
    for name in ("prompts", "preferences", "reward_model", "sft"):
        require(args.model or not getattr(args, name), f"--{name.replace('_', '-')} needs --model")
    require(args.prompts or not args.model, "--model needs --prompts FILE to answer")
    require(
        not args.model or bool(args.preferences) != bool(args.reward_model),
        "--model needs either --preferences FILE to learn from or --reward-model FOLDER",
    )
    require(args.task == "opinions" or not args.model, "--task reverse has a model of its own, so that --model is none")
    require(args.group_size > 1, f"--group-size {args.group_size} leaves nothing to compare an answer with: 2 or more")
    require(
        args.batch_size % (WORLD * args.group_size) == 0,
        f"--batch-size must be a multiple of the {WORLD} processes times --group-size {args.group_size}",
    )
    size = args.batch_size // WORLD
    require(size % args.num_minibatches == 0, f"--num-minibatches must divide batch-size = {size} a process")


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
        task = reversal_task(args) if args.task == "reverse" else builtin_task(args)
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


def reversal_task(args: Args) -> Task:
    """Strings to be written backwards. Texts to imitate have half of the letters drawn anew, so that π_ref errs."""
    tokenizer = word_tokenizer([*LETTERS, "="])
    ids = tokenizer.get_vocab()
    rng = random.Random(args.seed)
    strings = {tuple(rng.choices(LETTERS, k=rng.randint(3, 4))) for _ in range(2_000)}
    prompts = [[ids[letter] for letter in (*string, "=")] for string in sorted(strings)]
    rng.shuffle(prompts)
    texts = []
    for prompt in rng.choices(prompts[64:], k=args.sft_size):
        answer = [rng.choice(prompt[:-1]) if rng.random() < 0.5 else letter for letter in prompt[-2::-1]]
        texts.append([*prompt, *answer, tokenizer.eos_token_id])
    return Task(tokenizer, prompts[64:], prompts[:64], texts, [], backwards)


def check_room(args: Args, policy: Any) -> None:
    room = policy.config.n_positions
    needed = args.prompt_length + args.response_length
    require(needed <= room, f"--prompt-length + --response-length = {needed} exceeds the model's {room} positions")


def word_tokenizer(words: list[str]) -> Any:
    """A token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<end>", "<pad>", *words])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<pad>")


def load_stage(folder: Path, device: torch.device) -> Any:
    """A model that a run has saved in its folder."""
    from transformers import GPT2ForSequenceClassification, GPT2LMHeadModel

    kind: Any = GPT2ForSequenceClassification if folder.name == "reward_model" else GPT2LMHeadModel
    return kind.from_pretrained(folder, **NETWORK).to(device)


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
    require(len(prompts) > 1, f"--prompts {args.prompts} needs at least two rows, as one is held out")
    rows = read_rows(args.preferences, "--preferences", "prompt", "chosen", "rejected")
    pairs = [(whole(prompt, chosen), whole(prompt, rejected)) for prompt, chosen, rejected in rows]
    pairs = [(chosen, rejected) for chosen, rejected in pairs if chosen != rejected]
    require(
        not rows or len(pairs) > 1,
        f"--preferences {args.preferences} needs at least two rows that differ, as one is held out",
    )
    texts = [whole(*row) for row in read_rows(args.sft, "--sft", "prompt", "response")]
    tenth = -(-len(prompts) // 10)
    if cut and RANK == 0:
        print(f"too long and cut: {len(cut)} prompts or texts", file=sys.stderr)
    return Task(tokenizer, prompts[:-tenth], prompts[-tenth:], texts, pairs, None)


def as_scorer(policy: Any) -> Any:
    """A GPT2ForSequenceClassification with the policy's trunk."""
    from transformers import GPT2ForSequenceClassification

    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    config.update({"reward_gain": 1.0, "reward_bias": 0.0})
    model = GPT2ForSequenceClassification._from_config(config)
    model.transformer.load_state_dict(policy.transformer.state_dict())
    return model.to(policy.device)


def load_reward_model(args: Args, task: Task) -> Any:
    """The reward model of --reward-model, if there is one; raises UsageError if it cannot read the task's texts."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if not args.reward_model:
        return None
    model = load_model(args.reward_model, AutoModelForSequenceClassification, "--reward-model")
    tokenizer = load_model(args.reward_model, AutoTokenizer, "--reward-model")
    require(
        model.config.num_labels == 1 and tokenizer.get_vocab() == task.tokenizer.get_vocab(),
        f"--reward-model {args.reward_model} must have one label and the tokenizer of --model",
    )
    check_room(args, model)
    return model


def make_reward_model(args: Args, task: Task, reference: Any) -> Any:
    """The reward model of --reward-model, or a new one that has learnt from comparisons; normalised either way."""
    model = load_reward_model(args, task) or train_reward_model(args, task, reference)
    model.to(reference.device)
    normalize_reward(args, task, reference, model)
    return model


def make_agent(args: Args, reference: Any) -> Agent:
    """The policy starts as a copy of the reference."""
    agent = Agent(copy.deepcopy(reference), args.bf16)
    agent.to(reference.device)
    if args.compile:
        for block in agent.policy.transformer.h:
            block.compile(dynamic=True)
    return agent


# --- Fitting


def fit(
    args: Args, model: nn.Module, loss: Callable[[list[Any]], tuple[Tensor, int]], samples: list[Any], lr: float
) -> float:
    """One pass over the samples in a random order, the step size linear to 0; the mean loss of the last tenth.

    `loss` gives the mean over a list of samples, and over how many tokens or pairs that is.
    """
    few = min(len(samples), args.fit_batch_size)
    require(few >= WORLD, f"{few} texts or pairs are too few for {WORLD} processes")
    optimizer = torch.optim.Adam(model.parameters(), lr, eps=1e-5)
    steps = max(1, len(samples) // args.fit_batch_size)
    losses = []
    order = torch.randperm(len(samples)).tensor_split(steps)
    for step, index in enumerate(tqdm(order, leave=False, disable=RANK > 0 or None)):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        mine = index[RANK::WORLD].tolist()
        mean, size = loss([samples[i] for i in mine])
        per_process = global_mean(torch.tensor(float(size), device=mean.device))
        part = mean * (size / per_process)  # each counts the same
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


def annotate(args: Args, task: Task, reference: Any) -> Pairs:
    """Pairs (chosen, rejected) of two answers of π_ref, chosen with P = σ(3·difference in gold) (Bradley-Terry)."""
    pairs: Pairs = []
    while len(pairs) < args.num_pairs:
        prompts = random.choices(task.prompts, k=min(512, args.num_pairs - len(pairs)))
        one, _ = sample_responses(args, reference, prompts, task.eos)
        other, _ = sample_responses(args, reference, prompts, task.eos)
        prefers = torch.rand(len(prompts)) < (3 * (task.gold(one) - task.gold(other))).sigmoid()
        for a, b, first in zip(one.texts(), other.texts(), prefers.tolist(), strict=True):
            pairs.append((a, b) if first else (b, a))
    return pairs


def pair_scores(model: Any, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Scores of the chosen and of the rejected texts of n pairs, [n] each, in one pass."""
    texts = [text for pair in pairs for text in pair]
    tokens, mask = pad_left(texts, model.device)
    chosen, rejected = reward_scores(model, tokens, mask).view(-1, 2).unbind(1)
    return chosen, rejected


@torch.no_grad()
def accuracy(model: Any, pairs: Pairs) -> float:
    """The share of pairs of which the model scores the chosen text higher."""
    right = []
    for i in range(0, len(pairs), 64):
        chosen, rejected = pair_scores(model, pairs[i : i + 64])
        right.append(chosen > rejected)
    return float(torch.cat(right).float().mean())


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

EVALUATED = {  # names of evaluations and what they are the means of
    "gold": "charts/gold",
    "proxy": "charts/proxy",
    "kl_ref": "kl/ref",
    "kl_ref_exact": "kl/ref_exact",
    "length": "charts/episodic_length",
    "ended": "charts/ended",
}


def answers_of(args: Args, task: Task, agent: Agent, reference: Any, reward_model: Any) -> Answer:
    """The rollout of prompts, with what the built-in task's judge thinks of the answers."""

    def score(responses: Responses) -> Tensor:
        if not reward_model:
            return task.gold(responses).to(reference.device)
        return reward_scores(reward_model, responses.tokens, responses.mask, args.bf16)

    def answer(prompts: Texts) -> Rollout:
        answered = rollout(args, agent, reference, score, prompts, task.eos)
        if task.judge:
            gold = task.gold(answered.responses)
            answered.figures["charts/gold"] = gold.to(reference.device)
        return answered

    return answer


def measure(args: Args, task: Task, answer: Answer) -> tuple[dict[str, float], list[str]]:
    """Means over --eval-episodes answers to held-out prompts, always with the same random numbers, and four answers."""
    torch.manual_seed(args.seed)
    prompts = [task.held_out[i % len(task.held_out)] for i in range(args.eval_episodes)]
    responses, _, _, figures = answer(prompts)
    means = {name: float(figures[tag].mean()) for name, tag in EVALUATED.items() if tag in figures}
    answers = []
    for prompt, actions, real in zip(prompts[:4], responses.actions, responses.real, strict=False):
        answers.append(f"    {task.decode(prompt)} | {task.tokenizer.decode(actions[real])}")
    return means, answers


def describe(means: dict[str, float]) -> str:
    gold = f"gold {means['gold']:+.2f}, " if "gold" in means else ""
    return (
        f"{gold}proxy {means['proxy']:+.2f}, KL to the reference {means['kl_ref']:.2f} nats per response,"
        f" length {means['length']:.1f}, ended {means['ended']:.2f}"
    )


@torch.no_grad()
def self_check(args: Args, task: Task, agent: Agent, reference: Any, reward_model: Any) -> None:
    """What must hold before the first update; raises UsageError with the likely cause of what does not."""
    right = getattr(reward_model and reward_model.config, "reward_model_accuracy", 1.0)
    require(
        right >= args.min_accuracy,
        f"self-check: the reward model ranks only {right:.0%} of held-out pairs right, below --min-accuracy"
        f" {args.min_accuracy}: give it more comparisons",
    )
    tolerance = 0.2 if args.bf16 else 1e-3 / min(args.temperature, 1)
    prompts = random.choices(task.prompts, k=16)
    responses, sampled, per_token, figures = answers_of(args, task, agent, reference, reward_model)(prompts)
    difference = (sampled - per_token["logprobs"])[responses.real].abs().max()
    require(
        difference < tolerance,
        f"self-check: sampler and scorer differ by {difference:.2g} nats: other temperature, filters or position ids",
    )
    kl = figures["kl/ref_exact"].abs().max()
    require(kl < tolerance, f"self-check: the KL to the reference is {kl:.2g} nats before the first update")


# --- Log and checkpoints


def summarize(args: Args, answered: Rollout, history: list[dict[str, Tensor]]) -> dict[str, Any]:
    """What a run logs of an iteration: means by tag, standard errors of the KL's."""
    metrics: dict[str, Any] = {}
    for name in history[0]:
        metrics[name] = torch.stack([stats[name] for stats in history]).mean()
    for name, x in answered.figures.items():
        metrics[name] = global_mean(x.mean())
        if name.startswith("kl/"):
            variance = global_mean(x.square().mean()) - metrics[name].square()
            metrics[f"{name}_se"] = (variance.clamp(min=0) / args.batch_size).sqrt()
    metrics["charts/minibatches"] = len(history)
    return metrics


HEALTHY = (  # metric, its healthy range, and what it means to leave it
    ("losses/clipfrac", 0, 0.5, "most gradients are switched off; lower --learning-rate or --inner-steps"),
    ("losses/entropy", 0.01, 1e9, "the policy hardly explores any more; raise --beta"),
    ("kl/old", -1, 0.15, "the policy moves too far at once; lower --learning-rate or --inner-steps"),
    ("kl/ref", -2, 25, "below 0 answers are not drawn from the policy that is scored; far above, raise --beta"),
    ("charts/ended", 0.5, 1, "most responses do not end; raise --response-length or --missing-eos-penalty"),
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
        self.last = int(args.total_episodes) // self.batch_size
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
        task = Path(args.model).name if args.model else args.task
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
        self.bar = tqdm(total=self.last * self.batch_size, initial=step, unit="response", disable=None)
        atexit.register(self.close)  # also after an error
        self.bar.write(
            f"run folder: {self.folder}\nGRPO on {self.device}, step {step:,} to {self.last * self.batch_size:,} of"
            f" {int(args.total_episodes):,} by {self.batch_size:,}, saved every {self.every} iterations and at Ctrl-C"
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

    def report(self, iteration: int, means: dict[str, float], answers: list[str]) -> None:
        """Print and log an evaluation; before and after training also answers."""
        step = iteration * self.batch_size
        self.say(f"step {step:,}: {describe(means)}")
        if iteration in (0, self.last):
            self.say("\n".join(answers))
        self.note({f"eval/{name}": x for name, x in means.items()}, step)

    def end_iteration(self, metrics: dict[str, Any]) -> None:
        """Log, and save when it is due; raises RunError if not all is finite, KeyboardInterrupt after `stop`."""
        means = global_mean(torch.tensor(list(metrics.values())))
        self.metrics = dict(zip(metrics, means.tolist(), strict=True))
        if not all(x.isfinite().all() for x in self.parts["agent"].state_dict().values()):
            raise RunError(
                f"agent is not finite after iteration {self.iteration + 1}, which is not saved; lower --learning-rate"
            )
        stopping = global_mean(torch.tensor(float(self.stopping))) > 0  # whichever process got the signal
        self.scores.append(self.metrics["charts/episodic_return"])
        self.iteration += 1
        if RANK == 0:
            self.log()
            if self.iteration == self.last:
                self.save_model("policy", self.parts["agent"].policy)
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
            f"proxy {self.metrics['charts/proxy']:+.2f}, KL {self.metrics['kl/ref']:.2f},"
            f" dead groups {self.metrics['charts/dead_groups']:.0%}"
        )
        self.bar.set_postfix_str(text)
        self.bar.update(self.batch_size)
        if self.bar.disable:  # no terminal
            self.bar.write(f"step {step:,}, {text}, {self.metrics['charts/SPS']:.0f} responses/s")
        for name, low, high, meaning in HEALTHY:
            value = self.metrics[name]
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
    reward_model = load_stage(Path(folder, "reward_model"), device) if args.task == "opinions" else None
    check_room(args, reference)
    agent = make_agent(args, reference)
    load_checkpoint(folder, agent=agent)
    means, answers = measure(args, task, answers_of(args, task, agent, reference, reward_model))
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
