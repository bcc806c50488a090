"""What a policy with a memory must do: an LSTM by hand, episodes that begin and end within a segment, minibatches of
whole environments, play; and two tasks that need it."""

import copy
import functools
import itertools
import tempfile
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import MODULES
from gymnasium import spaces
from test_control import folder
from torch import Tensor

lstm: Any = MODULES["ppo_lstm"]
CHOICE = spaces.MultiDiscrete([2, 3])
BOTH = pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
STARTS = {  # [T, N] of 9 steps in 4 environments: which observations begin an episode
    "never": [],
    "at once": [(0, n) for n in range(4)],
    "in the middle": [(0, 1), (3, 1), (4, 2), (5, 2), (5, 3), (8, 3)],
    "always": [*itertools.product(range(9), range(4))],
}
EVERY_START = pytest.mark.parametrize("pattern", STARTS)


def begin(pattern: str) -> Tensor:
    starts = torch.zeros(9, 4, dtype=torch.bool)
    for t, n in STARTS[pattern]:
        starts[t, n] = True
    return starts


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_hand(memory: Any, obs: Tensor, starts: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [T, N, H] of an LSTM of float64, one observation of one environment after the other and gate by gate, and
    the state [2, N, H] after the last."""
    outputs, states = [], []
    for n in range(obs.shape[1]):
        output, cell = state[0, n], state[1, n]
        row = []
        for x, starting in zip(obs[:, n], starts[:, n].tolist(), strict=True):
            if starting:
                output, cell = torch.zeros(2, len(cell), dtype=torch.float64)
            sums = memory.weight_ih_l0 @ x + memory.bias_ih_l0 + memory.weight_hh_l0 @ output + memory.bias_hh_l0
            enter, keep, new, leave = sums.view(4, -1)
            cell = cell / (1 + (-keep).exp()) + new.tanh() / (1 + (-enter).exp())
            output = cell.tanh() / (1 + (-leave).exp())
            row.append(output)
        outputs.append(torch.stack(row))
        states.append(torch.stack([output, cell]))
    return torch.stack(outputs, 1), torch.stack(states, 1)


def agent_by_hand(agent: Any, obs: Tensor, starts: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [T, N, A, M], values [T, N] and states [S, N, H] of an agent of float64."""
    parts = [by_hand(memory, obs, starts, part) for memory, part in zip(agent.lstms, state.split(2), strict=True)]
    logits = parts[0][0] @ agent.actor.weight.T + agent.actor.bias
    values = parts[-1][0] @ agent.critic.weight[0] + agent.critic.bias
    return logits.view(*obs.shape[:2], *agent.choices), values, torch.cat([state for _, state in parts])


def lively(agent: Any) -> Any:
    """Larger weights and longer memories, so that what is remembered shows in what is chosen."""
    draws = torch.Generator().manual_seed(3)
    agent.actor.weight.data *= 600
    for name, p in agent.lstms.named_parameters():
        p.data *= 2
        if "bias" in name:
            p.data += 0.1 * torch.randn(p.shape, generator=draws)
            p.data[64:128] += 0.7  # of the gate that keeps
    return agent


def new_agent(obs_dim: int = 3, space: Any = CHOICE, **options: Any) -> Any:
    torch.manual_seed(0)
    return lively(lstm.Agent(obs_dim, space, **options))


def in_float64(agent: Any) -> Any:
    return copy.deepcopy(agent).double()


def gradients(loss: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True, materialize_grads=True))


# ---------------------------------------------------------------------------------------------------- the memory


@pytest.mark.detail("32")
@pytest.mark.detail("LSTM-i")
@BOTH
def test_weights_are_orthogonal_and_both_biases_zero(shared: bool) -> None:
    """As whole matrices with gain 1; each memory is a draw of its own."""
    agent = lstm.Agent(5, CHOICE, shared)
    assert len(agent.lstms) == (1 if shared else 2)
    for memory in agent.lstms:
        names = {name for name, _ in memory.named_parameters()}
        assert names == {"weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"}
        assert memory.weight_ih_l0.shape == (4 * 64, 5) and memory.weight_hh_l0.shape == (4 * 64, 64)
        for weight in (memory.weight_ih_l0, memory.weight_hh_l0):
            torch.testing.assert_close(weight.T @ weight, torch.eye(weight.shape[1]), atol=1e-5, rtol=0)
        assert not memory.bias_ih_l0.any() and not memory.bias_hh_l0.any()
    assert shared or not torch.equal(agent.lstms[0].weight_hh_l0, agent.lstms[1].weight_hh_l0)


@pytest.mark.detail("33")
@BOTH
def test_a_memory_begins_with_zeros_which_are_not_learned(shared: bool) -> None:
    """Output and cell of each; an episode's first step has the same outcome whatever was remembered before."""
    agent = new_agent(shared_lstm=shared)
    assert agent.initial_state.shape == (2 if shared else 4, 1, 64)
    assert not agent.initial_state.any() and not agent.initial_state.requires_grad
    obs, state = draw(1, 4, 3).float(), draw(len(agent.initial_state), 4, 64).float()
    first = agent(obs, torch.zeros(1, 4, dtype=torch.bool), agent.initial_state.expand(-1, 4, -1))
    again = agent(obs, torch.ones(1, 4, dtype=torch.bool), state)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.detail("34")
@EVERY_START
def test_a_memory_and_its_gradients_gate_by_gate(pattern: str) -> None:
    """Outputs, state afterwards and the gradient of all that goes in, through all steps."""
    torch.manual_seed(0)
    memory: Any = torch.nn.LSTM(3, 5, dtype=torch.float64)
    obs, state = draw(9, 4, 3).requires_grad_(), draw(2, 4, 5, seed=1).requires_grad_()
    starts = begin(pattern)
    got = lstm.remember(memory, obs, starts, state)
    want = by_hand(memory, obs, starts, state)
    learned = [*memory.parameters(), obs, state]
    weights = draw(9, 4, 5, seed=2), draw(2, 4, 5, seed=3)
    slopes = [gradients(sum((w * x).sum() for w, x in zip(weights, out, strict=True)), learned) for out in (got, want)]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*slopes)


@pytest.mark.detail("34")
@pytest.mark.detail("LSTM-a")
@EVERY_START
def test_nothing_is_remembered_across_a_start_and_all_since(pattern: str) -> None:
    """An output depends on an observation exactly if both are of one episode and it is not later; on the state before
    the segment if none has begun since."""
    torch.manual_seed(0)
    memory = torch.nn.LSTM(3, 5, dtype=torch.float64)
    obs, state = draw(9, 4, 3).requires_grad_(), draw(2, 4, 5, seed=1).requires_grad_()
    outputs, _ = lstm.remember(memory, obs, begin(pattern), state)
    for t, n in itertools.product(range(9), range(4)):
        of_obs, of_state = gradients(outputs[t, n].sum(), [obs, state])
        begun = max([s for s, where in STARTS[pattern] if where == n and s <= t], default=-1)
        depends = {(s, n) for s in range(max(begun, 0), t + 1)}
        assert {tuple(place) for place in of_obs.any(-1).nonzero().tolist()} == depends
        assert set(of_state.any(-1).nonzero()[:, 1].tolist()) == (set() if begun >= 0 else {n})


@pytest.mark.detail("13")
@pytest.mark.detail("34")
@pytest.mark.detail("36")
@pytest.mark.detail("LSTM-e")
@BOTH
@EVERY_START
def test_an_agent_and_its_gradients_by_hand(shared: bool, pattern: str) -> None:
    """Logits from the first memory and values from the last, whose loss goes through all steps of an episode."""
    agent = new_agent(shared_lstm=shared)
    double = in_float64(agent)
    state, starts = draw(len(agent.initial_state), 4, 64), begin(pattern)
    obs = draw(9, 4, 3)
    got = agent(obs.float(), starts, state.float())
    want = agent_by_hand(double, obs, starts, state)
    torch.testing.assert_close(got, tuple(x.float() for x in want), atol=1e-5, rtol=1e-5)
    weights = [draw(*x.shape, seed=5).float() for x in want]
    slopes = [
        gradients(sum((w * x).sum() for w, x in zip(weights, out, strict=True)), [*which.parameters()])
        for which, out in ((agent, got), (double, want))
    ]
    torch.testing.assert_close(slopes[0], [x.float() for x in slopes[1]], atol=1e-3, rtol=1e-4)


@pytest.mark.detail("13")
@BOTH
def test_policy_and_value_share_a_memory_or_have_their_own(shared: bool) -> None:
    """With a memory of its own, the value's gradient does not reach the policy's, nor the other way round."""
    agent = new_agent(shared_lstm=shared)
    logits, values, state = agent(draw(9, 4, 3).float(), begin("in the middle"), agent.initial_state.expand(-1, 4, -1))
    assert state.shape == (2 if shared else 4, 4, 64)
    for out, memory in ((logits, agent.lstms[0]), (values, agent.lstms[-1])):
        agent.zero_grad()
        out.square().sum().backward(retain_graph=True)
        assert all(p.grad.any() for p in memory.parameters())
        reached = {name for name, p in agent.named_parameters() if p.grad is not None}
        mine = {f"lstms.{[*agent.lstms].index(memory)}", "actor" if out is logits else "critic"}
        assert {name.rpartition(".")[0] for name in reached} == mine


@pytest.mark.detail("36")
@EVERY_START
def test_one_segment_is_two_halves_with_the_state_carried(pattern: str) -> None:
    """To 1e-6, also where an episode begins with the second half."""
    agent = new_agent(shared_lstm=False)
    obs, starts, state = draw(8, 4, 3).float(), begin(pattern)[:8], draw(4, 4, 64).float()
    with torch.no_grad():
        whole = agent(obs, starts, state)
        first = agent(obs[:4], starts[:4], state)
        second = agent(obs[4:], starts[4:], first[2])
    for one, a, b in zip(whole[:2], first, second, strict=False):
        torch.testing.assert_close(one, torch.cat([a, b]), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(whole[2], second[2], atol=1e-6, rtol=1e-6)


@pytest.mark.detail("35")
@BOTH
def test_environments_in_another_order_are_the_same(shared: bool) -> None:
    """Outputs are in that order, losses as they were."""
    agent = new_agent(shared_lstm=shared)
    order = torch.tensor([2, 0, 3, 1])
    batch = {
        "obs": draw(9, 4, 3).float(),
        "starts": begin("in the middle"),
        "state": draw(len(agent.initial_state), 4, 64, seed=1).float(),
        "masks": torch.tensor([[True, True, False], [True, True, True]]).expand(9, 4, 2, 3),
        "actions": (draw(9, 4, 2, seed=2) > 0).long(),
        **{x: draw(9, 4, seed=3 + i).float() for i, x in enumerate(("logprobs", "advantages", "values", "returns"))},
    }
    other = {name: x[:, order] for name, x in batch.items()}
    given = [(x["obs"], x["starts"], x["state"]) for x in (batch, other)]
    for one, two in zip(agent(*given[0]), agent(*given[1]), strict=True):
        torch.testing.assert_close(one[:, order], two, atol=1e-5, rtol=1e-5)
    args = lstm.Args()
    torch.testing.assert_close(
        lstm.ppo_loss(args, agent, batch), lstm.ppo_loss(args, agent, other), atol=1e-5, rtol=1e-5
    )


@pytest.mark.detail("LSTM-b")
@pytest.mark.detail("LSTM-c")
@pytest.mark.detail("LSTM-f")
@BOTH
def test_successors_are_seen_with_the_state_of_their_own_step(shared: bool) -> None:
    """V of the successor of step t in environment n, alone and by hand; a memory that has ended is not emptied."""
    agent = new_agent(shared_lstm=shared)
    double = in_float64(agent)
    next_obs, states = draw(5, 3, 3), draw(len(agent.initial_state), 5, 3, 64, seed=1)
    next_obs[2, 1] = 0
    with torch.no_grad():
        got = lstm.successor_values(agent, next_obs.float(), states.float())
        assert got.shape == (5, 3)
        for t, n in itertools.product(range(5), range(3)):
            alone = next_obs[None, None, t, n], torch.zeros(1, 1, dtype=torch.bool), states[:, None, t, n]
            _, value, _ = agent_by_hand(double, *alone)
            assert float(got[t, n]) == pytest.approx(float(value), abs=1e-5)


@pytest.mark.detail("LSTM-k")
@pytest.mark.parametrize("environment, component", [(0, 0), (2, 1)])
def test_a_single_component_without_a_valid_action_is_an_error(environment: int, component: int) -> None:
    mask = np.ones((3, 5), np.int8)
    mask[environment, [slice(0, 2), slice(2, 5)][component]] = 0
    with pytest.raises(lstm.RunError, match="leaves a component of MultiDiscrete.* without a valid action"):
        lstm.valid_actions(CHOICE, {"action_mask": mask})


# ---------------------------------------------------------------------------------------------------- training


@dataclass
class Minibatch:
    batch: dict[str, Tensor]
    agent: Any  # of float64, as it was
    logratio: Tensor | None = None
    values: Tensor | None = None
    approx_kl: float = 1.0


@dataclass
class Segment:
    """What an iteration saw; lists have an entry for each step."""

    agent: Any = None  # of float64, as it played
    obs: list[Tensor] = field(default_factory=list)  # what the environments show before each step
    led_to: list[Tensor] = field(default_factory=list)  # and what the step leads to
    logits: list[Tensor] = field(default_factory=list)  # by which actions were chosen
    actions: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # which the policy is given
    next_values: Tensor | None = None
    minibatches: list[Minibatch] = field(default_factory=list)

    def starts(self) -> Tensor:
        return torch.stack(self.obs)[..., 0] == 0


@functools.cache
def followed(shared: bool = True) -> list[Segment]:
    """Three iterations in environments whose episodes, many of a single step, are out of phase."""
    segments: list[Segment] = [Segment()]
    agents: list[Any] = []
    made, act, ppo_loss, gae = lstm.Agent, lstm.act, lstm.ppo_loss, lstm.compute_gae
    surrogate, value_loss = lstm.clipped_surrogate_loss, lstm.value_loss
    step, end = lstm.NormalizedEnvs.step, lstm.Run.end_iteration
    said: list[Tensor] = []

    def agent_made(*args: Any, **options: Any) -> Any:
        agents.append(lively(made(*args, **options)))
        agents[0].register_forward_hook(lambda _, given, out: said.append(out[0].detach()))
        return agents[0]

    def acted(agent: Any, obs: Tensor, starts: Tensor, state: Tensor, *others: Any) -> Any:
        segments[-1].agent = segments[-1].agent or in_float64(agent)
        segments[-1].states.append(state.clone())
        actions, after = act(agent, obs, starts, state, *others)
        segments[-1].logits.append(said[-1][0])
        segments[-1].actions.append(torch.from_numpy(actions))
        return actions, after

    def stepped(envs: Any, actions: Any) -> Any:
        segments[-1].obs.append(torch.from_numpy(envs.obs).double())
        outcome = step(envs, actions)
        segments[-1].led_to.append(torch.from_numpy(outcome[0]).double())
        return outcome

    def estimated(rewards: Tensor, values: Tensor, next_values: Tensor, *others: Any) -> Any:
        segments[-1].next_values = next_values.clone()
        return gae(rewards, values, next_values, *others)

    def lossy(args: Any, agent: Any, batch: dict[str, Tensor]) -> Any:
        assert not any(x.requires_grad for x in batch.values()), "a gradient leaves the segment"
        kept = {name: x.clone() for name, x in batch.items()}
        segments[-1].minibatches.append(Minibatch(kept, in_float64(agent)))
        loss, stats = ppo_loss(args, agent, batch)
        segments[-1].minibatches[-1].approx_kl = float(stats["losses/approx_kl"])
        return loss, stats

    def surrogated(logratio: Tensor, *others: Any) -> Tensor:
        segments[-1].minibatches[-1].logratio = logratio.detach().clone()
        return surrogate(logratio, *others)

    def valued(values: Tensor, *others: Any) -> Tensor:
        segments[-1].minibatches[-1].values = values.detach().clone()
        return value_loss(values, *others)

    def ended(run: Any, metrics: Any) -> None:
        end(run, metrics)
        segments.append(Segment())

    with pytest.MonkeyPatch.context() as here, tempfile.TemporaryDirectory() as runs:
        here.setattr(lstm, "Agent", agent_made)
        here.setattr(lstm, "act", acted)
        here.setattr(lstm, "ppo_loss", lossy)
        here.setattr(lstm, "compute_gae", estimated)
        here.setattr(lstm, "clipped_surrogate_loss", surrogated)
        here.setattr(lstm, "value_loss", valued)
        here.setattr(lstm.NormalizedEnvs, "step", stepped)
        here.setattr(lstm.Run, "end_iteration", ended)
        shape = {"num_envs": 6, "num_steps": 16, "num_minibatches": 3, "update_epochs": 3, "total_timesteps": 288}
        plain = {"norm_obs": False, "norm_reward": False, "learning_rate": 3e-3, "ent_coef": 0.01}
        lstm.train(
            lstm.Args(
                env_id="counting_envs:Ragged-v0", run_dir=runs, device="cpu", shared_lstm=shared, **shape, **plain
            )
        )
    return segments[:-1]


def rows_of(segment: Segment, minibatch: Minibatch) -> list[int]:
    """Which environments the columns of a minibatch are: each is all that one of them showed, in its order."""
    truth = torch.stack(segment.obs).float()
    found = []
    for column in minibatch.batch["obs"].unbind(1):
        same = [n for n in range(truth.shape[1]) if torch.equal(truth[:, n], column)]
        assert len(same) == 1, "a column of a minibatch is not the segment of an environment"
        found += same
    return found


def log_probabilities(logits: Tensor, actions: Tensor) -> Tensor:
    """Of the actions [..., 1] by logits [..., 1, M] that are all valid."""
    p = logits.double().exp()
    return (p / p.sum(-1, keepdim=True)).gather(-1, actions.unsqueeze(-1)).log()[..., 0, 0]


def test_the_followed_run_has_what_the_tests_below_need() -> None:
    """Episodes of one step before longer ones, others that reach from one segment into the next, out of phase."""
    segments = followed()
    starts = torch.cat([segment.starts() for segment in segments])
    assert len(segments) == 3 and starts.shape == (48, 6)
    assert (starts[:-2] & starts[1:-1] & ~starts[2:]).any(0).all(), "a single step, then a longer episode, everywhere"
    assert 0 < starts[16].sum() < 6 and 0 < starts[32].sum() < 6
    assert (starts.any(1) & ~starts.all(1)).float().mean() > 0.7
    assert all(segment.logits[0].std(0).min() > 0.05 for segment in segments)


@pytest.mark.detail("33")
@pytest.mark.detail("34")
@pytest.mark.detail("LSTM-a")
@pytest.mark.detail("LSTM-b")
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_the_policy_acts_on_its_own_episode_alone(shared: bool) -> None:
    """In every step by hand: from zeros at each start, and otherwise from where the last step left it, across segments,
    too, whatever was computed in between."""
    segments = followed(shared)
    state = torch.zeros(2 if shared else 4, 6, 64, dtype=torch.float64)
    assert not segments[0].states[0].any()
    for segment in segments:
        with torch.no_grad():
            logits, _, after = agent_by_hand(segment.agent, torch.stack(segment.obs), segment.starts(), state)
        torch.testing.assert_close(segment.states[0].double(), state, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.stack(segment.logits).double(), logits, atol=1e-4, rtol=1e-4)
        state = after


@pytest.mark.detail("34")
@pytest.mark.detail("36")
@pytest.mark.detail("LSTM-a")
@pytest.mark.detail("LSTM-d")
def test_before_the_first_step_every_ratio_is_one() -> None:
    """To 1e-5 in every step of every environment, of the policy that acted; later ones have moved."""
    for segment in followed():
        played = log_probabilities(torch.stack(segment.logits), torch.stack(segment.actions))
        first, *_, last = segment.minibatches
        for minibatch in segment.minibatches:
            stored = minibatch.batch["logprobs"].double()
            torch.testing.assert_close(stored, played[:, rows_of(segment, minibatch)], atol=1e-5, rtol=0)
        assert first.logratio is not None and last.logratio is not None
        assert first.logratio.shape == (16, 2) and first.logratio.exp().sub(1).abs().max() < 1e-5
        assert abs(first.approx_kl) < 1e-6
        assert last.logratio.exp().sub(1).abs().max() > 1e-3


@pytest.mark.detail("35")
def test_minibatches_are_whole_environments_in_the_order_of_time() -> None:
    """Each epoch takes every environment once, in an order of its own; what belongs to one stays together."""
    orders = []
    for segment in followed():
        actions = torch.stack(segment.actions)
        taken = [rows_of(segment, minibatch) for minibatch in segment.minibatches]
        assert [len(rows) for rows in taken] == [2] * 9
        epochs = [sum(taken[i : i + 3], []) for i in (0, 3, 6)]
        assert all(sorted(epoch) == [*range(6)] for epoch in epochs)
        orders += [tuple(epoch) for epoch in epochs]
        kept: dict[tuple[str, int], Tensor] = {}
        for minibatch, rows in zip(segment.minibatches, taken, strict=True):
            assert torch.equal(minibatch.batch["actions"], actions[:, rows])
            assert torch.equal(minibatch.batch["starts"], segment.starts()[:, rows])
            for (name, x), (column, row) in itertools.product(minibatch.batch.items(), enumerate(rows)):
                assert torch.equal(x[:, column], kept.setdefault((name, row), x[:, column])), name
    assert len({*orders}) == len(orders) == 9


@pytest.mark.detail("36")
@pytest.mark.detail("LSTM-e")
@pytest.mark.detail("LSTM-h")
def test_every_minibatch_begins_with_the_state_before_the_segment() -> None:
    """The one that the policy had before its first step, in all epochs; `followed` sees that no gradient goes there."""
    for number, segment in enumerate(followed()):
        assert segment.states[0].any() == (number > 0)
        for minibatch in segment.minibatches:
            rows = rows_of(segment, minibatch)
            assert minibatch.batch["state"].shape == (2, 2, 64)
            assert torch.equal(minibatch.batch["state"], segment.states[0][:, rows])


@pytest.mark.detail("36")
@pytest.mark.detail("LSTM-e")
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_every_minibatch_goes_through_its_segment_with_the_weights_of_the_moment(shared: bool) -> None:
    """Ratios and values by hand, from the first of the segment's observations on."""
    for segment in followed(shared):
        for minibatch in segment.minibatches:
            rows = rows_of(segment, minibatch)
            obs = torch.stack(segment.obs)[:, rows]
            state = segment.states[0][:, rows].double()
            with torch.no_grad():
                logits, values, _ = agent_by_hand(minibatch.agent, obs, segment.starts()[:, rows], state)
            logprobs = log_probabilities(logits, torch.stack(segment.actions)[:, rows])
            assert minibatch.logratio is not None and minibatch.values is not None
            ratios = minibatch.logratio.double() + minibatch.batch["logprobs"].double()
            torch.testing.assert_close(ratios, logprobs, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(minibatch.values.double(), values, atol=1e-4, rtol=1e-4)


@pytest.mark.detail("LSTM-b")
@pytest.mark.detail("LSTM-c")
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_what_a_step_led_to_is_valued_with_all_that_its_episode_has_shown(shared: bool) -> None:
    """By hand from the segment's beginning to each step's outcome, also where an episode or the segment ends."""
    for segment in followed(shared):
        obs, led_to, starts = torch.stack(segment.obs), torch.stack(segment.led_to), segment.starts()
        none = torch.zeros(1, 6, dtype=torch.bool)
        assert segment.next_values is not None
        for t in range(16):
            seen = torch.cat([obs[: t + 1], led_to[t : t + 1]])
            with torch.no_grad():
                begins = torch.cat([starts[: t + 1], none])
                _, values, _ = agent_by_hand(segment.agent, seen, begins, segment.states[0].double())
            torch.testing.assert_close(segment.next_values[t].double(), values[-1], atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------------------------- play


def saved_policy(small_args: Any, monkeypatch: Any, **changes: Any) -> tuple[str, Any]:
    """A run folder, and its agent in float64."""
    agents = []
    made = lstm.Agent

    def agent_made(*args: Any, **options: Any) -> Any:
        agents.append(lively(made(*args, **options)))
        return agents[-1]

    monkeypatch.setattr(lstm, "Agent", agent_made)
    plain = {"env_id": "counting_envs:Ragged-v0", "norm_obs": False, "norm_reward": False, "total_timesteps": 128}
    args = small_args(lstm, seed=2, **plain | changes)
    lstm.train(args)
    return str(folder(args)), in_float64(agents[0])


def best_actions(agent: Any, episode: Tensor) -> list[int]:
    """What is most probable in each step of an episode [T, D] that is fed at once."""
    starts = torch.zeros(len(episode), 1, dtype=torch.bool)
    state = torch.zeros(len(agent.lstms) * 2, 1, 64, dtype=torch.float64)
    with torch.no_grad():
        logits, _, _ = agent_by_hand(agent, episode[:, None].double(), starts, state)
    return [int(x) for x in logits[:, 0, 0].argmax(-1)]


def forgetful_actions(agent: Any, episode: Tensor) -> list[int]:
    return [best_actions(agent, row[None])[0] for row in episode]


@pytest.mark.detail("33")
@pytest.mark.detail("34")
@pytest.mark.detail("LSTM-g")
@BOTH
def test_each_policy_and_each_episode_has_a_state_of_its_own(shared: bool, small_args: Any, monkeypatch: Any) -> None:
    """Two policies of one folder in turn, each through two episodes; all as if an episode were fed at once."""
    path, agent = saved_policy(small_args, monkeypatch, shared_lstm=shared)
    episodes = [3 * draw(12, 4, seed=seed).float() for seed in range(4)]
    policies = [lstm.load_policy(path, sample=False) for _ in range(2)]
    got: list[list[int]] = [[] for _ in episodes]  # 0 and 2 by one, 1 and 3 by the other
    for round_, t, who in itertools.product(range(2), range(12), range(2)):
        number = 2 * round_ + who
        got[number].append(int(policies[who](episodes[number][t].numpy(), t == 0)))
    assert got == [best_actions(agent, episode) for episode in episodes]
    assert all(got[i] != forgetful_actions(agent, episode) for i, episode in enumerate(episodes)), "memory must matter"
    straight_on = [best_actions(agent, torch.cat(pair))[12:] for pair in zip(episodes[:2], episodes[2:], strict=True)]
    assert straight_on[0] != got[2] or straight_on[1] != got[3], "memory of the last episode must matter"


class Watched(gym.Wrapper[Any, Any, Any, Any]):
    """Keeps the observations that were acted on and the actions of each episode."""

    def __init__(self, env: Any):
        super().__init__(env)
        self.episodes: list[tuple[list[Tensor], list[int]]] = []

    def reset(self, **options: Any) -> Any:
        obs, info = self.env.reset(**options)
        self.obs = torch.from_numpy(obs.copy())
        self.episodes.append(([], []))
        return obs, info

    def step(self, action: Any) -> Any:
        seen, chosen = self.episodes[-1]
        seen.append(self.obs)
        chosen.append(int(action))
        obs, *rest = self.env.step(action)
        self.obs = torch.from_numpy(obs.copy())
        return obs, *rest


@pytest.mark.detail("34")
@pytest.mark.detail("LSTM-g")
def test_playing_is_feeding_whole_episodes(small_args: Any, monkeypatch: Any) -> None:
    """One policy through many episodes, with its best actions; and the returns of an evaluation are those."""
    path, agent = saved_policy(small_args, monkeypatch)
    env = Watched(gym.make("counting_envs:Ragged-v0", disable_env_checker=True))
    policy = lstm.load_policy(path, sample=False)
    args = lstm.parse_args(["--evaluate", path, "--eval-episodes", "30", "--no-eval-sample"])
    scores = [lstm.play(env, policy, args.seed + number, None) for number in range(30)]
    expected = [best_actions(agent, torch.stack(seen)) for seen, _ in env.episodes]
    assert [chosen for _, chosen in env.episodes] == expected
    assert max(map(len, expected)) == 9 and min(map(len, expected)) == 1
    assert expected != [forgetful_actions(agent, torch.stack(seen)) for seen, _ in env.episodes]
    assert lstm.evaluate(args) == scores


# ---------------------------------------------------------------------------------------------------- flags and ids


@pytest.mark.parametrize(
    "name, env_id", [("ppo_lstm", "CartPoleNoVel-v1"), ("ppo_discrete", "ppo_lstm:CartPoleNoVel-v1")]
)
def test_the_cart_without_velocities_is_the_cart_with_zeros_in_their_place(name: str, env_id: str) -> None:
    """Beside CartPole-v1 to its end, cut after 500 steps by a hand that knows the velocities, or dead before."""
    module: Any = MODULES[name]
    plain = {"norm_obs": False, "norm_reward": False}
    envs = [module.NormalizedEnvs(module.Args(env_id=i, **plain), 2) for i in (env_id, "CartPole-v1")]
    for env in envs:
        env.reset(5)
    blind, full = envs
    lengths = []
    for t in range(520):
        np.testing.assert_array_equal(blind.obs, full.obs * [1, 0, 1, 0])
        assert full.obs[:, [1, 3]].any() and blind.obs.dtype == np.float32
        steer = full.obs @ np.array([0.02, 0.1, 1.0, 0.5]) > 0
        actions = np.stack([steer, np.full(2, t % 7 == 0)])[[0, 1], [0, 1]][:, None].astype(int)
        (one, *outcome), (two, *expected) = blind.step(actions), full.step(actions)
        np.testing.assert_array_equal(one, two * [1, 0, 1, 0])
        for x, y in zip(outcome, expected, strict=True):
            np.testing.assert_array_equal(x, y)
        lengths += [(episode.env, episode.length) for episode in outcome[-1]]
    assert (0, 500) in lengths and len(lengths) > 10


@pytest.mark.parametrize("num_envs, num_minibatches", [(5, 2), (2, 4)])
def test_environments_that_no_minibatches_divide_are_refused(
    num_envs: int, num_minibatches: int, small_args: Any, tmp_path: Any
) -> None:
    """In one sentence with both flags, before anything is written."""
    args = small_args(lstm, num_envs=num_envs, num_minibatches=num_minibatches)
    with pytest.raises(lstm.UsageError, match=r"^--num-minibatches \S* ?must divide --num-envs[^.\n]*$"):
        lstm.train(args)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------- learning


LEARNING = {
    "num_envs": 16,
    "num_steps": 32,
    "num_minibatches": 4,
    "update_epochs": 4,
    "learning_rate": 5e-3,
    "ent_coef": 0.01,
    "gamma": 1.0,
    "gae_lambda": 1.0,
    "norm_obs": False,
    "norm_reward": False,
}


def learn(name: str, task: str, steps: int, small_args: Any) -> tuple[float, float]:
    """Mean return of the last 100 episodes of training, and of 200 of the best actions afterwards."""
    module: Any = MODULES[name]
    args = small_args(module, env_id=f"counting_envs:{task}-v0", total_timesteps=steps, **LEARNING)
    metrics = module.train(args)
    flags = ["--evaluate", str(folder(args)), "--eval-episodes", "200", "--no-eval-sample"]
    return metrics["episodic_return"], float(np.mean(module.evaluate(module.parse_args(flags))))


@pytest.mark.slow
@pytest.mark.detail("36")
def test_a_cue_is_remembered_over_eight_blank_steps(small_args: Any) -> None:
    """Without a memory there is nothing to choose by."""
    assert min(learn("ppo_lstm", "Recall", 24_576, small_args)) > 0.95
    assert max(abs(score - 0.5) for score in learn("ppo_discrete", "Recall", 24_576, small_args)) < 0.1


@pytest.mark.slow
@pytest.mark.detail("34")
@pytest.mark.detail("LSTM-a")
def test_an_episode_is_told_from_the_one_before(small_args: Any) -> None:
    """A memory that is never emptied, or a step late, earns some 0.7 and 0.55."""
    assert min(learn("ppo_lstm", "Leak", 8_192, small_args)) > 0.95
