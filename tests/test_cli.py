"""The command line as a newcomer meets it: what it prints, what it writes, and one line for each mistake."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

import specsim as ss
from specsim.cli.inputs import parse_policies, parse_scheduler, split_policy, typed_command

ROOT = Path(__file__).parents[1]
PROFILE = str(ROOT / "hw_profiles/dsv4-flash-b300-tp4.json")
TRACE = str(ROOT / "traces/qwen3-4b-dspark.json")
MTP = str(ROOT / "traces/mtp1.json")
BASE = ("--profile", PROFILE, "--trace", TRACE)
SMALL = ("--poisson", "20", "--num-requests", "40", "--output-tokens", "32")

Run = Callable[..., tuple[int, str, str]]


def mistake(run: Run, *arguments: object) -> str:
    """Run, expecting exit code 2, nothing on stdout and one line on stderr; return that line."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def test_simulate_prints_and_writes(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "deep/out"
    code, text, _ = run(
        "simulate",
        *BASE,
        *SMALL,
        "-s",
        "DSparkAsync(staleness=1)",
        "--steps",
        "--out",
        out,
        "--json",
        tmp_path / "r.json",
    )
    assert code == 0
    assert "DSparkAsync(staleness=1)" in text
    requests = pd.read_parquet(out / "requests.parquet")
    steps = pd.read_parquet(out / "steps.parquet")
    assert len(requests) == 40
    assert steps["emitted"].sum() == requests["emitted"].sum() == 40 * 32
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["policy"] == "DSparkAsync(staleness=1)@qwen3-4b-dspark"
    assert {row["domain"] for row in data["metrics"]} == {"all", "math", "code", "chat"}


def test_pareto_writes_tables_and_pictures(run: Run, tmp_path: Path) -> None:
    arguments = ("-s", "NoSpec", "-s", f"MTP1@{MTP}", "-s", "DSparkGreedy", "--closed", "2,8", "--output-tokens", "16")
    code, text, _ = run(
        "pareto", *BASE, *arguments, "--num-requests", "20", "--seeds", "2", "--jobs", "1", "--out", tmp_path,
        "--format", "svg", "--json", tmp_path / "front.json",
    )  # fmt: skip
    assert code == 0
    assert "MTP1()@mtp1" in text
    frame = pd.read_parquet(tmp_path / "results.parquet")
    assert len(frame) == 3 * 2 * 2 * 4  # policies, loads, seeds, domains and all
    pd.testing.assert_frame_equal(frame, pd.read_csv(tmp_path / "results.csv"), check_dtype=False)
    assert {p.name for p in tmp_path.iterdir()} == {
        "results.parquet", "results.csv", "sla.csv", "front.json",
        "pareto.svg", "throughput.svg", "verified_tokens.svg",
    }  # fmt: skip
    assert len(json.loads((tmp_path / "front.json").read_text())["points"]) == 6
    again = tmp_path / "again"
    code, _, _ = run("pareto", "--results", tmp_path / "results.parquet", "--out", again, "--format", "svg")
    assert code == 0
    assert (again / "pareto.svg").read_bytes() == (tmp_path / "pareto.svg").read_bytes()


def test_sweep_is_the_same_in_one_process_and_in_several(run: Run, tmp_path: Path) -> None:
    for jobs in (1, 2):
        code, _, _ = run(
            "sweep", *BASE, *SMALL, "-s", "NoSpec", "-s", "DSparkAsync", "--jobs", jobs, "--out", tmp_path / str(jobs)
        )
        assert code == 0
    assert (tmp_path / "1/results.parquet").read_bytes() == (tmp_path / "2/results.parquet").read_bytes()


def test_scenario_file_flags_win_and_paths_are_its_own(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "sub/scenario.toml"
    file.parent.mkdir()
    (tmp_path / "half.py").write_text("import numpy as np\n\n\ndef half(view):\n    return np.full(view.num_seqs, 1)\n")
    (tmp_path / "mtp.json").write_text(Path(MTP).read_text())
    file.write_text(
        f'profile = "{PROFILE}"\ntrace = "../mtp.json"\nscheduler = ["../half.py:half"]\nclosed = [1, 2]\n'
        "domains = { math = 1, chat = 2 }\noutput-tokens = 8\nnum_requests = 30\nseeds = 1\n"
    )
    code, text, _ = run("sweep", "--scenario", file, "--closed", "3")
    assert code == 0
    assert "half" in text
    assert " 3 " in text
    code, text, _ = run("sweep", "--scenario", file, "--poisson", "5")  # another kind of load replaces the file's
    assert code == 0
    assert " 5 " in text
    good = file.read_text()
    file.write_text(good.replace("half.py:half", "half.py"))
    assert "half.py:NAME, NAME one of half" in mistake(run, "sweep", "--scenario", file)
    file.write_text(good + "speed = 11\n")
    assert "speed: not an option of specsim sweep" in mistake(run, "sweep", "--scenario", file)
    file.write_text("closed = [")
    assert "expected TOML" in mistake(run, "sweep", "--scenario", file)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("simulate",), "--profile: expected"),
        (("simulate", *BASE), "expected one of --closed"),
        (
            ("simulate", *BASE, "--rate", "12"),
            "got none (--rate scales --arrivals; requests/s of a Poisson",
        ),
        (
            ("simulate", *BASE, "--closed", "1", "-s", "MTP1"),
            "name one with MTP1()@TRACE (@TRACE:1: the first",
        ),
        (("simulate", *BASE, "--closed", "4", "--poisson", "1"), "--closed and --poisson"),
        (("simulate", *BASE, "--closed", "0"), "--closed: expected whole numbers above 0"),
        (("simulate", *BASE, "--closed", "1.5"), "--closed: expected whole numbers"),
        (("simulate", *BASE, "--poisson", "0"), "--poisson: expected numbers above 0"),
        (("simulate", *BASE, "--poisson", "nan"), "--poisson: expected numbers above 0"),
        (("simulate", *BASE, "--closed", "1,2"), "expected one scheduler and one load"),
        (("simulate", *BASE, "--closed", "1", "-s", "Nope"), "scheduler 'Nope': not known, expected one of"),
        (("simulate", *BASE, "--closed", "1", "-s", "StaticGamma(9)"), "expected at most 7"),
        (("simulate", *BASE, "--closed", "1", "-s", "StaticGamma("), "expected Name, Name(arguments)"),
        (("simulate", *BASE, "--closed", "1", "-s", "StaticGamma(x=1)"), "StaticGamma"),
        (("simulate", *BASE, "--closed", "1", "-s", "MTP1"), "drafter of γ = 1"),
        (("simulate", *BASE, "--closed", "1", "-s", "Threshold(1.5)"), "expected 0..1"),
        (("simulate", *BASE, "--closed", "1", "-s", "missing.py:Mine"), "missing.py: cannot read"),
        (("simulate", *BASE, "--closed", "1", "-s", "NoSpec@none.json"), "none.json: cannot read"),
        (("simulate", *BASE, "--closed", "1", "--gamma", "9"), "gamma: expected 1..7"),
        (("simulate", "--profile", PROFILE, "--closed", "1", "-s", "DSparkGreedy"), "expected a drafter"),
        (("simulate", "--profile", "none.json", "--closed", "1"), "none.json: cannot read"),
        (("simulate", "--profile", TRACE, "--closed", "1"), "schema: expected 'specsim.profile/1'"),
        (("simulate", *BASE, "--closed", "1", "--kv-tokens", "100"), "can never fit in the KV cache of 96 tokens"),
        (("simulate", *BASE, "--closed", "1", "--router", "fast"), "router: expected"),
        (("simulate", *BASE, "--closed", "1", "--prompt-tokens", "many"), "many"),
        (("simulate", *BASE, "--closed", "1", "--domains", "poetry", "-s", "DSparkGreedy"), "domain 'poetry'"),
        (("simulate", *BASE, "--closed", "1", "--domains", "math:x"), "expected a number for its weight"),
        (("simulate", *BASE, "--closed", "300", "-s", "DSparkGreedy"), "outside the measured range 0..256"),
        (("simulate", *BASE, "--closed", "1", "--out", f"{PROFILE}/out"), "cannot write there"),
        (("simulate", *BASE, "--closed", "1", "--bogus"), "--bogus"),
        (
            ("simulate", *BASE, "--closed", "1", "--max-num-batched-tokens", "3", "-s", "DSparkGreedy"),
            "at least 1 + γ = 8",
        ),
        (("pareto", *BASE, "--closed", "1", "--format", "gif"), "--format: expected png or svg"),
        (("pareto", *BASE, "--closed", "1", "--sla", "fast"), "--sla: expected numbers"),
        (("pareto", "--results", PROFILE), "results.parquet"),
        (
            ("sweep", *BASE, "--closed", "1", "-s", "NoSpec", "-s", "NoSpec"),
            "error: policy NoSpec() is given twice: labels tell results apart\n",
        ),
        (("sweep", *BASE, "--closed", "2", "--out", "-"), "--out: expected a path, got '-'"),
        (("sweep", *BASE, "--closed", "2,2"), "--closed: 2 is given twice"),
        (("sweep", *BASE, "--closed", "2", "--jobs", "0"), "jobs: expected -1"),
        (("simulate", *BASE, "--closed", "2", "--seed", "-1"), "seed: expected a whole number, 0 or more"),
        (("simulate", *BASE, "--closed", "2", "--rate", "5"), "--rate: has no meaning with --closed"),
        (("simulate", *BASE, "--closed", "2", "--cv", "3"), "--cv: has no meaning with --closed"),
        (("simulate", *BASE, "--poisson", "2", "--think", "3"), "--think: has no meaning with --poisson"),
        (("simulate", *BASE, "--poisson", "2", "--num-requests", "0"), "--num-requests: expected 1 to 100,000,000"),
        (("simulate", *BASE, "--ramp", "1,2"), "--ramp: expected START,END,SECONDS"),
        (("simulate", *BASE, "--closed", "1", "--domains", "poetry"), "domain 'poetry'"),
        (("simulate", *BASE, "--closed", "1", "--slo-ttft", "nan"), "SLO: ttft: expected a number above 0"),
        (("simulate", *BASE, "--closed", "1", "--max-num-batched-tokens", "100000000000"), "at most 16777216"),
        (("simulate", *BASE, "--closed", "1", "-s", "MTP1@"), "expected a trace after @"),
        (("simulate", *BASE, "--closed", "1", "-s", "MTP1@:1"), "scheduler 'MTP1@:1': expected a trace after @"),
        (
            ("simulate", *BASE, "--closed", "1", "-s", f"StaticGamma(1)@{TRACE}:0"),
            f"scheduler 'StaticGamma(1)@{TRACE}:0': expected blocks of 1 to 7 tokens, as the trace has, after it, ",
        ),
        (("simulate", *BASE, "--closed", "1", "-s", f"StaticGamma(4)@{TRACE}:8"), "as the trace has, after it, got 8"),
        (("trace", "inspect", "none.csv"), "none.csv: cannot read"),
        (("trace", "inspect", __file__), "expected parquet"),
        (("profile", "show", TRACE), "schema: expected"),
        (("frobnicate",), "frobnicate"),
    ],
    ids=lambda value: " ".join(str(v) for v in value if v not in BASE)[:60] if isinstance(value, tuple) else "",
)
def test_mistakes(run: Run, arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    assert words in mistake(run, *arguments)


def test_a_profile_too_short_for_the_steps_names_its_range(run: Run, tmp_path: Path) -> None:
    profile = json.loads(Path(PROFILE).read_text())
    profile["verify"]["tokens"], profile["verify"]["seconds"] = [1, 256], [0.005, 0.01]
    profile["verify"]["capture_limit"] = None
    path = tmp_path / "short.json"
    path.write_text(json.dumps(profile))
    arguments = ("simulate", "--profile", path, "--trace", TRACE, "--closed", "2", "--output-tokens", "8")
    assert "a step of 1024 tokens is outside the measured range 1..256" in mistake(run, *arguments)
    code, _, err = run(*arguments, "--extrapolate")
    assert code == 0
    assert "outside what the profile measured" in err


def block_trace(tmp_path: Path, **changes: object) -> Path:
    """A small dense trace with one thing about it changed (None: the column is dropped)."""
    n, gamma = 12, 3
    columns: dict[str, object] = {
        "request_id": ["a"] * n,
        "domain": ["chat"] * n,
        "position": np.arange(n, dtype=np.int32),
        "confidence": np.full((n, gamma), 0.5, dtype=np.float32),
        "accepted": np.zeros(n, dtype=np.int8),
        "proposed": np.full(n, gamma, dtype=np.int8),
    } | changes
    arrays = {}
    for name, values in columns.items():
        if values is None:
            continue
        array = np.asarray(values)
        flat = pa.array(array.ravel().tolist() if array.dtype.kind == "U" else array.ravel())
        arrays[name] = pa.FixedSizeListArray.from_arrays(flat, array.shape[1]) if array.ndim == 2 else flat
    meta = ss.TraceMeta(drafter="d", target="t", gamma=gamma, kind="dense").model_dump_json(by_alias=True)
    path = tmp_path / "blocks.parquet"
    pq.write_table(pa.table(arrays).replace_schema_metadata({"specsim": meta}), path)
    return path


CONFIDENCE = np.full((12, 3), 0.5, dtype=np.float32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accepted": None}, "column 'accepted' is missing"),
        ({"speed": np.ones(12)}, "column 'speed' is not known"),
        ({"confidence": CONFIDENCE[:, :2]}, "expected lists of gamma = 3, got lists of 2"),
        (
            {"confidence": np.where(np.arange(12)[:, None] == 5, np.float32(1.5), CONFIDENCE)},
            "row 5, position 1: expected 0..1",
        ),
        (
            {"confidence": np.where(np.arange(12)[:, None] == 7, np.float32("nan"), CONFIDENCE)},
            "row 7, position 1: expected 0..1, got nan",
        ),
        ({"position": np.arange(12, dtype=np.int32) - 1}, "column 'position', row 0: expected 0 or more, got -1"),
        ({"accepted": np.full(12, 4, dtype=np.int8)}, "column 'accepted', row 0: expected 0..3, got 4"),
    ],
    ids=["missing", "extra", "gamma", "above one", "NaN", "negative", "more than proposed"],
)
def test_bad_block_traces(run: Run, tmp_path: Path, changes: dict[str, object], words: str) -> None:
    path = block_trace(tmp_path, **changes)
    line = mistake(run, "simulate", "--profile", PROFILE, "--trace", path, "--closed", "1", "-s", "DSparkGreedy")
    assert str(path) in line
    assert words in line


def test_an_empty_trace(run: Run, tmp_path: Path) -> None:
    path = block_trace(tmp_path)
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    assert "empty trace" in mistake(run, "trace", "inspect", path)


def test_block_trace_runs_and_is_inspected(run: Run, tmp_path: Path) -> None:
    path = block_trace(tmp_path)
    code, text, _ = run("trace", "inspect", path)
    assert code == 0
    assert "dense (12 rows)" in text
    code, _, _ = run("simulate", "--profile", PROFILE, "--trace", path, *SMALL, "-s", "Threshold(0.4)")
    assert code == 0


def test_inspect_leaves_out_tokens_that_were_not_proposed(run: Run, tmp_path: Path) -> None:
    confidence = np.full((12, 3), 0.5, dtype=np.float32)
    proposed = np.array([0, 1, 2, 3] * 3, dtype=np.int8)
    confidence[np.arange(3) >= proposed[:, None]] = 0
    accepted = np.array([0, 1, 1, 3] * 3, dtype=np.int8)
    path = block_trace(tmp_path, confidence=confidence, proposed=proposed, accepted=accepted)
    code, _, _ = run("trace", "inspect", path, "--json", tmp_path / "seen.json")
    assert code == 0
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["chat"]["conditional"] == [1.0, 0.5, 1.0]
    assert [row["count"] for row in seen["calibration"]] == [9, 6, 3]
    assert [row["predicted"] for row in seen["calibration"]] == [0.5, 0.25, 0.125]


@pytest.mark.parametrize(
    ("arrival_s", "words"), [([-1.0, 0.0], "row 0"), ([1.0, 0.0], "row 1")], ids=["negative", "unsorted"]
)
def test_bad_arrival_times(run: Run, tmp_path: Path, arrival_s: list[float], words: str) -> None:
    path = tmp_path / "arrivals.parquet"
    pd.DataFrame(
        {"arrival_s": arrival_s, "prompt_tokens": [5, 5], "output_tokens": [5, 5], "domain": ["chat", "chat"]}
    ).to_parquet(path, index=False)
    line = mistake(run, "simulate", *BASE, "--arrivals", path)
    assert "arrival_s" in line
    assert words in line


def test_domains_replace_those_of_arrivals(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "arrivals.parquet"
    pd.DataFrame(
        {"arrival_s": [0.0, 1.0], "prompt_tokens": [5, 5], "output_tokens": [5, 5], "domain": ["api", "api"]}
    ).to_parquet(path, index=False)
    assert "domain 'api'" in mistake(run, "simulate", *BASE, "--arrivals", path, "-s", "DSparkGreedy")
    code, _, _ = run("simulate", *BASE, "--arrivals", path, "-s", "DSparkGreedy", "--domains", "chat")
    assert code == 0


def test_disk_full_leaves_no_half_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "results.parquet"
    old.write_bytes(b"what was there before")

    def full(self: pd.DataFrame, path: Path, **_: object) -> None:
        Path(path).write_bytes(b"half a ta")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    code, _, err = run("sweep", *BASE, *SMALL, "--seeds", "1", "--out", tmp_path)
    assert code == 2
    assert "No space left on device" in err
    assert err.splitlines()[-1].startswith(f"error: {old}: cannot write")
    assert old.read_bytes() == b"what was there before"
    assert [p.name for p in tmp_path.iterdir()] == ["results.parquet"]


def test_outputs_are_apart_from_inputs_and_from_each_other(run: Run, tmp_path: Path) -> None:
    """Every file that a verb reads or writes, given again as another output."""
    names = ("p.json", "t.json", "s.toml", "m.py", "a.parquet", "results.parquet")
    profile, trace, scenario, module, arrivals, results = read = [tmp_path / name for name in names]
    profile.write_text(Path(PROFILE).read_text())
    trace.write_text(Path(TRACE).read_text())
    scenario.write_text('trace = "t.json"\nclosed = [1]\n')
    for path in (module, arrivals, results):
        path.write_bytes(b"read by nothing, since the outputs come first")
    before = [path.read_bytes() for path in read]
    new = tmp_path / "new"
    base = ("--profile", profile, "--trace", trace)
    given: list[tuple[tuple[object, ...], str]] = [
        (("simulate", *base, "--json", profile), f"--json: {profile}: is the input --profile, expected another path"),
        (("sweep", *base, "--json", trace), f"--json: {trace}: is the input --trace"),
        (("sweep", "--profile", profile, "--scenario", scenario, "--json", trace), "is the input --trace"),
        (("sweep", "--scenario", scenario, "--json", scenario), "is the input --scenario"),
        (("sweep", *base, "-s", f"NoSpec@{arrivals}", "--json", arrivals), "is the input --scheduler"),
        (("sweep", *base, "-s", f"{module}:Mine(1)", "--json", module), "is the input --scheduler"),
        (("simulate", *base, "--arrivals", arrivals, "--json", arrivals), "is the input --arrivals"),
        (("simulate", *base, "--arrivals", new / "requests.parquet", "--out", new), "--out: "),
        (("simulate", *base, "--out", new, "--json", new), f"--json: {new}: is also written by --out, expected"),
        (("simulate", *base, "--steps", "--out", new, "--json", new / "steps.parquet"), "is also written by --out"),
        (("sweep", *base, "--out", new, "--json", new / "results.csv"), "is also written by --out"),
        (("pareto", *base, "--out", new, "--json", new / "pareto.png"), "is also written by --out"),
        (("pareto", "--results", results, "--out", new, "--json", results), f"--json: {results}: is the input --res"),
        (("profile", "show", profile, "--json", profile), f"--json: {profile}: is the input FILE"),
        (("trace", "inspect", trace, "--json", trace), f"--json: {trace}: is the input FILE"),
        (("trace", "inspect", trace, "--json", tmp_path), "--json: expected a file name, got the folder"),
    ]
    for arguments, words in given:
        assert words in mistake(run, *arguments)
        assert not new.exists()
    assert [path.read_bytes() for path in read] == before


def test_pareto_may_draw_into_the_folder_of_its_results(run: Run, tmp_path: Path) -> None:
    code, _, err = run("sweep", *BASE, *SMALL, "-s", "NoSpec", "--seeds", "1", "--jobs", "1", "--out", tmp_path)
    assert code == 0, err
    old = pd.read_parquet(tmp_path / "results.parquet")
    kept = []
    for _ in range(2):
        code, _, err = run("pareto", "--results", tmp_path / "results.parquet", "--out", tmp_path)
        assert code == 0, err
        kept.append((tmp_path / "results.parquet").read_bytes())
    assert kept[0] == kept[1]
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "results.parquet"), old)


def test_a_users_scheduler(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n\nimport numpy as np\n\n\n@dataclass(frozen=True)\nclass Fixed:\n"
        "    k: int = 1\n\n    def __call__(self, view):\n        return np.full(view.num_seqs, self.k)\n\n\n"
        "def broken(view):\n    return 1 / 0\n\n\ndef wrong(view):\n    return np.full(view.num_seqs, 99)\n"
    )
    code, text, _ = run("sweep", *BASE, *SMALL, "-s", f"{file}:Fixed", "-s", f"{file}:Fixed(2)", "--jobs", "2")
    assert code == 0
    assert "Fixed(k=1)" in text
    assert "Fixed(k=2)" in text
    assert "ZeroDivisionError" in mistake(run, "simulate", *BASE, *SMALL, "-s", f"{file}:broken")
    assert "expected 1 whole draft lengths within 0..7" in mistake(
        run, "simulate", *BASE, *SMALL, "-s", f"{file}:wrong"
    )
    for name, words, jobs in (
        ("broken", "ZeroDivisionError: division by zero (in mine.py, line 15, broken)", 1),
        ("broken", "ZeroDivisionError: division by zero (in mine.py, line 15, broken)", 2),
        ("wrong", "expected 2 whole draft lengths within 0..7", 1),
    ):  # sweep, which asks twice, tells the same, and once
        told = mistake(run, "sweep", *BASE, "--closed", "2", "-s", f"{file}:{name}", "--jobs", jobs)
        assert told.startswith(f"error: scheduler {name}: {words}")
    assert "named without parentheses" in mistake(run, "simulate", *BASE, *SMALL, "-s", f"{file}:wrong()")
    assert "'Nope' is not defined in it, expected one of Fixed, broken, wrong" in mistake(
        run, "simulate", *BASE, *SMALL, "-s", f"{file}:Nope"
    )
    file.write_text("class Shy:\n    def __repr__(self):\n        raise ValueError('shy')\n")
    for verb in ("simulate", "sweep"):
        assert (
            "scheduler Shy: its __repr__, which makes its label, fails: ValueError: shy (in mine.py, line 3"
            in mistake(run, verb, *BASE, *SMALL, "-s", f"{file}:Shy")
        )


def test_a_length_after_a_trace_is_that_of_its_blocks_whatever_gamma_says() -> None:
    texts = ["StaticGamma(2)", *(f"StaticGamma(2)@{TRACE}{end}" for end in ("", ":2", ":3", ":7"))]
    _, policies = parse_policies(texts, Path(TRACE), 3)
    assert [p.drafter and p.drafter.gamma for p in policies] == [None, 3, 2, 3, 7]
    names = ["", "@qwen3-4b-dspark", "@qwen3-4b-dspark:2", "@qwen3-4b-dspark", "@qwen3-4b-dspark:7"]
    assert [repr(p) for p in policies] == [f"StaticGamma(2){name}" for name in names]


def test_a_schedulers_folder_may_have_an_at_sign(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "me@home"
    folder.mkdir()
    (folder / "mine@2.py").write_text("def none(view):\n    return view.request_ids * 0\n")
    mine = f"{folder}/mine@2.py:none"
    assert split_policy(f"{mine}@{TRACE}:{'9' * 5000}")[0] == mine
    assert run("simulate", *BASE, *SMALL, "-s", f"{mine}@{TRACE}:2")[0] == 0
    assert run("audit", mine, "--instances", "2", "--histories", "0")[0] == 0
    (tmp_path / "a.toml").write_text('scheduler = ["me@home/mine@2.py:none"]\n')
    assert run("simulate", *BASE, *SMALL, "--scenario", tmp_path / "a.toml")[0] == 0
    assert f"it makes drafters of its own: expected '{mine}'" in mistake(run, "audit", f"{mine}@{TRACE}")


@pytest.mark.parametrize("text", ["import nothing_of_this_name\n", "def policy(view)\n", "1 / 0\n"])
def test_a_schedulers_file_that_fails_names_its_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)  # by a relative path, too
    Path("mine.py").write_text(f"# a file of mine\n{text}")
    for path in ("mine.py", tmp_path / "mine.py"):
        told = mistake(run, "simulate", *BASE, *SMALL, "-s", f"{path}:Fixed")
        assert f"{path}, line 2: " in told
        assert "Error: " in told


@pytest.mark.parametrize(
    "scheduler",
    [
        ss.NoSpec(),
        ss.StaticGamma(3),
        ss.Threshold(0.25),
        ss.BatchSizeTable(((1, 4, 5), (5, 32, 2))),
        ss.DSparkAsync(1, "mean"),
    ],
    ids=repr,
)
def test_a_label_typed_back_gives_the_same_scheduler(scheduler: object) -> None:
    assert parse_scheduler(repr(scheduler)) == scheduler


@pytest.mark.parametrize("verb", ["simulate", "sweep", "pareto", "trace inspect", "profile show"])
def test_every_verb_has_an_example(run: Run, verb: str) -> None:
    code, text, _ = run(*verb.split(), "--help")
    assert code == 0
    assert "Example: specsim" in text


def test_a_command_is_told_as_it_was_typed() -> None:
    def verb(
        context: typer.Context, files: list[Path], tag: Annotated[list[str], typer.Option()], dry: bool = True
    ) -> None:
        told.append(typed_command(context))

    told: list[str] = []
    app, inner = typer.Typer(), typer.Typer()
    inner.command("fit")(verb)
    inner.command("other")(lambda: None)
    app.add_typer(inner, name="profile")
    words = ["profile", "fit", "--tag", "a b", "--no-dry", "--tag", "c", "x.csv", "y z.csv"]
    app(words, standalone_mode=False)
    assert told == ["specsim profile fit x.csv 'y z.csv' --tag 'a b' --tag c --no-dry"]


@pytest.mark.parametrize("where", ["file", "call", "step"])
def test_a_scheduler_that_ends_the_program_is_a_mistake(run: Run, tmp_path: Path, where: str) -> None:
    text = {
        "file": "import sys\nsys.exit(0)\n",
        "call": "import sys\nclass Mine:\n    def __init__(self):\n        sys.exit(0)\n",
        "step": "import sys\ndef Mine(view):\n    sys.exit(0)\n",
    }[where]
    path = tmp_path / "ends.py"
    path.write_text(text)
    assert "SystemExit: 0" in mistake(run, "simulate", *BASE, *SMALL, "-s", f"{path}:Mine")


def test_more_than_can_be_run_is_refused_at_once(run: Run) -> None:
    assert "--num-requests: expected 1 to 100,000,000" in mistake(
        run, "simulate", *BASE, "--poisson", "20", "--num-requests", 10**18
    )
    code, _, err = run("sweep", *BASE, *SMALL, "--seeds", 10**18)
    assert code == 2
    assert "--seeds" in err
