"""GRPO and RLOO: groups, losses and estimators by enumeration and by hand; two iterations of training in float64."""

import copy
import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_rlhf
import torch
from conftest import MODULES, SMALL, scalars
from test_rlhf import PROMPTS, alone_in_float64, enumerated, gpt2, plain_logprobs
from torch import Tensor

grpo: Any = MODULES["grpo_gpt2"]
CPU = torch.device("cpu")
tensor = lambda *x: torch.tensor(x, dtype=torch.float64)


def args(**changes: Any) -> Any:
    small = grpo.Args(response_length=6, batch_size=8, group_size=4, num_minibatches=2, inner_steps=2)
    return dataclasses.replace(small, **changes)


@pytest.fixture
def double(monkeypatch: Any) -> Any:
    """The script in float64, whatever it asks for."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def train(cwd: Path, *flags: Any) -> Path:
    """A small run inside this process; returns its folder."""
    grpo.train(grpo.parse_args([str(x) for x in (*SMALL["grpo_gpt2"], "--run-dir", cwd / "runs", *flags)]))
    (folder,) = cwd.glob("runs/*")
    return folder


# ------------------------------------------------------------------------------------------------ what RLHF has, too

SHARED: list[tuple[str, dict[str, Any]]] = [  # tests of test_rlhf.py, and what they are called with
    ("test_the_mask_comes_from_lengths_and_not_from_tokens", {}),
    ("test_the_cache_and_the_padding_do_not_change_what_is_drawn", {}),
    ("test_long_prompts_keep_their_end_and_short_ones_are_padded", {}),
    ("test_a_long_prompt_keeps_its_end_and_a_long_answer_its_beginning", {}),
    ("test_built_in_prompts_end_where_a_clause_may_pause", {}),
    ("test_strings_are_joined_before_they_become_tokens", {}),
    ("test_each_pass_uses_every_prompt_once_in_a_new_order", {}),
    ("test_the_score_is_read_at_the_last_real_token_of_prompt_and_response", {}),
    ("test_the_new_head_is_normal_with_variance_one_over_width_plus_one", {}),
    ("test_preferences_follow_bradley_and_terry", {}),
    ("test_the_two_answers_of_a_pair_are_compared_with_each_other", {}),
    ("test_accuracy_is_counted_on_pairs_that_were_never_trained_on", {"count": 50, "held_out": 5}),
    ("test_scores_of_the_start_policy_have_mean_0_and_variance_1", {}),
    ("test_fitting_uses_each_sample_once_in_a_random_order_with_falling_steps", {}),
    ("test_the_end_is_learnt_and_padding_is_not", {}),
    ("test_tokens_are_drawn_from_the_whole_softmax_at_its_temperature", {"temperature": 0.7}),
    ("test_the_first_end_stops_an_answer_and_is_part_of_it", {}),
    ("test_no_dropout_in_any_mode", {}),
    ("test_the_judge_weighs_meaning_and_faults", {"text": "it was not good good", "meaning": -1, "faults": 2}),
    ("test_annotators_prefer_by_gold_and_training_sees_only_their_choices", {}),
]


@pytest.mark.detail("R1")
@pytest.mark.detail("R2")
@pytest.mark.detail("R3")
@pytest.mark.detail("R4")
@pytest.mark.detail("R5")
@pytest.mark.detail("R6")
@pytest.mark.detail("R7")
@pytest.mark.detail("R8")
@pytest.mark.detail("R9")
@pytest.mark.detail("R10")
@pytest.mark.detail("R11")
@pytest.mark.detail("R12")
@pytest.mark.detail("R13")
@pytest.mark.detail("R14")
@pytest.mark.detail("R15")
@pytest.mark.detail("R16")
@pytest.mark.detail("R18")
@pytest.mark.detail("R31")
@pytest.mark.detail("G17")
@pytest.mark.detail("G18")
@pytest.mark.detail("G20")
@pytest.mark.parametrize(("name", "values"), SHARED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_the_text_of_rlhf_does_here_what_it_does_there(
    name: str, values: dict[str, Any], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    made = grpo.Agent
    monkeypatch.setattr(test_rlhf, "rlhf", grpo)
    monkeypatch.setattr(grpo, "Agent", lambda policy, *_: made(policy))  # without a value
    test = getattr(test_rlhf, name)
    given = {"tmp_path": tmp_path, "monkeypatch": monkeypatch, "capsys": capsys} | values
    if "answered" in inspect.signature(test).parameters:
        agent = grpo.Agent(gpt2(vocabulary=12))
        torch.manual_seed(5)
        responses, _ = grpo.sample_responses(test_rlhf.args(), agent.policy, PROMPTS, 0)
        assert responses.ended.any() and not responses.ended.all()
        given["answered"] = agent, None, responses
    test(**{key: given[key] for key in inspect.signature(test).parameters})


@pytest.mark.detail("R19")
@pytest.mark.detail("G16")
def test_the_reference_and_the_reward_model_never_move(tmp_path: Path, monkeypatch: Any) -> None:
    """The KL is that to a reference which is another object than the policy, and stays as it was."""
    frozen: list[Any] = []
    original = grpo.Run.stage

    def stage(self: Any, *inputs: Any) -> Any:
        model = original(self, *inputs)
        frozen.append((model, copy.deepcopy(model.state_dict())))
        return model

    monkeypatch.setattr(grpo.Run, "stage", stage)
    folder = train(tmp_path, "--learning-rate", 0.01, "--kl-in", "loss")
    assert len(frozen) == 2
    for model, before in frozen:
        assert not any(p.requires_grad for p in model.parameters())
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert scalars(folder)["kl/ref"][-1][1] > 0.01


# ------------------------------------------------------------------------------------------------ groups

RETURNS = [3.0, 1.0, 2.0, -2.0, 0.5, 0.5, 0.5, 0.5, 1e3, 1e3, 1e3 + 4, 1e3]


@pytest.mark.detail("G2")
@pytest.mark.detail("G3")
@pytest.mark.detail("G7")
@pytest.mark.detail("L1")
@pytest.mark.detail("L4")
@pytest.mark.detail("L5")
@pytest.mark.detail("G6")
@pytest.mark.parametrize("size", [2, 4, 12])
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("baseline", ["mean", "rloo"])
def test_advantages_by_loops_over_each_group(baseline: str, scale: str, size: int) -> None:
    expected: list[float] = []
    for first in range(0, 12, size):
        group = RETURNS[first : first + size]
        for i, own in enumerate(group):
            others = [x for j, x in enumerate(group) if j != i]
            base = sum(others) / (size - 1) if baseline == "rloo" else sum(group) / size
            std = 1.0 if scale == "none" else float(np.std(group if scale == "group" else RETURNS)) + 1e-4
            expected.append((own - base) / std)
    advantages = grpo.group_advantages(tensor(*RETURNS), size, baseline, scale)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)
    defaults = grpo.Args()
    assert (defaults.baseline, defaults.scale) == ("mean", "none")  # no std unless asked, nor for RLOO


@pytest.mark.detail("G4")
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("value", [0.7, 0.1, 1e8, -3.3])
def test_equal_returns_have_no_advantage_at_all(value: float, scale: str) -> None:
    """In float32 the mean of twelve times 0.7 is not 0.7."""
    equal = torch.full((12,), value)
    for baseline in ("mean", "rloo"):
        assert not grpo.group_advantages(equal, 12, baseline, scale).any()
        beside = torch.cat([equal, equal + torch.arange(12) * abs(value)])
        both = grpo.group_advantages(beside, 12, baseline, scale)
        assert not both[:12].any() and both[12:].count_nonzero() >= 11


@pytest.mark.detail("G7")
@pytest.mark.detail("L1")
@pytest.mark.parametrize(("baseline", "factor"), [("mean", 2 / 3), ("rloo", 1.0)])
def test_the_expected_gradient_over_all_groups_is_the_true_one_or_a_multiple(baseline: str, factor: float) -> None:
    """All 4³ groups of three draws from four answers; the true gradient is that of Σ p·r."""
    logits = tensor(0.3, -0.5, 1.0, 0.1).requires_grad_()
    rewards = tensor(1.0, 2.0, -1.0, 0.5)
    (true,) = torch.autograd.grad((logits.softmax(0) * rewards).sum(), logits)
    expected = torch.zeros_like(true)
    for group in itertools.product(range(4), repeat=3):
        drawn = torch.tensor(group)
        logp = logits.log_softmax(0)[drawn]
        advantages = grpo.group_advantages(rewards[drawn], 3, baseline, "none")
        (gradient,) = torch.autograd.grad((advantages * logp).mean(), logits)
        expected += float(logp.detach().sum().exp()) * gradient
    torch.testing.assert_close(expected, factor * true, atol=1e-12, rtol=1e-12)


# ------------------------------------------------------------------------------------------------ the loss


@pytest.mark.detail("8")
@pytest.mark.detail("G11")
@pytest.mark.detail("G12")
@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "flat"),
    [
        (2.0, 0.5, -1.0, False),  # a good token that has become rarer is pulled back
        (2.0, 1.2, -2.4, False),
        (2.0, 1.5, -2.6, True),  # above 1 + high
        (-2.0, 0.5, 1.8, True),  # below 1 - low
        (-2.0, 0.95, 1.9, False),
        (-2.0, 3.0, 6.0, False),  # a bad one that has become more likely, up to the bound
        (-2.0, 7.0, 8.0, True),
    ],
)
def test_seven_rows_of_signs_and_ratio_regions(advantage: float, ratio: float, value: float, flat: bool) -> None:
    """Clipped at 1 - 0.1 and 1 + 0.3, bounded by 4."""
    logratio = tensor(math.log(ratio)).requires_grad_()
    loss = grpo.clipped_surrogate(logratio, tensor(advantage), 0.1, 0.3, 4.0)
    assert loss.tolist() == pytest.approx([value])
    (gradient,) = torch.autograd.grad(loss.sum(), logratio)
    assert float(gradient) == pytest.approx(0.0 if flat else -advantage * ratio)


@pytest.mark.detail("G15")
@pytest.mark.parametrize("moved", [False, True])
def test_estimators_of_the_kl_have_the_gradients_they_are_named_by(moved: bool) -> None:
    """Σ over all tokens with the probability that each was drawn with, also where the policy has moved since."""
    logits = tensor(0.3, -0.5, 1.0, 0.1).requires_grad_()
    q = tensor(-0.2, 0.4, 0.0, 0.6).log_softmax(0)
    drawn = (logits.detach() + (tensor(0.2, 0.1, -0.3, 0.0) if moved else 0)).log_softmax(0)
    p = logits.log_softmax(0)
    gradient = lambda x: torch.autograd.grad(x, logits, retain_graph=True)[0]
    expected = lambda per_token: (drawn.exp() * per_token).sum()
    reverse = gradient((p.exp() * (p - q)).sum())
    forward = gradient((q.exp() * (q - p)).sum())
    right = expected(grpo.kl_penalty(p - drawn, p - q, "reverse"))
    assert float(right.detach()) == pytest.approx(float((p.exp() * (p - q)).sum().detach()))
    torch.testing.assert_close(gradient(right), reverse)
    published = gradient(expected(grpo.kl_penalty(p - drawn, p - q, "forward")))
    if not moved:
        torch.testing.assert_close(published, forward)
        assert not torch.allclose(forward, reverse, rtol=0.1)
        assert float(gradient(expected(p - q)).abs().max()) < 1e-12  # k1
        torch.testing.assert_close(gradient(expected(0.5 * (p - q).square())), reverse)  # k2
    assert grpo.Args().kl_gradient == "reverse" and grpo.Args().kl_in == "reward"


LENGTHS = [1, 4, 2, 5]
REAL = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
FORMULAS: dict[str, Callable[[list[Any]], Any]] = {  # of the losses of each response's tokens, with R = 6
    "token": lambda rows: sum(sum(row) for row in rows) / sum(map(len, rows)),
    "sequence": lambda rows: sum(sum(row) / len(row) for row in rows) / len(rows),
    "constant": lambda rows: sum(sum(row) for row in rows) / (6 * len(rows)),
}


@pytest.mark.detail("G13")
@pytest.mark.detail("L3")
@pytest.mark.parametrize("norm", FORMULAS)
def test_what_each_token_counts(norm: str) -> None:
    torch.manual_seed(0)
    losses = torch.randn(4, 5, dtype=torch.float64)
    rows = [row[:length].tolist() for row, length in zip(losses, LENGTHS, strict=True)]
    weights = grpo.token_weights(REAL, REAL.sum().double(), norm, 6)
    assert not weights[~REAL].any()
    assert float((weights * losses)[REAL].mean()) == pytest.approx(FORMULAS[norm](rows), rel=1e-6)
    if norm == "constant":  # so that a response's gradient is that of its log-probability, whatever its length
        assert len(weights[REAL].unique()) == 1


@pytest.fixture
def answered(double: Any) -> tuple[Any, Any, Any, dict[str, Tensor]]:
    """An agent that has moved away from its reference, the reference, answers to two prompts and data of tokens."""
    reference = gpt2(vocabulary=12)
    agent = grpo.Agent(copy.deepcopy(reference))
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    torch.manual_seed(7)
    prompts = [PROMPTS[1]] * 4 + [PROMPTS[4]] * 4
    score = lambda responses: torch.arange(8.0)
    rollout = grpo.rollout(args(), agent, reference, score, prompts, 0)
    assert rollout.responses.ended.any() and not rollout.responses.ended.all()
    per_token = rollout.per_token
    per_token["logprobs"] += 0.3 * torch.randn_like(per_token["logprobs"]) * rollout.responses.real
    advantages = grpo.group_advantages(rollout.figures["charts/episodic_return"], 4, "mean", "none")
    per_token["advantages"] = advantages[:, None] * rollout.responses.real
    return agent, reference, rollout.responses, per_token


def one_update(agent: Any, responses: Any, per_token: dict[str, Tensor], **changes: Any) -> tuple[Any, list[Any]]:
    """The agent after `update`, whose gradients are those of the last step, and the history."""
    moved = copy.deepcopy(agent)
    torch.manual_seed(2)
    arguments = args(max_grad_norm=1e9, **changes)
    optimizer = torch.optim.Adam(moved.parameters(), 1e-3, eps=1e-5)
    return moved, grpo.update(arguments, moved, optimizer, responses, per_token)


@pytest.mark.detail("G14")
@pytest.mark.detail("R26")
@pytest.mark.parametrize("norm", FORMULAS)
def test_micro_batches_and_wider_padding_change_no_loss(answered: Any, norm: str) -> None:
    agent, _, responses, per_token = answered
    results = []
    pad = lambda x, value: torch.nn.functional.pad(x, (3, 4), value=value)
    wide = responses._replace(
        tokens=pad(responses.tokens, 11), mask=pad(responses.mask, False), prompt_columns=responses.prompt_columns + 3
    )
    filled = {name: torch.nn.functional.pad(x, (0, 4), value=math.nan) for name, x in per_token.items()}
    for name in filled:
        filled[name][~wide.real] = math.nan
    for texts, tokens, micro in ((responses, per_token, None), (responses, per_token, 3), (wide, filled, 1)):
        moved, history = one_update(
            agent, texts, tokens, num_minibatches=2, inner_steps=1, micro_batch_size=micro, loss_norm=norm, kl_in="loss"
        )
        gradients = [p.grad for p in moved.parameters() if p.grad is not None]
        results.append([*gradients, *(stats[name] for stats in history for name in sorted(stats))])
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.detail("G10")
@pytest.mark.detail("G8")
def test_one_step_a_batch_has_no_loss_and_no_clip_but_a_gradient(answered: Any) -> None:
    agent, reference, responses, per_token = answered
    with torch.no_grad():
        per_token["logprobs"] = grpo.score_tokens(args(), agent, reference, responses)["logprobs"]
    _, history = one_update(agent, responses, per_token, num_minibatches=1, inner_steps=1, loss_norm="sequence")
    (stats,) = history
    loss = float(stats["losses/policy_loss"])
    assert abs(loss) < 1e-9 and not stats["losses/clipfrac"] and abs(float(stats["kl/old"])) < 1e-12
    assert float(stats["losses/grad_norm"]) > 0.1


@pytest.mark.detail("G5")
def test_groups_of_equal_returns_count_in_the_mean(answered: Any) -> None:
    """Half of the responses have no advantage: the gradient is half of that of the others alone."""
    agent, _, responses, per_token = answered
    per_token["advantages"][4:] = 0.0
    gradients = []
    for index in (torch.arange(8), torch.arange(4)):
        part = responses.rows(index)
        tokens = {name: x[index][:, : part.real.shape[1]] for name, x in per_token.items()}
        moved, _ = one_update(agent, part, tokens, num_minibatches=1, inner_steps=1, loss_norm="sequence")
        gradients.append(torch.cat([p.grad.flatten() for p in moved.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1] / 2, atol=1e-12, rtol=1e-9)
    assert float(gradients[0].norm()) > 1e-3


@pytest.mark.detail("6")
@pytest.mark.detail("R26")
def test_every_epoch_uses_each_response_once_in_a_new_order(answered: Any, monkeypatch: Any) -> None:
    agent, _, responses, per_token = answered
    per_token["row"] = torch.arange(8.0)[:, None].expand(responses.real.shape)
    used: list[int] = []
    original = grpo.grpo_loss

    def loss(arguments: Any, agent: Any, part: Any, tokens: dict[str, Tensor]) -> Any:
        used.extend(tokens["row"][:, 0].long().tolist())
        return original(arguments, agent, part, tokens)

    monkeypatch.setattr(grpo, "grpo_loss", loss)
    _, history = one_update(agent, responses, per_token, num_minibatches=4, inner_steps=3)
    epochs = [used[i : i + 8] for i in (0, 8, 16)]
    assert len(history) == 12 and all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(8))


@pytest.mark.detail("S3")
def test_epochs_end_before_the_step_that_passes_the_limit(answered: Any, monkeypatch: Any) -> None:
    agent, _, responses, per_token = answered
    original = grpo.grpo_loss
    told = lambda *inputs: (original(*inputs)[0], {"kl/old": torch.tensor(0.2)})
    monkeypatch.setattr(grpo, "grpo_loss", told)
    for limit, looked_at in ((0.2 / 1.5 * 0.99, 1), (0.2 / 1.5 * 1.01, 4), (None, 4)):
        moved, history = one_update(agent, responses, per_token, target_kl=limit)
        same = all(torch.equal(a, b) for a, b in zip(moved.parameters(), agent.parameters(), strict=True))
        assert len(history) == looked_at and same == (looked_at == 1)


# ------------------------------------------------------------------------------------------------ training by hand


def loss_by_hand(arguments: Any, policy: Any, rows: list[dict[str, Any]], figures: dict[str, list[Any]]) -> Tensor:
    """The loss of some answers, one token after the other; what a run logs of each token goes into `figures`."""
    losses: list[list[Any]] = []
    for row in rows:
        losses.append([])
        logits = alone_in_float64(policy, row["text"], "lm_head") / arguments.temperature
        for i, token in enumerate(row["answer"]):
            p = logits[len(row["prompt"]) + i - 1].softmax(0)
            r = p[token] / math.exp(row["logprobs"][i])
            bounded = torch.clamp(r, max=arguments.max_ratio)
            kept = torch.maximum(
                torch.minimum(r, tensor(1 + arguments.clip_high)[0]), tensor(1 - arguments.clip_low)[0]
            )
            loss = -torch.minimum(bounded * row["advantage"], kept * row["advantage"])
            if arguments.kl_in == "loss":
                u = math.exp(row["ref_logprobs"][i]) / p[token]
                k3 = u - 1 - u.log()
                loss = loss + arguments.beta * (k3 if arguments.kl_gradient == "forward" else r * k3)
            losses[-1].append(loss)
            low, high = r < 1 - arguments.clip_low, r > 1 + arguments.clip_high
            told = {"losses/entropy": -(p * p.log()).sum(), "losses/clipfrac": low or high}
            told |= {"losses/clipfrac_low": low, "losses/clipfrac_high": high}
            told |= {"kl/old_k1": -r.log(), "kl/old": r - 1 - r.log()}
            for name, x in told.items():
                figures.setdefault(name, []).append(float(torch.as_tensor(x).detach()))
    return FORMULAS[arguments.loss_norm](losses)


def rollout_by_hand(arguments: Any, seen: dict[str, Any]) -> list[dict[str, Any]]:
    """Each answer with its log-probabilities, figures and advantage, group by group."""
    responses, rows = seen["responses"], []
    answers = responses.tokens[:, responses.prompt_columns :].tolist()
    for number, answer in enumerate(answers):
        prompt = seen["prompts"][number // arguments.group_size]
        length = answer.index(seen["eos"]) + 1 if seen["eos"] in answer else len(answer)
        row: dict[str, Any] = {"prompt": prompt, "answer": answer[:length], "text": prompt + answer[:length]}
        mine = responses.tokens[number][responses.mask[number]].tolist()
        assert mine == row["text"], f"answer {number} belongs to another prompt"
        both = {}
        for name in ("policy", "reference"):
            logits = alone_in_float64(seen[name], row["text"], "lm_head") / arguments.temperature
            both[name] = logits.log_softmax(1)[len(prompt) - 1 : -1]
        taken = {name: [float(x[i, token]) for i, token in enumerate(row["answer"])] for name, x in both.items()}
        row["logprobs"], row["ref_logprobs"] = taken["policy"], taken["reference"]
        distances = [a - b for a, b in zip(row["logprobs"], row["ref_logprobs"], strict=True)]
        model = seen["reward_model"]
        scored = alone_in_float64(model, row["text"], "score")[-1, 0]
        proxy = float(scored) * model.config.reward_gain + model.config.reward_bias
        ended = row["answer"][-1] == seen["eos"]
        score = proxy - (0 if ended else arguments.missing_eos_penalty)
        returned = score - arguments.beta * sum(distances) if arguments.kl_in == "reward" else score
        exact = float((both["policy"].exp() * (both["policy"] - both["reference"])).sum())
        row["figures"] = {
            "charts/proxy": proxy,
            "charts/score": score,
            "charts/episodic_return": returned,
            "charts/episodic_length": len(row["answer"]),
            "charts/ended": float(ended),
            "kl/ref": sum(distances),
            "kl/ref_k2": sum(d**2 / 2 for d in distances),
            "kl/ref_k3": sum(math.exp(-d) - 1 + d for d in distances),
            "kl/ref_exact": exact,
        }
        rows.append(row)
    returns = [row["figures"]["charts/episodic_return"] for row in rows]
    for number, row in enumerate(rows):
        first = number // arguments.group_size * arguments.group_size
        group = returns[first : first + arguments.group_size]
        others = [x for i, x in enumerate(group, first) if i != number]
        base = np.mean(others if arguments.baseline == "rloo" else group)
        std = {"none": 1.0, "group": np.std(group) + 1e-4, "batch": np.std(returns) + 1e-4}[arguments.scale]
        row["advantage"] = (returns[number] - base) / std
        row["figures"]["charts/dead_groups"] = float(np.allclose(group, group[0]))
    return rows


def watched(monkeypatch: Any) -> list[dict[str, Any]]:
    """What `train` works with in each iteration: models, prompts, answers, the agent around each step, metrics."""
    seen: list[dict[str, Any]] = []
    models: dict[str, Any] = {}

    def watch(name: str, spy: Callable[..., Any]) -> None:
        original = getattr(grpo, name)
        monkeypatch.setattr(grpo, name, lambda *inputs: spy(original, *inputs))

    def spread(_: Any, arguments: Any, task: Any, policy: Any) -> Any:
        """In place of fine-tuning: a policy far from uniform, whose answers end or do not."""
        for parameter in policy.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=1.5 / policy.config.n_embd**0.5)
        with torch.no_grad():
            policy.lm_head.weight[task.eos] *= 3
        return policy

    def answers_made(original: Any, arguments: Any, task: Any, agent: Any, reference: Any, reward_model: Any) -> Any:
        models.update(reference=reference, reward_model=reward_model, eos=task.eos)
        return original(arguments, task, agent, reference, reward_model)

    def prompts_drawn(original: Any, *inputs: Any) -> Any:
        seen.append({"prompts": original(*inputs), "steps": []})
        return seen[-1]["prompts"]

    def updated(original: Any, arguments: Any, agent: Any, optimizer: Any, responses: Any, per_token: Any) -> Any:
        copies = {"policy": copy.deepcopy(agent.policy), "lr": optimizer.param_groups[0]["lr"]}
        seen[-1] |= models | copies | {"responses": responses, "per_token": per_token}
        history = original(arguments, agent, optimizer, responses, per_token)
        seen[-1]["after"] = copy.deepcopy(agent)
        return history

    def batch_drawn(original: Any, *inputs: Any) -> Any:
        for index in original(*inputs):
            seen[-1]["steps"].append({"rows": index.tolist()})
            yield index

    def gradient_made(original: Any, agent: Any) -> None:
        original(agent)
        if seen:  # past the reward model
            gradient = {name: p.grad.clone() for name, p in agent.named_parameters()}
            seen[-1]["steps"][-1] |= {"agent": copy.deepcopy(agent), "gradient": gradient}

    def summarized(original: Any, *inputs: Any) -> Any:
        seen[-1]["metrics"] = original(*inputs)
        return seen[-1]["metrics"]

    spies: dict[str, Callable[..., Any]] = {"prompt_batch": prompts_drawn, "update": updated}
    spies |= {"fine_tune": spread, "answers_of": answers_made}
    spies |= {"minibatches": batch_drawn, "average_gradients": gradient_made, "summarize": summarized}
    for name, spy in spies.items():
        watch(name, spy)
    return seen


HAND = [
    "--num-minibatches 2 --inner-steps 2 --clip-high 0.28 --clip-low 0.1",
    "--baseline rloo --loss-norm constant --num-minibatches 1 --inner-steps 2 --missing-eos-penalty 0.5",
    "--scale group --loss-norm sequence --kl-in loss --kl-gradient forward --inner-steps 2 --num-minibatches 1",
    "--scale batch --kl-in loss --beta 0.5 --max-ratio 1.5 --inner-steps 3 --num-minibatches 1 --micro-batch-size 5",
]


@pytest.mark.detail("G1")
@pytest.mark.detail("G2")
@pytest.mark.detail("G8")
@pytest.mark.detail("G10")
@pytest.mark.detail("G13")
@pytest.mark.detail("G14")
@pytest.mark.detail("G15")
@pytest.mark.detail("G17")
@pytest.mark.detail("G18")
@pytest.mark.detail("G19")
@pytest.mark.detail("G23")
@pytest.mark.detail("G27")
@pytest.mark.detail("L2")
@pytest.mark.detail("R15")
@pytest.mark.detail("R17")
@pytest.mark.detail("R28")
@pytest.mark.detail("R30")
@pytest.mark.detail("3")
@pytest.mark.detail("4")
@pytest.mark.detail("8")
@pytest.mark.detail("11")
@pytest.mark.parametrize("flags", HAND)
def test_two_iterations_of_training_by_hand(double: Any, tmp_path: Path, monkeypatch: Any, flags: str) -> None:
    """Groups, advantages, every gradient, every step and every logged figure, text by text in float64, to 1e-6."""
    seen = watched(monkeypatch)
    small = "--sft-size 32 --num-pairs 20 --min-accuracy 0 --response-length 6 --batch-size 12 --group-size 3"
    small += " --total-episodes 24 --eval-episodes 4 --learning-rate 0.001 --temperature 0.8 --max-grad-norm 0.2"
    arguments = grpo.parse_args([*small.split(), "--no-self-check", *flags.split(), "--run-dir", str(tmp_path)])
    grpo.train(arguments)
    assert len(seen) == 2
    moments: dict[str, Tensor] = {}
    ended: list[float] = []
    t = 0
    for iteration, known in enumerate(seen):
        assert known["lr"] == pytest.approx(0.001 * (1 - iteration / 2)) and len(known["prompts"]) == 4
        with torch.no_grad():
            rows = rollout_by_hand(arguments, known)
        ended += [row["figures"]["charts/ended"] for row in rows]
        for number, row in enumerate(rows):
            lengths = len(row["answer"])
            for name, mine in (("logprobs", row["logprobs"]), ("advantages", [row["advantage"]] * lengths)):
                stored = known["per_token"][name][number]
                assert stored[:lengths].tolist() == pytest.approx(mine, abs=1e-6), f"{name} of answer {number}"
                assert not stored[lengths:].any()
        history: dict[str, list[float]] = {}
        afterwards = [step["agent"] for step in known["steps"][1:]] + [known["after"]]
        for step, after in zip(known["steps"], afterwards, strict=True):
            t += 1
            agent = step["agent"]
            figures: dict[str, list[float]] = {}
            loss = loss_by_hand(arguments, agent.policy, [rows[i] for i in step["rows"]], figures)
            loss.backward()
            length = math.sqrt(sum(float(p.grad.square().sum()) for p in agent.parameters()))
            history.setdefault("losses/policy_loss", []).append(float(loss.detach()))
            history.setdefault("losses/grad_norm", []).append(length)
            for name, x in figures.items():
                history.setdefault(name, []).append(float(np.mean(x)))
            for (name, p), new in zip(agent.named_parameters(), after.parameters(), strict=True):
                assert float((p.grad - step["gradient"][name]).norm()) < 1e-6 * length, f"the gradient of {name}"
                g = p.grad * min(1.0, 0.2 / length)
                m = moments[f"m {name}"] = 0.9 * moments.get(f"m {name}", torch.zeros_like(g)) + 0.1 * g
                v = moments[f"v {name}"] = 0.999 * moments.get(f"v {name}", torch.zeros_like(g)) + 0.001 * g**2
                moved = known["lr"] * m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-5)
                torch.testing.assert_close(new.detach(), p.detach() - moved, atol=1e-7, rtol=1e-6)
        check_figures(known["metrics"], rows, history)
    assert 0 < sum(ended) < len(ended), "all answers end alike"
    assert abs(float(seen[1]["metrics"]["kl/ref"])) > 0.01, "the policy has not moved"


def check_figures(metrics: dict[str, Any], rows: list[dict[str, Any]], history: dict[str, list[float]]) -> None:
    """Everything that an iteration logs but times and settings."""
    logged = {tag: float(x) for tag, x in metrics.items()}
    figures = {tag: [row["figures"][tag] for row in rows] for tag in rows[0]["figures"]}
    for tag, values in (history | figures).items():
        assert logged.pop(tag) == pytest.approx(np.mean(values), rel=1e-6, abs=1e-8), tag
        if tag in figures and tag.startswith("kl/"):
            assert logged.pop(f"{tag}_se") == pytest.approx(np.std(values) / len(values) ** 0.5, rel=1e-5, abs=1e-7)
    gains = [row["advantage"] * len(row["answer"]) for row in rows]
    assert logged.pop("charts/length_gain") == pytest.approx(np.mean(gains), rel=1e-6)
    assert logged.pop("charts/minibatches") == len(history["losses/policy_loss"])
    assert set(logged) <= {"charts/gold"}


# ------------------------------------------------------------------------------------------------ a known optimum


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"baseline": "rloo", "loss_norm": "constant"}])
def test_groups_close_the_gap_to_the_best_regularised_reward(changes: dict[str, Any]) -> None:
    """The best E[r] - β·KL(π‖π_ref) of any policy is β·log E_ref[exp(r/β)] (Donsker-Varadhan); 97 % is asked."""
    answers, beta = enumerated(4, 3), 0.5
    rewards = torch.from_numpy(np.random.default_rng(1).normal(size=len(answers)))
    places = {tuple(answer): i for i, answer in enumerate(answers)}
    reference = gpt2(vocabulary=4, width=32, spread=1.2)
    agent = grpo.Agent(copy.deepcopy(reference))
    logprobs = lambda model: torch.stack([plain_logprobs(model, [1], a).double().sum() for a in answers])
    log_ref = logprobs(reference)

    def objective() -> float:
        p = logprobs(agent.policy)
        return float((p.exp() * (rewards - beta * (p - log_ref))).sum())

    best, start = beta * float((log_ref + rewards / beta).logsumexp(0)), objective()
    score = lambda responses: torch.tensor([float(rewards[places[tuple(text[1:])]]) for text in responses.texts()])
    arguments = args(response_length=3, missing_eos_penalty=0.0, num_minibatches=2, inner_steps=3, beta=beta, **changes)
    optimizer = torch.optim.Adam(agent.parameters(), 1e-3, eps=1e-5)
    torch.manual_seed(0)
    for i in range(60):
        optimizer.param_groups[0]["lr"] = 4e-3 * (1 - i / 60)
        drawn = grpo.rollout(arguments, agent, reference, score, [[1]] * 256, 0)
        returns = drawn.figures["charts/episodic_return"]
        advantages = grpo.group_advantages(returns, 8, arguments.baseline, "none")
        drawn.per_token["advantages"] = advantages[:, None] * drawn.responses.real
        grpo.update(arguments, agent, optimizer, drawn.responses, drawn.per_token)
    closed = (objective() - start) / (best - start)
    print(f"{changes}: {closed:.4f} of the gap")
    assert best - start > 0.3 and 0.97 < closed < 1


# ------------------------------------------------------------------------------------------------ what may go wrong


def told(monkeypatch: Any, score: Callable[[Any], Tensor]) -> list[tuple[Any, Any]]:
    """Rewards come from `score`; returns the policy before and after each update."""
    moved: list[tuple[Any, Any]] = []
    rollout, update = grpo.rollout, grpo.update

    def scored(arguments: Any, agent: Any, reference: Any, original: Any, *inputs: Any) -> Any:
        return rollout(arguments, agent, reference, lambda responses: score(original(responses)), *inputs)

    def updated(arguments: Any, agent: Any, *inputs: Any) -> Any:
        before = copy.deepcopy(agent)
        history = update(arguments, agent, *inputs)
        moved.append((before, copy.deepcopy(agent)))
        return history

    monkeypatch.setattr(grpo, "rollout", scored)
    monkeypatch.setattr(grpo, "update", updated)
    return moved


@pytest.mark.detail("G4")
@pytest.mark.detail("G27")
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_equal_rewards_are_counted_and_move_nothing(tmp_path: Path, monkeypatch: Any, scale: str) -> None:
    moved = told(monkeypatch, lambda scores: torch.full_like(scores, 0.7))
    folder = train(
        tmp_path, "--kl-in", "off", "--missing-eos-penalty", 0, "--scale", scale, "--total-episodes", 256, "--beta", 0
    )
    logged = scalars(folder)
    assert {x for _, x in logged["charts/dead_groups"]} == {1.0} and {x for _, x in logged["losses/grad_norm"]} == {0.0}
    for before, after in moved:
        assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert len(moved) == 2


@pytest.mark.detail("G19")
def test_answers_that_are_all_cut_off_are_compared_all_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    """Each loses the penalty; nothing is NaN, and what they are scored still tells them apart."""
    moved = told(monkeypatch, lambda scores: scores)
    original = grpo.sample_responses

    def cut_off(*inputs: Any) -> Any:
        responses, sampled = original(*inputs)
        return responses._replace(ended=torch.zeros_like(responses.ended)), sampled

    monkeypatch.setattr(grpo, "sample_responses", cut_off)
    folder = train(tmp_path, "--total-episodes", 256, "--kl-in", "off")
    logged = scalars(folder)
    assert {x for _, x in logged["charts/ended"]} == {0.0}
    for (_, proxy), (_, score) in zip(logged["charts/proxy"], logged["charts/score"], strict=True):
        assert proxy - score == pytest.approx(1.0, abs=1e-5)
    assert all(math.isfinite(x) for points in logged.values() for _, x in points)
    assert any(not torch.equal(a, b) for a, b in zip(*(x.parameters() for x in moved[0]), strict=True))


def test_a_reward_that_is_no_number_ends_the_run_in_a_sentence(tmp_path: Path, monkeypatch: Any) -> None:
    told(monkeypatch, lambda scores: scores.index_fill(0, torch.tensor([0]), math.nan))
    with pytest.raises(grpo.RunError, match="a score of the reward model is not finite"):
        train(tmp_path, "--no-self-check")


# ------------------------------------------------------------------------------------------------ backwards


@pytest.mark.detail("G21")
@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("a b c = c b a", True),
        ("a a b c = c b a a", True),
        ("a b c = c b", False),
        ("a b c = c b a a", False),
        ("a b c = a b c", False),
        ("a b c =", False),
        ("a b c = c b a =", False),
        ("a b c = c b a <pad>", False),
        ("a b c = = c b a", False),
        ("a b c c b a", False),
    ],
)
def test_only_the_whole_answer_is_right(text: str, right: bool) -> None:
    assert grpo.backwards(text, True) == float(right) and grpo.backwards(text, False) == 0.0


def test_strings_of_evaluations_are_in_no_prompt_and_no_text() -> None:
    task = grpo.reversal_task(grpo.Args(task="reverse"))
    strings = [task.decode(prompt) for prompt in task.prompts + task.held_out]
    assert len(set(strings)) == len(strings) and len(task.held_out) == 64 and len(strings) > 1000
    assert {len(string.split()) for string in strings} == {4, 5} and all(string.endswith(" =") for string in strings)
    texts = [task.decode(text).partition(" =") for text in task.texts]
    assert {letters for letters, *_ in texts} <= {task.decode(prompt).removesuffix(" =") for prompt in task.prompts}
    assert all(text[-1] == task.eos and text.count(task.eos) == 1 for text in task.texts)
    right = np.mean([answer.split() == letters.split()[::-1] for letters, _, answer in texts])
    assert 0.15 < right < 0.3 and len(texts) == 20_000
    letters = [a == b for string, _, answer in texts for a, b in zip(string.split()[::-1], answer.split(), strict=True)]
    assert 0.6 < np.mean(letters) < 0.72  # the right letter is the likeliest one at each place


def test_a_verifiable_task_needs_no_reward_model(tmp_path: Path, capsys: Any) -> None:
    folder = train(tmp_path, "--task", "reverse", "--response-length", 6, "--checkpoint-every", 1)
    assert folder.name.startswith("reverse__") and {"policy", "sft"} <= {path.name for path in folder.iterdir()}
    assert not (folder / "reward_model").exists()
    logged = scalars(folder)
    for tag in ("charts/proxy", "charts/gold"):
        assert all(0 <= x <= 1 and (128 * x).is_integer() for _, x in logged[tag])
    assert logged["charts/proxy"] == logged["charts/gold"]
    grpo.train(grpo.parse_args(["--resume", str(folder), "--total-episodes", "640"]))
    capsys.readouterr()
    grpo.evaluate(grpo.parse_args(["--evaluate", str(folder)]))
    assert "over 8 sampled responses" in capsys.readouterr().out
