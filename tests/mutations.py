"""Small changes to the scripts, each of which removes or breaks one detail; test_mutations.py sees that a test notices.

A mutant replaces `old`, which occurs once in each of its scripts, by `new`. Where one text serves several scripts the
mutants of a detail are spread over them. Those with a `sample` belong to the plain run of the tests, too.
"""

from dataclasses import dataclass

ATARI, CONTINUOUS, PENALTY, TRPO, RLHF = "ppo_atari", "ppo_continuous", "ppo_penalty", "trpo", "rlhf_ppo_gpt2"


@dataclass(frozen=True)
class Mutant:
    detail: str
    scripts: str  # separated by blanks
    what: str
    old: str
    new: str
    crash: str = ""  # why an exception is the right notice, where it is
    sample: str = ""  # the script for which it is in the plain run, too


ALL, PPO, GAUSSIAN = (
    f"{ATARI} {CONTINUOUS} {PENALTY} {TRPO}",
    f"{ATARI} {CONTINUOUS} {PENALTY}",
    f"{CONTINUOUS} {PENALTY}",
)
CONTROL, CLIP = f"{GAUSSIAN} {TRPO}", f"{ATARI} {CONTINUOUS}"
M = Mutant
MUTANTS = [
    # 1 vectorised architecture
    M("1", ALL, "every segment starts new episodes", "if run.starts_afresh(iteration):", "if run.starts_afresh(iteration) or True:"),
    M("1", CONTROL, "all environments get the first one's action", "self.envs.step(actions.clip(", "self.envs.step(actions[[0] * len(actions)].clip("),
    M("1", ATARI, "all games get the first one's action", "game.send(actions[i : i + 1])", "game.send(actions[:1])"),
    M("1", CONTROL, "rows begin with the old episode's last observation", "obs[t] = torch.from_numpy(envs.obs)", "obs[t] = torch.from_numpy(envs.final_obs)"),
    # 2 initialisation
    M("2", f"{ATARI} {PENALTY}", "weights are not orthogonal", "nn.init.orthogonal_(layer.weight, gain)", "nn.init.xavier_uniform_(layer.weight, gain)"),
    M("2", f"{CONTINUOUS} {TRPO}", "biases are not zero", "nn.init.zeros_(layer.bias)", "nn.init.constant_(layer.bias, 0.1)"),
    M("2", f"{ATARI} {TRPO}", "hidden layers have gain 1", "gain: float = 2**0.5", "gain: float = 1.0"),
    M("2", f"{CONTINUOUS} {PENALTY}", "the policy's head has gain 1", "gain=0.01", "gain=1.0"),
    M("2", f"{ATARI} {CONTINUOUS} {TRPO}", "the value's head has gain √2", "gain=1.0)", "gain=2**0.5)"),
    # 3 Adam's epsilon
    M("3", ALL, "torch's own epsilon of 1e-8", ", eps=1e-5", ""),
    M("3", f"{ATARI} {TRPO}", "the epsilon is lost after the optimiser is made", "optimizer.zero_grad(", 'optimizer.param_groups[0]["eps"] = 1e-8; optimizer.zero_grad(', sample=TRPO),
    M("3", PENALTY, "an epsilon of 1e-4", "eps=1e-5", "eps=1e-4"),
    # 4 annealing
    M("4", f"{ATARI} {PENALTY}", "the rate is one iteration ahead", "args.anneal_lr * iteration /", "args.anneal_lr * (iteration + 1) /"),
    M("4", f"{CONTINUOUS}", "the rate falls to a half", "args.anneal_lr * iteration /", "0.5 * args.anneal_lr * iteration /"),
    M("4", f"{PENALTY}", "it falls whatever --anneal-lr says", "args.anneal_lr * iteration /", "iteration /"),
    M("4", f"{ATARI}", "the rate stays", "args.anneal_lr * iteration /", "0 * iteration /"),
    # 5 GAE
    M("5", f"{ALL} {RLHF}", "death bootstraps", "gamma * next_values * (1 - terminations)", "gamma * next_values"),
    M("5", ALL, "the sum runs over time limits", "gae_lambda * (1 - dones)", "gae_lambda * (1 - terminations)", sample=CONTINUOUS),
    M("5", f"{ATARI} {PENALTY}", "λ is forgotten", "decays = gamma * gae_lambda *", "decays = gamma *"),
    M("5", f"{CONTINUOUS} {TRPO}", "the target lacks the value", "return advantages, advantages + values", "return advantages, advantages"),
    M("5", f"{PENALTY} {TRPO}", "the value is subtracted twice", "- terminations) - values", "- terminations) - 2 * values"),
    M("5", ATARI, "a cut game bootstraps from the next game", "torch.where(truncations > 0, final_values", "torch.where(truncations > 2, final_values"),
    M("5", ATARI, "nothing is bootstrapped at the segment's end", "last_value[None]]", "0 * last_value[None]]"),
    M("5", CONTROL, "an episode's end bootstraps from the next episode", "torch.from_numpy(envs.final_obs)", "torch.from_numpy(envs.obs)"),
    M("5", CONTROL, "time limits count as death whatever the flag says", "ends = terminations if args.bootstrap_truncated else dones", "ends = dones"),
    M("5", ATARI, "a cut game's last frames are the next game's first", "if chosen:", "if True:"),
    # 6 minibatches
    M("6", f"{ATARI} {TRPO} {RLHF}", "the order is that of time", "torch.randperm(size, device=device)", "torch.arange(size, device=device)"),
    M("6", f"{CONTINUOUS} {TRPO}", "samples are drawn with replacement", "torch.randperm(size, device=device)", "torch.randint(size, (size,), device=device)"),
    M("6", f"{ATARI} {PENALTY}", "one order serves all epochs", "for _ in range(epochs):\n        yield from torch.randperm(size, device=device)", "order = torch.randperm(size, device=device)\n    for _ in range(epochs):\n        yield from order"),
    # 7 advantage normalisation
    M("7", PPO, "normalised over the batch", "normalize_advantages(sample[3]) if", "normalize_advantages(batch[3])[index] if", sample=ATARI),
    M("7", f"{ATARI} {TRPO}", "the mean stays", "centred = advantages - global_mean(advantages.mean())", "centred = advantages"),
    M("7", f"{CONTINUOUS}", "divided by the variance", "centred.square().mean()).sqrt() + 1e-8", "centred.square().mean()) + 1e-8"),
    M("7", f"{PENALTY}", "equal advantages become NaN", ".sqrt() + 1e-8)", ".sqrt())"),
    M("7", TRPO, "--norm-adv does nothing", "normalize_advantages(advantages) if args.norm_adv else advantages", "advantages"),
    # 8 clipped surrogate
    M("8", f"{CLIP} {RLHF}", "max instead of min", "-torch.min(", "-torch.max("),
    M("8", CLIP, "the min is forgotten", "torch.min(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages)", "(ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages)"),
    M("8", CLIP, "nothing is clipped", "ratio.clamp(1 - clip_coef, 1 + clip_coef)", "ratio"),
    M("8", ATARI, "the sign is that of a reward", "return -torch.min(", "return torch.min("),
    M("8", CONTINUOUS, "clipped on one side", "ratio.clamp(1 - clip_coef, 1 + clip_coef)", "ratio.clamp(max=1 + clip_coef)"),
    # 9 value loss
    M("9", f"{ATARI} {PENALTY}", "the better of the two errors", "torch.max(errors", "torch.min(errors"),
    M("9", f"{CONTINUOUS} {TRPO} {RLHF}", "not halved", "return 0.5 * errors.mean()", "return errors.mean()"),
    M("9", f"{ATARI} {CONTINUOUS}", "values are clipped around 0", "clipped = old_values + (new_values", "clipped = (new_values"),
    M("9", CLIP, "--clip-vloss does nothing", "args.clip_coef if args.clip_vloss else None", "None"),
    # 10 one loss
    M("10", PPO, "entropy is punished", "- args.ent_coef * entropy", "+ args.ent_coef * entropy", sample=PENALTY),
    M("10", f"{ATARI} {PENALTY}", "the value's weight is forgotten", "args.vf_coef * v_loss", "v_loss"),
    M("10", CONTINUOUS, "the value is not in the loss", "loss = policy_loss + args.vf_coef * v_loss", "loss = policy_loss"),
    M("10", GAUSSIAN, "entropy is the mean over components", "np.log(2 * np.pi * np.e)).sum()", "np.log(2 * np.pi * np.e)).mean()"),
    # 11 gradient clipping
    M("11", PPO, "gradients are not clipped", "args.max_grad_norm", "1e9"),
    M("11", GAUSSIAN, "clipped at the square of the norm", "args.max_grad_norm", "args.max_grad_norm**2"),
    M("11", ATARI, "each component is clipped", "nn.utils.clip_grad_norm_(", "nn.utils.clip_grad_value_("),
    M("11", ATARI, "each tensor is clipped by its own norm", "nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)", "[nn.utils.clip_grad_norm_(p, args.max_grad_norm) for p in agent.parameters()]"),
    # 12 debug variables
    M("12", f"{ATARI} {PENALTY}", "the first estimate of KL has the wrong sign", "kls = -logratio.mean(),", "kls = logratio.mean(),"),
    M("12", f"{CONTINUOUS} {PENALTY}", "the second estimate of KL is half the square", "(logratio.exp() - 1 - logratio).mean()\n", "0.5 * logratio.square().mean()\n"),
    M("12", CLIP, "the clip fraction is that of log ratios", "(logratio.exp() - 1).abs() > args.clip_coef", "logratio.abs() > args.clip_coef"),
    M("12", PPO, "two losses are exchanged", "torch.stack([v_loss, policy_loss,", "torch.stack([policy_loss, v_loss,"),
    M("12", TRPO, "the estimates of KL have the wrong sign", "-logratio.mean(), (logratio.exp() - 1 - logratio).mean()", "logratio.mean(), (logratio.exp() - 1 - logratio).mean()"),
    M("12", TRPO, "the loss is logged with the sign of the objective", "zip(STATS, (-stats[0],", "zip(STATS, (stats[0],"),
    M("12", PPO, "what is logged is the last minibatch's", "torch.stack(history).mean(0)", "history[-1]"),
    M("12", ALL, "the variance explained is the one left over", "= 1 - (returns - values).var() / returns.var()", "= (returns - values).var() / returns.var()"),
    # 13 shared or separate networks
    M("13", ATARI, "the value does not train the shared network", "self.critic(hidden)", "self.critic(hidden.detach())"),
    M("13", ATARI, "the policy does not train the shared network", "self.actor(hidden)", "self.actor(hidden.detach())"),
    M("13", GAUSSIAN, "the value sits on the policy's hidden layers", "self.critic = nn.Sequential(*hidden(),", "self.critic = nn.Sequential(*self.actor_mean[:4],"),
    M("13", TRPO, "the value sits on the policy's hidden layers", "self.critic = nn.Sequential(*hidden(),", "self.critic = nn.Sequential(*self.actor[:4],"),
    # 14 to 22 Atari
    M("14", ATARI, "no no-ops", "noop_max=30", "noop_max=0"),
    M("14", ATARI, "few no-ops", "noop_max=30", "noop_max=4"),
    M("14", ATARI, "all games start with the same number", "seed=seeds[i : i + 1]", "seed=seeds[:1]"),
    M("15", ATARI, "three frames per step", "frameskip=4", "frameskip=3"),
    M("15", ATARI, "the last frame alone", "maxpool=True", "maxpool=False", sample=ATARI),
    M("16", ATARI, "a lost life is nothing", "rows[1:, i] = [over or lost, cut and not (over or lost)]", "rows[1:, i] = [over, cut and not over]"),
    M("16", ATARI, "a lost life ends the game's score", "if over or cut:  #", "if over or cut or lost:  #"),
    M("17", ATARI, "no FIRE after a lost life", "(lost and self.fire is not None)", "False"),
    M("17", ATARI, "NOOP in its place", "np.array([self.fire or 0])", "np.array([0])"),
    M("17", ATARI, "no FIRE at the start of a game", "use_fire_reset=True", "use_fire_reset=False"),
    M("18", ATARI, "colour", '"grayscale": True', '"grayscale": False'),
    M("18", ATARI, "another size", '"img_width": 84', '"img_width": 80'),
    M("19", ATARI, "rewards as they are", "rewards = rewards.sign()", "rewards = rewards * 1"),
    M("19", ATARI, "the score is clipped, too", "self.scores[i] += reward", "self.scores[i] += np.sign(reward)"),
    M("20", ATARI, "one frame", '"stack_num": 4', '"stack_num": 1'),
    M("20", ATARI, "the newest frame four times", "self.obs[i] = frames\n", "self.obs[i] = frames[-1]\n"),
    M("20", ATARI, "the newest frame comes first", "self.obs[i] = frames\n", "self.obs[i] = frames[::-1]\n"),
    M("21", ATARI, "no nonlinearity after the last convolution", "nn.ReLU(),  # [B, 64, 7, 7]", "nn.Identity(),  # [B, 64, 7, 7]"),
    M("21", ATARI, "tanh after the first convolution", "nn.ReLU(),  # [B, 32, 20, 20]", "nn.Tanh(),  # [B, 32, 20, 20]"),
    M("21", ATARI, "the last convolution in groups", "nn.Conv2d(64, 64, 3, stride=1)", "nn.Conv2d(64, 64, 3, stride=1, groups=2)"),
    M("22", ATARI, "pixels up to 255", ".div_(255.0)", ".div_(1.0)"),
    M("22", ATARI, "pixels from -1 to 1", ".div_(255.0)", ".div_(127.5).sub_(1.0)"),
    # 23 to 31 control
    M("23", f"{CONTINUOUS} {TRPO}", "the density does not integrate to 1", "- 0.5 * np.log(2 * np.pi)).sum(-1)", "- 0.5 * np.log(np.pi)).sum(-1)"),
    M("23", f"{PENALTY} {TRPO}", "wide distributions cost nothing", ".square() - logstd -", ".square() - 0 * logstd -"),
    M("23", f"{CONTINUOUS}", "a variance for a deviation", "(actions - means) / logstd.exp()", "(actions - means) / (2 * logstd).exp()"),
    M("24", f"{CONTINUOUS} {TRPO}", "the noise starts smaller", "nn.Parameter(torch.zeros(action_dim))", "nn.Parameter(torch.full((action_dim,), -0.5))"),
    M("24", f"{PENALTY} {TRPO}", "the noise is not learned", "nn.Parameter(torch.zeros(action_dim))", "nn.Parameter(torch.zeros(action_dim), requires_grad=False)"),
    M("24", GAUSSIAN, "actions are drawn with std 1 whatever has been learned", "noise = agent.actor_logstd.detach().exp() *", "noise = 1.0 *", sample=CONTINUOUS),
    M("24", TRPO, "the step leaves the noise alone", 'if not name.startswith("critic.")', 'if name.startswith("actor.")'),
    M("24", TRPO, "actions are drawn with std 1 whatever has been learned", "return pi[0] + pi[1].exp() * noise", "return pi[0] + noise"),
    M("25", f"{CONTINUOUS} {PENALTY} {TRPO}", "the mean over components", "- 0.5 * np.log(2 * np.pi)).sum(-1)", "- 0.5 * np.log(2 * np.pi)).mean(-1)"),
    M("25", f"{PENALTY}", "the first component alone", "- 0.5 * np.log(2 * np.pi)).sum(-1)", "- 0.5 * np.log(2 * np.pi))[..., 0]"),
    M("26", f"{CONTINUOUS} {TRPO}", "ReLU", "layer_init(nn.Linear(64, 64)), nn.Tanh()]", "layer_init(nn.Linear(64, 64)), nn.ReLU()]"),
    M("26", f"{PENALTY}", "one hidden layer", "layer_init(nn.Linear(64, 64)), nn.Tanh()]", "]"),
    M("26", GAUSSIAN, "the value is read from the policy's hidden layers", "self.critic(obs).float()", "self.critic[4](self.actor_mean[:4](obs)).float()"),
    M("27", f"{CONTINUOUS} {PENALTY}", "the clipped action is stored", "actions[t] = means[t] + noise[t]", "actions[t] = (means[t] + noise[t]).clamp(float(envs.low.min()), float(envs.high.max()))"),
    M("27", TRPO, "the clipped action is stored", "actions[t] = sample(policy_fn(obs[t]), noise[t])", "actions[t] = sample(policy_fn(obs[t]), noise[t]).clamp(float(envs.low.min()), float(envs.high.max()))"),
    M("27", f"{CONTINUOUS} {TRPO}", "the raw action is executed", "actions.clip(self.low, self.high)", "actions"),
    M("27", f"{PENALTY} {TRPO}", "the action is squashed", "actions.clip(self.low, self.high)", "np.tanh(actions).clip(self.low, self.high)"),
    M("28", f"{CONTINUOUS} {TRPO}", "observations are not centred", "((raw - self.obs_stats.mean) / np.sqrt(", "(raw / np.sqrt("),
    M("28", f"{PENALTY}", "the statistics are never taken", "self.obs_stats.update(raw.astype(np.float64))", "pass"),
    M("28", f"{PENALTY} {TRPO}", "divided by the variance", "/ np.sqrt(self.obs_stats.var + 1e-8)", "/ (self.obs_stats.var + 1e-8)"),
    M("28", f"{CONTINUOUS} {TRPO}", "batches are merged as if their means were equal", "squares + np.square(delta) * (self.count * n / total)", "squares", sample=CONTINUOUS),
    M("29", f"{CONTINUOUS} {TRPO}", "outliers stay", ".clip(-10, 10).astype(np.float32)", ".astype(np.float32)"),
    M("29", f"{PENALTY}", "clipped at ±5", ".clip(-10, 10).astype(np.float32)", ".clip(-5, 5).astype(np.float32)"),
    M("29", f"{TRPO}", "clipped above alone", ".clip(-10, 10).astype(np.float32)", ".clip(None, 10).astype(np.float32)"),
    M("30", CONTROL, "the return leaks into the next episode", "self.lengths[done] = self.discounted[done] = 0", "self.lengths[done] = 0"),
    M("30", f"{CONTINUOUS}", "the return starts anew at deaths alone", "self.lengths[done] = self.discounted[done] = 0", "self.lengths[done] = self.discounted[terminations] = 0"),
    M("30", f"{PENALTY}", "the return is not discounted", "self.discounted * self.gamma + rewards", "self.discounted + rewards"),
    M("30", f"{TRPO}", "the spread is that of rewards", "self.return_stats.update(self.discounted)", "self.return_stats.update(rewards)"),
    M("30", f"{CONTINUOUS} {TRPO}", "rewards are centred", "(rewards / np.sqrt(", "((rewards - rewards.mean()) / np.sqrt("),
    M("31", f"{CONTINUOUS} {TRPO}", "outliers stay", "self.return_stats.var + 1e-8)).clip(-10, 10)", "self.return_stats.var + 1e-8)).clip()"),
    M("31", f"{PENALTY}", "clipped at ±1", "self.return_stats.var + 1e-8)).clip(-10, 10)", "self.return_stats.var + 1e-8)).clip(-1, 1)"),
    M("31", f"{TRPO} {CONTINUOUS}", "clipped above alone", "self.return_stats.var + 1e-8)).clip(-10, 10)", "self.return_stats.var + 1e-8)).clip(None, 10)"),
    # S2 and S3
    M("S2", ALL, "each process keeps its own gradient", "grad.copy_(mean.view(grad.shape))", "pass"),
    M("S2", f"{ATARI} {TRPO}", "the sum over processes", "dist.all_reduce(x := x / WORLD)", "dist.all_reduce(x := x / 1)"),
    M("S3", f"{ATARI} {PENALTY}", "epochs end at the target itself", "> 1.5 * args.target_kl", "> args.target_kl"),
    M("S3", f"{CONTINUOUS}", "epochs never end early", "if args.target_kl is not None and", "if False and"),
    M("S3", PPO, "the other estimate of KL decides", "global_mean(history[-1][4])", "global_mean(history[-1][3])"),
    M("S3", f"{CONTINUOUS}", "the mean over the iteration decides", "global_mean(history[-1][4])", "global_mean(torch.stack(history).mean(0)[4])"),
    # TRPO
    M("TRPO-surrogate", TRPO, "log ratios instead of ratios", "((log_prob(actions, pi) - logprobs).exp() * advantages)", "((log_prob(actions, pi) - logprobs) * advantages)"),
    M("TRPO-surrogate", TRPO, "entropy is punished", "+ ent_coef * entropy(pi)", "- ent_coef * entropy(pi)"),
    M("TRPO-surrogate", TRPO, "the way down", "torch.func.grad(lambda theta: surrogate(", "torch.func.grad(lambda theta: -surrogate("),
    M("TRPO-FVP", TRPO, "M is the identity", "transposed(*fisher(*forward(v)))", "transposed(*forward(v))"),
    M("TRPO-FVP", TRPO, "damping is forgotten", " + damping * v", " + 0 * v"),
    M("TRPO-FVP", TRPO, "the sum over states", "kl_divergence(old, new).mean()), old)", "kl_divergence(old, new).sum()), old)"),
    M("TRPO-FVP", TRPO, "--fvp-subsample does nothing", "obs[:: args.fvp_subsample]", "obs"),
    M("TRPO-CG", TRPO, "steepest descent", "p = residual + square / previous * p", "p = residual"),
    M("TRPO-CG", TRPO, "it starts elsewhere", "x, residual, p = torch.zeros_like(b), b, b", "x, residual, p = torch.ones_like(b), b, b"),
    M("TRPO-CG", TRPO, "the tolerance is absolute", "square > tol**2 * first", "square > tol**2"),
    M("TRPO-CG", TRPO, "it never stops early", "square > tol**2 * first", "square > -1"),
    M("TRPO-CG", TRPO, "negative curvature is walked along", " and curvature > 0)", ")"),
    M("TRPO-step", TRPO, "half the KL", "(2 * max_kl / (x @ product))", "(max_kl / (x @ product))", sample=TRPO),
    M("TRPO-step", TRPO, "the plain gradient", ".sqrt() * x", ".sqrt() * gradient"),
    M("TRPO-step", TRPO, "the root is forgotten", "(2 * max_kl / (x @ product)).sqrt() * x", "(2 * max_kl / (x @ product)) * x"),
    M("TRPO-search", TRPO, "KL may be anything", " and after[1] <= max_kl:", ":"),
    M("TRPO-search", TRPO, "the surrogate need not improve", "if 0 < after[0] - before[0] <", "if -1e9 < after[0] - before[0] <"),
    M("TRPO-search", TRPO, "the last candidate is kept when none passes", "return theta, before, 0.0, steps", "return candidate, after, decay**k, k"),
    M("TRPO-search", TRPO, "one backtrack fewer", "for k in range(steps + 1):", "for k in range(steps):"),
    M("TRPO-search", TRPO, "the step shrinks as 1 / k", "decay**k * step)", "step / (k + 1))"),
    M("TRPO-search", TRPO, "the limit is on KL(new‖old)", "kls = kl_divergence(old, pi)", "kls = kl_divergence(pi, old)"),
    M("TRPO-degenerate", TRPO, "a step that is not finite is a step", "return step if usable else", "return step if True else"),
    M("TRPO-degenerate", TRPO, "failures are not counted", "agent.failures.add_(fraction == 0)", "pass"),
    M("TRPO-degenerate", TRPO, "the residual of no gradient is NaN", "(gradient - product).norm() / gradient.norm()).nan_to_num()", "(gradient - product).norm() / gradient.norm())"),
    # PPO with a KL penalty
    M("PEN-KL", PENALTY, "KL(new‖old)", "(old_means, old_logstd), (means, logstd) = old, new", "(old_means, old_logstd), (means, logstd) = new, old"),
    M("PEN-KL", PENALTY, "distances in units of the old deviation", "((old_means - means) / logstd.exp()).square() +", "((old_means - means) / old_logstd.exp()).square() +"),
    M("PEN-KL", PENALTY, "the half is forgotten", "return 0.5 * (((old_means", "return (((old_means"),
    M("PEN-KL", PENALTY, "the mean over components", "variance_ratio.log()).sum(-1)", "variance_ratio.log()).mean(-1)"),
    M("PEN-loss", PENALTY, "β is not used", "- beta * kl).mean()", "- kl).mean()"),
    M("PEN-loss", PENALTY, "distance is rewarded", "- beta * kl).mean()", "+ beta * kl).mean()"),
    M("PEN-loss", PENALTY, "the loss takes KL(new‖old)", "kl_divergence((old_means, old_logstd), (means, agent.actor_logstd))", "kl_divergence((means, agent.actor_logstd), (old_means, old_logstd))"),
    M("PEN-beta", PENALTY, "the lower threshold is the target", "kl < target_kl / 1.5", "kl < target_kl"),
    M("PEN-beta", PENALTY, "the upper threshold is twice the target", "kl > 1.5 * target_kl", "kl > 2 * target_kl"),
    M("PEN-beta", PENALTY, "β moves the wrong way", "factor = 0.5 if kl < target_kl / 1.5 else 2.0 if", "factor = 2.0 if kl < target_kl / 1.5 else 0.5 if", sample=PENALTY),
    M("PEN-beta", PENALTY, "factors of 1.5", "factor = 0.5 if kl < target_kl / 1.5 else 2.0 if", "factor = 1 / 1.5 if kl < target_kl / 1.5 else 1.5 if"),
    M("PEN-beta", PENALTY, "no lower bound", "min(max(beta * factor, 1e-4), 1e4)", "min(beta * factor, 1e4)"),
    M("PEN-beta", PENALTY, "no upper bound", "min(max(beta * factor, 1e-4), 1e4)", "max(beta * factor, 1e-4)"),
    M("PEN-beta", PENALTY, "no penalty becomes a small one", " if beta else 0.0", ""),
    M("PEN-beta", PENALTY, "--no-adaptive-beta does nothing", "if args.adaptive_beta:", "if True:"),
    M("PEN-beta", PENALTY, "β stays as it was", "if args.adaptive_beta:", "if False:"),
    M("PEN-old", PENALTY, "the old log std follows the new one", ".expand_as(means).clone()", ".expand_as(means)"),
    M("PEN-old", PENALTY, "actions stand in for the old means", "returns, values, means, old_logstd)]", "returns, values, actions, old_logstd)]"),
    M("PEN-old", PENALTY, "the KL that moves β is KL(new‖old)", "kl_divergence((means, old_logstd), (agent(obs)[0], agent.actor_logstd))", "kl_divergence((agent(obs)[0], agent.actor_logstd), (means, old_logstd))"),
    M("PEN-old", PENALTY, "the KL that moves β is that of the first step alone", "kl_divergence((means, old_logstd), (agent(obs)[0]", "kl_divergence((means[:1], old_logstd[:1]), (agent(obs[:1])[0]"),
]  # fmt: skip
