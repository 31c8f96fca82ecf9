"""Cost tables of SGLang and vLLM, plain columns of times, how formats are told apart, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cost_tables import ADDITIVE, SPS, TABLES, load
from hypothesis import given
from hypothesis import strategies as st

from specsim.hardware import Shape, load_profile, step_cost
from specsim.types import SpecsimError

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT.parent / "shared" / "data" / "published" / "step_cost_deepseek_v4_flash_b300_tp4.csv"


# SGLang, steps per second


def test_sglang_rates_are_read_as_they_were_measured(write):
    p, warnings = load(write(SPS), model="M", device="D", gpus=2, tp=2)
    assert (p.kind, p.engine, p.model, p.device, p.gpus, p.tp) == ("imported", "SGLang", "M", "D", 2, 2)
    assert warnings == []
    assert p.step_seconds([1, 8, 64]) == pytest.approx([1 / 100, 1 / 80, 1 / 50])
    assert p.step_seconds(36) == pytest.approx((1 / 80 + 1 / 50) / 2)
    with pytest.raises(SpecsimError, match=r"a step of 65 tokens is outside the measured range 1\.\.64"):
        p.step_seconds(65)
    assert "max_batch_tokens is 128" in p.provenance.notes
    assert "--as-engine" in p.provenance.notes


FIVE = {
    "sample_batch_tokens": [3, 8, 64, 100], "sample_steps_per_sec": [90.0, 80.0, 85.0, 10.0], "max_batch_tokens": 100,
}  # fmt: skip


@pytest.fixture(scope="module")
def looked_up(tmp_path_factory):
    path = tmp_path_factory.mktemp("sps") / "sps.json"
    path.write_text(json.dumps(FIVE))
    return load(path, as_engine=True)


def test_a_table_read_as_the_engine_does_warns_of_it(looked_up):
    profile, (warning,) = looked_up
    assert "tokens past the last probe (100) look free, and a size between two probes" in warning
    assert warning in profile.provenance.notes


@given(st.integers(1, 5000))
def test_sglang_rates_as_the_engine_looks_them_up(looked_up, tokens):
    """The probe at or below, the first below it, the last beyond."""
    i = max(0, int(np.searchsorted(FIVE["sample_batch_tokens"], tokens, side="right")) - 1)
    assert float(looked_up[0].step_seconds(tokens)) == pytest.approx(1 / FIVE["sample_steps_per_sec"][i])


@pytest.mark.parametrize("answers", [{}, {"as_engine": True}])
def test_drafting_is_inside_sglangs_steps(write, answers):
    for content in (SPS, ADDITIVE):
        p, _ = load(write(content), **answers)
        assert float(p.step_seconds(8, num_seqs=4, gamma=1)) == float(p.step_seconds(8, num_seqs=4))
        assert "the draft cost here is zero" in p.provenance.notes


# SGLang, additive


def test_sglang_sums_are_linear_and_end_at_the_last_probe(write):
    p, warnings = load(write(ADDITIVE))
    assert warnings == []
    # Three sequences, six tokens: 10 + 2 + 4 ms.
    assert float(p.step_seconds(6, num_seqs=3)) == pytest.approx(0.016)
    for tokens, seqs, says in [
        (11, 3, r"11 tokens is outside the measured range 2\.\.10"),
        (1, 1, r"1 tokens is outside the measured range 2\.\.10"),
        (6, 5, r"5 sequences is outside the measured range 0\.\.4"),
    ]:
        with pytest.raises(SpecsimError, match=says):
            p.step_seconds(tokens, num_seqs=seqs)


@pytest.fixture(scope="module")
def clamped(tmp_path_factory):
    path = tmp_path_factory.mktemp("additive") / "a.json"
    path.write_text(json.dumps(ADDITIVE))
    profile, (warning,) = load(path, as_engine=True)
    assert "past the last probe (10) look free, and so do requests" in warning
    return profile


@given(st.integers(1, 200), st.integers(0, 1000))
def test_sglang_sums_as_the_engine_clamps_them(clamped, seqs, budget):
    alpha = np.interp(seqs, ADDITIVE["bs_probes"], ADDITIVE["alpha_seconds"])
    theta = np.interp(seqs + budget, ADDITIVE["m_probes"], ADDITIVE["theta_seconds"])
    cost = step_cost(clamped, seqs + budget, seqs, 0)
    assert cost.seconds(Shape(seqs), budget) == pytest.approx(0.01 + alpha + theta)


def test_parts_of_a_sum_may_be_negative_but_not_the_sum(write):
    dips = ADDITIVE | {"alpha_seconds": [0.0, -0.002], "theta_seconds": [0.0, -0.001]}
    p, _ = load(write(dips))
    assert float(p.step_seconds(10, num_seqs=4)) == pytest.approx(0.007)
    assert float(p.step_seconds(2, num_seqs=1)) == pytest.approx(0.01)
    with pytest.raises(SpecsimError, match=r"theta_seconds\[1\]: expected a sum above 0, got -0.002 s at 10"):
        load(write(dips | {"theta_seconds": [0.0, -0.01]}))


@pytest.mark.parametrize("answers", [{}, {"as_engine": True}, {"monotone": True}])
def test_falls_of_either_part_of_a_sum_are_named(write, answers):
    falling = ADDITIVE | {"bs_probes": [1, 4, 8], "alpha_seconds": [0.0, 0.0025, 0.0], "theta_seconds": [0.01, 0.005]}
    notes = load(write(falling), **answers)[0].provenance.notes
    kept = "prices are their running maximum" if answers.get("monotone") else "kept as measured"
    assert f"Times fall at 1 of 2 sizes, {kept}: 2 to 10 tokens (theta_seconds[1], -25.0%)." in notes
    # Of 22.5 ms for two tokens; no running maximum by requests.
    assert "Times fall at 1 of 3 sizes, kept as measured: 4 to 8 requests (alpha_seconds[2], -11.1%)." in notes
    assert "fall" not in load(write(ADDITIVE), **answers)[0].provenance.notes


# vLLM


@pytest.mark.parametrize(
    "content",
    [
        TABLES,
        {"verify": [[8, 6.0], [1, 5.0], [16, 20.0]], "draft": [[1, 0.5], [4, 1.0]]},
        {"verify_us": {"1": 5000, "8": 6000, "16": 20000}, "draft_seconds": {"1": 0.0005, "4": 0.001}},
        "part,x,ms\ndraft,1,0.5\ndraft,4,1.0\nverify,1,5.0\nverify,8,6.0\nverify,16,20.0\n",
        "part;x;time (us)\nverify;16;20000\n\n# a remark\nverify;1;5000\nverify;8;6000\ndraft;1;500\ndraft;4;1000\n",
    ],
)
def test_vllm_tables_in_all_their_spellings(write, content):
    p, warnings = load(write(content), capture_limit=8)
    assert warnings == []
    assert p.engine == "vLLM"
    # Up to the largest graph the next size, above it the eager sizes alone.
    assert p.step_seconds([1, 2, 8, 9, 16]) == pytest.approx([0.005, 0.006, 0.006, 0.02, 0.02])
    assert float(p.step_seconds(8, num_seqs=2, gamma=7) - p.step_seconds(8)) == pytest.approx(0.0005 + 0.0005 / 3)


def test_two_files_of_columns(write):
    verify, draft = write("tokens ms\n1 5\n8 6\n16 20\n", "v.txt"), write("num_reqs ms\n1 0.5\n4 1\n", "d.txt")
    p, _ = load(verify, capture_limit=8, draft=draft)
    q, _ = load(write(TABLES), capture_limit=8)
    assert p.verify == q.verify
    assert p.draft == q.draft
    with pytest.raises(SpecsimError, match=r"--draft: .* holds a draft table of its own, expected one"):
        load(write(TABLES), capture_limit=8, draft=draft)


@pytest.mark.parametrize(("content", "twice"), [(SPS, True), (ADDITIVE, True), ("tokens,ms\n1,10\n8,16\n", False)])
def test_a_draft_cost_comes_on_top_of_any_table(write, content, twice):
    draft = write("num_seqs,us\n1,500\n4,1000\n8,900\n", "d.csv")
    p, warnings = load(write(content), draft=draft)
    assert (p.draft.num_seqs, p.draft.seconds) == ((1, 4, 8), (0.0005, 0.001, 0.0009))
    assert [w for w in warnings if "drafting may be counted twice" in w] == warnings[: int(twice)] == warnings
    notes = p.provenance.notes
    assert "The draft cost is that of d.csv, for the drafter's whole block." in notes
    assert "4 to 8 drafting sequences (line 4, -10.0%)" in notes
    assert "the draft cost here is zero" not in notes


def test_a_draft_file_may_need_its_unit_told(write):
    draft = write("1 0.5\n4 1\n", "d.txt")
    with pytest.raises(SpecsimError, match=r"d\.txt: line 1: expected a header .* as in num_seqs,time_ms, or --unit"):
        load(write(SPS), draft=draft)
    assert load(write(SPS), draft=draft, unit="ms")[0].draft.seconds == (0.0005, 0.001)
    with pytest.raises(SpecsimError, match=r"n\.json: expected columns of num_seqs and time, got JSON of another kind"):
        load(write(SPS), draft=write("null", "n.json"))


@pytest.mark.parametrize("head", ["tokens", "num_tokens"])
def test_a_draft_file_by_tokens_is_refused(write, head):
    draft = write(f"{head},us\n1,500\n4,1000\n", "d.csv")
    with pytest.raises(SpecsimError, match=rf"d\.csv: column '{head}': expected num_seqs: drafting is by them"):
        load(write(SPS), draft=draft)


def test_the_source_is_no_draft_file_and_neither_are_times_of_verification(write):
    path = write("x,ms\n1,5\n8,6\n")
    with pytest.raises(SpecsimError, match=r"--draft: .*source\.txt: is the source itself, expected another file"):
        load(path, draft=path)
    mixed = write("part,x,ms\ndraft,1,5\nverify,8,6\n", "d.csv")
    with pytest.raises(SpecsimError, match=r"d\.csv: line 3: part: expected draft in the file of --draft, got verify"):
        load(path, "csv", draft=mixed)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("tokens,s\n1,6000\n8,7000\n", "The longest step lasts 7,000 s: are these times, in the unit that is told?"),
        ({"verify_s": {"1": 20, "8": 25}}, "The longest step lasts 25 s: are these times, in the unit that is told?"),
        (
            SPS | {"sample_steps_per_sec": [0.01, 0.008, 0.005]},
            "The longest step lasts 200 s: are these rates, steps per second, and not seconds?",
        ),
        ({"verify": {"1": 0.005, "8": 0.007}}, "The shortest step lasts 5 µs: are these ms, as a table verify without"),
        ("tokens,ms\n1,0.03\n8,0.07\n", "The shortest step lasts 30 µs: are these times, in the unit that is told?"),
        (
            SPS | {"sample_steps_per_sec": [5e5, 4e5, 3e5]},
            "The shortest step lasts 2 µs: are these rates, steps per second, and not seconds?",
        ),
        (
            ADDITIVE | {"bias_seconds": 1e-5, "theta_seconds": [0.0, 1e-5]},
            "The shortest step lasts 10 µs: are these times, in the unit that is told?",
        ),
        (ADDITIVE | {"bias_seconds": 10}, "The longest step lasts 10.01 s: are these times, in the unit that is told?"),
    ],
)
def test_steps_that_no_engine_takes_get_a_warning(write, content, says):
    profile, warnings = load(write(content))
    assert any(warning.startswith(says) for warning in warnings)
    assert says in profile.provenance.notes


def test_drafting_in_another_unit_than_verification_gets_a_warning(write, tmp_path, run):
    content = "part,x,ms\ndraft,1,500\ndraft,4,1000\nverify,1,5\nverify,16,20\n"  # drafting in microseconds
    profile, warnings = load(write(content), capture_limit=16)
    says = "Drafting for 1 sequence lasts 0.5 s, 100 verify steps of them (0.005 s each): is the drafting in the same"
    assert [w for w in warnings if w.startswith(says)] == warnings
    assert says in profile.provenance.notes
    assert load(write(content.replace("500", "90").replace("1000", "100")), capture_limit=16)[1] == []
    # A table that starts above one sequence: at its first size.
    late = {"verify": {"8": 5.0, "16": 6.0}, "draft": {"1": 500.0, "32": 600.0}}
    assert says in load(write(late), capture_limit=16)[0].provenance.notes
    data = tmp_path / "d.json"
    _, printed, _ = run("profile", "import", write(TABLES), "--out", tmp_path / "p.json", "--json", data)
    assert "Drafting: 0.5 ms for 1 sequence to 1 ms for 4 sequences" in printed
    assert json.loads(data.read_text())["drafting"][0] == {"num_seqs": 1, "seconds": 0.0005}
    assert "Drafting" not in run("profile", "import", write(SPS), "--out", tmp_path / "p.json")[1]


def test_host_time_that_looks_like_milliseconds_gets_a_warning(write):
    path = write(SPS)
    says = "The host takes 1.2 s a step (--host-seconds): are these seconds, not ms?"
    assert load(path, host_seconds=1.2)[1] == [says]
    assert load(path, host_seconds=0.1)[1] == []


def test_fewer_tokens_than_the_first_size_are_refused(write):
    path = write("tokens,ms\n8,5\n16,6\n")
    assert load(path, max_num_tokens=8)[0].max_num_tokens == 8
    with pytest.raises(SpecsimError, match=r"--max-num-tokens: expected at least 8, the first size .* got 4"):
        load(path, max_num_tokens=4)


@pytest.mark.parametrize(("name", "fine"), [("draft_ms", False), ("drafter (ms)", False), ("verify_draft_ms", True)])
def test_a_times_name_tells_another_role(write, name, fine):
    path = write(f"num_tokens,{name}\n1,5\n8,6\n")
    if fine:
        load(path)
    else:
        with pytest.raises(SpecsimError, match=r": expected the times of verify steps, got those of draft: .* --draft"):
            load(path)
    draft = write("num_seqs,verify_ms\n1,5\n8,6\n", "d.csv")
    with pytest.raises(SpecsimError, match=r"d\.csv: column 'verify_ms': expected the times of draft steps"):
        load(write(SPS), draft=draft)


def test_without_a_capture_limit_vllms_tables_are_stairs_all_the_way_and_it_says_so(write):
    p, warnings = load(write(TABLES))
    assert p.step_seconds([9, 16]) == pytest.approx([0.02, 0.02])
    assert len(warnings) == 1
    assert "--capture-limit" in warnings[0]


@pytest.mark.parametrize(
    "content", [TABLES, "tokens,ms\n1,5\n16,20\n", "tokens,kv_tokens,ms\n1,0,5\n1,9,6\n16,0,7\n16,9,8\n"]
)
def test_a_graph_beyond_the_table_is_told(write, content):
    p, warnings = load(write(content), capture_limit=512)
    assert warnings == [
        "The largest CUDA graph (--capture-limit 512) is beyond the table's last size, 16 tokens: every size is read "
        "as captured."
    ]
    assert warnings[0] in p.provenance.notes
    assert load(write(content), capture_limit=16)[1] == []


def test_monotone_is_the_running_maximum_of_both_tables(write):
    content = {"verify": {"1": 5, "2": 4, "4": 6}, "draft": {"1": 2, "2": 1}}
    plain, rising = (load(write(content), monotone=m)[0] for m in (False, True))
    assert plain.step_seconds([1, 2, 4]) == pytest.approx([0.005, 0.004, 0.006])
    assert rising.step_seconds([1, 2, 4]) == pytest.approx([0.005, 0.005, 0.006])
    assert (plain.draft.seconds, rising.draft.seconds) == ((0.002, 0.001), (0.002, 0.002))
    assert "Times fall at 1 of 3 sizes, kept as measured: 1 to 2 tokens (verify.2, -20.0%)" in plain.provenance.notes
    assert "prices are their running maximum" in rising.provenance.notes
    assert "kept as measured: 1 to 2 drafting sequences (draft.2, -50.0%)" in plain.provenance.notes


@pytest.mark.skipif(not PUBLISHED.exists(), reason=f"{PUBLISHED} is not here")
def test_the_published_tables_give_the_shipped_profile():
    p, warnings = load(PUBLISHED, capture_limit=1024, max_num_tokens=16384)
    shipped = load_profile(ROOT / "hw_profiles" / "dsv4-flash-b300-tp4.json")
    assert warnings == []
    assert p.verify.model_copy(update={"seconds": ()}) == shipped.verify.model_copy(update={"seconds": ()})
    assert p.verify.seconds == pytest.approx(shipped.verify.seconds, rel=1e-12)
    assert p.draft.num_seqs == shipped.draft.num_seqs
    assert p.draft.seconds == pytest.approx(shipped.draft.seconds, rel=1e-12)
    assert "Times fall at 16 of 88 sizes, kept as measured: 672 to 688 tokens (line 98, -10.0%)" in p.provenance.notes
    assert "and 10 more" in p.provenance.notes


# Columns


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("tokens,ms\n1,10\n4,16\n", {}),
        ("tokens,time_us\n1,10000\n4,16000\n", {}),
        ("num_tokens,seconds\n4,0.016\n1,0.010\n", {}),
        ("tokens,Step time (s)\n1,0.01\n4,0.016\n", {}),
        ("tokens,latency\n1,10\n4,16\n", {"unit": "ms"}),
        ("tokens\ttime\n1\t10000\n4\t16000\n", {"unit": "us"}),
        ("1 10\n4 16\n", {"unit": "ms"}),
        ("tokens,p50 wall time per step (ms)\n1,10\n4,16\n", {}),
        ("tokens,ms/step\n1,10\n4,16\n", {}),
        ("tokens,ms_median\n1,10\n4,16\n", {}),
        ("tokens,verification_latency_ms\n1,10\n4,16\n", {}),
        ("tokens,cost\n1,10\n4,16\n", {"unit": "ms"}),
        ("\ufefftokens,ms\r\n1,10\r\n4,16\r\n", {}),
        ("tokens,num_seqs,ms\n1,1,10\n4,4,16\n", {}),
        ("tokens,kv_tokens,ms\n1,8192,10\n4,8192,16\n", {}),
    ],
)
def test_columns_in_any_unit(write, text, answers):
    p, warnings = load(write(text), **answers)
    assert warnings == []
    assert p.step_seconds([1, 2, 4]) == pytest.approx([0.010, 0.012, 0.016])
    with pytest.raises(SpecsimError, match=r"5 tokens is outside the measured range 1\.\.4"):
        p.step_seconds(5)


def test_what_else_columns_hold_is_in_the_notes(write):
    p, _ = load(write("tokens,num_seqs,kv_tokens,ms\n2,1,512,10\n4,2,512,16\n"))
    assert "The file's num_seqs are not in the price" in p.provenance.notes
    assert "All were measured with 512 KV tokens." in p.provenance.notes


def test_columns_below_a_told_graph_pad_to_the_next_size(write):
    p, _ = load(write("tokens,ms\n1,10\n4,16\n8,30\n16,50\n"), capture_limit=4)
    assert p.step_seconds([2, 5, 12]) == pytest.approx([0.016, 0.030, 0.040])


def test_columns_by_tokens_and_kv_tokens(write):
    rows = "".join(f"{t},{k},{t + k / 100}\n" for k in (0, 100, 400) for t in (8, 1, 2))
    p, _ = load(write("tokens,kv_tokens,ms\n" + rows))
    assert p.verify.type == "table2d"
    assert float(p.step_seconds(5, kv_tokens=250)) == pytest.approx(0.0075)
    with pytest.raises(SpecsimError, match=r"KV tokens is outside the measured range 0\.\.400"):
        p.step_seconds(5, kv_tokens=401)
    assert "fall" not in p.provenance.notes
    p, _ = load(write("tokens,kv_tokens,ms\n" + rows.replace("8,400,12.0", "8,400,3.0")))
    assert "Times fall at 1 of 9 sizes, kept as measured: 2 to 8 tokens (line 8, -50.0%)" in p.provenance.notes


def test_a_steep_curve_or_a_cliff_is_no_change_of_unit(write):
    load(write("tokens,ms\n1,5\n8192,5000\n"))
    load(write("tokens,ms\n1024,20.6\n1536,104\n"))


# The command


def test_the_command_prints_steps_and_warns_on_stderr(write, tmp_path, run):
    path, out, data = write(SPS), tmp_path / "p.json", tmp_path / "d.json"
    answers = ["--as-engine", "--model", "M", "--gpus", "4", "--tp", "4", "--host-seconds", "0.001", "--json", data]
    code, printed, said = run("profile", "import", path, "--out", out, *answers)
    assert code == 0
    assert said.startswith("warning: As the engine reads the table: tokens past the last probe (64) look free")
    assert said.count("\n") == 1
    assert "source: M on 4 × unknown, table1d" in printed
    p = load_profile(out)
    assert (p.gpus, p.tp, p.host_seconds, p.verify.below, p.verify.above) == (4, 4, 0.001, "floor", "flat")
    told = "--model M --gpus 4 --tp 4 --host-seconds 0.001 --as-engine"
    assert p.provenance.command == f"specsim profile import {path} {told} --out {out}"
    steps = json.loads(data.read_text())["steps"]
    assert [s["tokens"] for s in steps][::7] == [1, 64]
    assert steps[0]["seconds"] == pytest.approx(0.011)


@pytest.mark.parametrize("arguments", [["--kv-reads", "twice"], ["--format", "x"], ["--unit", "ms"]])
def test_the_command_fails_with_2_and_leaves_nothing(write, tmp_path, run, arguments):
    code, printed, said = run("profile", "import", write(SPS), "--out", tmp_path / "p.json", *arguments)
    assert (code, printed) == (2, "")
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "p.json").exists()


def test_the_command_never_writes_over_its_input(write, run):
    path = write(SPS)
    code, _, said = run("profile", "import", path, "--out", path)
    assert (code, json.loads(path.read_text())) == (2, SPS)
    assert "is the input FILE_OR_DIR" in said
