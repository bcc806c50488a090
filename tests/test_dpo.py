"""DPO, detail by detail: against one text at a time, formulas written out in float64 and enumerated distributions."""

import copy
import dataclasses
import itertools
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_rlhf
import torch
from conftest import MODULES, SMALL, scalars
from test_rlhf import CPU, PROMPTS, alone_in_float64, enumerated, gpt2, plain_logprobs, write
from torch import Tensor
from transformers import AutoModelForCausalLM

dpo: Any = MODULES["dpo_gpt2"]
RLHF: Any = MODULES["rlhf_ppo_gpt2"]


def args(**changes: Any) -> Any:
    return dataclasses.replace(dpo.Args(response_length=6, batch_size=8, fit_batch_size=4), **changes)


ANSWERS = [([6, 2, 0], [3]), ([0], [7, 7, 1, 2, 8, 0]), ([9, 9], [9, 0]), ([5, 0], [4, 3, 2, 1, 0]), ([1], [2])]


def pairs_of(reference: Any = None, **changes: Any) -> Any:
    """Five comparisons of answers of unequal length, in prompts that hold ends, with log π_ref if there is one."""
    rows = zip(PROMPTS, ANSWERS, strict=False)
    pairs = dpo.pad_pairs([dpo.Comparison(x, x + chosen, x + other) for x, (chosen, other) in rows], CPU)
    if reference:
        with torch.no_grad():
            pairs = pairs._replace(ref_logprobs=dpo.pair_logprobs(args(**changes), reference, pairs))
    return pairs


def alone(model: Any, temperature: float = 1.0) -> Tensor:
    """log π of the answers of `pairs_of` [n, 2], each text by itself."""
    rows = zip(PROMPTS, ANSWERS, strict=False)
    return torch.stack([torch.stack([plain_logprobs(model, x, y, temperature).sum() for y in two]) for x, two in rows])


def moved(reference: Any, size: float = 0.05) -> Any:
    """A policy some way from the reference."""
    policy = copy.deepcopy(reference).requires_grad_(True)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return policy


def kept(monkeypatch: Any, target: Any, name: str, keep: Callable[..., Any]) -> list[Any]:
    """What `keep(result, *inputs)` makes of each call of a function."""
    original, found = getattr(target, name), list[Any]()

    def call(*inputs: Any) -> Any:
        result = original(*inputs)
        found.append(keep(result, *inputs))
        return result

    monkeypatch.setattr(target, name, call)
    return found


# ------------------------------------------------------------------------------------------------ the losses


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.detail("D1")
@pytest.mark.detail("D6")
def test_the_loss_is_the_surprise_at_the_choice() -> None:
    """P(chosen is better) = e^a / (e^a + e^b) of the rewards β·log π/π_ref; β is 0.1 unless told otherwise."""
    margins = torch.tensor([0.0, 3.0, -7.0, 40.0], dtype=torch.float64, requires_grad=True)
    for changes, beta in (({}, 0.1), ({"beta": 0.7}, 0.7)):
        losses = dpo.margin_loss(args(**changes), margins, torch.ones(4, dtype=torch.float64))
        chances = [math.exp(beta * h) / (math.exp(beta * h) + 1) for h in margins.tolist()]
        assert losses.tolist() == pytest.approx([-math.log(p) for p in chances], rel=1e-9)
        (slopes,) = torch.autograd.grad(losses.sum(), margins)
        assert slopes.tolist() == pytest.approx([-beta * (1 - p) for p in chances], rel=1e-9)
    far = torch.tensor([-1e5, 1e5], requires_grad=True)
    dpo.margin_loss(args(), far, torch.ones(2)).sum().backward()
    assert far.grad is not None and far.grad.tolist() == pytest.approx([-0.1, 0.0])  # no overflow, whatever the margin


@pytest.mark.detail("D7")
def test_label_smoothing_is_the_mean_over_labels_of_which_some_are_wrong() -> None:
    """With the plain loss it is that mean; the robust loss has the plain one of right labels as its mean."""
    margins = torch.tensor([0.5, -2.0, 9.0], dtype=torch.float64)
    ones = torch.ones_like(margins)
    plain = lambda h: [-math.log(sigma(0.1 * x)) for x in h]
    smooth = dpo.margin_loss(args(label_smoothing=0.2), margins, ones).tolist()
    right, wrong = plain(margins.tolist()), plain((-margins).tolist())
    assert smooth == pytest.approx([0.8 * a + 0.2 * b for a, b in zip(right, wrong, strict=True)])
    robust = args(loss="robust", label_smoothing=0.2)
    as_they_are, turned = dpo.margin_loss(robust, margins, ones), dpo.margin_loss(robust, -margins, ones)
    assert (0.8 * as_they_are + 0.2 * turned).tolist() == pytest.approx(right)
    assert as_they_are.tolist() != pytest.approx(right, rel=1e-3)
    for loss in ("sigmoid", "robust"):
        assert dpo.margin_loss(args(loss=loss), margins, ones).tolist() == pytest.approx(right)


@pytest.mark.detail("D8")
@pytest.mark.detail("D7")
def test_ipo_draws_each_margin_to_one_half_over_beta() -> None:
    margins = torch.tensor([0.0, 5.0, -3.0, 20.0], dtype=torch.float64)
    losses = dpo.margin_loss(args(loss="ipo", beta=0.1), margins, torch.ones_like(margins))
    assert losses.tolist() == pytest.approx([(h - 5.0) ** 2 for h in margins.tolist()])
    smooth = dpo.margin_loss(args(loss="ipo", beta=0.25, label_smoothing=0.1), margins, torch.ones_like(margins))
    assert smooth.tolist() == pytest.approx([0.9 * (h - 2) ** 2 + 0.1 * (h + 2) ** 2 for h in margins.tolist()])


@pytest.mark.detail("D20")
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_a_soft_label_weighs_both_choices(loss: str) -> None:
    """p of one label and 1 - p of the other, whose margin is turned round."""
    margins, p = torch.tensor([1.5, -4.0], dtype=torch.float64), torch.tensor([0.7, 0.1], dtype=torch.float64)
    losses = dpo.margin_loss(args(loss=loss), margins, p)
    one, other = (dpo.margin_loss(args(loss=loss), x, torch.ones_like(p)) for x in (margins, -margins))
    torch.testing.assert_close(losses, p * one + (1 - p) * other)


# ------------------------------------------------------------------------------------------------ log-probabilities


@pytest.mark.detail("D2")
@pytest.mark.detail("D3")
@pytest.mark.detail("D14")
@pytest.mark.detail("R3")
@pytest.mark.detail("R4")
@pytest.mark.detail("R15")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_pairs_score_as_each_text_does_alone(temperature: float) -> None:
    """A sum over the answer, the end among it; chosen and rejected in one pass or in two, some at a time or all."""
    model = gpt2(vocabulary=12).requires_grad_(False)
    pairs, expected = pairs_of(), alone(model, temperature)
    for size in (1, 2, 100):
        together = dpo.pair_logprobs(args(temperature=temperature, fit_batch_size=size), model, pairs)
        torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-5)
    for side in (0, 1):
        one = (x[:, side] for x in (pairs.tokens, pairs.mask, pairs.answers))
        separately = dpo.answer_logprobs(args(temperature=temperature), model, *one)
        torch.testing.assert_close(separately, expected[:, side], atol=1e-5, rtol=1e-5)


@pytest.mark.detail("R4")
def test_what_lies_in_the_padding_changes_nothing() -> None:
    model, pairs = gpt2(vocabulary=12).requires_grad_(False), pairs_of()
    wide = [torch.nn.functional.pad(x, (3, 0)) for x in (pairs.tokens, pairs.mask, pairs.answers)]
    wide[0][~wide[1]] = 7
    other = pairs._replace(**dict(zip(("tokens", "mask", "answers"), wide, strict=True)))
    both = [dpo.pair_logprobs(args(), model, x) for x in (pairs, other)]
    torch.testing.assert_close(*both, atol=1e-5, rtol=1e-5)


@pytest.mark.detail("D15")
@pytest.mark.parametrize("bf16", [False, True])
def test_logarithms_are_taken_in_float32(bf16: bool) -> None:
    """Also where the trunk computes in bfloat16: a sum of 30 terms is right to more digits than that has."""
    model = gpt2(vocabulary=50, spread=0.3).requires_grad_(False)
    states: list[Tensor] = []
    model.transformer.register_forward_hook(lambda module, inputs, out: states.append(out.last_hidden_state[0, :-1]))
    torch.manual_seed(0)
    answer = torch.randint(1, 50, (30,))
    text = torch.cat([torch.tensor([3]), answer])[None]
    everywhere = torch.ones_like(text, dtype=torch.bool)
    logprob = dpo.answer_logprobs(args(bf16=bf16), model, text, everywhere, everywhere)
    logits = states[0].double() @ model.lm_head.weight.double().T
    exact = logits.log_softmax(1).gather(1, answer[:, None]).sum()
    assert logprob.dtype == torch.float32 and float(logprob) == pytest.approx(float(exact), rel=1e-6)


@pytest.mark.detail("D10")
@pytest.mark.detail("D17")
@pytest.mark.detail("D18")
def test_the_loss_and_its_statistics_by_the_pair() -> None:
    """Rewards are β·log π/π_ref, of chosen and rejected answers apart; per token if asked for."""
    reference = gpt2(vocabulary=12).requires_grad_(False)
    policy = moved(reference)
    pairs = pairs_of(reference)._replace(labels=torch.tensor([1.0, 1.0, 0.6, 1.0, 0.9]))
    with torch.no_grad():
        logratios = (alone(policy) - alone(reference)).double().numpy()
    lengths = np.array([[len(y) for y in two] for two in ANSWERS])
    for normalize in (False, True):
        ratios = logratios / lengths if normalize else logratios
        margins = ratios[:, 0] - ratios[:, 1]
        labels = pairs.labels.double().numpy()
        losses = [
            -p * math.log(sigma(0.3 * h)) - (1 - p) * math.log(sigma(-0.3 * h))
            for h, p in zip(margins, labels, strict=True)
        ]
        with torch.no_grad():
            loss, stats = dpo.dpo_loss(args(beta=0.3, length_normalize=normalize), policy, pairs)
        assert float(loss) == pytest.approx(np.mean(losses), rel=1e-4)
        expected = {
            "losses/policy_loss": np.mean(losses),
            "rewards/chosen": 0.3 * ratios[:, 0].mean(),
            "rewards/rejected": 0.3 * ratios[:, 1].mean(),
            "rewards/margin": 0.3 * margins.mean(),
            "rewards/accuracy": np.mean(margins > 0),
        }
        assert {tag: float(x) for tag, x in stats.items()} == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert 0 < expected["rewards/accuracy"] < 1


# ------------------------------------------------------------------------------------------------ comparisons


def word_for_word() -> Any:
    return dpo.word_tokenizer()


def task_of_files(tmp_path: Path, tokenizer: Any, prompts: list[str], pairs: list[tuple[str, str, str]], **flags: Any):
    write(tmp_path / "p", [{"prompt": x} for x in prompts])
    write(tmp_path / "q", [{"prompt": x, "chosen": y, "rejected": z} for x, y, z in pairs])
    files = {"prompts": str(tmp_path / "p"), "preferences": str(tmp_path / "q")}
    return dpo.file_task(dpo.Args(model="x", **files, **flags), tokenizer)


@pytest.mark.detail("D11")
@pytest.mark.detail("D12")
@pytest.mark.detail("R6")
@pytest.mark.detail("R13")
def test_strings_are_joined_and_the_prompt_ends_where_its_own_tokens_do(tmp_path: Path) -> None:
    """With a token for what arises only at the joint, which belongs to the answer, in both texts alike."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<end>", "a", "b", "c", "ab"])}
    core = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    rows = [("ca", "b", "c"), ("ca", "cb", "ca<end>"), ("ca", "c", "b")] * 4
    task = task_of_files(tmp_path, tokenizer, ["ca", "cb"], rows)
    first, second = task.comparisons[:2]
    assert first == ([3, 1], [3, 4, 0], [3, 1, 3, 0], 1.0)
    assert second == ([3, 1], [3, 1, 3, 2, 0], [3, 1, 3, 1, 0], 1.0)
    pairs = dpo.pad_pairs(task.comparisons[:3], CPU)
    rows_of = zip(pairs.tokens, pairs.answers, strict=True)
    kept = [[row[which].tolist() for row, which in zip(*two, strict=True)] for two in rows_of]
    assert kept == [[[4, 0], [1, 3, 0]], [[3, 2, 0], [3, 1, 0]], [[1, 3, 0], [4, 0]]]
    whole = dpo.pad_pairs([dpo.Comparison([1], [4, 0], [1, 2, 0])], CPU)  # a joint at the very first token
    assert whole.answers.tolist() == [[[False, False, True], [False, True, True]]]


@pytest.mark.detail("D13")
@pytest.mark.detail("R1")
@pytest.mark.detail("R2")
def test_a_long_prompt_keeps_its_end_and_no_answer_is_empty(tmp_path: Path, capsys: Any) -> None:
    """However short prompts and responses are cut; pairs of equal answers, and rows without one, are counted."""
    long = "well overall the long film was"
    rows = [(long, " great but the plot was slow", " not good"), ("it was", " great", " slow")] * 10
    rows += [("it was", " good", " good"), ("it was", " good", ""), (long, " very good", " very bad")]
    tokenizer = word_for_word()
    task = task_of_files(tmp_path, tokenizer, ["it was", long], rows, prompt_length=3, response_length=1)
    shown = [[tokenizer.decode(text) for text in pair[:3]] for pair in task.comparisons]
    assert (
        shown
        == [
            ["long film was", "long film was great", "long film was not"],
            ["it was", "it was great <end>", "it was slow <end>"],
        ]
        * 10
    )
    said = capsys.readouterr().err
    assert "1 rows with an empty string are left out" in said
    assert "equal and left out: 2 pairs" in said  # one of them since both answers were cut to the same word
    pairs = dpo.pad_pairs(task.comparisons, CPU)
    assert pairs.answers.sum(2).tolist() == [[1, 1], [2, 2]] * 10  # the end is one of them
    assert not (pairs.answers & ~pairs.mask).any()


def test_too_few_comparisons_are_a_sentence(tmp_path: Path) -> None:
    rows = [("it was", " great", " slow")] * 9 + [("it was", " good", " good")]
    with pytest.raises(dpo.UsageError, match="--preferences .* at least ten rows that differ"):
        task_of_files(tmp_path, word_for_word(), ["it was", "it"], rows)
    with pytest.raises(dpo.UsageError, match="--prompts .* at least two rows"):
        task_of_files(tmp_path, word_for_word(), ["it was"], rows * 2)


@pytest.mark.detail("R31")
@pytest.mark.detail("D20")
def test_annotators_prefer_by_gold_and_soft_labels_are_their_probabilities() -> None:
    task, policy = dpo.load_task(dpo.Args(sft_size=50), CPU)
    task.judge = lambda text, ended: float(len(text.split())) / 3  # long texts are liked, by 1 nat a word
    for soft in (False, True):
        random.seed(0)
        torch.manual_seed(0)
        pairs = dpo.annotate(args(num_pairs=400, soft_labels=soft), task, policy)
        assert len(pairs) == 400
        words = [[len(task.decode(text).split()) for text in (pair.chosen, pair.rejected)] for pair in pairs]
        gaps = np.array([a - b for a, b in words])
        chances = 1 / (1 + np.exp(-abs(gaps)))
        assert all(pair.prompt in task.prompts and pair.chosen != pair.rejected for pair in pairs)
        assert all(text[: len(pair.prompt)] == pair.prompt for pair in pairs for text in pair[1:3])
        if soft:
            assert [pair.label for pair in pairs] == pytest.approx(chances.tolist(), abs=1e-5) and (gaps >= 0).all()
        else:
            assert {pair.label for pair in pairs} == {1.0}
            assert np.mean(gaps[gaps != 0] > 0) == pytest.approx(np.mean(chances[gaps != 0]), abs=0.06)


def test_a_reference_that_always_says_the_same_is_a_sentence() -> None:
    task, policy = dpo.load_task(dpo.Args(sft_size=50), CPU)
    policy.requires_grad_(False).lm_head.weight.fill_(0)
    with pytest.raises(dpo.UsageError, match="one answer to each prompt; raise --temperature"):
        task.eos_only = policy.transformer.ln_f.bias.fill_(100), policy.lm_head.weight[0].fill_(1)
        dpo.annotate(args(num_pairs=2, response_length=2), task, policy)


@pytest.mark.detail("D16")
def test_reference_log_probabilities_are_made_once_and_right(monkeypatch: Any) -> None:
    """Equal to a fresh computation of each text alone; the reference reads nothing any more afterwards."""
    task, reference = dpo.load_task(dpo.Args(sft_size=50), CPU)
    reference = gpt2(vocabulary=len(task.tokenizer))
    arguments = args(num_pairs=30, response_length=4, temperature=0.8)
    held_out, rest = dpo.compare(arguments, task, reference)
    assert len(held_out.labels) == 3 and len(rest.labels) == 27
    again, _ = dpo.compare(arguments, task, reference)
    assert all(torch.equal(a, b) for a, b in zip(held_out, again, strict=True))  # as in a run that goes on
    other, _ = dpo.compare(dataclasses.replace(arguments, seed=2), task, reference)
    assert not torch.equal(held_out.ref_logprobs, other.ref_logprobs)
    for pairs in (held_out, rest):
        for row in range(len(pairs.labels)):
            for side in (0, 1):
                real, answer = pairs.mask[row, side], pairs.answers[row, side]
                prompt = pairs.tokens[row, side][real & ~answer].tolist()
                fresh = plain_logprobs(reference, prompt, pairs.tokens[row, side][answer].tolist(), 0.8).sum()
                assert float(pairs.ref_logprobs[row, side]) == pytest.approx(float(fresh), abs=1e-4)


def test_files_may_be_sorted_and_are_shuffled() -> None:
    task, reference = dpo.load_task(dpo.Args(sft_size=50), CPU)
    task.comparisons = [dpo.Comparison([5], [5, 1 + i // 10, 0], [5, 11 + i % 10, 0]) for i in range(50)]
    held_out, rest = dpo.compare(args(), task, reference)
    order = torch.cat([held_out.tokens, rest.tokens])[:, :, 1].tolist()
    assert len(held_out.labels) == 5
    expected = [[pair.chosen[1], pair.rejected[1]] for pair in task.comparisons]
    assert sorted(order) == sorted(expected) and order != expected


@pytest.mark.detail("R7")
@pytest.mark.detail("D19")
def test_each_pass_uses_every_pair_once_in_a_new_order(monkeypatch: Any) -> None:
    passes = [[i for n in range(3) for i in dpo.pair_batch(12, 3 * p + n, 4, 1).tolist()] for p in range(3)]
    assert all(sorted(p) == list(range(12)) for p in passes)
    assert passes[0] != passes[1] != passes[2] and passes[0] != list(range(12))
    assert passes[0] != [i for n in range(3) for i in dpo.pair_batch(12, n, 4, 2).tolist()]
    uneven = [i for n in range(5) for i in dpo.pair_batch(10, n, 4, 1).tolist()]  # batches that span two passes
    assert sorted(uneven[:10]) == sorted(uneven[10:]) == list(range(10))
    large = dpo.pair_batch(3, 1, 10, 1).tolist()
    assert sorted(large[2:5]) == sorted(large[5:8]) == [0, 1, 2]  # two of one pass, two whole ones, two of the next
    shares = []
    for rank in (0, 1):
        monkeypatch.setattr(dpo, "RANK", rank)
        monkeypatch.setattr(dpo, "WORLD", 2)
        shares.append(dpo.pair_batch(12, 1, 4, 1).tolist())
    assert sorted(shares[0] + shares[1]) == sorted(passes[0][4:8]) and len(shares[0]) == 2


# ------------------------------------------------------------------------------------------------ the update


@pytest.mark.detail("D4")
@pytest.mark.detail("D5")
def test_the_policy_starts_as_the_reference_and_is_another_object() -> None:
    """The loss is ln 2 and every margin 0, in the batch that the reference has read exactly."""
    reference = gpt2(vocabulary=12).requires_grad_(False)
    pairs = pairs_of(reference)
    policy = dpo.copied(args(), reference)
    loss, stats = dpo.dpo_loss(args(), policy, pairs)
    assert float(loss.detach()) == pytest.approx(math.log(2), rel=1e-7)
    assert all(float(stats[f"rewards/{name}"].detach()) == 0 for name in ("margin", "chosen", "accuracy"))
    before = copy.deepcopy(reference.state_dict())
    optimizer = torch.optim.Adam(policy.parameters(), 0.01)
    for _ in range(3):
        stats = dpo.update(args(), policy, optimizer, pairs, torch.arange(5))
    assert float(stats["losses/policy_loss"]) < 0.69 and all(p.requires_grad for p in policy.parameters())
    assert all(torch.equal(value, before[key]) for key, value in reference.state_dict().items())


def loss_by_hand(arguments: Any, policy: Any, reference: Any, rows: list[int]) -> Tensor:
    """Mean over pairs of what eq. 7 or --loss asks for, text by text and token by token."""
    losses = []
    for i in rows:
        ratios = []
        for answer in ANSWERS[i]:
            text, ratio = PROMPTS[i] + answer, torch.zeros((), dtype=torch.float64)
            for model, sign in ((policy, 1), (reference, -1)):
                logits = alone_in_float64(model, text, "lm_head") / arguments.temperature
                for at, token in enumerate(answer, len(PROMPTS[i]) - 1):
                    ratio = ratio + sign * (logits[at][token] - logits[at].exp().sum().log())
            ratios.append(ratio / len(answer) if arguments.length_normalize else ratio)
        losses.append(pair_by_hand(arguments, ratios[0] - ratios[1]))
    return torch.stack(losses).mean()


def pair_by_hand(arguments: Any, h: Tensor) -> Tensor:
    beta, epsilon = arguments.beta, arguments.label_smoothing
    if arguments.loss == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    right, wrong = (1 + (-beta * h).exp()).log(), (1 + (beta * h).exp()).log()
    if arguments.loss == "robust":
        return ((1 - epsilon) * right - epsilon * wrong) / (1 - 2 * epsilon)
    return (1 - epsilon) * right + epsilon * wrong


@pytest.mark.detail("D1")
@pytest.mark.detail("D2")
@pytest.mark.detail("D7")
@pytest.mark.detail("D8")
@pytest.mark.detail("D10")
@pytest.mark.detail("R15")
@pytest.mark.detail("R26")
@pytest.mark.detail("3")
@pytest.mark.detail("11")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"label_smoothing": 0.1, "temperature": 0.7, "micro_batch_size": 2},
        {"loss": "robust", "label_smoothing": 0.3, "beta": 0.5, "micro_batch_size": 1},
        {"loss": "ipo", "micro_batch_size": 3, "max_grad_norm": 0.01},
        {"length_normalize": True, "beta": 2.0},
    ],
    ids=str,
)
def test_two_whole_updates_by_hand_in_float64(changes: dict[str, Any], monkeypatch: Any) -> None:
    """Gradient, its norm, clipping and Adam's steps to 1e-6, whatever accumulates."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        reference = gpt2(vocabulary=12).double().requires_grad_(False)
        policy = moved(reference)
        arguments = args(**changes)
        pairs = pairs_of(reference, **changes)
        hand = copy.deepcopy(policy)
        optimizer = torch.optim.Adam(policy.parameters(), 0.01, eps=1e-5, fused=True)
        moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in hand.parameters()]
        for t, rows in enumerate(([3, 0, 4, 1, 2], [2, 4, 0]), 1):
            stats = dpo.update(arguments, policy, optimizer, pairs, torch.tensor(rows))
            hand.zero_grad()
            loss = loss_by_hand(arguments, hand, reference, rows)
            loss.backward()
            assert float(stats["losses/policy_loss"]) == pytest.approx(float(loss.detach()), rel=1e-6)
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in hand.parameters()]
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
            assert float(stats["losses/grad_norm"]) == pytest.approx(norm, rel=1e-6) and norm > 0.02
            shorter = min(1.0, arguments.max_grad_norm / (norm + 1e-6))
            with torch.no_grad():
                for p, g, (m, v) in zip(hand.parameters(), gradients, moments, strict=True):
                    m.mul_(0.9).add_(0.1 * shorter * g)
                    v.mul_(0.999).add_(0.001 * (shorter * g) ** 2)
                    p -= 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-5)
            for mine, told in zip(hand.parameters(), policy.parameters(), strict=True):
                torch.testing.assert_close(told, mine, atol=1e-6, rtol=1e-6)
    finally:
        torch.set_default_dtype(default)


# ------------------------------------------------------------------------------------------------ a known optimum


def whole_space(rewards: Tensor, answers: list[list[int]], rows: list[tuple[int, int]]) -> Any:
    """Comparisons of these answers to one prompt, the better one first, with the probability that people choose it."""
    pairs = []
    for i, j in rows:
        a, b = (i, j) if rewards[i] >= rewards[j] else (j, i)
        p = sigma(float(rewards[a] - rewards[b]))
        pairs.append(dpo.Comparison([1], [1, *answers[a]], [1, *answers[b]], p))
    return dpo.pad_pairs(pairs, CPU)


def learn(arguments: Any, reference: Any, pairs: Any, steps: int, lr: float, size: int = 128) -> Any:
    pairs = pairs._replace(ref_logprobs=dpo.pair_logprobs(arguments, reference, pairs))
    policy = dpo.copied(arguments, reference)
    optimizer = torch.optim.Adam(policy.parameters(), lr, eps=1e-5)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        stats = dpo.update(arguments, policy, optimizer, pairs, dpo.pair_batch(len(pairs.labels), step, size, 0))
    return policy, {tag: float(x) for tag, x in stats.items()}


@pytest.mark.slow
@pytest.mark.detail("D20")
def test_soft_labels_have_the_optimum_of_the_regularised_reward_and_hard_ones_none() -> None:
    """π* = π_ref·exp(r/β) / Z over every answer there is; with hard labels, margins grow with every step instead."""
    answers = enumerated(4, 3)
    rewards = torch.from_numpy(np.random.default_rng(1).normal(size=len(answers)))
    reference = gpt2(vocabulary=4, width=32, spread=1.2).requires_grad_(False)
    arguments = args(beta=0.5, fit_batch_size=1000)

    def logprobs(model: Any) -> Tensor:
        return torch.stack([plain_logprobs(model, [1], a).double().sum() for a in answers])

    best = (logprobs(reference) + rewards / 0.5).log_softmax(0)
    distance = lambda model: float((logprobs(model).exp() * (logprobs(model) - best)).sum())
    soft = whole_space(rewards, answers, list(itertools.combinations(range(len(answers)), 2)))
    policy, _ = learn(arguments, reference, soft, 160, 5e-3)
    assert distance(policy) < 1e-3 < 0.3 < distance(reference)

    order = np.random.default_rng(2).permutation(len(answers)).tolist()
    apart = whole_space(rewards, answers, list(zip(order[::2], order[1::2], strict=True)))  # each answer once
    gap = np.mean([math.log(p / (1 - p)) for p in apart.labels.double().tolist()])
    for beta in (0.1, 1.0):
        margins = {}
        for kind, pairs in {"soft": apart, "hard": apart._replace(labels=torch.ones_like(apart.labels))}.items():
            arguments = args(beta=beta, fit_batch_size=1000)
            margins[kind] = [learn(arguments, reference, pairs, n, 5e-3)[1]["rewards/margin"] for n in (30, 120)]
        assert margins["soft"][1] == pytest.approx(gap, abs=0.1)
        assert margins["hard"][1] > margins["hard"][0] + 1 and margins["hard"][1] > 2 * gap, margins


# ------------------------------------------------------------------------------------------------ what RLHF has, too


@pytest.fixture
def in_place(monkeypatch: Any) -> None:
    """test_rlhf.py's checks of what both scripts have look at this one."""
    monkeypatch.setattr(test_rlhf, "rlhf", dpo)
    monkeypatch.setattr(test_rlhf, "args", args)


@pytest.mark.detail("R5")
def test_prompts_of_dpo_end_where_a_clause_may_pause(in_place: None) -> None:
    test_rlhf.test_built_in_prompts_end_where_a_clause_may_pause()


@pytest.mark.detail("R31")
def test_the_judge_of_dpo_is_that_of_rlhf() -> None:
    """On sentences of any faults, whose score test_rlhf.py has by hand."""
    rng = random.Random(0)
    words = [*dpo.CATEGORY, "<pad>"]
    for _ in range(300):
        text = " ".join(rng.choices(words, k=rng.randint(1, 8)))
        assert dpo.judge(text, True) == RLHF.judge(text, True) and dpo.judge(text, False) == RLHF.judge(text, False)


def test_the_built_in_model_and_grammar_are_those_of_rlhf() -> None:
    tasks = [module.load_task(module.Args(sft_size=10), CPU) for module in (dpo, RLHF)]
    (words, config), (other_words, other_config) = [
        (task.tokenizer.get_vocab(), policy.config.to_dict()) for task, policy in tasks
    ]
    assert words == other_words and tasks[0][0].tokenizer.pad_token == "<pad>"
    for key in "vocab_size n_positions n_embd n_layer n_head activation_function eos_token_id".split():
        assert config[key] == other_config[key], key
    assert all(getattr(dpo, name) == getattr(RLHF, name) for name in ("WORDS", "FOLLOWS", "MEANING"))


@pytest.mark.detail("R13")
def test_the_end_is_learnt_and_padding_is_not() -> None:
    model, samples = gpt2(), [[5, 6, 7, 0], [9, 0], [1, 2, 3, 4, 5, 0]]
    expected = []
    for text in samples:
        logits = model(torch.tensor([text])).logits[0, :-1]
        expected += torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:]), reduction="none").tolist()
    assert float(dpo.sft_loss(args(), model, samples).detach()) == pytest.approx(np.mean(expected), rel=1e-5)


def test_fine_tuning_reads_each_text_once_with_falling_steps(monkeypatch: Any) -> None:
    task, policy = dpo.load_task(dpo.Args(sft_size=50), CPU)
    seen = kept(monkeypatch, dpo, "sft_loss", lambda _, args, policy, texts: texts)
    rates = kept(monkeypatch, torch.optim.Adam, "step", lambda _, self: self.param_groups[0]["lr"])
    before = task.texts.copy()
    dpo.fine_tune(dpo.Args(fit_batch_size=16, sft_learning_rate=0.1), task, policy)
    flat = list(itertools.chain(*seen))
    assert sorted(flat) == sorted(before) and flat != before and [len(x) for x in seen] == [16, 16, 16, 2]
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025])
    task.texts = []
    assert dpo.fine_tune(dpo.Args(), task, policy) is policy and len(seen) == 4


@pytest.mark.detail("R14")
@pytest.mark.detail("R15")
def test_answers_are_drawn_from_the_whole_softmax_at_its_temperature() -> None:
    """The first token of 30,000 answers against exact probabilities; more than 50 tokens have a chance."""
    model, n = gpt2(vocabulary=80, spread=1.2).requires_grad_(False), 30_000
    torch.manual_seed(3)
    responses, _ = dpo.sample_responses(args(response_length=1, temperature=0.7), model, [[4, 2]] * n, 79)
    counts = torch.bincount(responses.tokens[:, 2], minlength=80)
    p = (model(torch.tensor([[4, 2]])).logits[0, -1] / 0.7).softmax(0)
    assert float(((counts - n * p).square() / (n * p)).sum()) < 79 + 5 * (2 * 79) ** 0.5, "not the softmax"
    assert int((counts > 0).sum()) > 50


@pytest.mark.detail("R1")
@pytest.mark.detail("R3")
@pytest.mark.detail("R4")
@pytest.mark.detail("R14")
@pytest.mark.detail("R16")
def test_sampler_and_scorer_agree_on_each_answer_up_to_its_first_end() -> None:
    """Each token by a pass over its one text without padding; prompts hold ends and fillers."""
    policy = gpt2(vocabulary=12)
    torch.manual_seed(5)
    responses, sampled = dpo.sample_responses(args(temperature=0.8), policy, PROMPTS, 0)
    scored = dpo.answer_logprobs(args(temperature=0.8), policy, responses.tokens, responses.mask, responses.answers)
    torch.testing.assert_close(sampled.sum(1), scored.detach(), atol=1e-4, rtol=1e-5)
    assert responses.ended.any() and not responses.ended.all()
    for row, (prompt, answer) in enumerate(test_rlhf.texts(responses)):
        assert responses.texts()[row] == prompt + answer
        assert int(responses.answers[row].sum()) == len(answer) and bool(responses.ended[row]) == (0 in answer)
        assert answer[-1] == 0 or len(answer) == 6
        by_itself = plain_logprobs(policy, prompt, answer, 0.8)
        torch.testing.assert_close(sampled[row, : len(answer)], by_itself, atol=1e-5, rtol=1e-5)


@pytest.mark.detail("R18")
def test_no_dropout_in_any_mode(tmp_path: Path) -> None:
    tokens = torch.arange(1, 9)[None]
    gpt2(dropout=0.5).save_pretrained(tmp_path / "sft")
    loaded = dpo.load_model(str(tmp_path / "sft"), AutoModelForCausalLM, "--model")
    started = dpo.load_task(dpo.Args(sft_size=10), CPU)[1]
    for model in (loaded, dpo.copied(args(), loaded), started, dpo.load_stage(tmp_path / "sft", CPU)):
        assert torch.equal(*(model.train()(tokens).logits for _ in range(2)))


# ------------------------------------------------------------------------------------------------ a run


def train(cwd: Path, *flags: Any) -> Path:
    """A small run inside this process; returns its folder."""
    before = set(cwd.glob("*"))
    dpo.train(dpo.parse_args([str(x) for x in (*SMALL["dpo_gpt2"], "--run-dir", cwd, *flags)]))
    (folder,) = set(cwd.glob("*")) - before
    return folder


@pytest.mark.detail("D4")
@pytest.mark.detail("D17")
@pytest.mark.detail("D19")
@pytest.mark.detail("D21")
@pytest.mark.detail("D22")
@pytest.mark.detail("R31")
@pytest.mark.detail("3")
@pytest.mark.detail("4")
def test_what_a_run_logs_saves_and_shows(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """One pass over what is not held out; gold is the judge's; the reference stays; a later look sees the same."""
    used = kept(monkeypatch, dpo, "update", lambda _, *inputs: inputs[-1].tolist())
    warm = ["--warmup", 0.5]
    folder = train(tmp_path, "--num-pairs", 80, "--total-episodes", 72, "--batch-size", 9, "--eval-every", 3, *warm)
    assert sorted(itertools.chain(*used)) == list(range(72))
    logged = scalars(folder)
    every = [9, 18, 27, 36, 45, 54, 63, 72]
    own = {"losses/policy_loss", "losses/grad_norm", "charts/SPS", "charts/learning_rate"}
    own |= {f"rewards/{name}" for name in ("chosen", "rejected", "margin", "accuracy")}
    assert set(logged) == own | {tag for tag in logged if tag.startswith("eval/")} | {"sft/loss"}
    assert all([step for step, _ in logged[tag]] == every for tag in own)
    seen = {
        "gold",
        "kl_ref",
        "length",
        "ended",
        "ref_chosen",
        "ref_rejected",
        "chosen",
        "rejected",
        "margin",
        "accuracy",
    }
    for name in seen | {"policy_loss"}:
        assert [step for step, _ in logged[f"eval/{name}"]] == [0, 27, 54, 72], name
    rates = [rate for _, rate in logged["charts/learning_rate"]]
    assert rates == pytest.approx([3e-4 * min(1, (i + 1) / 4) * (1 - i / 8) for i in range(8)])
    start = {name: logged[f"eval/{name}"][0][1] for name in seen}
    assert start["kl_ref"] == pytest.approx(0, abs=1e-4) and start["margin"] == pytest.approx(0, abs=1e-5)
    held_out, _ = dpo.compare(*of_run(folder))
    assert [start["ref_chosen"], start["ref_rejected"]] == pytest.approx(held_out.ref_logprobs.mean(0).tolist())
    said = capsys.readouterr().out
    assert said.count(" | ") == 8 and f"step 0: gold {start['gold']:+.2f}, accuracy" in said
    monkeypatch.undo()
    means = dpo.evaluate(dpo.parse_args(["--evaluate", str(folder)]))
    last = {name: logged[f"eval/{name}"][-1][1] for name in seen}
    assert {name: means[name] for name in seen} == pytest.approx(last, rel=1e-5, abs=1e-5)
    assert "over 8 sampled responses" in capsys.readouterr().out
    policy, sft = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("policy", "sft"))
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert saved["optimizer"]["param_groups"][0]["eps"] == 1e-5
    state = saved["agent"]
    assert all(torch.equal(value, state[key]) for key, value in policy.state_dict().items())
    assert not torch.equal(policy.lm_head.weight, sft.lm_head.weight)
    settings = policy.generation_config
    assert (settings.do_sample, settings.top_k, settings.temperature, settings.max_new_tokens) == (True, 0, 1.0, 5)


def of_run(folder: Path) -> tuple[Any, Any, Any]:
    """What `compare` is given in a run that goes on."""
    arguments = dpo.parse_args(["--resume", str(folder)])
    return arguments, dpo.load_task(arguments, CPU)[0], dpo.load_stage(folder / "sft", CPU)


@pytest.mark.detail("D21")
@pytest.mark.detail("R31")
def test_an_evaluation_is_the_judge_s_on_prompts_that_no_comparison_had(monkeypatch: Any) -> None:
    """Gold by the judge, KL by both models, from one text at a time."""
    arguments = args(num_pairs=40, eval_episodes=12)
    task, reference = dpo.load_task(dpo.Args(sft_size=50), CPU)
    reference = gpt2(vocabulary=len(task.tokenizer)).requires_grad_(False)
    policy = moved(reference).requires_grad_(False)
    held_out, rest = dpo.compare(arguments, task, reference)
    drawn = kept(monkeypatch, dpo, "sample_responses", lambda drawn, *inputs: (inputs, drawn))
    means, shown = dpo.measure(arguments, task, policy, reference, held_out)
    ((_, sampler, prompts, _), (responses, _)) = drawn[0]
    assert len(drawn) == 1 and sampler is policy and all(prompt in task.held_out for prompt in prompts)
    golds, distances, lengths = [], [], []
    for prompt, text, ended in zip(prompts, responses.texts(), responses.ended.tolist(), strict=True):
        answer = text[len(prompt) :]
        golds.append(dpo.judge(task.decode(text), ended))
        distances.append(
            float((plain_logprobs(policy, prompt, answer) - plain_logprobs(reference, prompt, answer)).sum())
        )
        lengths.append(len(answer))
    assert means["gold"] == pytest.approx(np.mean(golds), abs=1e-5) and means["length"] == pytest.approx(
        np.mean(lengths)
    )
    assert means["kl_ref"] == pytest.approx(np.mean(distances), abs=1e-4) and abs(means["kl_ref"]) > 0.01
    assert means["ended"] == pytest.approx(float(responses.ended.float().mean())) and len(shown) == 4
    with torch.no_grad():
        _, stats = dpo.dpo_loss(arguments, policy, held_out)
    assert means["accuracy"] == pytest.approx(float(stats["rewards/accuracy"]))


@pytest.mark.detail("D5")
def test_the_self_check_names_what_is_not_the_reference(tmp_path: Path, monkeypatch: Any) -> None:
    def shaky(_: Any, reference: Any) -> Any:
        policy = copy.deepcopy(reference).requires_grad_(True).train()
        for module in policy.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
        return policy

    softmax = dpo.log_softmax
    sharper = lambda policy, states, temperature: softmax(policy, states, temperature / 2)

    def sharply(*inputs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dpo, "log_softmax", sharper)
            return original(*inputs)

    original = dpo.sample_responses
    arguments = dpo.parse_args([*SMALL["dpo_gpt2"], "--run-dir", str(tmp_path), "--response-length", "8"])
    for name, wrong in (
        ("copied", shaky),
        ("copied", lambda _, reference: moved(reference)),
        ("sample_responses", sharply),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(dpo, name, wrong)
            with pytest.raises(dpo.UsageError, match="self-check: (kl_ref|margin) is .* before the first update"):
                dpo.train(arguments)
    monkeypatch.setattr(dpo, "copied", lambda _, reference: moved(reference))
    assert dpo.train(dataclasses.replace(arguments, self_check=False))["global_step"] == 512


@pytest.mark.detail("D17")
@pytest.mark.detail("D18")
def test_health_says_once_what_is_usual_and_what_is_not(tmp_path: Path, capsys: Any) -> None:
    """Chosen answers that get rarer; margins that only hard labels ask for; a policy that has left its reference."""
    fine = {"rewards/chosen": -0.5, "rewards/margin": 2.0, "eval/kl_ref": 3.0, "eval/ended": 0.99}
    odd = {"rewards/chosen": [-2.5], "rewards/margin": [10.5, -3.0], "eval/kl_ref": [40.0, -3.0], "eval/ended": [0.2]}
    assert {name for name, *_ in dpo.HEALTHY} == set(fine)
    for name, low, high, meaning in dpo.HEALTHY:
        assert low <= fine[name] <= high and meaning
        assert not any(low <= value <= high for value in odd[name])
    folder = train(
        tmp_path, "--batch-size", 4, "--total-episodes", 96, "--learning-rate", 0.02, "--beta", 1, "--no-anneal-lr"
    )
    lines = capsys.readouterr().out.splitlines()
    for name in ("rewards/chosen", "rewards/margin"):
        (line,) = (line for line in lines if f": {name} is " in line)
        step = int(re.match(r"step (\d+): ", line)[1])  # type: ignore[index]
        values = dict(scalars(folder)[name])
        low, high = next((low, high) for tag, low, high, _ in dpo.HEALTHY if tag == name)
        assert step > 40 and not low <= values[step] <= high
        assert all(low <= x <= high for at, x in values.items() if 40 < at < step)


@pytest.mark.detail("D16")
@pytest.mark.detail("D19")
def test_a_model_and_comparisons_of_ones_own(tmp_path: Path, monkeypatch: Any) -> None:
    """Each is used once by default, and π_ref is asked once for each, however long DPO takes."""
    tokenizer = dpo.word_tokenizer()
    gpt2(vocabulary=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    write(tmp_path / "p", [{"prompt": x} for x in ("it was", "the film felt", "well it")])
    ends = list(itertools.combinations("good bad warm long slow ugly dull".split(), 2))
    write(tmp_path / "q", [{"prompt": "it was", "chosen": f" {a}", "rejected": f" {b}"} for a, b in ends])
    files = ["--model", tmp_path / "model", "--prompts", tmp_path / "p", "--preferences", tmp_path / "q"]
    flags = ["--prompt-length", 5, "--response-length", 4, "--batch-size", 4, "--eval-episodes", 4]
    read = kept(monkeypatch, dpo, "pair_logprobs", lambda _, args, model, pairs: model)
    dpo.train(dpo.parse_args([str(x) for x in (*files, *flags, "--run-dir", tmp_path / "runs")]))
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "args.json").read_text())["total_episodes"] == 19  # of 21, two of them held out
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert state["iteration"] == 4 and state["args"]["total_episodes"] == 19
    reference = read[0]
    assert read.count(reference) == 1 and len({id(model) for model in read}) == 2
    loaded = AutoModelForCausalLM.from_pretrained(folder / "policy")
    assert not torch.equal(loaded.lm_head.weight, reference.lm_head.weight)
