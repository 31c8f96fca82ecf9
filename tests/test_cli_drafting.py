"""record and train-drafter as typed, on a target of random weights: traces, resuming, one line for each mistake."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from specsim.blocktrace import read_trace
from specsim.cli import drafting, show

ROOT = Path(__file__).parents[1]
PROFILE = ROOT / "hw_profiles/dsv4-flash-b300-tp4.json"
WORDS = 40


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """target/ (a Llama of random weights with a tokenizer), small/ and wide/ (others), prompts.jsonl."""
    torch = pytest.importorskip("torch")
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models")
    words = {f"w{i}": i for i in range(WORDS)}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="w0")
    for seed, (name, layers, size) in enumerate([("target", 4, WORDS), ("small", 1, WORDS), ("wide", 1, WORDS + 1)]):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=size, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
            num_key_value_heads=1, initializer_range=0.5, max_position_embeddings=64, bos_token_id=None,
            eos_token_id=None,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rng = np.random.default_rng(0)
    lines = [
        {"prompt": " ".join(f"w{i}" for i in rng.integers(1, WORDS, 5 + i)), "domain": "ab"[i % 2], "id": f"p{i}"}
        for i in range(6)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


@pytest.fixture(scope="module")
def checkpoint(models):
    """A DSpark drafter of random weights for target/, blocks of 4."""
    torch = pytest.importorskip("torch")
    from specsim.drafters.checkpoint import build, save_checkpoint
    from specsim.drafters.config import DSPARK, DraftConfig

    torch.manual_seed(9)
    config = DraftConfig(
        architectures=(DSPARK,), hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, num_hidden_layers=1, vocab_size=WORDS, num_target_layers=4, target_layer_ids=(0, 2),
        block_size=4, markov_rank=2, enable_confidence_head=True, from_target=("embed_tokens", "lm_head"),
    )  # fmt: skip
    return save_checkpoint(build(config), models / "drafter")


@pytest.fixture
def record(run, models):
    """The record verb on the models, float32, answers of 12 tokens; more arguments after these."""
    given = ["--target", models / "target", "--prompts", models / "prompts.jsonl", "--max-tokens", 12]
    return lambda *more: run("record", *given, "--dtype", "float32", *more)


@pytest.fixture
def train(run, models, tmp_path):
    """The train-drafter verb: two steps of a small DSpark into tmp_path/drafter."""
    given = ["--target", models / "target", "--prompts", models / "prompts.jsonl", "--max-tokens", 12, "--gamma", 3,
             "--work", tmp_path / "answers", "--rows", 2, "--anchors", 4, "--num-layers", 1, "--rank", 2,
             "--dtype", "float32"]  # fmt: skip

    def call(*more, out="drafter", blocks=16):
        return run("train-drafter", *given, "--out", tmp_path / out, "--blocks", blocks, *more)

    return call


# record


def test_record_with_a_checkpoint_goes_straight_into_pareto(record, run, checkpoint, tmp_path):
    out, facts = tmp_path / "new/t.parquet", tmp_path / "facts.json"
    code, text, err = record("--drafter", checkpoint, "--out", out, "--json", facts, "--seed", 3)
    assert (code, err) == (0, "")
    trace, meta = read_trace(out), read_trace(out).meta
    assert (meta.drafter, meta.target, meta.gamma, meta.kind) == ("drafter", "target", 4, "dense")
    assert (meta.temperature, meta.draft_sampling, meta.confidence_source, meta.seed) == (1, "probabilistic", "head", 3)
    assert meta.dataset.startswith("prompts.jsonl sha256:")
    assert meta.command.startswith(f"specsim record --target {checkpoint.parent}/target --drafter {checkpoint} ")
    assert set(meta.versions) == {"specsim", "torch", "transformers"}
    assert len(trace) == 6 * 12  # every position of every answer
    assert set(trace.domains) == {"a", "b"}
    assert 0 < trace.confidence.min() < trace.confidence.max() < 1
    schema = pq.read_schema(out)
    assert [str(schema.field(n).type.value_type) for n in ("confidence", "accept_rate", "draft_prob")] == [
        "float", "halffloat", "halffloat",
    ]  # fmt: skip
    assert f"Wrote {out}" in text
    assert "6 prompts\n" in text
    data = json.loads(facts.read_text())
    assert data["meta"]["drafter"] == "drafter"
    assert {row["domain"] for row in data["tau"]} == {"all", "a", "b"}
    code, text, err = run(
        "pareto", "--profile", PROFILE, "--trace", out, "-s", "NoSpec", "-s", "DSparkAsync", "--closed", "2,4",
        "--num-requests", 20, "--output-tokens", 20, "--seeds", 1, "--out", tmp_path / "front",
    )  # fmt: skip
    assert code == 0, err
    assert (tmp_path / "front/sla.csv").exists()


def test_record_with_lookup_and_a_small_model(record, models, tmp_path):
    out = tmp_path / "t.parquet"
    name = "ngram(longest=2, shortest=1)"
    code, _, err = record("--drafter", name, "--out", out, "--gamma", 3, "--limit", 4, "--responses-per-prompt", 2)
    assert (code, err) == (0, "")
    trace = read_trace(out)
    assert (trace.meta.drafter, trace.gamma, trace.meta.confidence_source) == (name, 3, "none")
    assert trace.confidence is None
    assert len(trace.request_ids) == 8
    assert trace.proposed.min() == 0
    flags = ("--confidence", "draft_prob", "--draft-sampling", "greedy")
    code, _, err = record("--drafter", models / "small", "--out", out, *flags)
    assert (code, err) == (0, "")
    assert (read_trace(out).meta.drafter, read_trace(out).meta.draft_sampling) == ("small", "greedy")
    assert read_trace(out).confidence.min() == 1  # a greedy draft is sure of itself


def test_the_target_drafts_for_itself(record, models, tmp_path):
    out = tmp_path / "t.parquet"
    code, _, err = record("--drafter", models / "target", "--out", out, "--temperature", 0, "--gamma", 2)
    assert (code, err) == (0, "")
    trace = read_trace(out)
    assert trace.accepted.min() == 2
    assert trace.meta.draft_sampling == "greedy"


def test_record_takes_up_answers_with_more_layers(record, checkpoint, models, tmp_path):
    work, one, two = (tmp_path / name for name in ("work", "one.parquet", "two.parquet"))
    assert record("--drafter", checkpoint, "--out", one, "--work", work)[0] == 0
    shards = {path: path.stat().st_mtime_ns for path in work.glob("shard-*")}
    assert shards
    # Fewer layers and another batch size: the same answers.
    assert record("--drafter", "ngram", "--out", two, "--work", work, "--batch", 2)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in work.glob("shard-*")} == shards
    assert read_trace(one).request_ids == read_trace(two).request_ids
    # The same command gives the same trace, with the answers kept or made anew.
    assert record("--drafter", checkpoint, "--out", two)[0] == 0
    assert (read_trace(one).accepted == read_trace(two).accepted).all()
    for flags, words in [
        (("--temperature", 0.5), "responses.json: temperature: 1.0 in the answers there, expected 0.5"),
        (("--limit", 3), "other prompts"),
    ]:
        code, _, err = record("--drafter", "ngram", "--out", two, "--work", work, *flags)
        assert code == 2
        assert words in err
    shutil.rmtree(work)
    assert record("--drafter", "ngram", "--out", two, "--work", work)[0] == 0
    code, _, err = record("--drafter", checkpoint, "--out", two, "--work", work)
    assert code == 2
    assert "responses.json: layers: (3,) in the answers there, expected (0, 2, 3)" in err


def test_answers_of_another_model_of_that_name_are_not_taken(record, run, models, tmp_path):
    transformers = pytest.importorskip("transformers")
    work, other = tmp_path / "work", tmp_path / "target"
    assert record("--drafter", "ngram", "--out", tmp_path / "t.parquet", "--work", work)[0] == 0
    shutil.copytree(models / "target", other)
    model = transformers.AutoModelForCausalLM.from_pretrained(other)
    model.model.layers[2].mlp.up_proj.weight.data *= 1.1
    model.save_pretrained(other)
    given = ["--prompts", models / "prompts.jsonl", "--max-tokens", 12, "--work", work, "--drafter", "ngram"]
    code, _, err = run("record", "--target", other, *given, "--out", tmp_path / "u.parquet")
    assert code == 2
    assert "responses.json: target: 'target sha256:" in err
    # The same weights elsewhere, and read in another precision, are the same model.
    moved = tmp_path / "moved" / "target"
    shutil.copytree(models / "target", moved)
    assert run("record", "--target", moved, *given, "--out", tmp_path / "u.parquet", "--dtype", "bfloat16")[0] == 0


def test_a_smaller_gamma_cuts_the_blocks(record, checkpoint, tmp_path):
    """At temperature 0 nothing is drawn: blocks of 2 are the first two tokens of blocks of 4."""
    whole, cut = tmp_path / "4.parquet", tmp_path / "2.parquet"
    for out, gamma in ((whole, 4), (cut, 2)):
        assert record("--drafter", checkpoint, "--out", out, "--gamma", gamma, "--temperature", 0)[0] == 0
    whole, cut = read_trace(whole), read_trace(cut)
    assert (np.minimum(whole.accepted, 2) == cut.accepted).all()
    assert whole.confidence[:, :2] == pytest.approx(cut.confidence, abs=1e-6)


def test_mistakes_of_record_are_one_line_and_leave_nothing(record, models, checkpoint, tmp_path):
    out = tmp_path / "t.parquet"
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "w1"}\n{"domain": "x"}\n')
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "w1 " * 60}))
    broken = {name: shutil.copytree(checkpoint, tmp_path / name) for name in ("cut", "other", "width", "bare")}
    weights = next(broken["cut"].glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-10])
    next(broken["bare"].glob("*.safetensors")).unlink()
    for name, key, value in (("other", "architectures", ["LlamaEagle"]), ("width", "vocab_size", WORDS + 1)):
        config = broken[name] / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))
    mute = tmp_path / "mute"
    shutil.copytree(models / "target", mute, ignore=shutil.ignore_patterns("tokenizer*"))
    for flags, words in [
        (("--drafter", "ngram", "--out", tmp_path), "--out: expected a file name, got the folder"),
        (("--drafter", "ngram", "--out", bad / "t.parquet"), "bad.jsonl: cannot write there"),
        (("--drafter", "ngram", "--work", bad), "bad.jsonl: cannot write there"),
        (("--drafter", "ngram", "--target", tmp_path / "no"), "no: expected a Hugging Face model folder"),
        (("--drafter", "ngram", "--target", mute), "target mute: tokenizer: expected one"),
        (("--drafter", "ngram", "--prompts", tmp_path / "no.jsonl"), "no.jsonl: cannot read"),
        (("--drafter", "ngram", "--prompts", bad), "bad.jsonl, line 2: expected messages, turns or prompt"),
        (("--drafter", "ngram", "--prompts", long), "prompts: none has at most 45 tokens"),
        (("--drafter", "ngram", "--max-tokens", 60), "max_tokens: 60: target target has a context of 64"),
        (("--drafter", "ngram", "--max-tokens", 0), "--max-tokens"),
        (("--drafter", "ngram", "--temperature", "inf"), "--temperature: expected a number of 0 or more, got inf"),
        (("--drafter", "ngram", "--temperature", 0, "--responses-per-prompt", 2), "--responses-per-prompt: expected 1"),
        (("--drafter", "ngram", "--confidence", "head"), "--confidence: ngram has no head"),
        (("--drafter", "ngram", "--confidence", "x"), "--confidence: expected head, draft_prob, position_mean or none"),
        (("--drafter", "ngram", "--draft-sampling", "x"), "--draft-sampling: expected probabilistic or greedy"),
        (("--drafter", "ngram", "--device", "x"), "device: 'x', expected"),
        (("--drafter", "ngram", "--dtype", "x"), "--dtype: expected auto, float32 or bfloat16, got 'x'"),
        (("--drafter", "ngram", "--dtype", "x", "--target", tmp_path / "no"), "--dtype: expected"),  # nothing is loaded
        (("--drafter", "ngram", "--gamma", 65, "--target", tmp_path / "no"), "Invalid value for '--gamma'"),
        (("--drafter", "ngram", "--gamma", 0), "Invalid value for '--gamma'"),
        (("--drafter", "ngram(4)"), "expected ngram or ngram(longest=4, shortest=2)"),
        (("--drafter", "ngram(longest=1)"), "longest >= shortest >= 1"),
        (("--drafter", "ngram(longst=1)"), "expected ngram or ngram("),
        (("--drafter", tmp_path / "no"), "no: cannot read: expected a drafter's folder"),
        (("--drafter", tmp_path), "config.json: cannot read"),
        (("--drafter", checkpoint, "--gamma", 5), "gamma: 5, expected at most 4"),
        (("--drafter", models / "wide"), "drafter wide: vocab_size: expected 40 as target target, got 41"),
        (("--drafter", broken["cut"]), f"{weights.name}: cannot read, is it whole?"),
        (("--drafter", broken["other"]), "config.json: architectures: expected ['Qwen3DSparkModel']"),
        (("--drafter", broken["width"]), "config.json: vocab_size: expected 40 as target target, got 41"),
        (("--drafter", broken["bare"]), "bare: expected *.safetensors, found none"),
    ]:
        code, text, err = record("--out", out, *flags)
        assert (code, text) == (2, ""), (flags, err)
        assert words in err, (flags, err)
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert not out.exists()


def test_outputs_of_both_verbs_are_apart_from_what_they_read(record, train, models, checkpoint, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    shutil.copy(models / "prompts.jsonl", prompts)
    out, target = tmp_path / "t.parquet", models / "target"
    lookup = ("--drafter", "ngram", "--prompts", prompts)
    for call, flags, words in [
        (record, (*lookup, "--out", prompts), f"--out: {prompts}: is the input --prompts, expected another path"),
        (record, (*lookup, "--out", out, "--json", out), f"--json: {out}: is also written by --out"),
        (record, (*lookup, "--out", out, "--work", out), f"--work: {out}: is also written by --out"),
        (record, (*lookup, "--out", out, "--work", target), f"--work: {target}: is the input --target"),
        (record, ("--drafter", checkpoint, "--out", out, "--work", checkpoint), "is the input --drafter"),
        (train, ("--work", tmp_path / "drafter"), f"--out: {tmp_path / 'drafter'}: is also written by --work"),
        (train, ("--work", target), f"--work: {target}: is the input --target"),
        (train, ("--start", checkpoint, "--work", checkpoint), f"--work: {checkpoint}: is the input --start"),
    ]:
        code, text, err = call(*flags)
        assert (code, text, err.count("\n")) == (2, "", 1)
        assert words in err
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]
    assert prompts.read_bytes() == (models / "prompts.jsonl").read_bytes()
    assert not (target / "responses.json").exists()


def test_a_drafter_called_ngram_is_no_file(record, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        code, _, err = record("--drafter", "ngram", "--out", "ngram")
        assert (code, err) == (0, "")


def test_a_target_that_says_nothing_is_one_line(record, models, tmp_path):
    mute = shutil.copytree(models / "target", tmp_path / "mute")
    (mute / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(WORDS))}))
    code, text, err = record("--drafter", "ngram", "--out", tmp_path / "t.parquet", "--target", mute)
    assert (code, text) == (2, "")
    assert err == "error: responses: expected one of more than gamma = 7 tokens\n"


def test_an_interrupted_recording_leaves_the_old_file_and_goes_on(record, checkpoint, tmp_path, monkeypatch):
    from specsim.drafters import recorder, responses

    out, work = tmp_path / "t.parquet", tmp_path / "work"
    out.write_bytes(b"old")
    answer = responses._answer

    def stopped(*_):
        raise KeyboardInterrupt

    def second_time(*arguments):
        monkeypatch.setattr(responses, "_answer", stopped)
        answer(*arguments)

    flags = ("--drafter", checkpoint, "--out", out, "--work", work, "--batch", 3)
    monkeypatch.setattr(responses, "_answer", second_time)
    code, text, err = record(*flags)
    assert (code, text) == (130, "")
    assert err == "interrupted: the same command goes on from what is there\n"
    monkeypatch.setattr(responses, "_answer", answer)
    made = {path.name: path.stat().st_mtime_ns for path in work.glob("shard-*")}
    assert len(made) == 1
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "_record_one", stopped)
        assert record(*flags)[0] == 130
    assert out.read_bytes() == b"old"
    assert record(*flags)[0] == 0
    assert len(read_trace(out)) == 6 * 12
    assert made.items() <= {path.name: path.stat().st_mtime_ns for path in work.glob("shard-*")}.items()
    assert {p.name for p in tmp_path.iterdir()} == {"t.parquet", "work"}


def test_a_full_disk_is_one_line(record, train, checkpoint, tmp_path, monkeypatch):
    import safetensors

    from specsim.drafters import responses
    from specsim.drafters import train as training

    def full(*_, **__):
        raise safetensors.SafetensorError("I/O error: No space left on device")

    def torn(*_):
        raise RuntimeError("unexpected pos 576 vs 534")

    monkeypatch.setattr(training.torch, "save", torn)
    code, _, err = train(blocks=8)
    assert (code, err.count("\n")) == (2, 1)
    assert "training.pt: cannot write: unexpected pos" in err
    monkeypatch.setattr(responses, "save_file", full)
    code, _, err = record("--drafter", checkpoint, "--work", tmp_path / "work", "--out", tmp_path / "t.parquet")
    assert (code, err.count("\n")) == (2, 1)
    assert "shard-00000.safetensors: cannot write: I/O error: No space left" in err
    assert [p.name for p in (tmp_path / "work").iterdir()] == ["responses.json"]


@pytest.mark.parametrize("verb", ["record", "train-drafter"])
def test_without_torch_one_line_says_what_to_install(verb, run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    flags = {"record": ["--drafter", "ngram"], "train-drafter": ["--work", tmp_path]}[verb]
    code, text, err = run(verb, "--target", "t", "--prompts", "p", "--out", tmp_path / "o", *flags)
    assert (code, text) == (2, "")
    assert err == (
        "error: drafters need torch: pip install 'specsim[drafters]' (in a checkout: pip install -e '.[drafters]')\n"
    )


@pytest.mark.parametrize("verb", ["record", "train-drafter"])
def test_help_has_an_example(run, verb):
    code, text, _ = run(verb, "--help")
    assert code == 0
    assert f"Example: specsim {verb} " in " ".join(text.split())


# train-drafter


def test_train_two_steps_and_go_on(train, record, tmp_path, monkeypatch):
    from specsim.drafters import train as training

    monkeypatch.setattr(show, "PATIENCE", 0.0)  # progress from the start
    keep = training._keep
    with monkeypatch.context() as patch:

        def interrupted(*arguments):
            keep(*arguments)
            raise KeyboardInterrupt

        patch.setattr(training, "_keep", interrupted)
        code, text, err = train("--layers", "0,2", "--vocabulary", 30)
        assert (code, text) == (130, "")
        assert err.endswith("interrupted: the same command goes on from what is there\n")
        assert not (tmp_path / "drafter/config.json").exists()
    code, text, err = train("--layers", "0,2", "--vocabulary", 30)
    assert code == 0, err
    assert "step 2 of 2, 16 blocks: loss " in err
    assert "step 1 of" not in err  # the first was done
    assert "dspark for target: loss" in text
    config = json.loads((tmp_path / "drafter/config.json").read_text())
    assert config["target_layer_ids"] == [0, 2]
    assert config["specsim_training"]["command"].startswith("specsim train-drafter --target ")
    whole = (tmp_path / "drafter/model-00001-of-00001.safetensors").read_bytes()
    assert train("--layers", "0,2", "--vocabulary", 30, out="again")[0] == 0
    assert (tmp_path / "again/model-00001-of-00001.safetensors").read_bytes() == whole
    assert train("--layers", "0,2", "--vocabulary", 30)[0] == 0  # nothing left to do
    out = tmp_path / "t.parquet"
    assert record("--drafter", tmp_path / "drafter", "--out", out, "--work", tmp_path / "answers")[0] == 0
    assert read_trace(out).meta.confidence_source == "head"
    code, _, err = train("--layers", "1,2", "--vocabulary", 30)
    assert code == 2
    assert "training.json: layers: (0, 2) in the training begun there, got (1, 2)" in err


@pytest.mark.parametrize("kind", ["dspark-gated", "dspark-rnn", "dflash", "eagle3", "mtp"])
def test_every_kind_trains_and_starts_from_a_checkpoint(kind, train, tmp_path):
    code, _, err = train("--kind", kind, blocks=8)
    assert code == 0, err
    code, _, err = train("--kind", kind, "--start", tmp_path / "drafter", out="next", blocks=8)
    assert code == 0, err
    read = json.loads((tmp_path / "next/config.json").read_text())["target_layer_ids"]
    assert read == ([3] if kind == "mtp" else [1])


def test_a_start_of_another_vocabulary_or_rank(train, models, tmp_path):
    """What fits is taken over; the head stays the target's, of the tokens that the new answers use most."""
    import torch

    from specsim.drafters.checkpoint import load_checkpoint
    from specsim.drafters.target import load_target

    assert train("--vocabulary", 20, blocks=8)[0] == 0
    target = load_target(models / "target", "float32")
    mine = load_checkpoint(tmp_path / "drafter", target)
    other = ("--vocabulary", 20, "--work", tmp_path / "others", "--seed", 5, "--start", tmp_path / "drafter")
    for rank in (2, 3):
        code, _, err = train(*other, "--rank", rank, "--learning-rate", 1e-9, out=f"rank{rank}", blocks=8)
        assert code == 0, err
        theirs = load_checkpoint(tmp_path / f"rank{rank}", target)
        assert not torch.equal(theirs.vocabulary, mine.vocabulary)
        assert torch.equal(theirs.lm_head.weight, target.head[theirs.vocabulary])
        assert torch.equal(theirs.fc.weight, mine.fc.weight)


def test_a_training_that_overflows_leaves_no_drafter(train, tmp_path):
    code, text, err = train("--layers", "0,2", "--learning-rate", 1e30)
    assert (code, text) == (2, "")
    assert "is not a number: expected a smaller learning rate" in err
    assert not (tmp_path / "drafter/config.json").exists()


def test_a_finished_drafter_is_not_replaced_by_another_kind(train, tmp_path):
    assert train("--layers", "0,2")[0] == 0
    (tmp_path / "drafter/training.pt").unlink()
    before = {path.name: path.read_bytes() for path in (tmp_path / "drafter").iterdir()}
    code, _, err = train("--layers", "0,2", "--kind", "dflash")
    assert code == 2
    assert "training.json: kind: 'dspark' in the training begun there, got 'dflash'" in err
    assert {path.name: path.read_bytes() for path in (tmp_path / "drafter").iterdir()} == before


def test_mistakes_of_training_are_one_line(train, models, checkpoint, tmp_path):
    short = tmp_path / "short.jsonl"
    short.write_text('{"prompt": "w1"}')
    for flags, words in [
        (("--kind", "medusa"), "--kind: expected dspark, dspark-gated, dspark-rnn, dflash, eagle3 or mtp"),
        (("--dtype", "float16"), "--dtype: expected auto, float32 or bfloat16, got 'float16'"),
        (("--learning-rate", "0"), "--learning-rate: expected a number above 0, got 0"),
        (("--layers", "0,4"), "--layers: expected different numbers from 0 to 3, separated by commas: '0,4'"),
        (("--layers", "1,1"), "--layers: expected different numbers"),
        (("--layers", "0", "--kind", "mtp"), "--layers: an mtp drafter reads the last layer"),
        (("--vocabulary", 41), "--vocabulary: expected at most 40 as target target, got 41"),
        (("--start", tmp_path / "no"), "config.json: cannot read"),
        (("--out", checkpoint), "drafter: holds a drafter already, expected another folder"),
        (("--out", short), "short.jsonl: cannot write there"),
        (("--work", short), "short.jsonl: cannot write there"),
        (("--prompts", tmp_path / "no.jsonl"), "no.jsonl: cannot read"),
        (("--prompts", short), "responses: 1 answers of more than 3 tokens"),
        (("--target", checkpoint), "drafter: is a drafter (Qwen3DSparkModel), expected the model it drafts for"),
        (("--device", "meta"), "device: 'meta', expected auto, cpu, or cuda"),
    ]:
        code, text, err = train(*flags)
        assert (code, text) == (2, ""), (flags, err)
        assert words in err, (flags, err)
        assert err.startswith("error: ")
        assert err.count("\n") == 1
    assert not list((tmp_path / "drafter").glob("*.safetensors"))


def test_targets_that_are_not_like_llama(train, record, models, tmp_path):
    import transformers

    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    code, _, err = train("--target", tmp_path / "gpt2")
    assert (code, err.count("\n")) == (2, 1)
    assert "target gpt2: intermediate_size: not in its config" in err
    config = transformers.CohereConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, logit_scale=0.5,
    )  # fmt: skip
    transformers.CohereForCausalLM(config).save_pretrained(tmp_path / "cohere")
    code, _, err = record("--target", tmp_path / "cohere", "--drafter", "ngram", "--out", tmp_path / "t.parquet")
    assert (code, err.count("\n")) == (2, 1)
    assert "target cohere: its logits are not its final states times the head" in err


def test_the_command_line_takes_in_torch_only_when_asked():
    code = "import sys, specsim.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "specsim.cli.drafting" in loaded
    assert not {"torch", "transformers", "safetensors"} & set(loaded)


def test_layers_are_spread_as_deepspec_does():
    assert drafting.spread_layers(36) == (1, 9, 17, 25, 33)
    assert drafting.spread_layers(40) == (1, 10, 19, 28, 37)
    assert drafting.spread_layers(30) == (1, 8, 14, 21, 27)
    assert drafting.spread_layers(4) == (1,)
    assert drafting.spread_layers(1) == (0,)
