"""ppo_penalty.py in training: what it keeps of the old policy, and what moves β."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import scalars
from torch.distributions import Normal, kl_divergence


def watched_run(penalty: Any, small_args: Any, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, list[Any]]:
    """Train in this process; returns the agent, copies of what each loss was given, and each call of update_beta."""
    seen: dict[str, list[Any]] = {"agents": [], "losses": [], "betas": [], "args": []}
    make, loss, update = penalty.Agent, penalty.ppo_loss, penalty.update_beta

    def made(*args: Any, **kwargs: Any) -> Any:
        seen["agents"].append(make(*args, **kwargs))
        return seen["agents"][-1]

    def lost(args: Any, agent: Any, *batch: torch.Tensor) -> Any:
        logstd = agent.actor_logstd.detach().clone()
        seen["losses"].append([x.detach().clone() for x in batch] + [logstd, float(agent.beta)])
        return loss(args, agent, *batch)

    def moved(*args: float) -> float:
        seen["betas"].append((*args, update(*args)))
        return seen["betas"][-1][-1]

    for name, function in (("Agent", made), ("ppo_loss", lost), ("update_beta", moved)):
        monkeypatch.setattr(penalty, name, function)
    args = small_args(penalty, **changes)
    seen["args"].append(args)
    penalty.train(args)
    return seen


FAST = {"total_timesteps": 128, "learning_rate": 0.02, "num_minibatches": 1, "update_epochs": 5, "max_grad_norm": 1e3}


@pytest.mark.detail("PEN-old")
def test_the_old_policy_stays_as_it_was_while_the_new_one_moves(penalty, small_args, monkeypatch) -> None:
    """In every epoch each row comes with the mean and log std that drew its action: log density as stored, std 1."""
    seen = watched_run(penalty, small_args, monkeypatch, **FAST)
    assert len(seen["losses"]) == 5
    for _, actions, logprobs, _, _, _, old_means, old_logstd, _, _ in seen["losses"]:
        assert not old_logstd.any() and old_logstd.shape == old_means.shape
        torch.testing.assert_close(Normal(old_means, 1.0).log_prob(actions).sum(-1), logprobs)
    moved = seen["losses"][-1][8]
    assert moved.abs().min() > 1e-3  # the new log std has moved, the old one has not


@pytest.mark.detail("PEN-old")
@pytest.mark.detail("PEN-beta")
def test_the_kl_that_moves_beta_is_that_of_the_batch_after_all_epochs(penalty, small_args, monkeypatch) -> None:
    """Recomputed on all rows with torch.distributions; it is what update_beta is told and what is logged."""
    changes: dict[str, Any] = FAST | {"learning_rate": 0.1, "beta": 3.0, "kl_target": 0.02}
    seen = watched_run(penalty, small_args, monkeypatch, **changes)
    assert len(seen["betas"]) == 1  # once per iteration
    (agent,), ((beta, kl, target, new_beta),) = seen["agents"], seen["betas"]
    obs, *_, old_means, old_logstd, _, _ = seen["losses"][0]
    with torch.no_grad():
        new = Normal(agent(obs)[0], agent.actor_logstd.exp())
    old = Normal(old_means, old_logstd.exp())
    expected, reverse = (float(kl_divergence(*pair).sum(-1).mean()) for pair in ((old, new), (new, old)))
    assert expected > 0.01 and abs(reverse / expected - 1) > 0.02  # far enough to tell them apart
    assert kl == pytest.approx(expected, rel=1e-3) and (beta, target) == (3.0, 0.02)
    (folder,) = Path(seen["args"][0].run_dir).iterdir()
    logged = scalars(folder)
    assert logged["losses/kl"][0][1] == pytest.approx(expected, rel=1e-3) and logged["losses/beta"][0][1] == 3.0
    assert float(agent.beta) == pytest.approx(new_beta)


@pytest.mark.detail("PEN-beta")
@pytest.mark.parametrize("adaptive, expected", [(True, [2.0, 1.0, 0.5, 0.25]), (False, [2.0] * 4)])
def test_beta_changes_between_iterations_and_only_if_it_may(
    penalty, small_args, monkeypatch, adaptive: bool, expected: list[float]
) -> None:
    """A target that is never reached: half of β in each iteration, the same for all of its minibatches."""
    seen = watched_run(penalty, small_args, monkeypatch, beta=2.0, kl_target=1e3, adaptive_beta=adaptive)
    used = [loss[-1] for loss in seen["losses"]]
    assert used == [beta for beta in expected for _ in range(8)]
