"""Others' evidence of acceptance: counting conventions on hand-written files, and the real files whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import make_profile

import specsim as ss
from specsim.acceptance import load_trace
from specsim.blocktrace import Trace
from specsim.importers.acceptance import FORMATS, load_acceptance
from specsim.importers.evidence import LOWER_BOUND, conditional, constant_survival
from specsim.importers.rounds import sglang_steps
from specsim.synthesis import Synthetic
from specsim.types import SpecsimError

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared/data/acceptance"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real files are not part of the project")
PROFILE = ROOT / "hw_profiles/dsv4-flash-b300-tp4.json"
LOG = (
    "INFO 08-17 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: {mean}, Accepted throughput: 1.00 "
    "tokens/s, Drafted throughput: 2.00 tokens/s, Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
    "Per-position acceptance rate: {rates}, Avg Draft acceptance rate: 50.0%"
)


@pytest.fixture
def write(tmp_path):
    def write(content, name="evidence.txt"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def scrape(drafts=100, tokens=None, at=(80, 40, 10), accepted=None, engine="vllm", labels='model_name="m",engine="0"'):
    """The counters of one engine as it exports them, among others."""
    tokens = drafts * len(at) if tokens is None else tokens
    name, given = f"{engine}:spec_decode_num", f"{{{labels}}}" if labels else ""
    lines = [
        "# HELP vllm:num_requests_running Number of requests.", "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{labels}}} 1.0",
        f"# TYPE {name}_drafts_total counter",
        f"{name}_drafts_total{given} {drafts}.0",
        f"{name}_drafts_created{given} 1.76e+09",
        f"{name}_draft_tokens_total{given} {tokens}",
        f"{name}_accepted_tokens_total{given} {sum(at) if accepted is None else accepted}",
    ]  # fmt: skip
    comma = "," if labels else ""
    lines += [f'{name}_accepted_tokens_per_pos_total{{{labels}{comma}position="{k}"}} {n}' for k, n in enumerate(at)]
    return "\n".join(lines) + "\n"


def log(*lines):
    """A log: each line from (drafts, accepted at each position)."""
    out = ["INFO [loggers.py:271] Engine 000: Avg prompt throughput: 453.7 tokens/s, Running: 0 reqs"]
    for drafts, at in lines:
        rates = ", ".join(f"{n / drafts:.3f}" for n in at)
        mean = f"{1 + sum(at) / drafts:.2f}"
        out.append(LOG.format(mean=mean, accepted=sum(at), drafted=drafts * len(at), rates=rates))
    return "\n".join(out) + "\n"


def survival(trace: Synthetic, domain="*"):
    return np.cumprod(trace.domains[domain].conditional_acceptance)


def tau(trace: Synthetic, domain="*"):
    return 1 + float(survival(trace, domain).sum())


def mistake(path, *said, **given) -> None:
    """Loading must fail in one line that names the file and holds all of ``said``."""
    with pytest.raises(SpecsimError) as caught:
        load_acceptance(path, **given)
    text = str(caught.value)
    assert str(path.parent) in text
    assert "\n" not in text
    for part in said:
        assert part in text, text


# Prometheus counters


def test_counters_are_unconditional_and_become_conditional(write):
    trace = load_acceptance(write(scrape()))
    assert isinstance(trace, Synthetic)
    assert trace.domains["*"].conditional_acceptance == pytest.approx((0.8, 0.5, 0.25))
    assert tau(trace) == pytest.approx(1 + 130 / 100)
    assert (trace.gamma, trace.target, trace.drafter) == (3, "m", "unknown")
    assert trace.confidence_source == "position_mean"
    assert trace.provenance.source.startswith("imported: ")


def test_a_lower_bound_is_said_unless_the_length_was_fixed(write):
    path = write(scrape())
    assert LOWER_BOUND in load_acceptance(path).provenance.notes
    assert LOWER_BOUND not in load_acceptance(path, fixed_length=True).provenance.notes
    # 250 tokens in 100 drafts of 3: shorter drafts, which only the bound covers.
    short = write(scrape(tokens=250), "short.txt")
    assert "2.5 tokens of 3" in load_acceptance(short).provenance.notes
    mistake(short, "draft tokens", "for a fixed length", "got 2.5", fixed_length=True)
    mistake(write(scrape(tokens=301)), "draft tokens: expected at most gamma = 3", "3.01")


def test_engines_are_added_up_and_models_chosen(write):
    two = scrape() + scrape(100, at=(60, 20, 10), labels='model_name="m",engine="1"')
    trace = load_acceptance(write(two))
    assert survival(trace) == pytest.approx([0.7, 0.3, 0.1])
    both = write(two + scrape(10, at=(5,), labels='model_name="n",engine="0"'), "both.txt")
    mistake(both, "2 model names", "--select", "m, n")
    mistake(both, "select", "'x'", select="x")
    assert survival(load_acceptance(both, select="n")) == pytest.approx([0.5])


def test_llamacpp_exports_the_same_counters_without_labels(write):
    trace = load_acceptance(write(scrape(engine="llamacpp", labels="")))
    assert survival(trace) == pytest.approx([0.8, 0.4, 0.1])


def test_two_scrapes_give_the_difference(write):
    before = write(scrape(100, at=(80, 40, 10)), "before.txt")
    after = write(scrape(300, at=(180, 90, 10)), "after.txt")
    trace = load_acceptance(after, before=before)
    assert survival(trace) == pytest.approx([0.5, 0.25, 0])
    assert "before.txt" in trace.provenance.notes
    mistake(before, "drafts", "at least 300", "got 100", before=after)  # the wrong way round, or a restart
    mistake(after, "at least one draft", before=after)
    other = write(scrape(labels='model_name="other"'), "other.txt")
    mistake(after, "counters of model 'm'", before=other)
    added = scrape(300, at=(180, 90, 10)) + scrape(50, at=(50, 50, 50), labels='model_name="m",engine="1"')
    assert survival(load_acceptance(write(added), before=before)) == pytest.approx([0.6, 0.4, 0.2])


def test_positions_never_reached_are_said(write):
    trace = load_acceptance(write(scrape(at=(50, 0, 0))))
    assert trace.domains["*"].conditional_acceptance == (0.5, 0.0, 0.0)
    assert "Positions after 2 were never reached" in trace.provenance.notes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (scrape(at=(40, 50, 10)), ("position 2", "at most 0.4", "cannot increase", "0.5")),
        (scrape(at=(120, 50, 10)), ("position 1", "a share 0..1", "1.2")),
        (scrape(accepted=200), ("accepted_tokens_total", "130", "got 200")),
        (scrape(drafts=0, at=(0, 0)), ("drafts_total", "at least one draft")),
        (scrape().replace('position="1"', 'position="3"'), ("positions 0, 1", "got 0, 2, 3")),
        (scrape().replace('position="1"', 'position="one"'), ("line 10", "label position", "got one")),
        (scrape().replace(" 40", " -40"), ("line 10", "a count, 0 or more", "-40")),
        (scrape().replace(" 40", " NaN"), ("line 10", "a count, 0 or more", "NaN")),
        (scrape().replace(" 40", " 1e300"), ("line 10", "below 2^53", "1e+300")),
        (scrape().replace(" 40", " many"), ("line 10", "sample", "many")),
        (scrape() + scrape(), ("stands twice", "--before")),
        ("# TYPE sglang:spec_accept_length gauge\nsglang:spec_accept_length 2.5\n", ("expected counters", "SGLang")),
    ],
)
def test_counters_that_cannot_be(write, text, said):
    mistake(write(text), *said)


# Log lines


def test_log_lines_are_weighted_by_their_drafts(write):
    trace = load_acceptance(write(log((100, (80, 40)), (300, (120, 60)))))
    assert survival(trace) == pytest.approx([200 / 400, 100 / 400], abs=1e-3)
    assert tau(trace) == pytest.approx(1 + 300 / 400, abs=1e-3)
    assert "2 lines of 400 drafts" in trace.provenance.notes


def test_drafts_shorter_than_the_block_are_recovered_from_the_rates(write):
    """N-gram lookup: 100 drafts of at most 4 tokens held 250, of which 120 were accepted."""
    line = LOG.format(mean="2.20", accepted=120, drafted=250, rates="0.500, 0.400, 0.200, 0.100")
    trace = load_acceptance(write(line + "\n" + log((100, (90, 80, 70, 60)))))
    assert "200 drafts" in trace.provenance.notes
    assert survival(trace) == pytest.approx([0.7, 0.6, 0.45, 0.35], abs=1e-3)
    mistake(write(line), "draft tokens", "fixed length", fixed_length=True)


def test_lines_of_several_block_lengths_need_a_choice(write):
    path = write(log((100, (80, 40)), (100, (50,))))
    mistake(path, "2 block lengths", "--gamma", "1, 2")
    assert survival(load_acceptance(path, gamma=1)) == pytest.approx([0.5])
    mistake(path, "--gamma: ", "1, 2", "'3'", gamma=3)
    mistake(write(log((100, (80, 40)))), "--gamma: expected 2", "got 3", gamma=3)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (LOG.format(mean="2.50", accepted=120, drafted=200, rates="0.800, 0.400"), ("line 1", "Mean", "2.2", "2.5")),
        (LOG.format(mean="2.20", accepted=120, drafted=200, rates="0.400, 0.800"), ("line 1", "position 2", "0.8")),
        (LOG.format(mean="2.20", accepted=120, drafted=200, rates="none"), ("line 1", "Per-position", "none")),
        (LOG.format(mean="2.20", accepted=120, drafted=200, rates="0.8.1, 0.4"), ("line 1", "Per-position", "0.8.1")),
        (LOG.format(mean="2.20", accepted="many", drafted=200, rates="0.8"), ("line 1", "Accepted", "many")),
        ("SpecDecoding metrics: Avg Draft acceptance rate: 1%", ("line 1", "Mean acceptance length", "none")),
        (LOG.format(mean="1.00", accepted=0, drafted=0, rates="0.0"), ("drafted tokens, got none",)),
        (LOG.format(mean="2.20", accepted=300, drafted=200, rates="0.8, 0.4"), ("line 1: Accepted", "200", "300")),
        (LOG.format(mean="2.20", accepted=0, drafted=200, rates="0.8, 0.4"), ("line 1: Accepted", "120..200", "got 0")),
        (LOG.format(mean="1.20", accepted=90, drafted=200, rates="0.1, 0.1"), ("line 1: Accepted", "20..40", "got 90")),
        (LOG.format(mean="1.00", accepted=90, drafted=200, rates="0, 0"), ("line 1: Accepted", "0..0", "got 90")),
        (LOG.format(mean="2.20", accepted=120, drafted="9" * 400, rates="0.8, 0.4"), ("line 1: Drafted", "below 2^53")),
        (LOG.format(mean="2.20", accepted=1.5, drafted=200, rates="0.8, 0.4"), ("line 1: Accepted", "a whole number")),
        (LOG.format(mean="9" * 400, accepted=120, drafted=200, rates="0.8, 0.4"), ("line 1: Mean", "below 2^53")),
        (LOG.format(mean="2.20", accepted=120, drafted=200, rates="0.8, nan"), ("line 1: Per-position", "2: ", "NaN")),
        (LOG.format(mean="2.20", accepted=120, drafted=200, rates="0.8, -0.4"), ("Per-position", "2: ", "-0.4")),
    ],
)
def test_log_lines_that_cannot_be(write, line, said):
    mistake(write(line), *said)


# Rates by position


def test_a_row_is_chosen_by_its_id_or_drafter(write):
    rows = [
        {"id": "a", "drafter": "A", "verifier": "T", "mean": 2.0, "per_position": [0.6, 0.4]},
        {"id": "b", "drafter": "B", "per_position": [0.5]},
        {"id": "b2", "drafter": "B", "per_position": [0.4]},
    ]
    path = write({"note": "x", "rows": rows})
    mistake(path, "3 drafters", "--select", "a, b, b2")
    trace = load_acceptance(path, select="a")
    assert (trace.drafter, trace.target, tau(trace)) == ("A", "T", pytest.approx(2.0))
    assert load_acceptance(path, select="A") == trace
    mistake(path, "2 rows of drafter B", "b, b2", select="B")
    mistake(path, "select", "'c'", select="c")
    assert load_acceptance(write(rows[1]), drafter="mine", target="theirs").drafter == "mine"


def test_a_vllm_bench_result_says_the_same(write):
    bench = {
        "model_id": "m", "ttfts": [0.1], "spec_decode_acceptance_length": 2.2, "spec_decode_num_drafts": 100,
        "spec_decode_draft_tokens": 200, "spec_decode_accepted_tokens": 120, "spec_decode_acceptance_rate": 60.0,
        "spec_decode_per_position_acceptance_rates": [0.8, 0.4],
    }  # fmt: skip
    trace = load_acceptance(write(bench), fixed_length=True)
    assert (trace.target, tau(trace)) == ("m", pytest.approx(2.2))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"per_position": [0.5, 0.6]}, ("per_position, position 2", "at most 0.5", "0.6")),
        ({"per_position": [0.8, 0.75], "mean": 2.4}, ("mean", "about 2.55", "unconditional", "2.4")),
        ({"per_position": []}, ("per_position", "a list of shares")),
        ({"per_position": [0.5, None]}, ("position 2", "a share 0..1", "none")),
        ({"per_position": [True]}, ("position 1", "a share 0..1", "true")),
        ({"per_position": [0.5], "mean": "2"}, ("mean", "a number above 0")),
        ({"per_position": [0.5], "num_drafts": 0, "num_draft_tokens": 5}, ("num_drafts", "1 or more", "0")),
        ({"per_position": [0.5], "num_drafts": 4, "num_draft_tokens": 5}, ("draft tokens", "1.25")),
        ({"per_position": [0.5] * 65}, ("1..64",)),
    ],
)
def test_rates_that_cannot_be(write, row, said):
    mistake(write(row), *said)
    mistake(write({"rows": [row]}), *said)


# DeepSpec


def deepspec(**fields):
    spec = {
        "dataset": "gsm8k", "num_samples": 9, "draft_tokens_per_proposal": 2.95, "acceptance_length": 2.68,
        "verify_rate": 0.7, "accept_rates_by_position": [0.9, 0.5, 0.3],
    }  # fmt: skip
    arguments = {"target_name_or_path": "T", "draft_name_or_path": "D", "temperature": 1.0}
    return {"config": {"args": arguments, "tasks": []}, "spec": spec | fields, "confidence": {}}


def test_deepspec(write):
    trace = load_acceptance(write(deepspec()))
    assert (trace.drafter, trace.target, trace.temperature) == ("D", "T", 1.0)
    # τ counts a bonus token in the rounds that ended on an end of sequence, where DeepSpec's 2.68 does not.
    assert tau(trace, "gsm8k") == pytest.approx(2.7)
    assert "no bonus token" in trace.provenance.notes
    assert LOWER_BOUND not in trace.provenance.notes
    rows = [deepspec()["spec"], deepspec(dataset="mt-bench", accept_rates_by_position=[0.9, 0.5, 0.2])["spec"]]
    assert list(load_acceptance(write(rows)).domains) == ["gsm8k", "mt-bench"]
    assert load_acceptance(write(deepspec(accept_rates_by_position=[0.9, 0.5, 0.3, None]))).gamma == 3


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"accept_rates_by_position": [0.9, 0.5, 0.55]}, ("spec", "position 3", "cannot increase")),
        ({"accept_rates_by_position": [0.9, None, 0.5]}, ("position 2", "none")),
        ({"accept_rates_by_position": [None]}, ("accept_rates_by_position", "a list")),
        ({"draft_tokens_per_proposal": 1.5}, ("draft_tokens_per_proposal", "confidence threshold", "1.5")),
        ({"acceptance_length": 3.4}, ("acceptance_length", "about 2.7", "3.4")),
        ({"acceptance_length": None}, ("acceptance_length", "a number above 0")),
        ({"dataset": "all"}, ("domain: 'all' is the name of the total",)),
    ],
)
def test_deepspec_that_cannot_be(write, fields, said):
    mistake(write(deepspec(**fields)), *said)


# llama.cpp timings: one mean


def test_llamacpp_timings_give_one_mean(write):
    """20 cycles made 1 + 20 + 30 tokens; acceptance is spread evenly over the positions asked for."""
    lines = [{"timings": {"predicted_n": 26, "draft_n": 40, "draft_n_accepted": 15}}, {"timings": {"predicted_n": 7}}]
    path = write("\n".join(json.dumps(line) for line in [*lines, lines[0]]))
    mistake(path, "one mean", "--gamma")
    trace = load_acceptance(path, gamma=4)
    assert tau(trace) == pytest.approx(1 + 30 / 20)
    assert len(set(np.round(trace.domains["*"].conditional_acceptance, 12))) == 1
    assert "one mean only" in trace.provenance.notes
    mistake(path, "gamma", "at least 4", "got 3", gamma=3)
    mistake(write({"timings": {"predicted_n": 7}}), "at least one response with a draft", gamma=4)
    mistake(write({"draft_n": 4, "draft_n_accepted": 5, "predicted_n": 9}), "draft_n_accepted", "0..4", "5", gamma=4)


@pytest.mark.parametrize(("mean", "gamma"), [(0.0, 3), (1.7, 3), (3.0, 3), (0.4, 1)])
def test_constant_survival_has_the_mean(mean, gamma):
    found = constant_survival(mean, gamma)
    assert sum(found) == pytest.approx(mean, abs=1e-9)
    assert np.ptp([c for c in conditional(found) if c > 0] or [0]) < 1e-9


# Spec-Bench: rounds in order


def test_specbench_keeps_requests_and_order(write):
    rows = [
        {"question_id": 81, "category": "writing", "accept_lengths": [4, 1, 2]},
        {"question_id": 82, "category": "math", "model_id": "eagle",
         "choices": [{"index": 0, "accept_lengths": [3]}, {"index": 1, "accept_lengths": [1, 1]}]},
    ]  # fmt: skip
    path = write("\n".join(json.dumps(row) for row in rows) + "\n\n")
    trace = load_acceptance(path)
    assert isinstance(trace, Trace)
    assert (trace.meta.kind, trace.meta.confidence_source, trace.confidence) == ("sequential", "none", None)
    assert (trace.gamma, trace.meta.drafter) == (3, "eagle")
    assert trace.request_ids == ("81", "82/0", "82/1")
    assert trace.accepted[trace.domain == trace.domains.index("writing")].tolist() == [3, 0, 1]
    assert trace.position[trace.domain == trace.domains.index("writing")].tolist() == [0, 4, 5]
    assert load_acceptance(path, gamma=7).proposed.tolist() == [7] * 6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"accept_lengths": [1, 2]}\n{"accept_lengths": [0]}', ("line 2", "cycle 1", "1..65", "0")),
        ('{"accept_lengths": [1, 2]}\n{"accept_lengths": [2.5]}', ("line 2", "cycle 1", "2.5")),
        ('{"accept_lengths": [1, 2]}\n{"accept_lengths": 3}', ("line 2", "a list of tokens", "3")),
        ('{"accept_lengths": [1, 2]}\n{"question_id": 1}', ("line 2", "accept_lengths", "none")),
        ('{"accept_lengths": [1, 2]}\n{"accept_le', ("line 2", "JSON")),
        ('{"accept_lengths": [1, 2]}\n[1]', ("line 2", "a JSON object", "[1]")),
        ('{"accept_lengths": [1, 1]}', ("a length above 1",)),
        ('{"question_id": 1, "accept_lengths": [2]}\n' * 2, ("question_id", "got 1")),
    ],
)
def test_specbench_that_cannot_be(write, text, said):
    mistake(write(text), *said)


def test_a_block_shorter_than_a_length_is_refused(write):
    mistake(write('{"accept_lengths": [1, 4]}'), "cycle 2", "1..3", "4", gamma=2)


# SGLang step records


def sglang(*steps, **info):
    """A server_info; a step is a list of (rid, verify_len, correct_drafts, survival)."""
    records = []
    for n, reqs in enumerate(steps):
        record = {
            "forward_ct": n, "bs": len(reqs), "num_verify_tokens": sum(r[1] for r in reqs), "step_gpu_ms": 20.0,
            "predicted_step_ms": 10.0,
        }  # fmt: skip
        named = [
            {"rid": rid, "verify_len": length, "correct_drafts": kept, "acc_len": kept + 1, "survival": survival}
            for rid, length, kept, survival in reqs
        ]
        records.append(record | {"reqs": named})
    return {"internal_states": [{"dspark_info_record": {"gamma": 2, "records": records} | info}]}


def test_sglang_records_with_requests_are_rounds(write):
    info = sglang(
        [("a", 3, 2, [0.9, 0.45]), ("b", 2, 0, [0.5, 0.0])],
        [("a", 1, 0, [0.2, 0.1])],
        [("a", 2, 1, [0.8, 0.8])],
    )
    trace = load_acceptance(write(info))
    assert isinstance(trace, Trace)
    assert (trace.gamma, trace.meta.confidence_source) == (2, "head")
    assert trace.accepted.tolist() == [2, 0, 1, 0]
    assert trace.proposed.tolist() == [2, 0, 1, 1]  # trimmed tokens are not known
    assert trace.position.tolist() == [0, 3, 4, 0]
    assert trace.confidence[0] == pytest.approx([0.9, 0.5])
    assert "75.0% of the rounds" in trace.meta.notes
    assert "Confidences are as the server used them." in trace.meta.notes
    steps = sglang_steps(write(info))
    assert steps["per_request"].tolist() == [2.5, 1, 2]
    assert steps["step_s"].tolist() == [0.02] * 3
    assert steps["draft_s"].isna().all()
    for step in info["internal_states"][0]["dspark_info_record"]["records"]:
        for request in step["reqs"]:
            del request["survival"]
    bare = load_acceptance(write(info))
    assert bare.confidence is None
    assert "Confidences" not in bare.meta.notes


def test_sglang_records_without_requests_have_one_mean_or_nothing(write):
    info = sglang([("a", 3, 2, []), ("b", 3, 1, [])])
    state = info["internal_states"][0]
    del state["dspark_info_record"]["records"][0]["reqs"]
    mistake(write(info), "reqs with correct_drafts", "1 steps of 20 ms", "3 tokens a request", "not how many")
    state["avg_spec_accept_length"] = 2.5
    trace = load_acceptance(write(info))
    assert (tau(trace), trace.gamma) == (pytest.approx(2.5), 2)
    assert "one mean only" in trace.provenance.notes
    state["avg_spec_accept_length"] = 3.5
    mistake(write(info), "internal_states.0", "avg_spec_accept_length", "1..3", "3.5")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (("a", 3, 3, []), ("records.0.reqs.0", "correct_drafts", "0..2", "3")),
        (("a", 4, 0, []), ("records.0.reqs.0", "verify_len", "gamma = 2", "4")),
        ((None, 3, 0, []), ("reqs.0", "rid")),
        (("a", 3, 0, [0.5]), ("reqs.0", "survival", "2 numbers")),
        (("a", 3, 0, [0.5, 2]), ("reqs.0", "survival", "shares")),
        (("a", 3, None, []), ("correct_drafts", "whole number", "none")),
    ],
)
def test_sglang_that_cannot_be(write, step, said):
    mistake(write(sglang([step]) if step[2] is not None else sglang_without(step)), *said)


def sglang_without(step):
    info = sglang([(step[0], step[1], 0, [])])
    del info["internal_states"][0]["dspark_info_record"]["records"][0]["reqs"][0]["correct_drafts"]
    return info


# Any format


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ("an empty file",)),
        ("a,b\n1,2\n", ("one of the formats metrics", "'a,b")),
        ('{"x": 1', ("line 1", "expected JSON")),
        ('{"x": 1}', ("one of the formats",)),
        ("[]", ("one of the formats",)),
        ("[" * 100_000, ("JSON",)),
        ('{"per_position": [0.5], "per_position": [0.9]}', ("the key 'per_position' stands twice",)),
    ],
)
def test_what_is_no_evidence(write, text, said):
    mistake(write(text), *said)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", "3", "null", '{"rows": [1]}', '{"records": 3}', "garbage \0"])
def test_a_format_that_was_named_is_no_excuse(write, format, text):
    mistake(write(text), format=format, gamma=3)


def test_half_a_surrogate_pair_does_no_harm(write):
    path = write('{"id": "a\\ud800", "drafter": "\\ud801", "per_position": [0.5]}')
    assert load_acceptance(path).drafter == "?"
    mistake(path, "--select: expected one of a?", select="b")


def test_answers_without_meaning_are_refused(write):
    path = write('{"accept_lengths": [1, 2]}')
    mistake(path, "--fixed-length: ", "no meaning", "specbench", fixed_length=True)
    mistake(path, "--select: ", "no meaning", select="a")
    with pytest.raises(SpecsimError, match=r"^--gamma: expected 1\.\.64"):
        load_acceptance(path, gamma=0)
    with pytest.raises(SpecsimError, match=r"^--format: expected auto or one of metrics"):
        load_acceptance(path, "xml")
    with pytest.raises(SpecsimError, match="cannot read"):
        load_acceptance(path.parent / "missing")


# The law of what was imported


def replayed_tau(drafter, seed=0):
    scenario = ss.Scenario(
        profile=make_profile(), drafter=drafter, workload=ss.ClosedLoop(8), scheduler=ss.StaticGamma(drafter.gamma)
    )
    requests = ss.simulate(scenario, seed=seed).requests
    return 1 + requests["accepted"].sum() / requests["cycles"].sum()


def test_replay_of_counters_reproduces_tau(write):
    trace = load_acceptance(write(scrape(1000, at=(800, 400, 100))))
    assert replayed_tau(ss.Drafter(trace, trace.gamma)) == pytest.approx(2.3, rel=0.01)


# The real files


@needs_data
def test_real_rates_have_the_means_of_their_file():
    path = DATA / "vllm_per_position.json"
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 10
    for row in rows:
        trace = load_acceptance(path, select=row["id"])
        assert tau(trace) == pytest.approx(row["mean"], abs=0.02)  # one row was published to 15 %
        assert survival(trace) == pytest.approx(row["per_position"])
        if "num_drafts" in row:
            assert tau(trace) == pytest.approx(1 + row["num_accepted_tokens"] / row["num_drafts"], abs=0.006)


@needs_data
def test_real_log_lines():
    path = DATA / "vllm_log_lines.txt"
    with pytest.raises(SpecsimError, match="6 block lengths, expected --gamma with one of 1, 2, 3, 6, 7, 15"):
        load_acceptance(path)
    # The four lines of K = 3: 206 + 141 + 463 + 94 accepted in 203 + 68 + 235 + 40 drafts.
    assert tau(load_acceptance(path, gamma=3, fixed_length=True)) == pytest.approx(1 + 904 / 546, abs=2e-3)
    for gamma, mean in {1: 1.93, 2: 3.00, 6: 2.89, 7: 3.49, 15: 3.53}.items():
        assert tau(load_acceptance(path, gamma=gamma)) == pytest.approx(mean, abs=0.007)


@needs_data
def test_real_spec_bench_keeps_tau_and_autocorrelation(tmp_path):
    path = DATA / "specbench_vicuna7b_eagle_accept_lengths.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lengths = [np.array(row["accept_lengths"]) for row in rows]
    trace = load_acceptance(path)
    assert isinstance(trace, Trace)
    assert (len(trace), len(trace.request_ids), trace.gamma) == (12_143, 164, 5)
    mean = np.concatenate(lengths).mean()
    assert trace.accepted.mean() + 1 == pytest.approx(mean)

    def lag_one(requests):
        pairs = [(x[:-1] - mean, x[1:] - mean) for x in requests]
        return sum((a * b).sum() for a, b in pairs) / sum((a * a).sum() for a, _ in pairs)

    imported = [trace.accepted[trace.request_id == r] + 1 for r in range(len(trace.request_ids))]
    assert lag_one(imported) == pytest.approx(lag_one(lengths))
    assert lag_one(imported) > 0.1  # there is something to keep
    drafter = ss.load_drafter(ss.write_trace(trace, tmp_path / "eagle.parquet"))
    tau_of = np.array([trace.accepted[trace.domain == d].mean() + 1 for d in range(len(trace.domains))])
    weights = {name: float((trace.domain == d).mean()) for d, name in enumerate(trace.domains)}
    scenario = ss.Scenario(
        profile=make_profile(), drafter=drafter, workload=ss.ClosedLoop(64, measured=4000), domains=weights,
        scheduler=ss.StaticGamma(5),
    )  # fmt: skip
    requests = ss.simulate(scenario, seed=1).requests
    # A request of a fixed length spends more cycles where fewer tokens are accepted: replay has the harmonic
    # mean over domains, and within a domain a little less than the mean over its rounds.
    for name, expected in zip(trace.domains, tau_of, strict=True):
        part = requests[requests["domain"] == name]
        assert 0.96 * expected < 1 + part["accepted"].sum() / part["cycles"].sum() < 1.015 * expected
    harmonic = 1 / (np.array(list(weights.values())) / tau_of).sum()
    assert 1 + requests["accepted"].sum() / requests["cycles"].sum() == pytest.approx(harmonic, rel=0.015)


# The command line


def test_import_then_pareto(run, write, tmp_path):
    first, last = write(scrape(), "first.txt"), write(scrape(300, at=(180, 90, 10)), "last.txt")
    out = tmp_path / "made/mine.json"
    code, text, _ = run("trace", "import", last, "--before", first, "--out", out, "--json", tmp_path / "s.json")
    assert code == 0
    assert re.search(r"\*\s+–\s+1\.75\s+0\.5\s+0\.5\s+0 ", text)
    assert "lower bound" in text
    assert json.loads((tmp_path / "s.json").read_text())["domains"][0]["tau"] == pytest.approx(1.75)
    assert load_trace(out).provenance.command == f"specsim trace import {last} --before {first} --out {out}"
    rounds = tmp_path / "rounds.parquet"
    lines = "".join(json.dumps({"category": c, "accept_lengths": [3, 1, 2] * 40}) + "\n" for c in ("chat", "code"))
    code, text, _ = run("trace", "import", write(lines), "--out", rounds)
    assert code == 0
    assert re.search(r"all\s+240\s+2 ", text)
    # Without confidences the position's mean is what a scheduler sees; recorded rounds have not even that.
    for trace, scheduler in ((out, "DSparkGreedy"), (rounds, "StaticGamma(2)")):
        code, text, err = run(
            "pareto", "--profile", PROFILE, "--trace", trace, "-s", "NoSpec", "-s", scheduler, "--closed", "2",
            "--output-tokens", "8", "--num-requests", "20", "--seeds", "1", "--jobs", "1", "--out", tmp_path / "front",
        )  # fmt: skip
        assert code == 0, err
        assert scheduler in text


def test_import_shows_what_inspect_shows_of_trimmed_drafts(run, write, tmp_path):
    path = write(sglang([("a", 1, 0, []), ("b", 2, 1, [])], [("a", 3, 1, []), ("b", 3, 2, [])]))
    out, shown, inspected = (tmp_path / name for name in ("rounds.parquet", "shown.json", "inspected.json"))
    assert run("trace", "import", path, "--out", out, "--json", shown)[0] == 0
    assert run("trace", "inspect", out, "--json", inspected)[0] == 0
    (domain,) = json.loads(shown.read_text())["domains"]
    assert domain == {"domain": "*", "rows": 4, "tau": 2.0, "conditional": [1.0, 0.5]}
    assert json.loads(inspected.read_text())["*"]["conditional"] == [1.0, 0.5]


def test_names_print_as_they_are(run, write, tmp_path):
    path = write('{"category": "c[/b]", "accept_lengths": [3, 1, 2]}')
    code, text, _ = run("trace", "import", path, "--drafter", "a[/b]", "--out", tmp_path / "x[v2].parquet")
    assert code == 0
    assert "a[/b] for unknown: " in text
    assert re.search(r"c\[/b\]\s+3 ", text)
    assert f"Wrote {tmp_path}/x[v2].parquet" in text


def test_a_mistake_is_one_line_and_leaves_no_file(run, write, tmp_path):
    path = write(log((100, (80, 40)), (100, (50,))))
    code, out, err = run("trace", "import", path, "--out", tmp_path / "x.json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {path}: holds 2 block lengths")
    assert not (tmp_path / "x.json").exists()


def test_what_is_imported_is_not_written_over(run, write, tmp_path):
    path, earlier = write(scrape(300, at=(180, 90, 10)), "last.txt"), write(scrape(), "first.txt")
    before = path.read_bytes(), earlier.read_bytes()
    new = tmp_path / "new.json"
    for flags, words in [
        (("--out", path), f"--out: {path}: is the input FILE, expected another path"),
        (("--out", earlier), f"--out: {earlier}: is the input --before"),
        (("--out", new, "--json", path), f"--json: {path}: is the input FILE"),
        (("--out", new, "--json", new), f"--json: {new}: is also written by --out"),
        (("--out", new, "--json", tmp_path), "--json: expected a file name, got the folder"),
    ]:
        code, out, err = run("trace", "import", path, "--before", earlier, *flags)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"error: {words}")
        assert not new.exists()
    assert (path.read_bytes(), earlier.read_bytes()) == before
