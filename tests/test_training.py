"""What `train` does with the pieces, seen from inside one process: the tests watch the functions that it calls."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BOXES, BUDGET, MODULES, scalars
from torch.utils._python_dispatch import TorchDispatchMode


def watch(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, keep: Any = None) -> list[Any]:
    """Record the arguments and the result of every call of module.name."""
    original, calls = getattr(module, name), []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls.append(keep(args, result) if keep else (args, result))
        return result

    monkeypatch.setattr(module, name, wrapper)
    return calls


def samples(args: Any, _: Any) -> list[torch.Tensor]:
    """Copies of the tensors of one ppo_loss call: obs, actions, logprobs, advantages, returns, values, ..."""
    return [x.detach().clone() for x in args[2:]]


def copies(args: Any, result: Any) -> Any:
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in args], [x.clone() for x in result]


def folder(args: Any) -> Path:
    (path,) = Path(args.run_dir).iterdir()
    return path


@pytest.mark.detail("1")
def test_segments_join_without_gap_or_repetition(gaussian, small_args, monkeypatch) -> None:
    """Episodes of 5 in segments of 7: the step counter in the stored rows runs on from segment to segment."""
    monkeypatch.setattr(gaussian.Normalizer, "merge", lambda *_: None)
    calls = watch(monkeypatch, gaussian, "ppo_loss", samples)
    args = small_args(
        gaussian, num_envs=1, num_steps=7, num_minibatches=1, update_epochs=1, total_timesteps=28, checkpoint_every=0
    )
    gaussian.train(args)
    episode_steps = [sorted(call[0][:, 0].tolist()) for call in calls]
    running = [t % 5 for t in range(28)]
    assert episode_steps == [sorted(float(x) for x in running[i : i + 7]) for i in range(0, 28, 7)]


@pytest.mark.detail("3")
@pytest.mark.detail("10")
def test_one_adam_with_epsilon_1e5_holds_every_parameter(ppo, small_args, monkeypatch) -> None:
    made = watch(monkeypatch, torch.optim, "Adam", lambda args, result: result)
    agents = watch(monkeypatch, ppo, "Agent", lambda args, result: result)
    ppo.train(small_args(ppo, total_timesteps=128))
    (optimizer,), (agent,) = made, agents
    assert optimizer.defaults["eps"] == 1e-5
    held = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in agent.parameters()]
    with torch.no_grad():
        for p in held:
            p.add_(1)  # what it holds are the agent's own numbers, every one of them once
    assert sum(p.numel() for p in held) == sum(p.numel() for p in before)
    for p, old in zip(agent.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old + 1)


@pytest.mark.detail("4")
@pytest.mark.parametrize("anneal", [True, False])
def test_the_learning_rate_falls_linearly(ppo, small_args, anneal: bool) -> None:
    args = small_args(ppo, anneal_lr=anneal, learning_rate=0.004)
    ppo.train(args)
    rates = [value for _, value in scalars(folder(args))["charts/learning_rate"]]
    assert rates == pytest.approx([0.004, 0.003, 0.002, 0.001] if anneal else [0.004] * 4)


@pytest.mark.detail("5")
@pytest.mark.parametrize("bootstrap", [True, False])
def test_time_limits_bootstrap_and_deaths_do_not(gaussian, small_args, monkeypatch, bootstrap: bool) -> None:
    """Targets of the last step of an episode: 1 + γ·V(final) if cut, 1 if dead; learning rate 0, plain numbers."""
    monkeypatch.setattr(gaussian.Normalizer, "merge", lambda *_: None)
    for name in ("Trunc", "Term", "Both"):
        calls = watch(monkeypatch, gaussian, "compute_gae", copies)
        agents = watch(monkeypatch, gaussian, "Agent", lambda args, result: result)
        finals = watch(monkeypatch, gaussian.NormalizedEnvs, "step", lambda args, result: args[0].final_obs.copy())
        gaussian.train(
            small_args(
                gaussian,
                env_id=f"counting_envs:{name}-v0",
                learning_rate=0.0,
                gae_lambda=0.0,
                bootstrap_truncated=bootstrap,
                total_timesteps=128,
            )
        )
        (inputs, (_, returns)), critic = calls[-1], agents[-1].critic
        dones, next_values = inputs[4], inputs[2]
        outcomes = torch.from_numpy(np.stack(finals[-64:]))  # [T, N, 3]: step, episode, draw
        assert dones.sum() == 2 * (64 // 5) and (dones == (outcomes[..., 0] == 5)).all()
        torch.testing.assert_close(next_values, critic(outcomes)[..., 0].detach())
        targets = returns[dones > 0]
        if name == "Trunc" and bootstrap:
            torch.testing.assert_close(targets, 1.0 + 0.99 * next_values[dones > 0])
            assert (targets - 1).abs().min() > 1e-3
        else:
            torch.testing.assert_close(targets, torch.ones_like(targets))


@pytest.mark.detail("5")
@pytest.mark.detail("19")
def test_atari_targets_bootstrap_a_cut_game(atari, small_args, monkeypatch) -> None:
    """A frame cap of 40: every tenth step is cut and its next value is that of the true last frames; rewards are signs."""
    calls = watch(monkeypatch, atari, "compute_gae", copies)
    finals = watch(monkeypatch, atari.AtariGames, "step", lambda args, result: args[0].final_obs.copy())
    agents = watch(monkeypatch, atari, "Agent", lambda args, result: result)
    monkeypatch.setattr(atari.AtariGames, "step", stretched(atari.AtariGames.step))
    atari.train(small_args(atari, max_episode_frames=40, learning_rate=0.0, total_timesteps=128))
    inputs, _ = calls[0]
    rewards, values, next_values, ends, dones = inputs[:5]
    assert set(rewards.unique().tolist()) == {-1.0, 0.0, 1.0}
    cut = dones[:, 0].nonzero()[:, 0].tolist()
    assert cut == [9, 19, 29, 39, 49, 59] and not ends.any()
    with torch.no_grad():
        true = agents[0](torch.from_numpy(np.stack([finals[t][0] for t in cut])))[1]
    torch.testing.assert_close(next_values[cut, 0], true, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(next_values[cut[:-1], 0], values[[t + 1 for t in cut[:-1]], 0], atol=1e-4)
    kept = [t for t in range(63) if t not in cut]
    torch.testing.assert_close(next_values[kept], values[[t + 1 for t in kept]])


def stretched(step: Any) -> Any:
    """Rewards of -25, 0 and 25 instead of the game's."""
    counter = iter(range(10**6))

    def wrapper(self: Any, actions: np.ndarray) -> Any:
        rows, finished = step(self, actions)
        rows[0] = (next(counter) % 3 - 1) * 25.0
        return rows, finished

    return wrapper


@pytest.mark.detail("6")
@pytest.mark.detail("7")
def test_minibatches_cover_the_batch_and_are_normalised_one_by_one(ppo, small_args, monkeypatch) -> None:
    calls = watch(monkeypatch, ppo, "ppo_loss", samples)
    gae = watch(monkeypatch, ppo, "compute_gae", copies)
    ppo.train(small_args(ppo, total_timesteps=128, update_epochs=2, num_minibatches=4))
    assert len(calls) == 8
    for call in calls:
        assert float(call[3].mean()) == pytest.approx(0, abs=1e-5)
        assert float(call[3].std()) == pytest.approx(1, abs=0.05)
    returns = torch.sort(gae[0][1][1].flatten())[0]
    for epoch in (calls[:4], calls[4:]):
        torch.testing.assert_close(torch.sort(torch.cat([call[4] for call in epoch]))[0], returns)


def test_without_normalisation_advantages_stay_as_they_are(ppo, small_args, monkeypatch) -> None:
    calls = watch(monkeypatch, ppo, "ppo_loss", samples)
    ppo.train(small_args(ppo, total_timesteps=128, update_epochs=1, norm_adv=False))
    for call in calls:
        torch.testing.assert_close(call[3], call[4] - call[5], atol=1e-4, rtol=1e-4)


@pytest.mark.detail("10")
@pytest.mark.detail("12")
def test_the_loss_and_its_debug_variables_by_distributions(ppo, small_args) -> None:
    """Against torch.distributions and sums written out, at a policy that has moved."""
    torch.manual_seed(0)
    args = small_args(ppo, ent_coef=0.3, vf_coef=0.7, clip_coef=0.2) if hasattr(ppo.Args, "clip_coef") else None
    args = args or small_args(ppo, ent_coef=0.3, vf_coef=0.7)
    atari = ppo.__name__ == "ppo_atari"
    agent = ppo.Agent(4) if atari else ppo.Agent(3, 2)
    obs = torch.randint(0, 256, (16, 4, 84, 84), dtype=torch.uint8) if atari else torch.randn(16, 3)
    if atari:
        agent.actor.weight.data *= 100
        policy, values = agent(obs)
        distribution: Any = torch.distributions.Categorical(logits=policy.logits.detach())
        joint, entropy = distribution.log_prob, distribution.entropy().mean()
    else:
        agent.actor_logstd.data[:] = torch.tensor([-0.3, 0.2])
        means, values = agent(obs)
        distribution = torch.distributions.Normal(means.detach(), agent.actor_logstd.detach().exp())
        joint, entropy = lambda a: distribution.log_prob(a).sum(-1), distribution.entropy().sum(-1).mean()
    actions = distribution.sample()
    logprobs = joint(actions) + 0.3 * torch.randn(16)
    advantages, returns, old_values = torch.randn(3, 16)
    extra = () if ppo.__name__ != "ppo_penalty" else (means.detach() + 0.1, torch.zeros(16, 2))
    loss, stats = ppo.ppo_loss(args, agent, obs, actions, logprobs, advantages, returns, old_values, *extra)

    ratios = (joint(actions) - logprobs).exp().tolist()
    if extra:
        old = torch.distributions.Normal(extra[0], extra[1].exp())
        kl = torch.distributions.kl_divergence(old, distribution).sum(-1).tolist()
        policy_loss = (
            -sum(r * a - float(agent.beta) * k for r, a, k in zip(ratios, advantages.tolist(), kl, strict=True)) / 16
        )
        squares = [(v - r) ** 2 for v, r in zip(values.tolist(), returns.tolist(), strict=True)]
    else:
        terms = [min(r * a, min(max(r, 0.8), 1.2) * a) for r, a in zip(ratios, advantages.tolist(), strict=True)]
        policy_loss = -sum(terms) / 16
        squares = []
        for v, o, r in zip(values.tolist(), old_values.tolist(), returns.tolist(), strict=True):
            squares.append(max((v - r) ** 2, (o + min(max(v - o, -0.2), 0.2) - r) ** 2))
    v_loss = sum(squares) / 32
    expected = {
        "losses/value_loss": v_loss,
        "losses/policy_loss": policy_loss,
        "losses/entropy": float(entropy),
        "losses/old_approx_kl": sum(-math.log(r) for r in ratios) / 16,
        "losses/approx_kl": sum(r - 1 - math.log(r) for r in ratios) / 16,
        "losses/clipfrac": sum(abs(r - 1) > 0.2 for r in ratios) / 16,
    }
    assert ppo.STATS == list(expected)[: len(ppo.STATS)]
    for key, value in zip(ppo.STATS, stats.tolist(), strict=True):
        assert value == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key
    assert float(loss.detach()) == pytest.approx(policy_loss + 0.7 * v_loss - 0.3 * float(entropy), rel=1e-4)


@pytest.mark.detail("9")
def test_the_value_clip_can_be_switched_off(small_args, monkeypatch, ppo) -> None:
    if not hasattr(ppo.Args, "clip_vloss"):
        return
    for on in (True, False):
        calls = watch(monkeypatch, ppo, "value_loss", lambda args, result: args[3])
        ppo.train(small_args(ppo, total_timesteps=128, clip_vloss=on, clip_coef=0.125))
        assert set(calls) == ({0.125} if on else {None})


@pytest.mark.detail("11")
def test_gradients_are_clipped_by_their_global_norm(ppo, small_args, monkeypatch) -> None:
    norms = []
    step = torch.optim.Adam.step

    def spy(self: Any, *rest: Any) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms.append(float(sum(g.double().square().sum() for g in grads)) ** 0.5)
        return step(self, *rest)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    ppo.train(small_args(ppo, total_timesteps=128, max_grad_norm=1e-3, ent_coef=0.1))
    assert norms and max(norms) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.detail("27")
def test_the_raw_action_is_stored_and_scored(gaussian, small_args, monkeypatch) -> None:
    """In a box of [0, 5] half of the samples lie outside; they are stored so, and the first ratio is exactly 1."""
    calls = watch(monkeypatch, gaussian, "ppo_loss", lambda args, result: (samples(args, result), result[1].tolist()))
    args = small_args(
        gaussian, env_id="counting_envs:Box05-v0", total_timesteps=128, num_minibatches=1, update_epochs=1
    )
    gaussian.train(args)
    stored, stats = calls[0]
    assert 0.3 < float((stored[1] < 0).float().mean()) < 0.7
    assert abs(stats[3]) < 1e-6 and abs(stats[4]) < 1e-6  # log ratio 0 before any update
    logged = scalars(folder(args))
    share = float((stored[1] < 0).float().mean())
    assert logged["charts/clipped_actions"][0][1] == pytest.approx(share, abs=0.01)
    assert logged["charts/policy_std"][0][1] == pytest.approx(1, abs=0.01)


@pytest.mark.detail("S3")
def test_target_kl_ends_the_epochs_before_the_step_that_goes_on(ppo, small_args, monkeypatch) -> None:
    steps = watch(monkeypatch, torch.optim.Adam, "step", lambda args, result: None)
    agents = watch(monkeypatch, ppo, "Agent", lambda args, result: result)
    estimates = watch(monkeypatch, ppo, "ppo_loss", lambda args, result: float(result[1][4].detach()))
    args = small_args(
        ppo,
        total_timesteps=128,
        target_kl=1e-4,
        learning_rate=0.01,
        update_epochs=20,
        num_minibatches=4,
        max_grad_norm=10.0,
    )
    ppo.train(args)
    assert agents and 1 <= len(steps) < 80 and len(estimates) == len(steps) + 1
    assert all(kl <= 1.5e-4 for kl in estimates[:-1]) and estimates[-1] > 1.5e-4
    assert scalars(folder(args))["charts/updates"][0][1] == len(steps)


@pytest.mark.detail("S3")
def test_epochs_end_where_approximate_kl_passes_one_and_a_half_times_the_target(ppo, small_args, monkeypatch) -> None:
    """Estimates told to the loop: 1.49 and 1.51 times the target."""
    original, told = ppo.ppo_loss, iter([0.0149, 0.0149, 0.0149, 0.0151, 0.0])
    steps = watch(monkeypatch, torch.optim.Adam, "step", lambda args, result: None)

    def tell(*args: Any) -> Any:
        loss, stats = original(*args)
        stats[4] = next(told)
        return loss, stats

    monkeypatch.setattr(ppo, "ppo_loss", tell)
    ppo.train(small_args(ppo, total_timesteps=128, target_kl=0.01, update_epochs=4, num_minibatches=4))
    assert len(steps) == 3 and next(told) == 0.0


def test_losses_logged_are_means_over_all_minibatches(ppo, small_args, monkeypatch) -> None:
    calls = watch(monkeypatch, ppo, "ppo_loss", lambda args, result: result[1].tolist())
    args = small_args(ppo, total_timesteps=128, update_epochs=3)
    ppo.train(args)
    logged = scalars(folder(args))
    for i, tag in enumerate(ppo.STATS):
        assert logged[tag][0][1] == pytest.approx(np.mean([stats[i] for stats in calls]), rel=1e-4, abs=1e-6)


def test_bf16_changes_no_more_than_rounding(ppo, small_args, monkeypatch) -> None:
    """The first minibatch of the first iteration: same frames or states, same policy up to rounding."""
    results = {}
    for bf16 in (False, True):
        calls = watch(monkeypatch, ppo, "ppo_loss", lambda args, result: result[1].tolist())
        ppo.train(small_args(ppo, total_timesteps=128, update_epochs=1, bf16=bf16))
        results[bf16] = calls[0]
    assert results[True] != results[False]
    assert results[True][2] == pytest.approx(results[False][2], rel=0.01)  # entropy
    assert results[True][0] == pytest.approx(results[False][0], rel=0.5, abs=0.3)
    assert abs(results[True][4]) < 0.02  # the ratio is 1 up to bfloat16 before any update


@pytest.mark.slow
def test_the_compiled_loss_has_the_eager_gradient(ppo, small_args) -> None:
    torch.manual_seed(0)
    args = small_args(ppo, ent_coef=0.01)
    atari = ppo.__name__ == "ppo_atari"
    agent = ppo.Agent(4) if atari else ppo.Agent(3, 2)
    obs = torch.randint(0, 256, (8, 4, 84, 84), dtype=torch.uint8) if atari else torch.randn(8, 3)
    actions = torch.randint(4, (8,)) if atari else torch.randn(8, 2)
    extra = (torch.randn(8, 2), torch.zeros(8, 2)) if ppo.__name__ == "ppo_penalty" else ()
    batch = (obs, actions, torch.full((8,), -2.0), *torch.randn(3, 8), *extra)
    gradients = []
    for function in (ppo.ppo_loss, torch.compile(ppo.ppo_loss)):
        agent.zero_grad()
        loss, stats = function(args, agent, *batch)
        loss.backward()
        gradients.append((torch.cat([p.grad.reshape(-1) for p in agent.parameters() if p.grad is not None]), stats))
    (eager, eager_stats), (compiled, compiled_stats) = gradients
    assert float((compiled - eager).norm() / eager.norm()) < 1e-5
    torch.testing.assert_close(compiled_stats, eager_stats, atol=1e-5, rtol=1e-5)


def test_frames_are_stored_in_bytes_and_a_rollout_is_small(atari, small_args, monkeypatch) -> None:
    calls = watch(monkeypatch, atari, "ppo_loss", samples)
    atari.train(small_args(atari, total_timesteps=128, update_epochs=1))
    assert calls[0][0].dtype == torch.uint8
    default = atari.Args()
    assert default.num_steps * default.num_envs * calls[0][0][0].nbytes < 40e6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("changes", [{}, {"bf16": True}, {"compile": True}], ids=["plain", "bf16", "compile"])
@pytest.mark.parametrize("there, back", [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_begun_on_one_device_goes_on_on_the_other(
    name: str, small_args, changes: dict[str, Any], there: str, back: str
) -> None:
    module = MODULES[name]
    args = small_args(module, device=there, **changes)
    metrics = module.train(args)
    assert all(math.isfinite(metrics[tag]) for tag in module.STATS)
    state = torch.load(folder(args) / "checkpoint.pt", weights_only=True, map_location="cpu")
    assert state["iteration"] == 4
    budget = BUDGET[name].removeprefix("--").replace("-", "_")
    resumed = small_args(module, device=back, resume=str(folder(args)), **changes, **{budget: 768})
    assert module.train(resumed)["global_step"] == 768


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_no_cuda_leaves_the_gpu_alone(name: str, small_args) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    MODULES[name].train(small_args(MODULES[name], cuda=False))
    assert torch.cuda.max_memory_allocated() == before


class Types(TorchDispatchMode):
    """The types of all tensors that come out of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.seen |= {x.dtype for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor)}
        return out


def test_no_float64_reaches_the_device(name: str, small_args) -> None:
    """Which Apple's GPUs do not have; the simulator's observations and the statistics are of that type."""
    module = MODULES[name]
    changes: dict[str, Any] = {"total_episodes": 128} if name == "rlhf_ppo_gpt2" else {"total_timesteps": 128}
    changes |= {"env_id": "Pendulum-v1"} if name in BOXES else {}
    with Types() as types:
        module.train(small_args(module, **changes))
    assert torch.float32 in types.seen and torch.float64 not in types.seen


def test_weights_that_are_not_finite_are_never_saved(ppo, small_args) -> None:
    """A last step that spoils them comes after the last loss."""
    args = small_args(ppo, learning_rate=1e39, num_minibatches=1, update_epochs=1, total_timesteps=128, save_model=True)
    with pytest.raises(FloatingPointError, match="not finite|is inf|is nan"):
        ppo.train(args)
    assert not list(folder(args).glob("*.pt*"))


def test_value_weights_that_are_not_finite_are_never_saved(small_args) -> None:
    trpo = MODULES["trpo"]
    args = small_args(trpo, learning_rate=1e39, num_minibatches=1, update_epochs=1, total_timesteps=128)
    with pytest.raises(
        FloatingPointError, match="weights are not finite after iteration 1; checkpoint.pt was not written"
    ):
        trpo.train(args)
    assert not list(folder(args).glob("*.pt*"))


def test_one_sample_is_a_batch(name: str, small_args, recwarn: Any) -> None:
    """Explained variance does not exist then, and says so without a warning."""
    module = MODULES[name]
    small = {"batch_size": 1, "response_length": 1, "total_episodes": 4} if name == "rlhf_ppo_gpt2" else {}
    args = small_args(module, num_minibatches=1, **(small or {"num_envs": 1, "num_steps": 1, "total_timesteps": 4}))
    assert math.isfinite(module.train(args)["losses/value_loss"])
    assert not [w for w in recwarn if "degrees of freedom" in str(w.message)]


def test_scores_logged_are_those_of_whole_games(atari, small_args, monkeypatch) -> None:
    """Added up here from what the emulator says, 25 for a point, and neither clipped nor cut by life."""
    original, totals, expected = atari.AtariGames.step, np.zeros(2), []

    def step(self: Any, actions: np.ndarray) -> Any:
        rows, finished = original(self, actions)
        totals[:] += 25
        for i, _, _ in finished:
            expected.append(totals[i])
            totals[i] = 0
        return rows, [(i, expected[j - len(finished)], length) for j, (i, _, length) in enumerate(finished)]

    monkeypatch.setattr(atari.AtariGames, "step", step)
    args = small_args(atari, max_episode_frames=40, checkpoint_every=0)
    atari.train(args)
    logged = [value for _, value in scalars(folder(args))["charts/episodic_return"]]
    assert len(logged) > 20 and set(logged) == {250.0}


def test_a_run_says_when_no_episode_ends_between_checkpoints(control, small_args, capsys) -> None:
    for name, said in (("Long", 1), ("Trunc", 0)):
        control.train(small_args(control, env_id=f"counting_envs:{name}-v0", checkpoint_every=1))
        assert capsys.readouterr().out.count("no episode ended between two checkpoints") == said


def test_an_episode_without_end_ends_the_evaluation_in_a_sentence(control, small_args, monkeypatch, tmp_path) -> None:
    args = small_args(control, env_id="counting_envs:Long-v0", total_timesteps=128)
    control.train(args)
    step = control.NormalizedEnvs.step

    def fast(self: Any, actions: np.ndarray) -> Any:
        self.lengths += 999  # time flies
        return step(self, actions)

    monkeypatch.setattr(control.NormalizedEnvs, "step", fast)
    with pytest.raises(control.UsageError, match="counting_envs:Long-v0 has not ended in 100,000 steps"):
        control.evaluate(control.parse_args(["--evaluate", str(folder(args))]))


def test_each_environment_plays_its_share_of_an_evaluation(control, small_args, monkeypatch) -> None:
    """Ten episodes in four environments are 3, 3, 2 and 2, although those of the first are the shortest."""
    args = small_args(control, env_id="counting_envs:Step-v0", num_envs=4, num_steps=32, total_timesteps=128)
    control.train(args)
    reset = control.NormalizedEnvs.reset

    def unequal(self: Any, seed: int) -> None:
        reset(self, seed)
        for i, env in enumerate(self.envs.envs):
            env.unwrapped.end = 2 + 10 * i

    monkeypatch.setattr(control.NormalizedEnvs, "reset", unequal)
    scores = control.evaluate(control.parse_args(["--evaluate", str(folder(args)), "--eval-episodes", "10"]))
    sums = [n * (n + 1) / 2 for n in (2, 12, 22, 32)]
    assert [scores.count(total) for total in sums] == [3, 3, 2, 2]


def test_a_loss_that_is_not_finite_stops_before_anything_is_saved(ppo, small_args, monkeypatch) -> None:
    original = ppo.ppo_loss
    monkeypatch.setattr(ppo, "ppo_loss", lambda *a: tuple(x * math.nan for x in original(*a)))
    args = small_args(ppo)
    with pytest.raises(FloatingPointError, match="losses/value_loss is nan in iteration 1"):
        ppo.train(args)
    assert not (folder(args) / "checkpoint.pt").exists()


@pytest.mark.parametrize("name", ["Zero", "OneStep", "Huge"])
def test_odd_rewards_do_not_poison_the_run(control, small_args, name: str, recwarn: Any) -> None:
    args = small_args(control, env_id=f"counting_envs:{name}-v0")
    metrics = control.train(args)
    assert all(math.isfinite(v) for k, v in metrics.items() if k != "losses/explained_variance")
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]
    assert metrics["episodic_return"] == pytest.approx({"Zero": 0, "OneStep": 1, "Huge": 5e30}[name])


def test_no_episode_within_a_rollout(control, small_args) -> None:
    args = small_args(control, env_id="counting_envs:Long-v0", num_steps=16)
    assert math.isnan(control.train(args)["episodic_return"])
    assert "charts/episodic_return" not in scalars(folder(args))
    long = small_args(control, env_id="counting_envs:Long-v0", num_envs=1, num_steps=16, total_timesteps=3100)
    metrics = control.train(long)
    assert metrics["episodic_return"] == 3000  # credited when it ends, many rollouts later


@pytest.mark.parametrize("env", ["Trunc", "Term"])
def test_every_episode_is_logged_once_also_when_several_end_in_one_step(control, small_args, env: str) -> None:
    args = small_args(control, env_id=f"counting_envs:{env}-v0", num_envs=4, num_steps=32, checkpoint_every=0)
    control.train(args)
    logged = scalars(folder(args))
    episodes = logged["charts/episodic_return"]
    assert len(episodes) == 4 * (128 // 5) and {value for _, value in episodes} == {5.0}
    assert {value for _, value in logged["charts/episodic_length"]} == {5.0}
    steps = [step for step, _ in episodes]
    assert steps == sorted(set(steps))
    assert steps[:8] == [17, 18, 19, 20, 37, 38, 39, 40]  # the fifth step of four environments, then the tenth


def test_penalty_adapts_beta_once_per_iteration_for_the_next(penalty, small_args, monkeypatch) -> None:
    used = watch(monkeypatch, penalty, "ppo_loss", lambda args, result: float(args[1].beta))
    args = small_args(penalty, beta=2.0, kl_target=1e3, update_epochs=2)
    penalty.train(args)
    assert [used[i] for i in range(0, 32, 8)] == [2.0, 1.0, 0.5, 0.25] and len(set(used[:8])) == 1
    assert [v for _, v in scalars(folder(args))["losses/beta"]] == [2.0, 1.0, 0.5, 0.25]
    used.clear()
    penalty.train(small_args(penalty, beta=2.0, kl_target=1e-9, update_epochs=2))
    assert [used[i] for i in range(0, 32, 8)] == [2.0, 4.0, 8.0, 16.0]
    used.clear()
    penalty.train(small_args(penalty, beta=2.0, adaptive_beta=False, kl_target=1e-9))
    assert set(used) == {2.0}
    penalty.train(small_args(penalty, beta=0.0, adaptive_beta=False))


def test_penalty_logs_the_kl_of_the_whole_batch_after_all_epochs(penalty, small_args, monkeypatch) -> None:
    """Recomputed from the policy before and after the iteration on all rows, with torch.distributions."""
    batches = watch(monkeypatch, penalty, "ppo_loss", samples)
    agents = watch(monkeypatch, penalty, "Agent", lambda args, result: result)
    args = small_args(penalty, total_timesteps=128, update_epochs=4, num_minibatches=1, learning_rate=0.01)
    penalty.train(args)
    obs, old_means, old_logstd = batches[-1][0], batches[-1][6], batches[-1][7]
    with torch.no_grad():
        means, _ = agents[0](obs)
    new = torch.distributions.Normal(means, agents[0].actor_logstd.detach().exp())
    old = torch.distributions.Normal(old_means, old_logstd.exp())
    expected = float(torch.distributions.kl_divergence(old, new).sum(-1).mean())
    assert expected > 1e-4
    assert scalars(folder(args))["losses/kl"][0][1] == pytest.approx(expected, rel=1e-3)
