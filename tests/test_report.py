"""The report: what the page says, that it asks nobody, and that names users chose stay names.

How it looks and works in a browser is test_report_browser.py's.
"""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib import util
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import make_profile
from report_pages import EVIL, FLOORS, Evil, made, small_sweep
from test_pareto import sweep as by_hand

import specsim as ss
from specsim.acceptance import synthetic
from specsim.pareto import number, pareto, sla_table
from specsim.plots import COLOURS
from specsim.report import charts, html, make_report
from specsim.report.looks import PALETTE
from specsim.types import SpecsimError

vl_convert = pytest.importorskip("vl_convert", reason="the extra report is not installed")
ROOT = Path(__file__).parents[1]
READINGS = ROOT / "specsim/report/page/readings.js"


class Page(HTMLParser):
    """A page taken apart: its elements, its scripts and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.inside: list[str] = []
        self.rows: list[list[str]] = []
        self.said = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        if "script" in self.inside:
            self.scripts[-1] += data
        elif "style" not in self.inside:
            self.said += data
            if "td" in self.inside or "th" in self.inside:
                self.rows[-1][-1] += data.replace("\u00a0", " ")

    @property
    def data(self):
        return json.loads(self.scripts[0])

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def swept():
    return small_sweep()


@pytest.fixture(scope="module")
def text(swept):
    return made(swept)


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_the_same_sweep_makes_the_same_bytes(swept, text):
    assert made(swept) == text


def test_the_page_needs_nothing_else_and_is_small(text, page):
    assert len(text.encode()) < 2e6
    targets = [value for _, found in page.elements for name, value in found.items() if name in ("src", "href")]
    assert all(target.startswith(("#", "data:,")) for target in targets)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style


def test_only_the_pages_own_scripts_may_run(page):
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-")
    assert [s.get("type") for s in page.all("script")] == ["application/json", None, None, None]
    for script in page.scripts[1:]:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy


def test_every_fragment_is_there(page):
    ids = [found["id"] for _, found in page.elements if found.get("id")]
    assert len(ids) == len(set(ids))
    wanted = [a["href"][1:] for a in page.all("a")] + [a["for"] for a in page.all("label") if "for" in a]
    assert set(wanted) <= set(ids)
    regions = [c["aria-label"] for c in page.all("div") if c.get("role") == "region"]
    assert len(regions) == len(set(regions))
    assert {c["data-chart"] for c in page.all("div") if "data-chart" in c} == set(page.data["charts"])


def test_a_name_that_is_markup_stays_a_name(swept):
    page = Page(made(small_sweep(Evil()), command=f"specsim report -s '{EVIL}'", notes=[EVIL]))
    assert not page.all("img")
    assert len(page.scripts) == 4
    assert EVIL in [p["name"] for p in page.data["front"]["policies"]]
    assert EVIL in [p["policy"] for p in page.data["charts"]["front"]["data"]["values"]]
    assert EVIL in page.said
    assert not [name for _, found in page.elements for name in found if name.startswith("on")]


def test_text_is_escaped_and_json_is_no_markup():
    assert html.text("<a b=\"'&\udcff") == "&lt;a b=&quot;&#x27;&amp;?"
    assert html.script_json({"a": ["</script><!--", float("nan"), np.float64(2.5), np.int64(3)]}) == (
        '{"a":["\\u003c/script\\u003e\\u003c!--",null,2.5,3]}'
    )


def test_the_table_at_the_floors_is_the_command_lines(swept, page):
    front = pareto(swept["frame"])
    for policy, part in sla_table(front, FLOORS).groupby("policy"):
        assert [policy, *part["text"]] in page.rows
    assert front.policies == [p["name"] for p in page.data["front"]["policies"]]


def test_every_chart_has_its_numbers_in_a_table(swept, page):
    front = pareto(swept["frame"])
    for row in front.points.to_dict("records"):
        mine = [r for r in page.rows if r[:2] == [row["policy"], f"{row['load']:g}"]]
        assert len(mine) == 3  # the front's, the loads' and the latencies' table
        assert html.number(row["throughput"], row["throughput_ci"]) in mine[0]
        assert html.number(row["verified_tokens"], row["verified_tokens_ci"]) in mine[1]
        assert mine[2][2:] == [
            html.number(factor * row[f"{name}_{q}"])
            for name, (_, factor, _) in charts.LATENCIES.items()
            for q in charts.QUANTILES
        ]
    assert len(page.all("details")) >= 4


def test_charts_compile_and_hold_their_numbers(swept, page):
    for name, spec in page.data["charts"].items():
        assert vl_convert.vegalite_to_vega(spec, vl_version=html.VEGA_LITE)["marks"], name
        assert spec["description"]
    front = pareto(swept["frame"])
    drawn = page.data["charts"]["front"]["data"]["values"]
    assert [(d["x"], d["y"]) for d in drawn] == list(
        zip(front.points["interactivity_p50"], front.points["throughput"], strict=True)
    )


def test_inputs_are_told_with_where_they_are_from(swept, page):
    for words in (
        "analytic: worked out from the hardware's ratings", "made up for a test", "profile tiny is analytic",
        "recorded: 64 blocks of 2 responses, dense", "synthetic: blocks drawn from parameters",
        "γ = 2, of 2 in the trace",
        "StaticGamma(2)", "1, 4, 8 users", "Seeds0, 1, 2", "specsim report --of this", "Vega-Lite 6.4",
    ):  # fmt: skip
        assert words in page.said, words


def test_drafters_without_confidence_have_no_reliability(swept):
    other = Page(
        made({**swept, "policies": swept["policies"][:1]}, swept["frame"][swept["frame"]["policy"] == "NoSpec()"])
    )
    assert not [name for name in other.data["charts"] if name.startswith(("acceptance", "reliability"))]
    assert "#drafters" not in [a["href"] for a in other.all("a")]
    names = [name for name in Page(made(swept)).data["charts"] if name.startswith(("acceptance", "reliability"))]
    assert names == ["acceptance-0", "reliability-0", "acceptance-1", "reliability-1"]


def test_calibrated_confidences_stand_beside_the_raw_ones():
    report = pd.DataFrame(
        {"position": [1, 1], "bin": [3, 9], "count": [40, 10], "predicted": [0.2, 0.6], "observed": [0.3, 0.5]}
    )
    spec = charts.reliability_chart([("calibrated", report), ("raw", report)])
    assert [row["policy"] for row in spec["data"]["values"]] == ["calibrated"] * 2 + ["raw"] * 2
    assert [row["share"] for row in spec["data"]["values"]] == [0.8, 0.2] * 2
    assert [row["few"] for row in spec["data"]["values"]] == [False, True] * 2


def test_an_open_loop_is_served_by_requests_a_second():
    """By users in flight, of which the faster scheduler has fewer, it would need more GPUs for the same rate."""
    swept = small_sweep(workloads=[ss.Poisson(r, 40, 8, 12) for r in (0.02, 0.05)], seeds=1)
    page = Page(made(swept, demand=2.5))
    runs = swept["frame"][swept["frame"]["domain"] == "all"]
    expected = (runs["request_rate"] / runs["gpus"]).tolist()
    assert [served for p in page.data["front"]["policies"] for served in p["served"]] == pytest.approx(expected)
    for words in ("Requests/s to serve", "requests/s per GPU", "one seed, so no intervals", "40, the first tenth"):
        assert words in page.said
    assert "users per GPU" not in page.said
    assert next(i for i in page.all("input") if i.get("id") == "demand")["value"] == "2.5"
    with pytest.raises(SpecsimError, match="requests/s: expected a number above 0"):
        made(swept, demand=0)


def test_the_slider_ends_where_nobody_sells_more_and_floors_beyond_are_said_to(swept):
    page = Page(made(swept, floors=[0.95, 1.5, 5000]))
    best = pareto(swept["frame"]).points.sort_values("interactivity_p50").iloc[-1]
    slider = next(i for i in page.all("input") if i.get("id") == "floor")
    assert best["interactivity_p50"] - float(slider["step"]) < float(slider["max"]) <= best["interactivity_p50"]
    assert [b["data-floor"] for b in page.all("button") if "data-floor" in b] == ["0.95", "1.5"]
    most = number(best["interactivity_p50"])
    assert f"No scheduler is as fast as 5,000 tok/s per user: the most is {most}, " in page.said
    assert "'s at 1 user." in page.said
    alone = Page(made(swept, floors=[3000, 5000]))
    assert "as fast as 3,000 or 5,000 tok/s" in alone.said
    assert "No scheduler is as fast" not in Page(made(swept)).said


def test_one_scheduler_sells_and_one_user_is_one(swept):
    frame = swept["frame"]
    one = {**swept, "policies": swept["policies"][:1], "workloads": swept["workloads"][:1]}
    page = Page(made(one, frame[(frame["policy"] == "NoSpec()") & (frame["load"] == 1)]))
    assert "What one scheduler of speculative decoding sells at 1 user, 3 seeds each" in page.said


def test_what_is_typed_is_told_in_words(swept):
    page = Page(made({**swept, "policies": [*swept["policies"], ss.Policy(ss.StaticGamma(1))]}))
    for words in (
        "8 in every request", "12 in every request", "1, 4, 8 users, each with one request at a time",
        "each block's own chances, as the drafter's confidence head tells them",
        "varying from block to block (Beta, concentration 3); confidences as they are",
        "first position whose confidence lies below a threshold.", "not limited: neither the profile nor --kv-tokens",
        "StaticGamma(2)@made, StaticGamma(1)Verify the first γ tokens of every block, always.",
    ):  # fmt: skip
        assert words in page.said, words
    for words in ("Fixed(", "table1d", "position_mean", "overconfidence", "not limited by the profile", "``"):
        assert words not in page.said, words
    assert page.said.count("Verify the first γ tokens of every block") == 1


@pytest.mark.parametrize(
    ("law", "words"),
    [
        (ss.LogNormal(512, 1.2, maximum=4096), "log-normal, median 512, σ 1.2, 4,096 at most"),
        (ss.Empirical((3, 5)), "drawn from 2 values, mean about 4"),
        (ss.Quantiles((0, 1), (10, 20)), "drawn from 2 quantiles, mean about 14.9"),
    ],
)
def test_laws_of_lengths_are_told_in_words(law, words):
    from specsim.report.sources import _law

    assert _law(law).startswith(words)


def test_ten_curves_have_ten_colours_on_the_page_as_in_pictures(text):
    names = [f"P{i}" for i in range(10)]
    assert len(set(charts._series(names)[0]["scale"]["range"])) == 10
    assert len(set(COLOURS)) == len(COLOURS) == len(PALETTE)
    for i, colour in enumerate(COLOURS):
        assert f"--s{i}: {colour};" in text
    looks = [tuple(str(c["scale"]["range"][i]) for c in charts._series([*map(str, range(40))])) for i in range(40)]
    assert len(set(looks)) == 40  # further ones differ by dash or marker


def test_wide_latencies_get_logarithms_with_round_ticks():
    assert charts._decades(0.21, 5.5) == [0.2, 0.5, 1, 2, 5, 10]
    assert charts._decades(3.0, 4000.0) == [1, 10, 100, 1000, 10000]


@pytest.mark.parametrize(
    ("floors", "base", "words"),
    [
        ([], None, "floors: expected numbers above 0"),
        ([50, -1], None, "floors"),
        ([5], "None", "policy: 'None' is not in"),
    ],
)
def test_what_cannot_be_reported(swept, floors, base, words):
    with pytest.raises(SpecsimError, match=words):
        made(swept, floors=floors, base_policy=base)


# ---- the page's reading of fronts, in node

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")


def in_node(code: str, given: object) -> object:
    read = "JSON.parse(require('fs').readFileSync(0))"
    program = f"const r = require({json.dumps(str(READINGS))}); const given = {read};{code}"
    done = subprocess.run([NODE, "-e", program], input=json.dumps(given), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def curves_of(frame, gpus=1):
    """The curves that the page gets, without the page."""
    from specsim.report import _curves

    waits = {"ttft_p50": frame["load"] / 10, "ttft_p90": frame["load"] / 5}
    front = pareto(frame.assign(served=frame["load"] / gpus, **waits))
    profile = type("Profile", (), {"gpus": gpus})
    return front, _curves(front, type("Scenario", (), {"profile": profile, "lockstep": False}), None)


@needs_node
def test_the_page_reads_fronts_as_the_command_line_does():
    """Random fronts, bends and crossings among them: every text and number, with intervals, gains paired by seed."""
    rng = np.random.default_rng(3)
    cases, expected = [], []
    for _ in range(40):
        points = {
            name: [(load, rng.uniform(5, 200), rng.uniform(1, 20000)) for load in (1, 2, 5)] for name in ("A", "B", "C")
        }
        for curve in (points["A"], points["B"]):
            curve.sort(key=lambda p: -p[1])  # falling, as most are; C bends as it likes
            curve[:] = [(load, x, y) for load, (_, x, y) in zip((1, 2, 5), curve, strict=True)]
        frame = by_hand(points, factors=(0.9, 1.0, 1.25))
        frame["interactivity_p50"] *= 1 + 0.02 * frame["seed"]
        front, curves = curves_of(frame)
        floors = [*rng.uniform(1, 220, 4), float(front.points["interactivity_p50"].iloc[1])]
        cases.append({"front": curves, "floors": floors})
        expected.append(sla_table(front, floors))
    code = """
    const clean = (v) => (Number.isFinite(v) ? v : null);
    console.log(JSON.stringify(given.map(({front, floors}) => front.policies.flatMap((p) => floors.map((floor) => {
      const s = r.sold(front, p, front.policies[front.base], floor);
      const value = s.kind === "value" ? s.value : NaN, least = s.kind === "at_least" ? s.value : NaN;
      return [r.text(s), ...[value, s.ci, least, s.gain, s.gainCi].map(clean)];
    })))));"""
    kinds = set()
    for rows, table in zip(in_node(code, cases), expected, strict=True):
        assert [row[0] for row in rows] == table["text"].tolist()
        kinds |= {row[0][:1] if row[0][:1] in "≥–" else "value" for row in rows}
        for i, column in enumerate(("throughput", "ci", "at_least", "gain", "gain_ci"), start=1):
            got = np.array([row[i] for row in rows], dtype=np.float64)
            np.testing.assert_allclose(got, table[column].to_numpy(), rtol=1e-9, atol=1e-9, err_msg=column)
    assert kinds == {"≥", "–", "value"}


@needs_node
def test_users_and_their_wait_are_read_where_the_throughput_is():
    _, curves = curves_of(by_hand({"A": [(1, 100.0, 100.0), (3, 60.0, 160.0), (8, 40.0, 240.0)]}), gpus=4)
    code = """const [p] = given.policies;
    console.log(JSON.stringify([80, 50, 20, 120].map((f) => {
      const s = r.sold(given, p, p, f);
      return [s.kind, s.served, s.ttft, s.late, r.gpusFor(given, s.served, 10)];
    })));"""
    assert in_node(code, curves) == [
        ["value", 0.5, 0.2, 0.4, 20], ["value", 1.375, 0.55, 1.1, 8], ["at_least", 2, 0.8, 1.6, 8],
        ["none", None, None, None, None],
    ]  # fmt: skip


@needs_node
@pytest.mark.parametrize(
    ("rows", "leader", "tied", "open_", "unsure"),
    [
        ([("value", 100, 5), ("value", 93, 3), ("value", 80, 1)], 0, [1], [], []),
        ([("value", 100, 5), ("value", 91, 3)], 0, [], [], []),
        ([("value", 100, None), ("value", 91, 3)], 0, [], [], [1]),
        ([("value", 100, 5), ("at_least", 40, None), ("none", None, None)], 0, [], [1], []),
        ([("value", 100, 5), ("at_least", 140, None)], 1, [], [], []),
        ([("at_least", 100, None), ("at_least", 90, None)], 0, [], [1], []),
    ],
)
def test_the_best_is_named_with_what_speaks_against_it(rows, leader, tied, open_, unsure):
    code = """
    const rows = given.map(([kind, value, ci], i) => ({kind, value: value ?? NaN, ci: ci ?? NaN, i}));
    const b = r.best(rows), at = (found) => found.map((row) => row.i);
    console.log(JSON.stringify([b.leader.i, at(b.tied), at(b.open), at(b.unsure), r.best([{kind: "none"}])]));"""
    assert in_node(code, rows) == [leader, tied, open_, unsure, None]


@needs_node
def test_numbers_look_as_on_the_command_line():
    from specsim.pareto import Reading

    values = [
        (12345.4, 67.2),
        (100, 0.4),
        (99.96, 1.26),
        (99.94, 0.123),
        (1.23456, 0.0123),
        (0.5, 0),
        (2500.5, 1.5),
        (-3.5, 1),
    ]
    code = "console.log(JSON.stringify(given.map(([value, ci]) => r.text({kind: 'value', value, ci}))));"
    assert in_node(code, values) == [str(Reading(value, ci)) for value, ci in values]


@needs_node
def test_seconds_and_demands_are_read_as_people_write_them():
    code = """console.log(JSON.stringify([
      [0.0206, 0.9999, 3.567, 123.4, null].map((v) => r.seconds(v ?? NaN)),
      [["7", true], ["2.5", true], ["2.5", false], ["0", false], ["1e9", false], ["1e10", false], ["", false]]
        .map(([text, users]) => r.demand(text, 1e9, users)),
    ]));"""
    assert in_node(code, None) == [
        ["20.6 ms", "1,000 ms", "3.57 s", "123 s", "–"],
        [7, None, 2.5, None, 1e9, None, None],
    ]


# ---- the command

SMALL = (
    "--profile", ROOT / "hw_profiles/dsv4-flash-b300-tp4.json", "--trace", ROOT / "traces/qwen3-4b-dspark.json",
    "-s", "NoSpec", "-s", "StaticGamma(2)", "--closed", "2,6", "--num-requests", "20", "--prompt-tokens", "32",
    "--output-tokens", "16", "--seeds", "2", "--jobs", "1",
)  # fmt: skip


def test_the_command_writes_the_page_of_the_sweep(run, tmp_path):
    out, picture = tmp_path / "new/page.html", tmp_path / "front"
    code, printed, err = run("report", *SMALL, "--sla", "80,200.5", "--users", "77", "--out", out)
    assert (code, err) == (0, "")
    assert f"Wrote {out}" in printed
    page = Page(out.read_text(encoding="utf-8"))
    assert f"--sla 80,200.5 --users 77 --out {out}" not in page.said  # as declared, not as typed
    assert f"--out {out} --sla 80,200.5 --users 77" in page.said
    assert "'StaticGamma(2)'" in page.said
    assert "arXiv 2607.05147" in page.said
    slider = next(i for i in page.all("input") if i.get("id") == "floor")
    assert (slider["step"], slider["value"]) == ("0.1", "80")
    assert run("pareto", *SMALL, "--sla", "80,200.5", "--out", picture)[0] == 0
    table = pd.read_csv(picture / "sla.csv")
    for policy, part in table[table["domain"] == "all"].groupby("policy"):
        assert [policy, *part["text"]] in page.rows
    # The same from the sweep's results.
    again = tmp_path / "again.html"
    results = ("--results", picture / "results.parquet", "--sla", "80,200.5", "--out", again)
    assert run("report", *SMALL, *results)[0] == 0
    told = Page(again.read_text(encoding="utf-8"))
    assert told.data["front"] == page.data["front"]
    assert f"Numbersread from {picture / 'results.parquet'}, which these options and input files made" in told.said
    code, printed, err = run("report", *SMALL, "-s", "StaticGamma(1)", *results)
    assert (code, printed) == (2, "")
    assert "column 'policy': expected NoSpec(), StaticGamma(1), StaticGamma(2), as the options say" in err


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with a profile, a scheduler and results.parquet made with both."""
    from specsim.cli import app

    folder = tmp_path_factory.mktemp("kept")
    shutil.copy(SMALL[1], folder / "profile.json")
    (folder / "mine.py").write_text("def lazy(view):\n    return [0] * view.num_seqs\n", encoding="utf-8")
    typed = ("sweep", *map(str, of(folder)), "--seeds", "2", "--out", str(folder))
    assert app(typed, standalone_mode=False) in (0, None)
    return folder


def of(folder):
    rest = SMALL[SMALL.index("--closed") : SMALL.index("--seeds")]
    return ("--profile", folder / "profile.json", "--trace", SMALL[3], "-s", "NoSpec", "-s", f"{folder}/mine.py:lazy",
            *rest, "--jobs", "1")  # fmt: skip


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--output-tokens", "17"], "--output-tokens 16, not 17"),
        (["--block-size", "8", "--gamma", "3"], "--block-size 16, not 8; --gamma its default, not 3"),
        (["--seeds", "3"], "--seeds 2, not 3"),
        (["--trace", ROOT / "traces/mtp1.json"], "--trace qwen3-4b-dspark.json (sha256 "),
    ],
)
def test_results_of_other_options_are_refused(run, tmp_path, kept, more, words):
    out = tmp_path / "page.html"
    code, printed, err = run("report", *of(kept), "--results", kept / "results.parquet", "--out", out, *more)
    assert (code, printed) == (2, "")
    assert f"results.parquet: made with other options: {words}" in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_results_are_of_their_files_contents_not_of_their_names(run, tmp_path, kept):
    folder = tmp_path / "elsewhere"
    shutil.copytree(kept, folder)
    typed = ("report", *of(folder), "--results", folder / "results.parquet", "--out", folder / "page.html")
    for seeds in ((), ("--seeds", "2")):
        assert run(*typed, *seeds)[::2] == (0, "")
    assert (
        "results.parquet, which these options and input files made"
        in Page((folder / "page.html").read_text(encoding="utf-8")).said
    )
    for name, option in (("mine.py", "--scheduler"), ("profile.json", "--profile")):
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write("\n")
        code, _, err = run(*typed)
        assert code == 2
        assert f"{option} {name} (sha256 " in err


def test_results_that_tell_nothing_are_said_to(run, tmp_path, kept):
    frame = pd.read_parquet(kept / "results.parquet")
    frame.attrs = {}
    frame.to_parquet(tmp_path / "bare.parquet")
    out = tmp_path / "page.html"
    assert run("report", *of(kept), "--results", tmp_path / "bare.parquet", "--out", out, "--gamma", "3")[0] == 0
    assert "the assumptions below are as told on the command line, not checked" in Page(out.read_text("utf-8")).said


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--out", "x.pdf"], "--out: expected a file name that ends in .html, got x.pdf"),
        (["--base", "MTP1()"], "--base: expected one of NoSpec(), StaticGamma(2), got 'MTP1()'"),
        (["--sla", "0"], "--sla: expected numbers above 0"),
        (["--users", "0"], "--users"),
        (["--users", "1000000001"], "--users"),
        (["--demand-rate", "5"], "--demand-rate: has no meaning with --closed, expected --users"),
        (["--results", "none.parquet"], "none.parquet: cannot read"),
    ],
)
def test_mistakes_are_one_line(run, tmp_path, monkeypatch, more, words):
    monkeypatch.chdir(tmp_path)
    code, printed, err = run("report", *SMALL, *more)
    assert (code, printed) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob("*.html"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--users", "5"], "--users: has no meaning with open arrivals, expected --demand-rate"),
        (["--demand-rate", "0"], "--demand-rate: expected requests/s above 0, 1,000,000,000 at most, got 0"),
    ],
)
def test_open_loops_are_asked_for_requests_a_second(run, tmp_path, more, words):
    typed = [*SMALL[: SMALL.index("--closed")], "--poisson", "5", "--out", tmp_path / "page.html", *more]
    assert run("report", *typed) == (2, "", f"error: {words}\n")


def test_without_its_extra_the_command_says_what_to_install(run, monkeypatch, tmp_path):
    there = util.find_spec
    monkeypatch.setattr(html, "find_spec", lambda name: None if name == "vl_convert" else there(name))
    code, printed, err = run("report", *SMALL, "--out", tmp_path / "x.html")
    assert (code, printed) == (2, "")
    assert "pip install 'specsim[report]'" in err


def test_a_drafter_of_one_position_has_a_table_and_no_curve():
    drafter = synthetic(0.8, 1)
    workload = ss.ClosedLoop(2, 8, 12, measured=10)
    base = ss.Scenario(make_profile(), workload, drafter, ss.MTP1())
    frame = ss.sweep(base, seeds=[0], jobs=1)
    page = Page(make_report(frame, base, [ss.Policy(ss.MTP1())], [workload]))
    assert not {"acceptance-0", "reliability-0"} & set(page.data["charts"])
    assert [row[:3] for row in page.rows if row[:2] == ["any domain", "1"]] == [["any domain", "1", "16,384"]] * 2
    assert any(row[:2] == ["any domain", "1"] for row in page.rows)


def test_the_command_names_every_drafters_file_and_what_nobody_sells(run, tmp_path):
    out = tmp_path / "page.html"
    mtp = ROOT / "traces/mtp1.json"
    code, printed, _ = run("report", *SMALL, "-s", f"MTP1@{mtp}:1", "--sla", "50,5000", "--out", out)
    assert code == 0
    assert "note: No scheduler is as fast as 5,000 tok/s per user" in printed
    assert page_terms(out)["File"] == [str(SMALL[1]), str(SMALL[3]), str(mtp)]


def page_terms(path):
    """The assumptions of a page: descriptions by term."""
    found: dict[str, list[str]] = {}
    for term, said in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", path.read_text(encoding="utf-8")):
        found.setdefault(term, []).append(said)
    return found
