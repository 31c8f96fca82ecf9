"""What an import of cost tables refuses, in one line that names the file, the row and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest
from cost_tables import ADDITIVE, SPS, TABLES, load

from specsim.importers.profile_parts import BOUNDS
from specsim.importers.profiles import FORMATS
from specsim.types import SpecsimError

# What is refused

COLUMNS = {
    "two units": ("tokens,ms,seconds\n1,5,0.005\n", "expected one column of times, got ms, seconds: mixed units"),
    "two times": ("tokens,median_ms,p90_ms\n1,5,6\n", "expected one column of times, got median_ms, p90_ms$"),
    "a jump": (
        "tokens,ms\n1,5.1\n2,0.0052\n4,5.3\n",
        r"line 3: expected one unit, got 5.2e-06 s at 2 tokens after 0.0051 s at 1: a jump of 981 times looks like",
    ),
    "a jump up": ("tokens,seconds\n1,0.005\n2,5.1\n", "a jump of 1,020 times looks like mixed units"),
    "no unit": ("tokens,time\n1,5\n", "column 'time': expected its unit, as in time_ms, or --unit"),
    "no unit, no header": (
        "1,5\n2,6\n",
        "line 1: expected a header that tells the unit, as in tokens,time_ms, or --unit, got numbers$",
    ),
    **{
        f"a rate, {head}": (
            f"tokens,{head}\n1,5\n2,6\n",
            "column .*: is a rate, not a time: expected a time with its unit",
        )
        for head in (
            "steps/s",
            "steps_per_s",
            "tokens_per_sec",
            "SPS (1/s)",
            "throughput tok/s",
            "time per s",
            "tok / ms",
            "steps/min",
        )
    },
    **{
        f"no time, {head}": (
            f"tokens,{head}\n1,5\n2,6\n",
            f"column '{head}': expected tokens, .* or a time with its unit",
        )
        for head in ("throughput_ms", "cost_usd_s", "tokens_s", "timestamp", "time_s_ms")
    },
    **{
        f"a unit of {head}": (
            f"tokens,{head}\n1,5\n2,6\n",
            f": is in {unit}, expected a time in s, ms, us",
        )
        for head, unit in (("time_ns", "ns"), ("time_minutes", "minutes"), ("Step time (min)", "min"))
    },
    "more sequences than tokens": (
        "tokens,num_seqs,ms\n1,1,5\n8,100,6\n",
        "line 3: num_seqs: expected at most the 8 tokens, got 100",
    ),
    "one size": ("tokens,ms\n8,5\n", "expected at least two sizes of tokens, got one, 8"),
    "one size, two of KV": ("tokens,kv_tokens,ms\n8,0,5\n8,9,6\n", "expected at least two sizes of tokens, got one, 8"),
    "an endless step": ("tokens,ms\n1,5\n2,1e300\n", "line 3: ms: expected a time of 1e-12 to 1e.09 s, got '1e300'"),
    "no step": ("tokens,ms\n1,5\n2,5e-324\n", "line 3: ms: expected a time of 1e-12 to 1e.09 s, got '5e-324'"),
    "negative": ("tokens,ms\n1,5\n2,-6\n", "line 3: ms: expected a time above 0, got '-6'"),
    "zero": ("tokens,ms\n1,0\n", "line 2: ms: expected a time above 0, got '0'"),
    "not a number": ("tokens,ms\n1,5ms\n", "line 2: ms: expected a time above 0, got '5ms'"),
    "infinite": ("tokens,ms\n1,inf\n", "line 2: ms: expected a time above 0, got 'inf'"),
    "B = 0": ("tokens,ms\n0,5\n1,6\n", "line 2: tokens: expected a whole number of at least 1, got '0'"),
    "half a token": ("tokens,ms\n1.5,5\n", "line 2: tokens: expected a whole number of at least 1, got '1.5'"),
    "twice": ("tokens,ms\n1,5\n4,6\n1,7\n", "line 4: 1 tokens stand there and at line 2, expected each once"),
    "unknown column": ("tokens,ms,temperature\n1,5,60\n", "column 'temperature': expected tokens, num_seqs"),
    "no tokens": ("num_seqs,ms\n1,5\n", "expected a column tokens, got num_seqs, ms"),
    "column twice": ("tokens,num_tokens,ms\n1,1,5\n", "expected one column tokens, got 2"),
    "short row": ("tokens,ms\n1\n", "line 2: expected 2 columns, got 1"),
    "no rows": ("tokens,ms\n", "expected rows below the header, got none"),
    "numbers": ("1,2,3\n", "line 1: expected a header, got numbers"),
    "two batches": (
        "tokens,num_seqs,ms\n8,1,5\n8,4,6\n",
        "line 3: expected one time for 8 tokens, got another with other num_seqs at line 2",
    ),
    "a hole": (
        "tokens,kv_tokens,ms\n1,0,5\n1,9,6\n2,0,7\n",
        "expected a time for each pair, got none at 2 tokens with 9 KV tokens",
    ),
    "a pair twice": ("tokens,kv_tokens,ms\n1,0,5\n1,9,6\n1,0,7\n", "line 4: 1 tokens with 0 KV tokens stand there and"),
    "part": ("part,x,ms\nprefill,1,5\n", "line 2: part: expected verify or draft, got 'prefill'"),
    "a wide cell": (f"tokens,ms\n1,5\n2,{'1' * 200_000}\n", "line 3: expected CSV: field larger than field limit"),
    "no verify": ("part,x,ms\ndraft,1,5\n", "verify: expected a table of times by tokens, got none"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_one_line_says_what_is_wrong_with_columns(write, name):
    text, says = COLUMNS[name]
    path = write(text)
    with pytest.raises(SpecsimError, match=says) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def without(data, key):
    return {k: v for k, v in data.items() if k != key}


JSONS = {
    "rate of 0": (SPS | {"sample_steps_per_sec": [1, 0, 1]}, r"steps_per_sec\[1\]: expected steps per second above 0"),
    "B = 0": (SPS | {"sample_batch_tokens": [0, 8, 64]}, r"sample_batch_tokens\[0\]: expected a whole number of at le"),
    "B = true": (SPS | {"sample_batch_tokens": [True, 8, 64]}, r"batch_tokens\[0\]: expected a whole .* got True"),
    "probes fall": (SPS | {"sample_batch_tokens": [1, 64, 8]}, r"batch_tokens\[2\]: expected a probe above 64, got 8"),
    "lengths": (SPS | {"sample_batch_tokens": [1]}, "sample_steps_per_sec: expected 1 entries, one a sample_batch_tok"),
    "flat": (
        SPS | {"sample_batch_tokens": [1], "sample_steps_per_sec": [1.0]},
        "expected at least two probes, got 1: a flat placeholder",
    ),
    "most": (SPS | {"max_batch_tokens": 8}, "max_batch_tokens: expected a whole number of at least 64, got 8"),
    "no most": (without(SPS, "max_batch_tokens"), "max_batch_tokens: is missing"),
    "stranger": (SPS | {"colour": 1}, "colour: is not a known field"),
    "mixed units": (SPS | {"sample_steps_per_sec": [100, 0.1, 90]}, r"batch_tokens\[1\]: expected one unit"),
    "bias": (ADDITIVE | {"bias_seconds": 0}, "bias_seconds: expected a time above 0, got 0"),
    "an endless sum": (
        ADDITIVE | {"theta_seconds": [0.0, 1e300]},
        r"theta_seconds\[1\]: expected one unit, got 1e\+300 s at 10 tokens after .* a jump of 1e\+302 times",
    ),
    "a rate of nothing": (
        SPS | {"sample_steps_per_sec": [100, 1e-300, 90]},
        r"per_sec\[1\]: expected a time of 1e-12 to 1e.09 s, got 1e-300",
    ),
    "vllm rates": ({"verify_per_s": {"1": 5, "2": 4}}, "verify_per_s: is a rate, not a time: expected times of steps"),
    "vllm throughput": ({"verify_throughput_s": {"1": 5, "2": 4}}, "verify_throughput_s: expected one table verify"),
    "vllm, one size": ({"verify": {"8": 5}}, "expected at least two sizes of tokens, got one, 8"),
    "no theta": (without(ADDITIVE, "theta_seconds"), "theta_seconds: is missing"),
    "theta text": (ADDITIVE | {"theta_seconds": [0, "x"]}, r"theta_seconds\[1\]: expected a number, got 'x'"),
    "no probes": (ADDITIVE | {"bs_probes": []}, r"bs_probes: expected a list of numbers, got \[\]"),
    "requests fall": (ADDITIVE | {"bs_probes": [4, 4]}, r"alpha_seconds\[1\]: expected a probe above 4, got 4"),
    "vllm time": ({"verify": {"1": -5}}, r"verify\.1: expected a time above 0, got -5"),
    "vllm size": ({"verify": [[0, 5]]}, r"verify\[0\]: size: expected a whole number of at least 1, got 0"),
    "vllm shape": ({"verify": [1, 2]}, r"verify: expected \{size: time\} or \[\[size, time\], \.\.\]"),
    "vllm stranger": (TABLES | {"prefill": {}}, "prefill: expected one table verify and at most one draft"),
    "vllm twice": ({"verify": {"1": 1}, "verify_us": {"1": 1}}, "verify_us: expected one table verify"),
    "vllm alone": ({"draft": {"1": 1}}, "verify: expected a table of times by tokens, got none"),
    "ours": (
        {"schema": "specsim.profile/1"},
        "schema: expected another's file, got 'specsim.profile/1': it needs no",
    ),
    "nothing known": ({"a": 1}, r"expected one of the formats .*, got fields \['a'\]"),
    "a list": ([], "expected one of the formats .*, got a list$"),
    "a key twice": (
        '{"verify": {"1": 5, "1": 6, "8": 7}}',
        "expected JSON: the key '1' stands twice in one object",
    ),
    "nested": ("[" * 100_000, "expected JSON: nested too deep"),
    "broken": ("{", "expected JSON: "),
    "null": ("null\n", "expected columns of tokens and time, got JSON of another kind: null$"),
    "true": ("true", "got JSON of another kind: a truth value$"),
    "a number": (" 5\n", "got JSON of another kind: a number$"),
    "a string": ('"verify"', "got JSON of another kind: a string$"),
    "empty": ("  \n", "expected one of the formats .*, got an empty file"),
}


@pytest.mark.parametrize("name", JSONS)
def test_one_line_says_what_is_wrong_with_json(write, name):
    content, says = JSONS[name]
    path = write(content)
    with pytest.raises(SpecsimError, match=says) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "answers", "says"),
    [
        (TABLES, {"as_engine": True}, "--as-engine: .* for the format vllm, only for sglang, sglang-additive$"),
        (SPS, {"unit": "ms"}, "--unit: has no meaning for the format sglang, only for vllm, csv$"),
        (
            ADDITIVE,
            {"capture_limit": 8},
            "--capture-limit: has no meaning for the format sglang-additive, only for vllm",
        ),
        (TABLES, {"no_skew": True}, "--no-skew: has no meaning for the format vllm, only for bundle$"),
        (TABLES, {"link_latency": 0.0}, "--link-latency: has no meaning for the format vllm, only for bundle$"),
        (TABLES, {"date": "yesterday"}, "--date: expected a day as 2026-08-14, got 'yesterday'"),
        (TABLES, {"date": "20260814"}, "--date: expected a day as 2026-08-14, got '20260814'"),
        (TABLES, {"date": "2026-02-30"}, "--date: expected a day as"),
        (TABLES, {"name": ""}, "--name: expected a text, got an empty one"),
        (TABLES, {"engine": " "}, "--engine: expected a text, got an empty one"),
        (TABLES, {"draft": Path("d"), "draft_layers": 2}, "--draft, --draft-layers: expected one of them"),
        (TABLES, {"capture_limit": 0}, "--capture-limit: expected 1 to 10,000,000, got 0"),
        (TABLES, {"host_seconds": -1.0}, "--host-seconds: expected 0 to 1,000, got -1"),
        (TABLES, {"host_seconds": float("nan")}, "--host-seconds: expected 0 to 1,000, got nan"),
        (TABLES, {"gpus": 2, "tp": 4}, "--gpus: expected a multiple of --tp 4, got 2"),
        (TABLES, {"gpus": 6, "tp": 4}, "--gpus: expected a multiple of --tp 4, got 6"),
        (TABLES, {"gpus": 0}, "--gpus: expected 1 to 10,000, got 0"),
        ("tokens,ms\n1,5\n", {"unit": "s"}, "--unit: the column 'ms' is in ms, got s"),
        ({"verify_us": {"1": 5}}, {"unit": "s"}, "--unit: verify_us is in us, got s"),
        ("tokens,time_ns\n1,5\n2,6\n", {"unit": "ms"}, "column 'time_ns': is in ns, expected a time in s, ms, us"),
        ("tokens,cost_usd\n1,5\n2,6\n", {"unit": "ms"}, "column 'cost_usd': expected tokens, .* or a time"),
        ("tokens,time\n1,5\n", {"unit": "minutes"}, "--unit: expected one of s, ms, us, got 'minutes'"),
    ],
)
def test_answers_that_do_not_fit(write, content, answers, says):
    with pytest.raises(SpecsimError, match=says):
        load(write(content), **answers)


@pytest.mark.parametrize("name", BOUNDS)
def test_absurd_numbers_are_told_short(write, tmp_path, run, name):
    given = "1e300" if name in ("host_seconds", "link_latency", "link_bandwidth") else str(10**300)
    path, out, option = write(TABLES), tmp_path / "p.json", f"--{name.replace('_', '-')}"
    code, printed, said = run("profile", "import", path, option, given, "--out", out)
    assert (code, printed) == (2, "")
    assert said.startswith(f"error: {option}: expected {BOUNDS[name][0]} to {BOUNDS[name][1]:,}, got 1")
    assert len(said) < 100
    assert not out.exists()


def test_a_number_of_hundreds_of_digits_in_a_file_is_told_short(write, tmp_path, run):
    path, out = write(f"tokens,ms\n1,5\n{10**300},6\n", "t.csv"), tmp_path / "p.json"
    code, _, said = run("profile", "import", path, "--out", out)
    assert code == 2
    assert "got 10000000000000000525..." in said
    assert len(said) < 200 + len(str(path))
    assert not out.exists()


def test_a_format_can_be_told(write, tmp_path):
    text = "part,x,ms\nverify,1,5\ndraft,1,5\n"
    with pytest.raises(SpecsimError, match="line 3: part: a draft table has no place in the format csv, but in vllm"):
        load(write(text), "csv")
    with pytest.raises(SpecsimError, match=f"--format: expected auto or one of {', '.join(FORMATS)}, got 'pickle'"):
        load(write(text), "pickle")
    with pytest.raises(SpecsimError, match="expected a folder for the format bundle"):
        load(write(text), "bundle")
    for format in ("sglang", "sglang-additive"):
        with pytest.raises(SpecsimError, match="expected a JSON object, got null"):
            load(write("null"), format)
    with pytest.raises(SpecsimError, match="got JSON of another kind: a list"):
        load(write("[1, 2]"), "csv")
    with pytest.raises(SpecsimError, match="expected a file for the format csv"):
        load(tmp_path, "csv")
    with pytest.raises(SpecsimError, match=r"nowhere\.csv: cannot read: No such file"):
        load(tmp_path / "nowhere.csv")
