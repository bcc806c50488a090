"""RLHF as users run it: the built-in task, their own model and data from files, failing checks."""

import copy
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import MODULES, SMALL, run, scalars
from test_rlhf import gpt2, scorer
from test_runs import assert_same_run
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

rlhf: Any = MODULES["rlhf_ppo_gpt2"]
WORDS = "the cat dog sat ran on mat sun in a and was big red end".split()


def train(cwd: Path, *flags: Any) -> Path:
    """A small run inside this process; returns its folder."""
    before = set(cwd.glob("runs/*"))
    rlhf.train(rlhf.parse_args([str(x) for x in (*SMALL["rlhf_ppo_gpt2"], "--run-dir", cwd / "runs", *flags)]))
    (folder,) = set(cwd.glob("runs/*")) - before
    return folder


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run that nobody stopped."""
    return train(tmp_path_factory.mktemp("straight"))


def resume(folder: Path, *flags: Any) -> None:
    rlhf.train(rlhf.parse_args([str(x) for x in ("--resume", folder, *flags)]))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with a byte-level tokenizer like the real one, float16 in the file, dropout in the config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    corpus = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))]
    core.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=120, special_tokens=["<|endoftext|>"], show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    model = gpt2(vocabulary=len(tokenizer), dropout=0.1)
    model.generation_config.update(repetition_penalty=1.5, eos_token_id=7)  # settings of its own
    model.half().save_pretrained(folder)
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    prompts = [f"the {a} {b}" for a in ("cat", "dog", "sun", "mat") for b in ("sat", "ran", "was")]
    pairs = [{"prompt": p, "chosen": " on a mat", "rejected": " big big red"} for p in prompts]
    return {
        "prompts": write(folder / "prompts.jsonl", [{"prompt": p} for p in prompts]),
        "preferences": write(folder / "pairs.jsonl", pairs * 4),
        "sft": write(folder / "sft.jsonl", [{"prompt": p, "response": " on a mat and in the sun"} for p in prompts]),
    }


REAL = "--response-length 6 --prompt-length 8 --batch-size 16 --num-minibatches 2 --update-epochs 1 --total-episodes 32"


def real_flags(model_folder: Path, data: dict[str, Path]) -> list[Any]:
    flags = [x for key, path in data.items() for x in (f"--{key}", path)]
    return [
        "--model",
        model_folder,
        *flags,
        *REAL.split(),
        "--eval-episodes",
        4,
        "--fit-batch-size",
        8,
        "--min-accuracy",
        0,
    ]


def test_a_model_and_data_of_ones_own_and_what_transformers_opens_afterwards(
    model_folder: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    result = run("rlhf_ppo_gpt2", *real_flags(model_folder, data), cwd=tmp_path, env={"HF_HUB_OFFLINE": "1"})
    assert result.returncode == 0 and not result.stderr, result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith(model_folder.name) and "gold" not in result.stdout
    policy: Any = AutoModelForCausalLM.from_pretrained(folder / "policy")
    sft: Any = AutoModelForCausalLM.from_pretrained(folder / "sft")
    reward_model = AutoModelForSequenceClassification.from_pretrained(folder / "reward_model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    given: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    weights = [m.transformer.h[0].mlp.c_fc.weight.float() for m in (given, sft, policy)]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    assert policy.dtype == torch.float32 and reward_model.config.num_labels == 1
    state = torch.load(folder / "checkpoint.pt", weights_only=True)["agent"]
    assert torch.equal(policy.transformer.wte.weight, state["policy.transformer.wte.weight"])
    policy.train()  # as saved, there is no dropout to come back
    tokens = tokenizer("the cat sat", return_tensors="pt").input_ids
    settings = policy.generation_config
    assert (settings.do_sample, settings.top_k, settings.top_p, settings.temperature) == (True, 0, 1.0, 1.0)
    assert (settings.eos_token_id, settings.max_new_tokens) == (tokenizer.eos_token_id, 6)
    drawn = policy.eval().generate(tokens, return_dict_in_generate=True, output_scores=True, min_new_tokens=4)
    with torch.no_grad():
        raw = policy(drawn.sequences).logits[0, tokens.shape[1] - 1 : -1]
    used = torch.cat(drawn.scores)
    used[:4, tokenizer.eos_token_id] = raw[:4, tokenizer.eos_token_id]  # which min_new_tokens has forbidden
    torch.testing.assert_close(used.log_softmax(-1), raw.log_softmax(-1), atol=1e-5, rtol=0)
    again = run("rlhf_ppo_gpt2", "--evaluate", folder, cwd=tmp_path)
    assert again.returncode == 0 and "over 4 sampled responses" in again.stdout
    # The finished reward model serves another run, without comparisons.
    flags = real_flags(model_folder, {"prompts": data["prompts"]})
    other = run("rlhf_ppo_gpt2", *flags, "--reward-model", folder / "reward_model", "--run-dir", "other", cwd=tmp_path)
    assert other.returncode == 0, other.stderr
    (second,) = (tmp_path / "other").iterdir()
    same = AutoModelForSequenceClassification.from_pretrained(second / "reward_model")
    assert torch.equal(same.score.weight, reward_model.score.weight)


@pytest.mark.parametrize("kind", ["built in", "files"])
def test_evaluations_answer_prompts_that_training_never_sees(
    model_folder: Path, data: dict[str, Path], tmp_path: Path, monkeypatch: Any, kind: str
) -> None:
    trained: list[tuple[int, ...]] = []
    answered: list[list[tuple[int, ...]]] = []
    batch, measure, drawn = rlhf.prompt_batch, rlhf.measure, rlhf.sample_responses

    def spied_batch(*inputs: Any) -> Any:
        prompts = batch(*inputs)
        trained.extend(map(tuple, prompts))
        return prompts

    def spied_measure(args: Any, task: Any, answer: Any) -> Any:
        def told(prompts: Any) -> Any:
            answered.append([tuple(prompt) for prompt in prompts])
            return answer(prompts)

        return measure(args, task, told)

    def spied_drawn(args: Any, policy: Any, prompts: Any, eos: int) -> Any:
        if not answered:  # the stages and the self-check
            trained.extend(map(tuple, prompts))
        return drawn(args, policy, prompts, eos)

    monkeypatch.setattr(rlhf, "prompt_batch", spied_batch)
    monkeypatch.setattr(rlhf, "measure", spied_measure)
    monkeypatch.setattr(rlhf, "sample_responses", spied_drawn)
    flags = real_flags(model_folder, data) if kind == "files" else []
    folder = train(tmp_path, *flags, "--eval-every", 1, "--eval-episodes", 5)
    rlhf.evaluate(rlhf.parse_args(["--evaluate", str(folder)]))
    assert len(answered) == (2 if kind == "files" else 4) + 2  # before, after each iteration, and afterwards
    assert len(answered[0]) == 5 and all(prompts == answered[0] for prompts in answered)
    assert trained and not set(trained) & set(answered[0])


def test_saved_models_have_no_dropout(model_folder: Path, data: dict[str, Path], tmp_path: Path) -> None:
    folder = train(tmp_path, *real_flags(model_folder, data))
    for name, kind in (("policy", AutoModelForCausalLM), ("reward_model", AutoModelForSequenceClassification)):
        model = kind.from_pretrained(folder / name).train()
        assert not any(m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)), name


@pytest.mark.parametrize(
    ("key", "content", "words"),
    [
        ("prompts", "", "is empty"),
        ("prompts", '{"prompt": "x"}\n', "at least two rows"),
        ("prompts", '{"text": "x"}\n', "prompt"),
        ("prompts", '{"prompt": "x"}\n{"prompt": 3}\n', "row 2"),
        ("prompts", '{"prompt": "x"}\n{"prompt": ""}\n', "at least two rows"),
        ("prompts", '{"prompt": ""}\n{"prompt": ""}\n', "is empty"),
        ("prompts", "not json\n", "JSONDecodeError"),
        ("preferences", '{"prompt": "x", "chosen": "y"}\n', "rejected"),
        ("preferences", '{"prompt": "x", "chosen": "y", "rejected": "z"}\n', "at least two rows"),
        ("preferences", '{"prompt": "x", "chosen": "y", "rejected": "y"}\n' * 2, "at least two rows that differ"),
        ("preferences", '{"prompt": "x"}\n', "chosen.*row 1 has {'prompt': 'x'}"),
        ("sft", '{"prompt": "x"}\n', "response"),
    ],
)
def test_faulty_files_are_named(
    model_folder: Path, data: dict, tmp_path: Path, key: str, content: str, words: str
) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    args = rlhf.parse_args([str(x) for x in real_flags(model_folder, data | {key: tmp_path / "bad.jsonl"})])
    with pytest.raises(rlhf.UsageError, match=words) as caught:
        rlhf.load_task(args, torch.device("cpu"))
    assert f"--{key} " in str(caught.value) and "\n" not in str(caught.value)


def test_files_may_hold_what_json_allows(model_folder: Path, data: dict[str, Path], tmp_path: Path) -> None:
    """Separators that are no line ends, a byte order mark, CRLF, empty lines; a tokenizer that adds ends by itself."""
    from tokenizers import processors

    text = '\ufeff{"prompt": "the\u2028cat"}\r\n\r\n{"prompt": "the dog\x85"}\n'
    (tmp_path / "odd.jsonl").write_bytes(text.encode())
    assert rlhf.read_rows(str(tmp_path / "odd.jsonl"), "--prompts", "prompt") == [["the\u2028cat"], ["the dog\x85"]]
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    assert tokenizer("the cat").input_ids[0] == tokenizer("the cat").input_ids[-1] == 0
    task = rlhf.file_task(rlhf.parse_args([str(x) for x in real_flags(model_folder, data)]), tokenizer)
    assert not any(0 in prompt for prompt in task.prompts) and all(text.count(0) == 1 for text in task.texts)


def test_a_run_goes_on_where_its_files_have_another_path(
    model_folder: Path, data: dict[str, Path], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(model_folder.parent)
    folder = train(tmp_path, *real_flags(Path(model_folder.name), data), "--checkpoint-every", 1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rlhf.UsageError, match="--model"):
        resume(folder, "--total-episodes", 48)
    resume(folder, "--total-episodes", 48, "--model", model_folder)
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["iteration"] == 3


def test_a_run_that_saves_only_at_the_end_can_be_evaluated_and_goes_on(tmp_path: Path, capsys: Any) -> None:
    folder = train(tmp_path, "--checkpoint-every", 0, "--learning-rate", 0.01)
    (final,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("step 512: gold"))
    rlhf.evaluate(rlhf.parse_args(["--evaluate", str(folder)]))
    assert final.removeprefix("step 512: ") in capsys.readouterr().out.splitlines()[0]  # same policy, prompts and seed
    resume(folder, "--total-episodes", 640)
    (folder / "checkpoint.pt").unlink()  # stages alone would train anew what is finished
    with pytest.raises(rlhf.UsageError, match="no whole checkpoint.*FileNotFoundError"):
        resume(folder)


def test_evaluation_asks_no_more_than_the_model_can_read(tmp_path: Path) -> None:
    folder = train(tmp_path)
    with pytest.raises(rlhf.UsageError, match="positions"):
        rlhf.evaluate(rlhf.parse_args(["--evaluate", str(folder), "--response-length", "200"]))


@pytest.mark.parametrize("flags", [["--sft-learning-rate", "1e18"], ["--learning-rate", "1e18"]])
def test_numbers_that_run_away_end_the_run_in_a_sentence(tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(rlhf.RunError, match="finite.*lower"):
        train(tmp_path, *flags)


def test_a_reward_model_of_nans_is_not_trained_on(model_folder: Path, data: dict[str, Path], tmp_path: Path) -> None:
    model = scorer(gpt2(vocabulary=len(AutoTokenizer.from_pretrained(model_folder))))
    with torch.no_grad():
        model.score.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path / "scorer")
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / "scorer")
    with pytest.raises(rlhf.RunError, match="score of the reward model|a weight of reward_model"):
        train(tmp_path, *real_flags(model_folder, {"prompts": data["prompts"]}), "--reward-model", tmp_path / "scorer")


def test_a_disk_that_fills_up_while_a_model_is_saved(tmp_path: Path) -> None:
    result = run("rlhf_ppo_gpt2", *SMALL["rlhf_ppo_gpt2"], cwd=tmp_path, limit=500_000)
    assert result.returncode == 1 and "sft could not be written" in result.stderr and "Traceback" not in result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert not list(folder.glob("*.tmp")) and not (folder / "sft").exists()


def test_models_that_do_not_fit_are_refused(model_folder: Path, data: dict[str, Path], tmp_path: Path) -> None:
    flags = [str(x) for x in real_flags(model_folder, data)]
    with pytest.raises(rlhf.UsageError, match="exceeds the model's 40 positions"):
        rlhf.load_task(rlhf.parse_args([*flags, "--prompt-length", "39"]), torch.device("cpu"))
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "gpt_neo"}))
    with pytest.raises(rlhf.UsageError, match="gpt_neo|cannot be loaded"):
        rlhf.load_task(rlhf.parse_args([*flags, "--model", str(other)]), torch.device("cpu"))
    scorer(gpt2(vocabulary=9)).save_pretrained(tmp_path / "scorer")
    with pytest.raises(rlhf.UsageError, match="wrong kind"):
        rlhf.load_model(str(tmp_path / "scorer"), transformers.AutoModelForCausalLM, "--model")
    with pytest.raises(rlhf.UsageError, match="wrong kind"):  # its head would be a random one
        rlhf.load_model(str(model_folder), transformers.AutoModelForSequenceClassification, "--reward-model")


def test_a_model_without_its_tokenizer_is_refused(model_folder: Path, data: dict[str, Path], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(tmp_path / "bare")
    args = rlhf.parse_args([str(x) for x in real_flags(tmp_path / "bare", data)])
    with pytest.raises(rlhf.UsageError, match="has no tokenizer"):
        rlhf.load_task(args, torch.device("cpu"))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("none", ""),
        ("no tokenizer", "the tokenizer of --model"),
        ("other tokens", "the tokenizer of --model"),
        ("short", "13 positions"),
        ("two labels", "one label"),
        ("missing", "cannot be loaded"),
    ],
)
def test_a_reward_model_that_cannot_serve_is_refused_before_anything_is_written(
    model_folder: Path, data: dict[str, Path], tmp_path: Path, fault: str, words: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    policy = gpt2(vocabulary=len(tokenizer))
    if fault == "short":
        policy.config.n_positions = 13
        policy.transformer.wpe = torch.nn.Embedding(13, 16)
    model = scorer(policy)
    if fault == "two labels":
        model.config.num_labels = 2
        model.score = torch.nn.Linear(16, 2, bias=False)
    folder = tmp_path / "scorer"
    model.save_pretrained(folder)
    if fault != "no tokenizer":
        tokenizer.save_pretrained(folder)
    if fault == "other tokens":  # as many
        core = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = core["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        (folder / "tokenizer.json").write_text(json.dumps(core))
    if fault == "missing":
        folder = tmp_path / "nowhere"
    flags = [*real_flags(model_folder, {"prompts": data["prompts"]}), "--reward-model", folder]
    if not words:
        train(tmp_path, *flags)
        return
    with pytest.raises(rlhf.UsageError, match=words):
        train(tmp_path, *flags)
    assert not (tmp_path / "runs").exists()


def test_without_a_network_a_sentence_names_the_way(data: dict[str, Path], tmp_path: Path) -> None:
    """The hub's name leads to a port where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path / "cache")}
    flags = ["--model", "gpt2", "--prompts", data["prompts"], "--preferences", data["preferences"]]
    result = run("rlhf_ppo_gpt2", *flags, cwd=tmp_path, env=environment, timeout=90, fresh=True)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "--model gpt2" in result.stderr and "--local-dir" in result.stderr and not (tmp_path / "runs").exists()


# ------------------------------------------------------------------------------------------------ the self-check


class Broken:
    """What could be wrong, each as it happens to people; the self-check must name it."""

    @staticmethod
    def top_k(monkeypatch: Any, agent: Any) -> None:
        original = rlhf.sample_responses

        def sample(*args: Any) -> Any:
            responses, logprobs = original(*args)
            return responses, logprobs + 0.1  # as from a distribution cut to its likeliest tokens

        monkeypatch.setattr(rlhf, "sample_responses", sample)

    @staticmethod
    def dropout(monkeypatch: Any, agent: Any) -> None:
        agent.train()
        for module in agent.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1

    @staticmethod
    def another_reference(monkeypatch: Any, agent: Any) -> None:
        with torch.no_grad():
            agent.policy.transformer.h[0].mlp.c_fc.weight.mul_(1.3)

    @staticmethod
    def positions(monkeypatch: Any, agent: Any) -> None:
        original = rlhf.attention_inputs

        def shifted(mask: torch.Tensor) -> dict[str, torch.Tensor]:
            inputs = original(mask)
            return inputs | {"position_ids": torch.arange(mask.shape[1]).expand(mask.shape)}

        monkeypatch.setattr(rlhf, "attention_inputs", shifted)

    @staticmethod
    def nothing(monkeypatch: Any, agent: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("top_k", "sampler and scorer differ"),
        ("dropout", "sampler and scorer differ|KL to the reference"),
        ("another_reference", "KL to the reference"),
        ("positions", "sampler and scorer differ"),
        ("nothing", ""),
    ],
)
def test_the_self_check_names_what_is_wrong(monkeypatch: Any, fault: str, words: str) -> None:
    args = rlhf.Args(sft_size=20)
    task, _ = rlhf.load_task(args, torch.device("cpu"))
    reference = gpt2(vocabulary=len(task.tokenizer))
    model = scorer(reference)
    agent = rlhf.Agent(copy.deepcopy(reference), copy.deepcopy(model))
    getattr(Broken, fault)(monkeypatch, agent)
    check = lambda: rlhf.self_check(args, task, agent, reference, model)
    if not words:
        return check()
    with pytest.raises(rlhf.UsageError, match=f"self-check: .*({words})"):
        check()


def test_a_reward_model_near_chance_stops_before_ppo(tmp_path: Path) -> None:
    with pytest.raises(rlhf.UsageError, match="self-check: the reward model ranks only .* more comparisons"):
        train(tmp_path, "--min-accuracy", 1)


# ------------------------------------------------------------------------------------------------ what a run shows


@pytest.mark.detail("R30")
@pytest.mark.detail("R31")
@pytest.mark.detail("4")
@pytest.mark.detail("R28")
def test_a_run_logs_both_kls_both_judges_and_shows_the_same_prompts_twice(tmp_path: Path, capsys: Any) -> None:
    folder = train(tmp_path, "--eval-every", 2, "--best-of-n", 4, "--target-kl", 1)
    logged = scalars(folder)
    losses = {"value_loss", "policy_loss", "entropy", "clipfrac", "explained_variance"}
    charts = {"episodic_return", "episodic_length", "learning_rate", "SPS", "beta", "proxy", "score", "gold", "ended"}
    charts |= {"minibatches"}
    kls = {"ref", "ref_k2", "ref_k3", "ref_exact", "ref_se", "ref_k2_se", "ref_k3_se", "ref_exact_se", "old", "old_k1"}
    expected = {f"losses/{k}" for k in losses} | {f"charts/{k}" for k in charts} | {f"kl/{k}" for k in kls}
    for tag in expected:
        assert [step for step, _ in logged[tag]] == [128, 256, 384, 512], tag
    for tag in ("gold", "proxy", "kl_ref", "kl_ref_exact", "length", "ended"):
        assert [step for step, _ in logged[f"eval/{tag}"]] == [0, 256, 512], tag
    rates = [value for _, value in logged["charts/learning_rate"]]
    assert rates == pytest.approx([3e-4, 2.25e-4, 1.5e-4, 0.75e-4])
    assert [step for step, _ in logged["best_of_n/kl"]] == [1, 2, 4]
    proxies = [value for _, value in logged["best_of_n/proxy"]]
    assert proxies == sorted(proxies) and logged["best_of_n/kl"][0][1] == 0
    assert [step for step, _ in logged["sft/loss"]] == [step for step, _ in logged["reward_model/accuracy"]] == [0]
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split("|")[0] for line in lines if " | " in line]
    assert len(shown) == 8 and shown[:4] == shown[4:]  # before and after
    assert logged["kl/ref"][0][1] == pytest.approx(0, abs=1e-4) and logged["kl/old"][0][1] >= 0
    assert set(logged) == expected | {
        k for k in logged if k.startswith(("eval/", "best_of_n/", "sft/", "reward_model/"))
    }


@pytest.mark.detail("R22")
def test_the_beta_of_the_log_follows_the_kl_of_the_log(tmp_path: Path) -> None:
    flags = ["--beta-controller", "proportional", "--kl-target", 0.05, "--kl-horizon", 500, "--learning-rate", 0.003]
    folder = train(tmp_path, *flags)
    logged = scalars(folder)
    betas, kls = ([value for _, value in logged[tag]] for tag in ("charts/beta", "kl/ref"))
    assert betas[0] == pytest.approx(0.15)
    for i in range(3):
        factor = 1 + min(max(kls[i] / 0.05 - 1, -0.2), 0.2) * 128 / 500
        assert betas[i + 1] == pytest.approx(betas[i] * factor, rel=1e-5)
    assert len({round(b, 6) for b in betas}) == 4
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)["agent"]["beta"]
    assert float(saved) == pytest.approx(
        betas[-1] * (1 + min(max(kls[-1] / 0.05 - 1, -0.2), 0.2) * 128 / 500), rel=1e-5
    )


@pytest.mark.detail("R19")
def test_the_reference_and_the_reward_model_never_move(tmp_path: Path, monkeypatch: Any) -> None:
    """Neither in memory nor in the folder, and the KL after resuming is that to the original."""
    frozen: list[Any] = []
    original = rlhf.Run.stage

    def stage(self: Any, *args: Any) -> Any:
        model = original(self, *args)
        frozen.append((model, copy.deepcopy(model.state_dict())))
        return model

    monkeypatch.setattr(rlhf.Run, "stage", stage)
    folder = train(tmp_path, "--learning-rate", 0.01)
    assert len(frozen) == 2
    for model, before in frozen:
        assert not any(p.requires_grad for p in model.parameters())
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    first = scalars(folder)["kl/ref"]
    resume(folder, "--total-episodes", 640)
    after = scalars(folder)["kl/ref"]
    assert after[:4] == first and after[4][1] > 0.3 * first[3][1] > 0.01


@pytest.mark.parametrize("stage", ["fine_tune", "make_reward_model", "make_agent"])
def test_a_run_stopped_before_its_first_checkpoint_goes_on_with_the_stages_it_has(
    tmp_path: Path, straight: Path, monkeypatch: Any, stage: str
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    at_exit: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(rlhf, stage, stopped)
        patched.setattr(rlhf.atexit, "register", at_exit.append)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path)
    at_exit[0]()
    (folder,) = tmp_path.glob("runs/*")
    with pytest.raises(rlhf.UsageError, match="no trained policy yet"):
        rlhf.evaluate(rlhf.parse_args(["--evaluate", str(folder)]))
    made = {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/model.safetensors")}
    assert len(made) == ["fine_tune", "make_reward_model", "make_agent"].index(stage)
    resume(folder)
    assert_same_run(folder, straight)
    assert (folder / "policy" / "config.json").exists()
    assert all((folder / name / "model.safetensors").stat().st_mtime_ns == time for name, time in made.items())


@pytest.mark.parametrize(
    "flags", [["--value-model", "head"], ["--micro-batch-size", "16"], ["--beta-controller", "doubling"]]
)
def test_other_ways_resume_exactly_too(tmp_path: Path, flags: list[str]) -> None:
    flags = [*flags, "--checkpoint-every", "2", "--no-anneal-lr"]
    straight, halfway = train(tmp_path, *flags), train(tmp_path, *flags, "--total-episodes", 256)
    assert torch.load(halfway / "checkpoint.pt", weights_only=True)["iteration"] == 2
    resume(halfway, "--total-episodes", 512)
    states = [torch.load(folder / "checkpoint.pt", weights_only=True)["agent"] for folder in (halfway, straight)]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def test_the_smoke_preset_gives_defaults_that_flags_override() -> None:
    args = rlhf.parse_args(["--preset", "smoke", "--batch-size", "32"])
    assert args.batch_size == 32 and args.total_episodes == rlhf.SMOKE["total_episodes"] and args.preset == "smoke"
    assert rlhf.parse_args([]).total_episodes > 5_000
    about_a_minute = {"sft_size": 4_000, "num_pairs": 1_000, "total_episodes": 512, "batch_size": 64}
    assert about_a_minute | {"eval_episodes": 64, "min_accuracy": 0.5} == rlhf.SMOKE


def test_health_names_the_metric_and_a_remedy_for_rlhf() -> None:
    """Each range holds what is usual and leaves out what is not."""
    fine = {
        "losses/clipfrac": 0.1,
        "losses/entropy": 1.0,
        "losses/explained_variance": 0.5,
        "kl/old": 0.01,
        "kl/ref": 3.0,
        "charts/ended": 0.99,
    }
    odd = {
        "losses/clipfrac": [0.9],
        "losses/entropy": [0.0],
        "losses/explained_variance": [-0.5],
        "kl/old": [0.2],
        "kl/ref": [-3.0, 40.0],
        "charts/ended": [0.2],
    }
    assert {name for name, *_ in rlhf.HEALTHY} == set(fine)
    for name, low, high, meaning in rlhf.HEALTHY:
        assert low <= fine[name] <= high and meaning
        assert not any(low <= value <= high for value in odd[name])


@pytest.mark.slow
def test_bf16_and_compile_agree_with_eager_float32() -> None:
    from test_rlhf import PROMPTS, args, fixed_rollout

    reference = gpt2(vocabulary=12)
    torch.manual_seed(5)
    responses, _ = rlhf.sample_responses(args(), reference, PROMPTS, 0)
    results = []
    for bf16, compiled in ((False, False), (True, False), (False, True)):
        start = reference, scorer(gpt2(vocabulary=12, seed=3))
        agent = rlhf.make_agent(args(bf16=bf16, compile=compiled), *start)
        per_token = fixed_rollout(agent, reference, responses, args()).per_token
        loss, _ = rlhf.ppo_loss(args(), agent, responses, per_token)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in agent.parameters() if p.grad is not None])
        results.append((float(loss.detach()), gradient))
    (loss, gradient), (half_loss, half_gradient), (compiled_loss, compiled_gradient) = results
    assert compiled_loss == pytest.approx(loss, abs=1e-5) and torch.allclose(compiled_gradient, gradient, atol=1e-5)
    assert half_loss == pytest.approx(loss, abs=0.05)
    assert float(torch.cosine_similarity(half_gradient, gradient, dim=0)) > 0.98
