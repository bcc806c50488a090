"""RLHF, detail by detail: against unpadded transformers passes, worked examples and enumerated distributions."""

import copy
import dataclasses
import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MODULES, SMALL
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
)

rlhf: Any = MODULES["rlhf_ppo_gpt2"]
CPU = torch.device("cpu")


def gpt2(vocabulary: int = 60, width: int = 16, seed: int = 0, dropout: float = 0.0, spread: float = 1.0) -> Any:
    """A small GPT-2 whose distributions are far from uniform."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=40, n_embd=width, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    model = GPT2LMHeadModel._from_config(config, attn_implementation="sdpa")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=spread / width**0.5)
    return model.eval()


def scorer(policy: Any, seed: int = 1, gain: float = 1.7, bias: float = -0.3) -> Any:
    model = rlhf.as_scorer(policy)
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.score.weight)
    model.config.reward_gain, model.config.reward_bias = gain, bias
    return model


def args(**changes: Any) -> Any:
    return dataclasses.replace(rlhf.Args(response_length=6, batch_size=8, num_minibatches=2), **changes)


PROMPTS = [[5], [7, 0, 9, 1], [3, 4], [0, 0, 2], [8, 8, 8, 8, 8], [1, 2], [9], [4, 5, 6]]  # ends and fillers among them


@pytest.fixture
def answered() -> tuple[Any, Any, Any]:
    """An agent that has moved away from its reference, the reference, and answers of the agent, some of them ended."""
    reference = gpt2(vocabulary=12)
    agent = rlhf.Agent(copy.deepcopy(reference), scorer(gpt2(vocabulary=12, seed=3)))
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    torch.manual_seed(5)
    responses, _ = rlhf.sample_responses(args(), agent.policy, PROMPTS, 0)
    assert responses.ended.any() and not responses.ended.all()
    return agent, reference, responses


def texts(responses: Any) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of each row, read off without the mask: known prompts, and answers up to their first end."""
    both = []
    for prompt, row in zip(PROMPTS, responses.tokens[:, responses.prompt_columns :].tolist(), strict=True):
        length = row.index(0) + 1 if 0 in row else len(row)
        both.append((prompt, row[:length]))
    return both


def plain_logprobs(model: Any, prompt: list[int], answer: list[int], temperature: float = 1.0) -> Tensor:
    """log-probabilities of an answer by a pass over this one text, as transformers does it without any padding."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.stack([row.log_softmax(0)[token] for row, token in zip(logits, answer, strict=True)])


# ------------------------------------------------------------------------------------------------ texts and padding


@pytest.mark.detail("R3")
def test_the_mask_comes_from_lengths_and_not_from_tokens(answered: Any) -> None:
    _, _, responses = answered
    for row, (prompt, answer) in enumerate(texts(responses)):
        left = responses.prompt_columns - len(prompt)
        expected = [0] * left + [1] * (len(prompt) + len(answer))
        expected += [0] * (responses.mask.shape[1] - len(expected))
        assert responses.mask[row].tolist() == [bool(x) for x in expected]
    assert responses.texts() == [prompt + answer for prompt, answer in texts(responses)]


@pytest.mark.detail("R4")
@pytest.mark.detail("R15")
@pytest.mark.detail("R30")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_padded_rows_score_as_each_text_does_alone(answered: Any, temperature: float) -> None:
    agent, reference, responses = answered
    _, _, per_token, figures = fixed_rollout(agent, reference, responses, args(temperature=temperature))
    for row, (prompt, answer) in enumerate(texts(responses)):
        alone = plain_logprobs(agent.policy, prompt, answer, temperature)
        distance = (alone - plain_logprobs(reference, prompt, answer, temperature)).sum()
        assert float(figures["kl/ref"][row]) == pytest.approx(float(distance), abs=1e-4)
        torch.testing.assert_close(per_token["logprobs"][row, : len(answer)], alone, atol=1e-5, rtol=1e-5)
        assert not any(x[row, len(answer) :].any() for x in per_token.values())


def fixed_rollout(
    agent: Any, reference: Any, responses: Any, arguments: Any, score: Any = None, beta: float = 0.3
) -> Any:
    """`rollout` with the given answers in place of sampled ones."""
    original = rlhf.sample_responses
    rlhf.sample_responses = lambda *_: (responses, torch.zeros(responses.real.shape))
    try:
        score = score or (lambda responses: torch.arange(len(PROMPTS), dtype=torch.float32))
        agent.beta.fill_(beta)
        return rlhf.rollout(arguments, agent, reference, score, PROMPTS, 0)
    finally:
        rlhf.sample_responses = original


@pytest.mark.detail("R4")
def test_wider_padding_and_what_lies_in_it_change_nothing(answered: Any) -> None:
    """Loss, statistics and gradients, also with other tokens, 1e6 and NaN where no token is."""
    agent, reference, responses = answered
    arguments = args()
    per_token = fixed_rollout(agent, reference, responses, arguments).per_token
    per_token["logprobs"] += 0.1 * torch.randn_like(per_token["logprobs"])

    def gradients(responses: Any, per_token: dict[str, Tensor]) -> list[Tensor]:
        agent.zero_grad()
        loss, stats = rlhf.ppo_loss(arguments, agent, responses, per_token)
        loss.backward()
        return [loss.detach(), *stats.values(), *(p.grad.clone() for p in agent.parameters() if p.grad is not None)]

    expected = gradients(responses, per_token)
    pad = lambda x, value: torch.nn.functional.pad(x, (3, 4), value=value)
    wide = responses._replace(
        tokens=pad(responses.tokens, 11),
        mask=pad(responses.mask, False),
        prompt_columns=responses.prompt_columns + 3,
    )
    wide.tokens[~wide.mask] = 7
    for filler in (1e6, -1e6, math.nan):
        filled = {}
        for name, x in per_token.items():
            filled[name] = torch.nn.functional.pad(x, (0, 4), value=filler)
            filled[name][~wide.real] = filler
        for a, b in zip(gradients(wide, filled), expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.detail("R2")
def test_long_prompts_keep_their_end_and_short_ones_are_padded(tmp_path: Path, capsys: Any) -> None:
    tokenizer = rlhf.builtin_task(rlhf.Args(sft_size=10)).tokenizer
    write(tmp_path / "p", [{"prompt": "the film was"}, {"prompt": "well overall the long film was"}, {"prompt": "it"}])
    task = rlhf.file_task(rlhf.Args(model="x", prompts=str(tmp_path / "p"), prompt_length=4), tokenizer)
    assert [tokenizer.decode(p) for p in task.prompts] == ["the film was", "the long film was"]
    assert "1 prompts" in capsys.readouterr().err
    tokens, mask = rlhf.pad_left(task.prompts, CPU)
    assert tokens.shape == (2, 4) and mask.tolist() == [[False, True, True, True], [True] * 4]
    assert tokens[0, 1:].tolist() == task.prompts[0]


@pytest.mark.detail("R5")
def test_built_in_prompts_end_where_a_clause_may_pause() -> None:
    task = rlhf.builtin_task(rlhf.Args())
    assert not {tuple(p) for p in task.prompts} & {tuple(p) for p in task.held_out} and len(task.held_out) == 64
    lengths = set()
    for prompt in task.prompts + task.held_out:
        words = task.decode(prompt).split()
        lengths.add(len(words))
        assert rlhf.CATEGORY[words[-1]] in "HONIV" and len(words) == len(prompt)
    assert lengths == {1, 2, 3, 4, 5}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.detail("R1")
@pytest.mark.detail("R6")
@pytest.mark.detail("R13")
def test_strings_are_joined_before_they_become_tokens(tmp_path: Path) -> None:
    """With a tokenizer that has a token for what arises only at the joint."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<end>", "a", "b", "c", "ab"])}
    core = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    write(tmp_path / "p", [{"prompt": "ca"}, {"prompt": "cb"}])
    write(tmp_path / "q", [{"prompt": "ca", "chosen": "b", "rejected": "c"}] * 2)
    write(tmp_path / "s", [{"prompt": "ca", "response": "ba"}, {"prompt": "ca", "response": "ba<end>"}])
    flags = {"prompts": "p", "preferences": "q", "sft": "s"}
    task = rlhf.file_task(rlhf.Args(model="x", **{k: str(tmp_path / v) for k, v in flags.items()}), tokenizer)
    assert (
        task.prompts == [[3, 1]] and task.texts == [[3, 4, 1, 0]] * 2 and task.pairs == [([3, 4, 0], [3, 1, 3, 0])] * 2
    )


@pytest.mark.detail("R2")
def test_a_long_prompt_keeps_its_end_and_a_long_answer_its_beginning(tmp_path: Path, capsys: Any) -> None:
    """Rows with an empty string are left out, and counted as those are that are cut."""
    tokenizer = rlhf.builtin_task(rlhf.Args(sft_size=10)).tokenizer
    short, long, answer = "it was", "well overall the long film was", "great but the plot was slow"
    write(tmp_path / "p", [{"prompt": short}, {"prompt": short}, {"prompt": ""}])
    write(tmp_path / "s", [{"prompt": x, "response": y} for x in (short, long) for y in (" " + answer, " great", "")])
    flags = {"prompts": str(tmp_path / "p"), "sft": str(tmp_path / "s"), "prompt_length": 3, "response_length": 4}
    task = rlhf.file_task(rlhf.Args(model="x", **flags), tokenizer)
    assert [tokenizer.decode(text) for text in task.texts] == [
        "it was great but the plot was",
        "it was great <end>",
        "long film was great but the plot",
        "long film was great <end>",
    ]
    said = capsys.readouterr().err
    assert "1 rows with an empty string" in said and "2 rows with an empty string" in said and "3 prompts" in said


@pytest.mark.detail("R7")
def test_each_pass_uses_every_prompt_once_in_a_new_order(monkeypatch: Any) -> None:
    prompts = [[i] for i in range(12)]
    passes = [[p for i in (0, 1, 2) for p in rlhf.prompt_batch(prompts, 3 * n + i, 4, 1)] for n in range(3)]
    assert all(sorted(p) == prompts for p in passes)
    assert passes[0] != passes[1] != passes[2] and passes[0] != prompts
    assert passes[0] != [p for i in (0, 1, 2) for p in rlhf.prompt_batch(prompts, i, 4, 2)]
    shares = []
    for rank in (0, 1):
        monkeypatch.setattr(rlhf, "RANK", rank)
        monkeypatch.setattr(rlhf, "WORLD", 2)
        shares.append(rlhf.prompt_batch(prompts, 1, 4, 1))
    assert sorted(shares[0] + shares[1]) == sorted(passes[0][4:8])


# ------------------------------------------------------------------------------------------------ the reward model


@pytest.mark.detail("R1")
@pytest.mark.detail("R10")
def test_the_score_is_read_at_the_last_real_token_of_prompt_and_response(answered: Any, tmp_path: Path) -> None:
    """Against what transformers gives for one text without padding, from a saved folder with gain and bias."""
    _, _, responses = answered
    scorer(gpt2(vocabulary=12, seed=3)).save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval().requires_grad_(False)
    scores = rlhf.reward_scores(loaded, responses.tokens, responses.mask)
    for row, (prompt, answer) in enumerate(texts(responses)):
        logit = float(loaded(torch.tensor([prompt + answer])).logits)
        assert float(scores[row]) == pytest.approx(1.7 * logit - 0.3, abs=1e-5)
        other = float(loaded(torch.tensor([[10] + prompt[1:] + answer])).logits)
        assert abs(other - logit) > 1e-4 or prompt[0] == 10  # it reads the prompt
    assert loaded.config.reward_gain == 1.7 and loaded.config.reward_bias == -0.3


@pytest.mark.detail("R8")
def test_the_new_head_is_normal_with_variance_one_over_width_plus_one(monkeypatch: Any) -> None:
    monkeypatch.setattr(rlhf, "fit", lambda *_: 0.0)
    reference = gpt2(width=1024, vocabulary=20)
    task = rlhf.Task(None, [[1]], [[1]], [], [([1, 2], [1, 3])] * 20, None)
    weight = rlhf.train_reward_model(rlhf.Args(), task, reference).score.weight.detach()
    assert weight.shape == (1, 1024) and float(weight.std()) == pytest.approx(1025**-0.5, rel=0.1)
    assert abs(float(weight.mean())) < 4 / 1024
    assert float((weight / weight.std()).pow(4).mean()) == pytest.approx(3, abs=0.6)  # 1.8 if it were uniform


@pytest.mark.detail("R9")
def test_preferences_follow_bradley_and_terry() -> None:
    """P(chosen wins) = e^a / (e^a + e^b); the loss is its negative log, its gradient the surprise."""
    chosen = torch.tensor([0.5, -1.0, 30.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.0, 2.0, -30.0], dtype=torch.float64)
    loss = rlhf.preference_loss(chosen, rejected)
    p = [math.exp(a) / (math.exp(a) + math.exp(b)) for a, b in zip(chosen.tolist(), rejected.tolist(), strict=True)]
    assert float(loss) == pytest.approx(-sum(map(math.log, p)) / 3)
    loss.backward()
    assert chosen.grad is not None and chosen.grad.tolist() == pytest.approx([-(1 - x) / 3 for x in p])
    far = torch.tensor([-1e4], requires_grad=True)
    rlhf.preference_loss(far, -far.detach()).backward()
    assert far.grad is not None and float(far.grad) == -1.0  # no overflow where it is sure and wrong


@pytest.mark.detail("R9")
def test_the_two_answers_of_a_pair_are_compared_with_each_other() -> None:
    """Each score is that of its text alone; answers of all pairs are different, also in their lengths."""
    model = scorer(gpt2(vocabulary=12)).requires_grad_(False)
    pairs = [([1, 2], [3, 4, 5, 6]), ([7], [8, 9, 10]), ([11, 1, 2, 3, 4], [5])]
    alone = lambda text: 1.7 * float(model(torch.tensor([text])).logits) - 0.3
    expected = [[alone(text) for text in side] for side in zip(*pairs, strict=True)]
    assert [side.tolist() for side in rlhf.pair_scores(model, pairs)] == [pytest.approx(x, abs=1e-5) for x in expected]


@pytest.mark.detail("R9")
@pytest.mark.detail("R12")
@pytest.mark.parametrize(("count", "held_out"), [(50, 5), (700, 70)])
def test_accuracy_is_counted_on_pairs_that_were_never_trained_on(monkeypatch: Any, count: int, held_out: int) -> None:
    reference = gpt2(vocabulary=20)
    pairs = [([1, i % 19 + 1, i // 361 + 2], [3, i // 19 % 19 + 1]) for i in range(count)]  # all different
    trained: list[Any] = []
    monkeypatch.setattr(rlhf, "fit", lambda args, model, loss, samples, lr: trained.extend(samples))
    model = rlhf.train_reward_model(rlhf.Args(), rlhf.Task(None, [[1]], [[1]], [], pairs, None), reference)
    kept = [pair for pair in pairs if pair not in trained]
    assert (
        len(trained) == count - held_out and len(kept) == held_out and kept != pairs[:held_out]
    )  # files may be sorted
    right = [
        float(model(torch.tensor([a])).logits) > float(model(torch.tensor([b])).logits) for a, b in kept
    ]  # one text at a time
    assert model.config.reward_model_accuracy == pytest.approx(sum(right) / held_out)


@pytest.mark.detail("R9")
def test_fitting_uses_each_sample_once_in_a_random_order_with_falling_steps(monkeypatch: Any) -> None:
    model, seen, rates = torch.nn.Linear(1, 1), list[Any](), list[float]()
    original = torch.optim.Adam.step

    def step(self: Any) -> None:
        rates.append(self.param_groups[0]["lr"])
        original(self)

    monkeypatch.setattr(torch.optim.Adam, "step", step)

    def loss(batch: list[Any]) -> tuple[Tensor, int]:
        seen.append(list(batch))
        return model(torch.tensor([[1.0]])).square().sum(), len(batch)

    torch.manual_seed(0)
    rlhf.fit(args(fit_batch_size=8), model, loss, list(range(50)), 0.1)
    flat = list(itertools.chain(*seen))
    assert sorted(flat) == list(range(50)) and flat != list(range(50)) and {len(b) for b in seen} == {8, 9}
    assert rates == pytest.approx([0.1 * (1 - i / 6) for i in range(6)])


def task_of(prompts: list[list[int]]) -> Any:
    """A task without a tokenizer, whose end is the token 0."""
    task = rlhf.Task(None, prompts, prompts, [], [], None)
    task.__class__ = type("Task", (rlhf.Task,), {"eos": 0})
    return task


@pytest.mark.detail("R11")
def test_scores_of_the_start_policy_have_mean_0_and_variance_1(tmp_path: Path) -> None:
    reference = gpt2(vocabulary=12, spread=2.0)
    model = scorer(reference, gain=3.0, bias=2.0)  # of another run, perhaps
    rlhf.normalize_reward(args(), task_of(PROMPTS), reference, model)
    model.save_pretrained(tmp_path)
    again = GPT2ForSequenceClassification.from_pretrained(tmp_path)
    torch.manual_seed(77)
    responses, _ = rlhf.sample_responses(args(), reference, PROMPTS * 250, 0)
    scores = rlhf.reward_scores(again.eval(), responses.tokens, responses.mask)
    assert abs(float(scores.mean())) < 0.2 and float(scores.std()) == pytest.approx(1, abs=0.15)
    assert abs(float(model.config.reward_gain) - 1) > 0.05


# ------------------------------------------------------------------------------------------------ fine-tuning


@pytest.mark.detail("R13")
def test_the_end_is_learnt_and_padding_is_not() -> None:
    model = gpt2()
    samples = [[5, 6, 7, 0], [9, 0], [1, 2, 3, 4, 5, 0]]
    expected = []
    for text in samples:
        logits = model(torch.tensor([text])).logits[0, :-1]
        expected += torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:]), reduction="none").tolist()
    assert float(rlhf.sft_loss(model, samples)) == pytest.approx(sum(expected) / len(expected), rel=1e-5)


@pytest.mark.detail("R13")
def test_the_texts_of_the_built_in_task_end() -> None:
    task = rlhf.builtin_task(rlhf.Args(sft_size=50))
    assert len(task.texts) == 50 and all(t[-1] == task.eos and t.count(task.eos) == 1 for t in task.texts)


# ------------------------------------------------------------------------------------------------ sampling


@pytest.mark.detail("R14")
@pytest.mark.detail("R15")
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_tokens_are_drawn_from_the_whole_softmax_at_its_temperature(temperature: float) -> None:
    """First and second token of 60,000 answers against exact probabilities; more than 50 tokens have a chance."""
    model, n = gpt2(vocabulary=80, spread=1.2), 60_000
    torch.manual_seed(3)
    responses, logprobs = rlhf.sample_responses(
        args(response_length=2, temperature=temperature), model, [[4, 2]] * n, 79
    )
    first, second = responses.actions.T
    p = (model(torch.tensor([[4, 2]])).logits[0, -1] / temperature).softmax(0).detach()
    counts = torch.bincount(first, minlength=80)
    chi2 = float(((counts - n * p).square() / (n * p)).sum())
    assert chi2 < 79 + 5 * (2 * 79) ** 0.5, "not the softmax"
    assert int((p > 0).sum()) == 80 and int((counts > 0).sum()) > 60
    likely = int(p.argmax())
    q = (model(torch.tensor([[4, 2, likely]])).logits[0, -1] / temperature).softmax(0).detach()
    followers = torch.bincount(second[first == likely], minlength=80)
    m = int(followers.sum())
    assert float(((followers - m * q).square() / (m * q)).sum()) < 79 + 5 * (2 * 79) ** 0.5
    torch.testing.assert_close(logprobs[:, 0], p.log()[first], atol=1e-5, rtol=1e-5)


@pytest.mark.detail("R14")
@pytest.mark.detail("R3")
@pytest.mark.detail("R4")
def test_the_cache_and_the_padding_do_not_change_what_is_drawn(answered: Any) -> None:
    agent, *_ = answered
    torch.manual_seed(5)
    responses, logprobs = rlhf.sample_responses(args(temperature=0.8), agent.policy, PROMPTS, 0)
    for row, (prompt, answer) in enumerate(texts(responses)):
        alone = plain_logprobs(agent.policy, prompt, answer, 0.8)
        torch.testing.assert_close(logprobs[row, : len(answer)], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.detail("R16")
def test_the_first_end_stops_an_answer_and_is_part_of_it(answered: Any) -> None:
    _, _, responses = answered
    for row, (_, answer) in enumerate(texts(responses)):
        assert int(responses.real[row].sum()) == len(answer)
        assert answer[-1] == 0 or len(answer) == 6  # an end alone makes it shorter than asked
        assert bool(responses.ended[row]) == (answer[-1] == 0) == (0 in answer)
    sure = gpt2(vocabulary=12)
    with torch.no_grad():
        sure.transformer.ln_f.weight.zero_()
        sure.transformer.ln_f.bias.copy_(20 * sure.lm_head.weight[0])  # the end is all but certain
    stopped, _ = rlhf.sample_responses(args(temperature=0.01), sure, PROMPTS, 0)
    assert stopped.actions.shape == (8, 1) and stopped.ended.all()  # nothing is computed after the last end


@pytest.mark.detail("R17")
def test_a_response_without_end_loses_the_penalty_and_no_other_does(answered: Any) -> None:
    agent, reference, responses = answered
    for penalty in (0.0, 10.0):
        figures = fixed_rollout(agent, reference, responses, args(missing_eos_penalty=penalty)).figures
        assert figures["charts/proxy"].tolist() == list(range(8))
        expected = [i - penalty * (answer[-1] != 0) for i, (_, answer) in enumerate(texts(responses))]
        assert figures["charts/score"].tolist() == expected


@pytest.mark.detail("R18")
def test_no_dropout_in_any_mode(tmp_path: Path) -> None:
    tokens = torch.arange(1, 9)[None]
    shaky = gpt2(dropout=0.5).train()
    assert not torch.equal(shaky(tokens).logits, shaky(tokens).logits)
    shaky.save_pretrained(tmp_path / "sft")
    loaded = rlhf.load_model(str(tmp_path / "sft"), AutoModelForCausalLM, "--model")
    assert all(loaded.config.to_dict()[rate] == 0 for rate in ("resid_pdrop", "embd_pdrop", "attn_pdrop"))
    started = rlhf.load_task(rlhf.Args(sft_size=10), CPU)[1]
    for model in (loaded, rlhf.as_scorer(loaded), started, rlhf.load_stage(tmp_path / "sft", CPU)):
        assert torch.equal(*(model.train()(tokens).logits for _ in range(2)))


@pytest.mark.detail("R18")
def test_dropout_neither_comes_back_from_a_file_nor_with_a_reward_model_that_is_given(tmp_path: Path) -> None:
    rates = lambda model: {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    gpt2(vocabulary=12, dropout=0.5).save_pretrained(tmp_path / "policy")
    reference = rlhf.load_model(str(tmp_path / "policy"), AutoModelForCausalLM, "--model")
    reference.save_pretrained(tmp_path / "policy")
    assert rates(GPT2LMHeadModel.from_pretrained(tmp_path / "policy")) == {0.0}
    config = GPT2Config(vocab_size=12, n_positions=40, n_embd=16, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    config.update({"n_layer": 1, "n_head": 2, "num_labels": 1, "reward_gain": 1.0, "reward_bias": 0.0})
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path / "given")
    assert 0.5 in rates(GPT2ForSequenceClassification.from_pretrained(tmp_path / "given"))
    model = rlhf.load_model(str(tmp_path / "given"), AutoModelForSequenceClassification, "--reward-model")
    assert rates(model) == {0.0}


# ------------------------------------------------------------------------------------------------ the value function


@pytest.mark.detail("R20")
def test_the_value_starts_as_the_reward_model_or_as_zero(answered: Any) -> None:
    _, reference, responses = answered
    model = scorer(reference)
    agent = rlhf.Agent(reference, copy.deepcopy(model))
    _, values = agent(responses)
    for row, (prompt, answer) in enumerate(texts(responses)):
        for t in range(len(answer)):  # what is to come is valued before the token is chosen
            logit = float(model(torch.tensor([prompt + answer[:t]])).logits)
            assert float(values[row, t]) == pytest.approx(1.7 * logit - 0.3, abs=1e-5)
    states, zeros = rlhf.Agent(reference, None)(responses)
    assert not zeros.any() and states.shape == (8, responses.real.shape[1], 16)


# ----------------------------------------------------------------------------------------------- rewards and advantages


@pytest.mark.detail("R21")
def test_the_reward_of_each_token_worked_by_hand() -> None:
    real = torch.tensor([[True, True, True], [True, False, False]])
    logprobs = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, 9.0, 9.0]])
    reference = torch.tensor([[-1.5, -1.0, -0.5], [-2.0, 7.0, math.nan]])
    rewards = rlhf.token_rewards(torch.tensor([10.0, -4.0]), logprobs, reference, real, 0.2)
    # -0.2·0.5, -0.2·(-1), -0.2·0 + 10; -0.2·(-1) - 4 at the second one's only token
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 0.2, 10.0], [-3.8, 0.0, 0.0]]))


@pytest.mark.detail("R22")
def test_beta_follows_the_kl() -> None:
    """e = KL / target - 1 within ±0.2, and β(1 + e·n / horizon)."""
    assert rlhf.proportional_beta(0.2, 6.6, 6.0, 0.5) == pytest.approx(0.2 * (1 + 0.1 * 0.5))
    assert rlhf.proportional_beta(0.2, 60.0, 6.0, 0.5) == pytest.approx(0.2 * 1.1)
    assert rlhf.proportional_beta(0.2, 0.0, 6.0, 0.5) == pytest.approx(0.2 * 0.9)
    for kl, factor in ((3.9, 0.5), (4.1, 1.0), (8.9, 1.0), (9.1, 2.0)):
        assert rlhf.update_beta(0.2, kl, 6.0) == pytest.approx(0.2 * factor)
    assert rlhf.proportional_beta(9e3, 1e9, 1e-6, 1.0) == 1e4 and rlhf.proportional_beta(1e-4, 0.0, 6.0, 1.0) == 1e-4
    assert rlhf.proportional_beta(0.0, 1e9, 1.0, 1.0) == 0.0
    agent, again = (rlhf.Agent(gpt2(), None, beta=beta) for beta in (0.2, 0.7))
    again.load_state_dict(agent.state_dict())  # as a checkpoint does
    assert float(again.beta) == pytest.approx(0.2)


@pytest.mark.detail("R23")
@pytest.mark.detail("R25")
def test_whitening_under_a_mask() -> None:
    rng = np.random.default_rng(0)
    x, mask = rng.normal(3, 4, (5, 7)), rng.random((5, 7)) < 0.6
    x[~mask] = np.nan
    white = rlhf.masked_whiten(torch.from_numpy(x), torch.from_numpy(mask)).numpy()
    np.testing.assert_allclose(white[mask], (x[mask] - x[mask].mean()) / x[mask].std(), rtol=1e-6)
    assert not white[~mask].any()
    kept = rlhf.masked_whiten(torch.from_numpy(x), torch.from_numpy(mask), shift_mean=False).numpy()
    assert kept[mask].mean() == pytest.approx(x[mask].mean()) and kept[mask].std() == pytest.approx(1, rel=1e-6)
    assert rlhf.masked_mean(torch.from_numpy(x), torch.from_numpy(mask)).item() == pytest.approx(x[mask].mean())


@pytest.mark.detail("R23")
def test_rewards_are_whitened_only_when_asked(answered: Any) -> None:
    agent, reference, responses = answered
    plain, white = (
        fixed_rollout(agent, reference, responses, args(whiten_rewards=on, gae_lambda=1.0)).per_token["returns"]
        for on in (False, True)
    )
    first = plain[:, 0]  # with γ = λ = 1 the first return is the sum of the token rewards
    rewards = [
        row.diff(append=torch.zeros(1)).neg()[: int(n)] for row, n in zip(plain, responses.real.sum(1), strict=True)
    ]
    flat = torch.cat(rewards)
    expected = [((r - flat.mean()) / flat.std(correction=0) + flat.mean()).sum() for r in rewards]
    torch.testing.assert_close(white[:, 0], torch.stack(expected), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(first, white[:, 0])


@pytest.mark.detail("R17")
@pytest.mark.detail("R21")
@pytest.mark.detail("R24")
@pytest.mark.detail("R25")
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
def test_returns_and_advantages_by_sums_over_the_tokens_to_come(answered: Any, lam: float) -> None:
    """γ = 1 and nothing after the last token: G_t^λ written out, then advantages of mean 0, variance 1."""
    agent, reference, responses = answered
    scores = torch.randn(8)
    arguments = args(missing_eos_penalty=0.5, **({} if lam == 0.95 else {"gae_lambda": lam}))
    per_token = fixed_rollout(agent, reference, responses, arguments, lambda _: scores, beta=0.3).per_token
    _, values = agent(responses)
    raw = []
    for row, (prompt, answer) in enumerate(texts(responses)):
        n = len(answer)
        ratio = plain_logprobs(agent.policy, prompt, answer) - plain_logprobs(reference, prompt, answer)
        rewards = (-0.3 * ratio).tolist()
        rewards[-1] += float(scores[row]) - 0.5 * (answer[-1] != 0)
        v = [*values[row, :n].tolist(), 0.0]
        for t in range(n):
            steps = [sum(rewards[t : t + k]) + v[t + k] for k in range(1, n - t + 1)]  # k-step returns
            weights = [(1 - lam) * lam**k for k in range(len(steps))]
            weights[-1] = lam ** (len(steps) - 1)
            expected = sum(w * g for w, g in zip(weights, steps, strict=True))
            assert float(per_token["returns"][row, t]) == pytest.approx(expected, abs=1e-4)
            raw.append(expected - v[t])
        assert not per_token["advantages"][row, n:].any() and not per_token["values"][row, n:].any()
    expected_advantages = (np.array(raw) - np.mean(raw)) / np.std(raw)
    np.testing.assert_allclose(per_token["advantages"][responses.real].numpy(), expected_advantages, atol=1e-4)


def test_the_three_estimators_and_the_exact_kl_agree(monkeypatch: Any) -> None:
    """On 4,000 answers of length 2, against the sum over all texts."""
    reference, policy = gpt2(vocabulary=6, spread=1.5), gpt2(vocabulary=6, spread=1.5, seed=0)
    with torch.no_grad():
        policy.lm_head.weight.add_(0.1 * torch.randn_like(policy.lm_head.weight))
    exact = 0.0
    for text in itertools.product(range(6), repeat=2):
        answer = list(text[:1]) if text[0] == 0 else list(text)
        if text[0] == 0 and text[1] != 0:
            continue
        p, q = plain_logprobs(policy, [1], answer).sum(), plain_logprobs(reference, [1], answer).sum()
        exact += float(p.exp() * (p - q))
    torch.manual_seed(0)
    agent = rlhf.Agent(policy, None)
    score = lambda responses: torch.zeros(len(responses.tokens))
    figures = rlhf.rollout(args(response_length=2), agent, reference, score, [[1]] * 4000, 0).figures
    assert 0.01 < exact < 0.5
    for name in ("kl/ref", "kl/ref_k3", "kl/ref_exact"):
        assert abs(float(figures[name].mean()) - exact) < 4 * float(figures[name].std()) / 4000**0.5, name
    assert float(figures["kl/ref_k2"].mean()) == pytest.approx(exact, rel=0.3)
    assert figures["kl/ref_exact"].std() < figures["kl/ref"].std()


# ------------------------------------------------------------------------------------------------ the update


def random_tokens(responses: Any) -> dict[str, Tensor]:
    """What `rollout` gives of each token, drawn at random."""
    return {name: torch.randn(responses.real.shape) for name in ("logprobs", "advantages", "returns", "values")}


def test_the_value_clip_of_rlhf_can_be_switched_off(answered: Any) -> None:
    """Without it the loss is half the mean squared error over the real tokens."""
    agent, _, responses = answered
    torch.manual_seed(1)
    per_token = random_tokens(responses)
    _, new_values = agent(responses)
    error = (new_values - per_token["returns"])[responses.real]
    losses = {}
    for clip in (False, True):
        _, stats = rlhf.ppo_loss(args(clip_vloss=clip), agent, responses, per_token)
        losses[clip] = float(stats["losses/value_loss"])
    assert losses[False] == pytest.approx(float(0.5 * error.square().mean()), rel=1e-4)
    assert losses[True] > losses[False] + 1e-3


@pytest.mark.detail("R27")
@pytest.mark.detail("R30")
def test_the_loss_and_its_statistics_are_means_over_real_tokens(answered: Any) -> None:
    """Token by token, from the definitions: min of two products, max of two squares, no entropy bonus."""
    agent, _, responses = answered
    torch.manual_seed(1)
    per_token = random_tokens(responses)
    logprobs, advantages, returns, values = per_token.values()
    losses, value_losses, entropies, k1, k3, clipped = [], [], [], [], [], []
    _, new_values = agent(responses)
    for row, (prompt, answer) in enumerate(texts(responses)):
        logits = agent.policy(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double()
        for t, token in enumerate(answer):
            p = logits[t].softmax(0)
            entropies.append(float(-(p * p.log()).sum()))
            r, a = float(p[token]) / math.exp(float(logprobs[row, t])), float(advantages[row, t])
            losses.append(-min(r * a, min(max(r, 0.8), 1.2) * a))
            v, v_old, g = float(new_values[row, t]), float(values[row, t]), float(returns[row, t])
            value_losses.append(0.5 * max((v - g) ** 2, (v_old + min(max(v - v_old, -0.2), 0.2) - g) ** 2))
            k1.append(-math.log(r))
            k3.append(r - 1 - math.log(r))
            clipped.append(abs(r - 1) > 0.2)
    loss, stats = rlhf.ppo_loss(args(), agent, responses, per_token)
    assert float(loss) == pytest.approx(np.mean(losses) + 0.1 * np.mean(value_losses), rel=1e-4)
    expected: dict[str, list[Any]] = {
        "losses/value_loss": value_losses,
        "losses/policy_loss": losses,
        "losses/entropy": entropies,
        "losses/clipfrac": clipped,
        "kl/old_k1": k1,
        "kl/old": k3,
    }
    means = {name: np.mean(x) for name, x in expected.items()}
    assert {name: float(x) for name, x in stats.items()} == pytest.approx(means, rel=1e-4, abs=1e-5)


@pytest.mark.detail("R15")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_loss_scores_at_the_temperature_of_the_sampler(answered: Any, temperature: float) -> None:
    """Old log-probabilities come from one text at a time: at the same temperature nothing has moved."""
    agent, _, responses = answered
    per_token = {name: torch.zeros_like(x) for name, x in random_tokens(responses).items()}
    for row, (prompt, answer) in enumerate(texts(responses)):
        per_token["logprobs"][row, : len(answer)] = plain_logprobs(agent.policy, prompt, answer, temperature)
    _, stats = rlhf.ppo_loss(args(temperature=temperature), agent, responses, per_token)
    assert max(abs(float(stats[name])) for name in ("kl/old_k1", "kl/old", "losses/clipfrac")) < 1e-5


def optimizer_of(agent: Any, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.Adam(agent.parameters(), lr, eps=1e-5)


@pytest.mark.parametrize("micro", [1, 2, 3, 4])
@pytest.mark.detail("R26")
def test_micro_batches_only_accumulate(answered: Any, micro: int) -> None:
    agent, reference, responses = answered
    gradients = []
    for size in (None, micro):
        arguments = args(num_minibatches=1, update_epochs=1, micro_batch_size=size, max_grad_norm=1e9)
        per_token = fixed_rollout(agent, reference, responses, arguments).per_token
        per_token["logprobs"] += 0.1
        copied = copy.deepcopy(agent)
        torch.manual_seed(2)
        history = rlhf.update(arguments, copied, optimizer_of(copied), responses, per_token)
        assert len(history) == 1
        gradients.append([*history[0].values(), *(p.grad for p in copied.parameters())])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.detail("R26")
@pytest.mark.detail("6")
def test_every_epoch_uses_each_response_once_in_a_new_order(answered: Any, monkeypatch: Any) -> None:
    agent, reference, responses = answered
    arguments = args(num_minibatches=4, update_epochs=3)
    per_token = fixed_rollout(agent, reference, responses, arguments).per_token
    rows = {tuple(text): i for i, text in enumerate(responses.texts())}
    used: list[int] = []
    original = rlhf.ppo_loss

    def loss(_: Any, agent: Any, part: Any, per_token: Any) -> tuple[Tensor, Any]:
        used.extend(rows[tuple(text)] for text in part.texts())
        return original(arguments, agent, part, per_token)

    monkeypatch.setattr(rlhf, "ppo_loss", loss)
    history = rlhf.update(arguments, agent, optimizer_of(agent), responses, per_token)
    assert len(history) == 12
    epochs = [used[i : i + 8] for i in (0, 8, 16)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_first_ratio_is_one(answered: Any) -> None:
    agent, reference, responses = answered
    arguments = args()
    per_token = fixed_rollout(agent, reference, responses, arguments).per_token
    for index in (torch.arange(8), torch.tensor([6, 0]), torch.tensor([4])):
        part = responses.rows(index)
        states, _ = agent(part)
        new, _ = rlhf.token_logprobs(agent.policy, states[part.real], part.actions[part.real], 1.0)
        ratio = (new - per_token["logprobs"][index][:, : part.real.shape[1]][part.real]).exp()
        assert float((ratio - 1).abs().max()) < 1e-5


@pytest.mark.detail("R26")
@pytest.mark.detail("R28")
@pytest.mark.detail("R29")
@pytest.mark.detail("3")
@pytest.mark.parametrize("epsilon", [0.01, 1e-5])
def test_two_steps_of_adam_with_epsilon_where_tensorflow_has_it(
    answered: Any, monkeypatch: Any, epsilon: float
) -> None:
    """θ -= lr·sqrt(1 - β2^t) / (1 - β1^t) · m / (sqrt(v) + ε), also with an ε so large that its place matters."""
    agent, reference, responses = answered
    changes = {} if epsilon == 1e-5 else {"adam_eps": epsilon}
    arguments = args(num_minibatches=1, update_epochs=2, max_grad_norm=1e9, **changes)
    per_token = fixed_rollout(agent, reference, responses, arguments).per_token
    grads: list[Tensor] = []
    original = rlhf.ppo_loss

    def loss(*inputs: Any) -> tuple[Tensor, Any]:
        value, stats = original(*inputs)
        grads.append(torch.autograd.grad(value, agent.policy.lm_head.weight, retain_graph=True)[0])
        return value, stats

    theta = agent.policy.lm_head.weight.detach().clone()
    monkeypatch.setattr(rlhf, "ppo_loss", loss)
    rlhf.update(arguments, agent, optimizer_of(agent, 0.01), responses, per_token)
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    for t, g in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g.square()
        theta = theta - 0.01 * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t) * m / (v.sqrt() + epsilon)
    torch.testing.assert_close(agent.policy.lm_head.weight.detach(), theta, atol=1e-7, rtol=1e-5)


@pytest.mark.detail("11")
def test_the_gradient_is_clipped_by_its_global_norm(answered: Any) -> None:
    agent, reference, responses = answered
    arguments = args(num_minibatches=1, update_epochs=1, max_grad_norm=1e-3)
    per_token = fixed_rollout(agent, reference, responses, arguments).per_token
    rlhf.update(arguments, agent, optimizer_of(agent), responses, per_token)
    norm = sum(float(p.grad.square().sum()) for p in agent.parameters() if p.grad is not None) ** 0.5
    assert norm == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.detail("S3")
def test_epochs_end_before_the_step_that_passes_the_limit(answered: Any, monkeypatch: Any) -> None:
    agent, reference, responses = answered
    for limit, looked_at in ((1e-12, 2), (1e9, 8)):
        arguments = args(num_minibatches=1, update_epochs=8, target_kl=limit)
        copied = copy.deepcopy(agent)
        per_token = fixed_rollout(copied, reference, responses, arguments).per_token
        optimizer = optimizer_of(copied)
        history = rlhf.update(arguments, copied, optimizer, responses, per_token)
        steps = looked_at if limit > 1 else looked_at - 1  # the first minibatch has KL 0
        assert len(history) == looked_at and optimizer.param_groups[0]["steps"] == steps
    stats = {"kl/old": torch.tensor(0.2)}
    for limit, steps in ((0.2 / 1.5 * 0.99, 0), (0.2 / 1.5 * 1.01, 1)):
        monkeypatch.setattr(rlhf, "ppo_loss", lambda *_: (sum(p.sum() for p in agent.parameters()) * 0, stats))
        arguments = args(num_minibatches=1, update_epochs=1, target_kl=limit)
        optimizer = optimizer_of(agent)
        rlhf.update(arguments, agent, optimizer, responses, per_token)
        assert optimizer.param_groups[0].get("steps", 0) == steps


def test_vocabularies_are_worked_on_in_pieces_with_the_same_result(answered: Any, monkeypatch: Any) -> None:
    agent, reference, responses = answered
    states = torch.randn(50, 16, requires_grad=True)
    actions = torch.randint(12, (50,))
    results: list[list[Tensor]] = []
    for vocabulary in (12, 2**22):  # four tokens at a time
        monkeypatch.setattr(agent.policy.config, "vocab_size", vocabulary)
        agent.zero_grad()
        states.grad = None
        logprobs, entropy = rlhf.token_logprobs(agent.policy, states, actions, 0.9)
        logprobs.square().sum().backward()
        scored = rlhf.score_tokens(args(), agent, reference, responses)
        assert states.grad is not None
        gradient = agent.policy.lm_head.weight.grad.clone()
        results.append([logprobs, entropy, states.grad, gradient, *(x.detach() for x in scored.values())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------ whole updates


def alone_in_float64(model: Any, text: list[int], head: str) -> Tensor:
    """What a head of a model in float64 gives at each position of one text, by transformers' own pass over it."""
    hidden = model.transformer(torch.tensor([text])).last_hidden_state[0]
    return getattr(model, head)(hidden)


def loss_by_hand(arguments: Any, policy: Any, value: Any, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Means over the tokens of some answers, one token after the other."""
    sums: dict[str, Any] = dict.fromkeys(("policy", "value", "entropy", "clipped", "k1", "k3"), 0.0)
    count = 0
    for row in rows:
        logits = alone_in_float64(policy, row["text"], "lm_head") / arguments.temperature
        scores = alone_in_float64(value, row["text"], "score")[:, 0]
        values = scores * value.config.reward_gain + value.config.reward_bias
        for i, token in enumerate(row["answer"]):
            at = len(row["prompt"]) + i - 1  # the state is all that stands before the token
            p = logits[at].softmax(0)
            ratio = p[token] / math.exp(row["logprobs"][i])
            kept = ratio.clamp(1 - arguments.clip_coef, 1 + arguments.clip_coef)
            sums["policy"] -= torch.minimum(ratio * row["advantages"][i], kept * row["advantages"][i])
            moved = values[at] - row["values"][i]
            near = row["values"][i] + moved.clamp(-arguments.clip_coef, arguments.clip_coef)
            errors = [(x - row["returns"][i]) ** 2 for x in (values[at], near)]
            sums["value"] += 0.5 * torch.maximum(*errors)
            sums["entropy"] -= (p * p.log()).sum()
            sums["clipped"] += float(abs(ratio - 1) > arguments.clip_coef)
            sums["k1"] -= ratio.log()
            sums["k3"] += ratio - 1 - ratio.log()
            count += 1
    return {name: x / count for name, x in sums.items()}


def rollout_by_hand(arguments: Any, seen: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Fill in what each token got, from the models before the update; returns the figures of each answer."""
    beta, scorer_ = float(seen["beta"]), seen["reward_model"]
    figures: dict[str, list[float]] = {}
    for row in rows:
        before = len(row["prompt"]) - 1
        logp, ref_logp = (
            (alone_in_float64(model, row["text"], "lm_head") / arguments.temperature).log_softmax(1)[before:-1]
            for model in (seen["policy"], seen["reference"])
        )
        steps = range(len(row["answer"]))
        row["logprobs"] = [float(logp[i, token]) for i, token in enumerate(row["answer"])]
        distances = [float(logp[i, token] - ref_logp[i, token]) for i, token in enumerate(row["answer"])]
        scored = alone_in_float64(scorer_, row["text"], "score")[-1, 0]
        proxy = float(scored) * scorer_.config.reward_gain + scorer_.config.reward_bias
        ended = row["answer"][-1] == seen["eos"]
        score = proxy - (0 if ended else arguments.missing_eos_penalty)
        rewards = [-beta * distance for distance in distances]
        rewards[-1] += score
        values = alone_in_float64(seen["value"], row["text"], "score")[before:-1, 0]
        row["values"] = [float(v) * seen["value"].config.reward_gain + seen["value"].config.reward_bias for v in values]
        after = [*row["values"][1:], 0.0]
        errors = [rewards[i] + arguments.gamma * after[i] - row["values"][i] for i in steps]
        decay = arguments.gamma * arguments.gae_lambda
        row["raw"] = [sum(decay ** (j - i) * errors[j] for j in steps if j >= i) for i in steps]
        row["returns"] = [a + v for a, v in zip(row["raw"], row["values"], strict=True)]
        exact = float((logp.exp() * (logp - ref_logp)).sum())
        for tag, x in {
            "charts/proxy": proxy,
            "charts/score": score,
            "charts/episodic_return": score - beta * sum(distances),
            "charts/episodic_length": len(row["answer"]),
            "charts/ended": float(ended),
            "kl/ref": sum(distances),
            "kl/ref_k2": sum(d**2 / 2 for d in distances),
            "kl/ref_k3": sum(math.exp(-d) - 1 + d for d in distances),
            "kl/ref_exact": exact,
        }.items():
            figures.setdefault(tag, []).append(x)
    raw = np.array([a for row in rows for a in row["raw"]])
    for row in rows:
        row["advantages"] = [(a - raw.mean()) / raw.std() for a in row["raw"]]
    return figures


@pytest.mark.detail("R21")
@pytest.mark.detail("R24")
@pytest.mark.detail("R25")
@pytest.mark.detail("R27")
def test_two_iterations_of_training_by_hand(tmp_path: Path, monkeypatch: Any) -> None:
    """Rewards, advantages, every gradient, every step and every logged figure, text by text in float64."""
    seen: list[dict[str, Any]] = []
    models: dict[str, Any] = {}

    def watch(name: str, spy: Callable[..., Any]) -> None:
        original = getattr(rlhf, name)
        monkeypatch.setattr(rlhf, name, lambda *inputs: spy(original, *inputs))

    def spread(_: Any, arguments: Any, task: Any, policy: Any) -> Any:
        """In place of fine-tuning: a policy far from uniform."""
        for parameter in policy.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=1.5 / policy.config.n_embd**0.5)
        with torch.no_grad():
            policy.lm_head.weight[task.eos] *= 3  # now all but certain, now all but impossible
        return policy

    def agent_made(original: Any, arguments: Any, reference: Any, reward_model: Any) -> Any:
        models.update(reference=reference, reward_model=reward_model, eos=reference.config.eos_token_id)
        return original(arguments, reference, reward_model)

    def prompts_drawn(original: Any, *inputs: Any) -> Any:
        seen.append({"prompts": original(*inputs), "steps": []})
        return seen[-1]["prompts"]

    def updated(original: Any, arguments: Any, agent: Any, optimizer: Any, responses: Any, per_token: Any) -> Any:
        parts = models | {"policy": agent.policy, "value": agent.value}
        copies = {name: copy.deepcopy(part) for name, part in parts.items()}
        lr = optimizer.param_groups[0]["lr"]
        seen[-1] |= copies | {"beta": agent.beta.item(), "lr": lr, "responses": responses, "per_token": per_token}
        history = original(arguments, agent, optimizer, responses, per_token)
        seen[-1]["after"] = weights_of(agent)
        return history

    def batch_drawn(original: Any, *inputs: Any) -> Any:
        for index in original(*inputs):
            seen[-1]["steps"].append({"rows": index.tolist()})
            yield index

    def gradient_made(original: Any, agent: Any) -> None:
        original(agent)
        if seen:  # past the reward model
            seen[-1]["steps"][-1] |= {"agent": copy.deepcopy(agent), "gradient": gradients_of(agent)}

    def summarized(original: Any, *inputs: Any) -> Any:
        seen[-1]["metrics"] = original(*inputs)
        return seen[-1]["metrics"]

    watch("fine_tune", spread)
    watch("make_agent", agent_made)
    watch("prompt_batch", prompts_drawn)
    watch("update", updated)
    watch("minibatches", batch_drawn)
    watch("average_gradients", gradient_made)
    watch("summarize", summarized)
    flags = "--sft-size 64 --num-pairs 20 --min-accuracy 0 --response-length 4 --batch-size 12 --num-minibatches 2"
    flags += " --update-epochs 2 --total-episodes 24 --eval-episodes 4 --learning-rate 0.003 --temperature 0.8"
    flags += " --gamma 0.9 --max-grad-norm 0.5 --beta-controller doubling --kl-target 0.01 --no-self-check"
    arguments = rlhf.parse_args([*flags.split(), "--run-dir", str(tmp_path)])
    rlhf.train(arguments)

    assert len(seen) == 2 and seen[0]["beta"] == pytest.approx(0.15)
    assert seen[1]["beta"] == pytest.approx(0.075)  # the policy was still the reference
    adam = AdamByHand(arguments)
    for iteration, known in enumerate(seen):
        assert known["lr"] == pytest.approx(0.003 * (1 - iteration / 2))
        follow_by_hand(arguments, known, adam)
    assert float(seen[1]["metrics"]["kl/ref_exact"]) > 0.01, "the policy has not moved"


def weights_of(agent: Any) -> list[Tensor]:
    return [p.detach().double() for p in agent.parameters()]


def gradients_of(agent: Any) -> list[Tensor]:
    return [torch.zeros_like(p).double() if p.grad is None else p.grad.double() for p in agent.parameters()]


class AdamByHand:
    """Global norm, moments and step of all parameters, with ε where TensorFlow has it."""

    def __init__(self, arguments: Any):
        self.arguments, self.t = arguments, 0
        self.moments: list[tuple[Any, Any]] = []

    def step(self, before: list[Tensor], gradient: list[Tensor], lr: float) -> list[Tensor]:
        self.t += 1
        length = math.sqrt(sum(float(g.square().sum()) for g in gradient))
        shorter = min(1.0, self.arguments.max_grad_norm / length)
        old = self.moments or [(0.0, 0.0)] * len(gradient)
        both = list(zip(old, gradient, strict=True))
        self.moments = [(0.9 * m + 0.1 * shorter * g, 0.999 * v + 0.001 * (shorter * g) ** 2) for (m, v), g in both]
        size = lr * math.sqrt(1 - 0.999**self.t) / (1 - 0.9**self.t)
        moved = zip(before, self.moments, strict=True)
        return [theta - size * m / (v.sqrt() + self.arguments.adam_eps) for theta, (m, v) in moved]


def follow_by_hand(arguments: Any, known: dict[str, Any], adam: AdamByHand) -> None:
    """One iteration; float32 against float64 is right to about 1e-5, a gradient to 1e-4 of its length."""
    for name in ("policy", "value", "reference", "reward_model"):
        known[name].double()
    answers = known["responses"].tokens[:, known["responses"].prompt_columns :].tolist()
    rows: list[dict[str, Any]] = []
    for prompt, answer in zip(known["prompts"], answers, strict=True):
        length = answer.index(known["eos"]) + 1 if known["eos"] in answer else len(answer)
        rows.append({"prompt": prompt, "answer": answer[:length], "text": prompt + answer[:length]})
    with torch.no_grad():
        figures = rollout_by_hand(arguments, known, rows)
    assert 0 < sum(figures["charts/ended"]) < len(rows), "all answers end alike"
    for name, stored in known["per_token"].items():
        for number, row in enumerate(rows):
            mine = torch.tensor(row[name]).float()
            assert torch.allclose(stored[number][: len(mine)], mine, atol=2e-4), f"{name} of answer {number}"
            assert not stored[number][len(mine) :].any(), f"{name} where answer {number} has no token"

    history = []
    afterwards = [weights_of(step["agent"]) for step in known["steps"][1:]] + [known["after"]]
    for step, after in zip(known["steps"], afterwards, strict=True):
        before = weights_of(step["agent"])
        agent = step["agent"].double()
        agent.zero_grad()
        losses = loss_by_hand(arguments, agent.policy, agent.value, [rows[i] for i in step["rows"]])
        history.append({name: float(x) for name, x in losses.items()})
        (losses["policy"] + arguments.vf_coef * losses["value"]).backward()
        gradient = gradients_of(agent)
        length = math.sqrt(sum(float(g.square().sum()) for g in gradient))
        for (name, _), mine, told in zip(agent.named_parameters(), gradient, step["gradient"], strict=True):
            assert float((mine - told).norm()) < 2e-4 * length, f"the gradient of {name} is that of other answers"
        expected = adam.step(before, step["gradient"], known["lr"])  # its gradient, so that rounding does not add up
        for (name, _), mine, told in zip(agent.named_parameters(), expected, after, strict=True):
            assert torch.allclose(told, mine, atol=1e-6, rtol=1e-5), f"the step of {name}"
    check_figures(known["metrics"], rows, figures, history)


def check_figures(metrics: dict[str, Any], rows: list[Any], figures: dict[str, Any], history: list[Any]) -> None:
    """Everything that an iteration logs but times and settings."""
    expected = {
        "losses/policy_loss": [step["policy"] for step in history],
        "losses/value_loss": [step["value"] for step in history],
        "losses/entropy": [step["entropy"] for step in history],
        "losses/clipfrac": [step["clipped"] for step in history],
        "kl/old_k1": [step["k1"] for step in history],
        "kl/old": [step["k3"] for step in history],
    }
    logged = {tag: float(x) for tag, x in metrics.items()}
    for tag, values in (expected | figures).items():
        assert logged.pop(tag) == pytest.approx(np.mean(values), rel=1e-3, abs=1e-4), tag
    for tag in [tag for tag in figures if tag.startswith("kl/")]:
        assert logged.pop(f"{tag}_se") == pytest.approx(np.std(figures[tag]) / len(rows) ** 0.5, rel=1e-3, abs=1e-4), (
            tag
        )
    returns = np.array([x for row in rows for x in row["returns"]])
    values = np.array([x for row in rows for x in row["values"]])
    explained = 1 - np.var(returns - values) / np.var(returns)
    assert logged.pop("losses/explained_variance") == pytest.approx(explained, abs=1e-3)
    assert logged.pop("charts/minibatches") == len(history)
    assert set(logged) == {"charts/beta", "charts/gold"}


# ------------------------------------------------------------------------------------------------ a known optimum


def enumerated(vocabulary: int, length: int) -> list[list[int]]:
    """Every answer: of full length, or ended by the token 0."""
    whole = [list(text) for text in itertools.product(range(vocabulary), repeat=length)]
    return [list(x) for x in dict.fromkeys(tuple(t[: t.index(0) + 1] if 0 in t else t) for t in whole)]


@pytest.mark.slow
def test_ppo_closes_the_gap_to_the_best_regularised_reward() -> None:
    """The best E[r] - β·KL(π‖π_ref) of any policy is β·log E_ref[exp(r/β)] (Donsker-Varadhan); 97 % is asked."""
    answers, beta = enumerated(4, 3), 0.5
    table = {
        tuple(a): float(r) for a, r in zip(answers, np.random.default_rng(1).normal(size=len(answers)), strict=True)
    }
    reference = gpt2(vocabulary=4, width=32, spread=1.2)
    agent = rlhf.Agent(copy.deepcopy(reference), None, beta=beta)

    def logprobs(model: Any) -> Tensor:
        return torch.stack([plain_logprobs(model, [1], a).double().sum() for a in answers])

    def objective(model: Any) -> float:
        p, q = logprobs(model), logprobs(reference)
        return float((p.exp() * (torch.tensor(list(table.values())) - beta * (p - q))).sum())

    log_ref, rewards = logprobs(reference), torch.tensor(list(table.values()), dtype=torch.float64)
    assert float(log_ref.exp().sum()) == pytest.approx(1, abs=1e-5)
    best, start = beta * float((log_ref + rewards / beta).logsumexp(0)), objective(agent.policy)
    score = lambda responses: torch.tensor([table[tuple(text[1:])] for text in responses.texts()])
    arguments = args(response_length=3, missing_eos_penalty=0.0, num_minibatches=4, update_epochs=4, vf_coef=0.5)
    optimizer = optimizer_of(agent)
    torch.manual_seed(0)
    iterations = 60
    for i in range(iterations):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - i / iterations)
        answers_now = rlhf.rollout(arguments, agent, reference, score, [[1]] * 512, 0)
        rlhf.update(arguments, agent, optimizer, answers_now.responses, answers_now.per_token)
    closed = (objective(agent.policy) - start) / (best - start)
    assert best - start > 0.3 and 0.97 < closed < 1


# ------------------------------------------------------------------------------------------------ a short run


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder of a run of one iteration of the built-in task, and responses and figures of each rollout."""
    seen: list[Any] = []
    original = rlhf.rollout

    def rollout(*inputs: Any) -> Any:
        answers = original(*inputs)
        seen.append((answers.responses, dict(answers.figures)))
        return answers

    cwd = tmp_path_factory.mktemp("short")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlhf, "rollout", rollout)
        flags = [*SMALL["rlhf_ppo_gpt2"], "--total-episodes", "128", "--run-dir", str(cwd)]
        rlhf.train(rlhf.parse_args(flags))
    (folder,) = cwd.iterdir()
    return folder, seen


@pytest.mark.detail("R1")
@pytest.mark.detail("R31")
def test_ppo_learns_from_the_saved_reward_model_which_reads_whole_texts(short_run: Any) -> None:
    """Self-check, evaluation, iteration, evaluation: each score is transformers' for the one text."""
    folder, seen = short_run
    model = GPT2ForSequenceClassification.from_pretrained(folder / "reward_model").eval()
    assert len(seen) == 4
    for responses, figures in seen:
        for tokens, mask, score in list(zip(responses.tokens, responses.mask, figures["charts/proxy"], strict=True))[
            :8
        ]:
            with torch.no_grad():
                logit = float(model(tokens[mask][None]).logits)
            assert float(score) == pytest.approx(model.config.reward_gain * logit + model.config.reward_bias, abs=1e-4)


@pytest.mark.detail("R20")
def test_policy_and_value_learn_from_where_they_start(short_run: Any) -> None:
    """Each weight is within some Adam steps of the model it was copied from; most have left it."""
    folder, _ = short_run
    agent = torch.load(folder / "checkpoint.pt", weights_only=True)["agent"]
    for part, start, kind in (
        ("policy", "sft", GPT2LMHeadModel),
        ("value", "reward_model", GPT2ForSequenceClassification),
    ):
        before = kind.from_pretrained(folder / start).state_dict()
        moves = torch.cat([(agent[f"{part}.{key}"] - value).abs().flatten() for key, value in before.items()])
        assert float(moves.max()) < 3e-3 and float((moves > 0).float().mean()) > 0.5, part


def test_a_new_run_makes_its_stages_also_where_folders_have_their_names(tmp_path: Path, monkeypatch: Any) -> None:
    gpt2().save_pretrained(tmp_path / "sft")
    monkeypatch.chdir(tmp_path)
    run, made = rlhf.Run(args(), CPU, rlhf.word_tokenizer()), gpt2()
    assert run.stage("sft", "loss", lambda: made) is made
    assert (run.folder / "sft" / "model.safetensors").exists()
    run.close()


# ------------------------------------------------------------------------------------------------ the built-in task


def test_people_write_the_grammar_and_repeat_nothing() -> None:
    rng = random.Random(0)
    for _ in range(300):
        words = rlhf.opinion(rng)
        categories = [rlhf.CATEGORY[word] for word in words]
        assert len(words) < 24 and categories[0] in "HODI" and categories[-1] in "+-0"
        adjectives = [word for word, c in zip(words, categories, strict=True) if c in "+-0"]
        assert len(adjectives) == len(set(adjectives))
        text = " ".join(words)
        faultless = rlhf.judge(text, True)
        assert rlhf.judge(text, False) == pytest.approx(max(faultless - 1, -3))


@pytest.mark.detail("R31")
@pytest.mark.parametrize(
    ("text", "meaning", "faults"),
    [
        ("the film was good", 1, 0),
        ("the film was not good", -1, 0),
        ("it felt never bad", 1, 0),
        ("it felt very good", 1.5, 0),
        ("it felt not very good", -1.5, 0),
        ("it was good and dull", 0, 0),
        ("it was good and warm and lovely", 3, 0),
        ("the plot was long", 0, 0),
        ("it was good and good", 1, 1),
        ("it was good good", 1, 2),
        ("the was good", 1, 1),
        ("it was very very good", 2.25, 1),
        ("it was good and", 1, 1),
        ("it was <pad> good", 1, 2),
    ],
)
def test_the_judge_weighs_meaning_and_faults(text: str, meaning: float, faults: float) -> None:
    assert rlhf.judge(text, True) == pytest.approx(3 * math.tanh(meaning / 3) - faults, abs=1e-6)


@pytest.mark.detail("R31")
def test_annotators_prefer_by_gold_and_training_sees_only_their_choices(monkeypatch: Any) -> None:
    task, policy = rlhf.load_task(rlhf.Args(sft_size=50), CPU)
    task.judge = lambda text, ended: float(len(text.split()))  # long texts are liked, by 3 nats a word
    random.seed(0)
    torch.manual_seed(0)
    pairs = rlhf.annotate(args(num_pairs=400), task, policy)
    assert len(pairs) == 400
    same_prompt = sum(a[0] == b[0] for a, b in pairs)
    gaps = [len(task.decode(a).split()) - len(task.decode(b).split()) for a, b in pairs]
    wins = np.mean([g > 0 for g in gaps if g])
    sizes = np.abs([g for g in gaps if g])
    assert same_prompt == 400 and wins == pytest.approx(np.mean(1 / (1 + np.exp(-3.0 * sizes))), abs=0.06)
    task.judge = None  # rewards need no judge
    model = rlhf.as_scorer(policy)
    score = lambda responses: rlhf.reward_scores(model, responses.tokens, responses.mask)
    figures = rlhf.rollout(args(), rlhf.Agent(policy, None), policy, score, task.prompts[:8], task.eos).figures
    assert "charts/gold" not in figures
