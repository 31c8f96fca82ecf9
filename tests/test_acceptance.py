"""Blocks: synthetic ones have the law they were asked for, recorded ones are replayed row by row."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from conftest import always, make_arrivals, make_blocks, make_profile
from scipy import stats

from specsim import calibration
from specsim.acceptance import TAPE_ROWS, Drafter, load_drafter, load_trace, synthetic
from specsim.blocktrace import Trace, write_trace
from specsim.engine import Scenario, simulate
from specsim.hardware import Provenance
from specsim.schedulers import StaticGamma
from specsim.synthesis import Domain, Synthetic, generate
from specsim.types import SpecsimError


def blocks(rows=TAPE_ROWS, seed=1, **parameters):
    """Reported confidence and accepted of a domain's ``rows`` blocks."""
    return generate(Domain(**parameters), rows, np.random.default_rng(seed))


def parameters(domains, gamma=3, **fields):
    source = Provenance(source="a test")
    return Synthetic(drafter="d", target="t", gamma=gamma, domains=domains, provenance=source, **fields)


def scores(confidence, mean, concentration):
    """The Gaussian scores behind Beta confidences."""
    beta = stats.beta(mean * concentration, (1 - mean) * concentration)
    return stats.norm.ppf(np.clip(beta.cdf(confidence.astype(np.float64)), 1e-9, 1 - 1e-9))


def visited(accepted):
    """The rows that a request reads that starts at row 0 and verifies whole blocks."""
    rows, row = [], 0
    while row < len(accepted):
        rows.append(row)
        row += accepted[row] + 1
    return np.array(rows)


# What synthetic blocks are like


@pytest.mark.parametrize("spread", [{}, {"concentration": 6.0}, {"concentration": 6.0, "autocorrelation": 0.5}])
def test_acceptance_given_survival_is_what_was_asked_for(spread):
    asked = (0.9, 0.7, 0.8, 0.4, 0.95)
    _, accepted = blocks(conditional_acceptance=asked, **spread)
    rows = visited(accepted) if "autocorrelation" not in spread else np.arange(len(accepted))
    for k, chance in enumerate(asked):
        reached = accepted[rows] >= k
        share = (accepted[rows][reached] > k).mean()
        # Neighbours that are alike (lag .5) count for a third: (1 - .5)/(1 + .5).
        worth = reached.sum() / (3 if "autocorrelation" in spread else 1)
        assert share == pytest.approx(chance, abs=4 * np.sqrt(chance * (1 - chance) / worth)), k


def test_tied_positions_leave_the_easier_blocks_as_survivors():
    _, accepted = blocks(conditional_acceptance=(0.6,) * 4, concentration=3.0, block_correlation=0.9)
    assert (accepted > 0).mean() == pytest.approx(0.6, abs=0.01)
    for k in (1, 2, 3):
        assert (accepted[accepted >= k] > k).mean() > 0.65


@pytest.mark.parametrize(("mean", "concentration"), [(0.8, 5.0), (0.5, 1.0), (0.95, 20.0), (0.3, 100.0), (0.99, 10.0)])
def test_confidences_are_beta_with_that_mean_and_spread(mean, concentration):
    confidence, _ = blocks(conditional_acceptance=(mean, mean), concentration=concentration)
    beta = stats.beta(mean * concentration, (1 - mean) * concentration)
    n, variance, kurtosis = confidence.size, mean * (1 - mean) / (concentration + 1), float(beta.stats("k"))
    assert confidence.mean(dtype=np.float64) == pytest.approx(mean, abs=4 * np.sqrt(variance / n))
    # The standard error of a variance is variance · sqrt((kurtosis + 2)/n), about 0.4 % to 2 % here.
    assert confidence.var(dtype=np.float64) == pytest.approx(variance, rel=4 * np.sqrt((kurtosis + 2) / n))
    for q in (0.05, 0.25, 0.5):  # higher ones come too near 1 for single precision
        below = (confidence < beta.ppf(q)).mean()
        assert below == pytest.approx(q, abs=4 * np.sqrt(q * (1 - q) / n))


def test_without_spread_every_confidence_is_the_mean():
    confidence, accepted = blocks(conditional_acceptance=(0.9, 0.25))
    assert (confidence == np.float32([0.9, 0.25])).all()
    assert len(np.unique(accepted)) == 3


@pytest.mark.parametrize(("chance", "expected"), [(0.0, 0), (1.0, 3)])
def test_certain_rejection_and_acceptance(chance, expected):
    for spread in (None, 4.0):
        confidence, accepted = blocks(2000, conditional_acceptance=(chance,) * 3, concentration=spread)
        assert (accepted == expected).all()
        assert (confidence == chance).all()


def errors(confidence, accepted):
    """The ECE of the survival at each position."""
    survival = np.cumprod(confidence.astype(np.float64), axis=1)
    return [calibration.ece(survival[:, k], accepted > k) for k in range(confidence.shape[1])]


def test_confidences_are_calibrated():
    assert max(errors(*blocks(conditional_acceptance=(0.8, 0.7, 0.6), concentration=4.0))) < 0.01


@pytest.mark.parametrize("factor", [2.0, 0.6])
def test_overconfidence_is_undone_by_a_temperature_of_its_size(factor):
    asked = {"conditional_acceptance": (0.8, 0.7, 0.6), "concentration": 4.0}
    honest, accepted = blocks(**asked)
    boastful, same = blocks(**asked, overconfidence=factor)
    assert (same == accepted).all()  # what is reported changes nothing about what happens
    assert max(errors(boastful, accepted)) > 0.04
    repaired = calibration.apply_sts(boastful, np.full(3, factor))
    np.testing.assert_allclose(repaired, honest, atol=2e-4)
    assert max(errors(repaired, accepted)) < 0.01


def test_a_tape_applies_the_temperatures_of_its_trace_unless_told_not_to():
    domain = Domain(conditional_acceptance=(0.8,) * 3, concentration=4.0, overconfidence=2.0)
    drafter = Drafter(parameters({"*": domain}, sts=(2.0,) * 3), 3)
    raw, calibrated = drafter.tape(0, calibrated=False), drafter.tape(0)
    np.testing.assert_allclose(calibration.apply_sts(raw.confidence, np.full(3, 2.0)), calibrated.confidence)
    assert max(errors(calibrated.confidence, calibrated.accepted)) < 0.01 < max(errors(raw.confidence, raw.accepted))
    np.testing.assert_allclose(calibrated.survival, np.cumprod(calibrated.confidence, axis=1))


@pytest.mark.parametrize("lag", [0.0, 0.6, 0.95])
def test_scores_of_neighbouring_rows_have_the_autocorrelation(lag):
    confidence, _ = blocks(conditional_acceptance=(0.6, 0.7), concentration=4.0, autocorrelation=lag)
    for k, mean in enumerate((0.6, 0.7)):
        z = scores(confidence[:, k], mean, 4.0)
        # Bartlett's standard error of a lag-1 correlation is sqrt((1 - lag²)/n).
        assert np.corrcoef(z[1:], z[:-1])[0, 1] == pytest.approx(lag, abs=4 * np.sqrt((1 - lag**2) / len(z)) + 1e-3)
        assert z.std() == pytest.approx(1, abs=0.05)
    across = np.corrcoef(scores(confidence[:, 0], 0.6, 4.0), scores(confidence[:, 1], 0.7, 4.0))[0, 1]
    assert across == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize("lag", [0.0, 0.7])
def test_scores_within_a_block_have_the_block_correlation(lag):
    confidence, _ = blocks(
        conditional_acceptance=(0.6, 0.7), concentration=4.0, block_correlation=0.5, autocorrelation=lag
    )
    z = [scores(confidence[:, k], mean, 4.0) for k, mean in enumerate((0.6, 0.7))]
    assert np.corrcoef(z)[0, 1] == pytest.approx(0.5, abs=0.03)


def test_block_correlation_of_one_is_one_shared_score():
    confidence, _ = blocks(conditional_acceptance=(0.6, 0.6, 0.8), concentration=4.0, block_correlation=1.0)
    assert (confidence[:, 0] == confidence[:, 1]).all()
    z, other = scores(confidence[:, 0], 0.6, 4.0), scores(confidence[:, 2], 0.8, 4.0)
    inside = np.abs(z) < 3  # beyond, single precision is too coarse to go back to a score
    np.testing.assert_allclose(other[inside], z[inside], atol=0.01)


def test_the_seed_decides_the_blocks():
    drafter = synthetic(0.8, 3, concentration=5.0)
    one, again, other = drafter.tape(1), synthetic(0.8, 3, concentration=5.0).tape(1), drafter.tape(2)
    assert (one.confidence == again.confidence).all()
    assert (one.accepted == again.accepted).all()
    assert (one.confidence != other.confidence).mean() > 0.99
    assert (one.accepted != other.accepted).mean() > 0.2


def test_domains_are_drawn_apart_and_laid_end_to_end():
    trace = parameters({
        "chat": Domain(conditional_acceptance=(0.2,) * 3), "code": Domain(conditional_acceptance=(0.9,) * 3)
    })  # fmt: skip
    tape = Drafter(trace, 3).tape(0)
    assert tape.domains == ("chat", "code")
    assert tape.size.tolist() == [TAPE_ROWS, TAPE_ROWS]
    assert tape.first.tolist() == [0, TAPE_ROWS]
    assert (tape.accepted[:TAPE_ROWS] > 0).mean() == pytest.approx(0.2, abs=0.01)
    assert (tape.accepted[TAPE_ROWS:] > 0).mean() == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize("source", ["head", "position_mean", "none"])
def test_what_a_scheduler_sees_of_a_synthetic_trace(source):
    domain = Domain(conditional_acceptance=(0.9, 0.5, 0.7), concentration=4.0)
    drafter = Drafter(parameters({"*": domain}, confidence_source=source), 2)
    tape = drafter.tape(0)
    assert drafter.has_confidence == (source != "none")
    if source == "none":
        assert tape.confidence is None
        assert tape.survival is None
    elif source == "head":
        assert len(np.unique(tape.confidence)) > 1000
    else:
        assert (tape.confidence == np.float32([0.9, 0.5])).all()


# Cut to a shorter block


def test_a_shorter_block_is_the_first_columns_of_a_longer_one():
    long, short = synthetic(0.8, 7, concentration=5.0), synthetic((0.8,) * 7, 3, concentration=5.0)
    assert (long.gamma, short.gamma) == (7, 3)
    a, b = long.tape(4), short.tape(4)
    assert (b.confidence == a.confidence[:, :3]).all()
    np.testing.assert_allclose(b.survival, a.survival[:, :3], rtol=1e-6)
    assert (b.accepted == np.minimum(a.accepted, 3)).all()


def test_a_recorded_trace_is_cut_the_same_way():
    trace = make_blocks([0, 1, 2, 3, 4], 4, proposed=[4, 1, 2, 4, 4], sts=(0.5, 1.0, 2.0, 1.0))
    whole, cut = Drafter(trace, 4).tape(), Drafter(trace, 2).tape()
    assert (cut.confidence == whole.confidence[:, :2]).all()
    assert cut.accepted.tolist() == [0, 1, 2, 2, 2]
    assert cut.proposed.tolist() == [2, 1, 2, 2, 2]
    assert Drafter(trace, 1).tape().proposed is None  # every block holds a token
    expected = calibration.apply_sts(trace.confidence, np.array(trace.meta.sts))
    assert (whole.confidence == expected).all()
    assert (Drafter(trace, 4).tape(calibrated=False).confidence == trace.confidence).all()


@pytest.mark.parametrize("gamma", [0, 4, -1])
def test_a_block_longer_than_the_traces_is_refused(gamma):
    with pytest.raises(SpecsimError, match=rf"gamma: expected 1\.\.3, its trace's block length, got {gamma}"):
        Drafter(make_blocks([1], 3), gamma)


# Files and arguments


def test_trace_files_are_told_apart_by_their_content(tmp_path):
    trace = make_blocks([1, 0], 2)
    assert isinstance(load_trace(write_trace(trace, tmp_path / "a.json")), Trace)
    model = parameters({"*": Domain(conditional_acceptance=(0.5,) * 3)})
    (tmp_path / "b.parquet").write_text("\n  " + model.model_dump_json(by_alias=True))
    assert load_trace(tmp_path / "b.parquet") == model
    drafter = load_drafter(tmp_path / "b.parquet", gamma=2, weight_bytes=5.0)
    assert (drafter.name, drafter.gamma, drafter.weight_bytes) == ("b", 2, 5.0)
    assert load_drafter(tmp_path / "b.parquet").gamma == 3
    assert drafter.domains == ("*",)


@pytest.mark.parametrize("gamma", [0, 9])
def test_loading_with_a_gamma_that_the_trace_does_not_have(tmp_path, gamma):
    path = write_trace(make_blocks([1, 0], 2), tmp_path / "a.parquet")
    with pytest.raises(SpecsimError, match=rf"drafter 'a': gamma: expected 1\.\.2, .* got {gamma}"):
        load_drafter(path, gamma=gamma)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"domains": {"x": {"conditional_acceptance": [0.5]}}}, "domains.x.conditional_acceptance: expected gamma = 3"),
        ({"domains": {"x": {"conditional_acceptance": [0.5, 1.5, 0.5]}}}, "conditional_acceptance.1: .*1.5"),
        ({"domains": {"x": {"conditional_acceptance": [0.5] * 3, "luck": 1}}}, "domains.x.luck: is not a known field"),
        ({"domains": {"x": {"conditional_acceptance": [0.5] * 3, "concentration": 0}}}, "concentration: .*greater"),
        ({"domains": {"x": {"conditional_acceptance": [0.5] * 3, "autocorrelation": 1}}}, "autocorrelation: .*less"),
        ({"domains": {}}, "domains: "),
        ({"domains": {"all": {"conditional_acceptance": [0.5] * 3}}}, "domains: 'all' is the name of the total"),
        ({"sts": [1.0]}, "sts: expected gamma = 3 temperatures, got 1"),
        ({"gamma": 65}, "gamma: "),
        ({"schema": "specsim.synthetic/2"}, "schema: "),
        ({"colour": "red"}, "colour: is not a known field"),
        ({"provenance": {}}, "provenance.source: is missing"),
    ],
)
def test_what_is_wrong_with_a_synthetic_file(tmp_path, change, says):
    good = parameters({"x": Domain(conditional_acceptance=(0.5,) * 3)}).model_dump(mode="json", by_alias=True)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(good | change))
    with pytest.raises(SpecsimError, match=says) as error:
        load_drafter(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_what_is_wrong_with_synthetic_arguments():
    for wrong in (
        lambda: synthetic(1.5, 3),
        lambda: synthetic((), None),
        lambda: synthetic(0.5, 3, concentration=-1),
        lambda: synthetic((0.5, 0.5), 3),
        lambda: synthetic(0.5, 0),
    ):
        with pytest.raises(SpecsimError):
            wrong()


# Replay by the engine


class Reader:
    """Verifies a changing number of tokens and notes which row of the trace each request stood on."""

    needs_confidence = True

    def __init__(self, rows):
        self.rows, self.calls = rows, 0
        self.seen: dict[int, list[tuple[int, int]]] = {}

    def __call__(self, view):
        self.calls += 1
        lens = (view.request_ids * 3 + self.calls * 5) % (view.gamma + 1)
        rows = np.rint((view.confidence[:, 0] - 0.5) * 2 * self.rows).astype(int)
        for request, row, length in zip(view.request_ids.tolist(), rows.tolist(), lens.tolist(), strict=True):
            self.seen.setdefault(request, []).append((row, length))
        return lens


def replay(trace, outputs=60, requests=6, **fields):
    """Run a Reader on ``trace`` and return it with the request table."""
    reader = Reader(len(trace))
    arrivals = make_arrivals(sorted(np.arange(requests) * 1.5), 20, outputs, **fields.pop("arrivals", {}))
    run = simulate(Scenario(make_profile(), arrivals, Drafter(trace, trace.gamma), reader, **fields))
    return reader, run.requests.set_index("request_id")


def accepted_rows(n, gamma, seed=2):
    return np.random.default_rng(seed).integers(0, gamma + 1, n)


@pytest.mark.parametrize("kind", ["dense", "sequential"])
def test_a_request_walks_along_the_rows(kind):
    accepted = accepted_rows(37, 3)  # shorter than an answer: every request comes past the end
    reader, table = replay(make_blocks(accepted.tolist(), 3, kind=kind))
    starts = set()
    for request, seen in reader.seen.items():
        row = seen[0][0]
        starts.add(row)
        kept = 0
        for at, length in seen:
            assert at == row
            made = min(accepted[row], length) + 1
            kept += made - 1
            row = (row + (made if kind == "dense" else 1)) % 37
        assert table.loc[request, "accepted"] == kept
        assert table.loc[request, "verified"] == sum(length for _, length in seen)
        assert table.loc[request, "cycles"] == len(seen)
        assert table.loc[request, "emitted"] == 60
    assert len(starts) > 3  # requests start at places of their own


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_domain_shorter_than_a_block(rows):
    accepted = [*[5, 4, 5][:rows], 0, 0]
    trace = make_blocks(accepted, 5, domain=["tiny"] * rows + ["other"] * 2)
    only_tiny = {"arrivals": {"domain": [0] * 6, "domains": ("tiny",)}}
    reader, table = replay(trace, **only_tiny)
    for request, seen in reader.seen.items():
        row, kept = seen[0][0], 0
        for at, length in seen:
            assert at == row < rows  # never in the other domain
            made = min(accepted[row], length) + 1
            kept += made - 1
            row = (row + made) % rows
        assert table.loc[request, "accepted"] == kept


def test_each_request_reads_its_own_domain():
    domain = ["chat"] * 16 + ["code"] * 16
    trace = make_blocks(accepted_rows(32, 3).tolist(), 3, domain=domain)
    codes = [0, 1, 1, 0, 1, 0]
    reader, table = replay(trace, arrivals={"domain": codes, "domains": ("code", "chat")})
    for request, seen in reader.seen.items():
        name = ("code", "chat")[codes[request]]
        assert table.loc[request, "domain"] == name
        assert {domain[row] for row, _ in seen} == {name}


def test_requests_start_anywhere_in_their_domain():
    trace = make_blocks([1] * 18, 1, domain=["short"] * 2 + ["long"] * 16)
    codes = [0, 1] * 150
    reader, _ = replay(trace, 2, 300, arrivals={"domain": codes, "domains": ("short", "long")})
    starts = np.array([reader.seen[request][0][0] for request in range(300)])
    counts = np.bincount(starts, minlength=18)
    # 75 and 9.4 requests a row; 4.5 deviations either way.
    assert (abs(counts[:2] - 75) < 4.5 * np.sqrt(75 / 2)).all()
    assert (counts[2:] >= 1).all()
    assert (counts[2:] < 9.4 + 4.5 * 3).all()


@pytest.mark.parametrize("kind", ["dense", "sequential"])
def test_walks_go_on_where_they_stopped_after_preemption(kind):
    accepted = accepted_rows(37, 3)
    reader, table = replay(make_blocks(accepted.tolist(), 3, kind=kind), kv_tokens=12 * 16)
    assert table["preemptions"].sum() > 2
    for request, seen in reader.seen.items():
        jumps = 0
        for (row, length), (after, _) in pairwise(seen):
            if kind == "sequential":
                assert after == (row + 1) % 37
                continue
            moved = (after - row) % 37 - (min(accepted[row], length) + 1)
            assert moved in (0, 1)
            jumps += moved  # recomputing the prompt and the answer so far yields a token of its own
        assert jumps <= table.loc[request, "preemptions"]


def test_every_scheduler_starts_a_request_at_the_same_block():
    trace = make_blocks(accepted_rows(37, 3).tolist(), 3)
    starts = []
    for options in ({}, {"max_num_seqs": 2}, {"prefill": "free"}):
        reader, _ = replay(trace, **options)
        starts.append({request: seen[0][0] for request, seen in reader.seen.items()})
    assert starts[0] == starts[1] == starts[2]


def test_another_seed_starts_elsewhere():
    trace = make_blocks(accepted_rows(37, 3).tolist(), 3)
    starts = []
    for seed in (0, 1):
        reader = Reader(37)
        scenario = Scenario(make_profile(), make_arrivals([0.0] * 8, 4, 4), Drafter(trace, 3), reader)
        simulate(scenario, seed)
        starts.append([reader.seen[i][0][0] for i in range(8)])
    assert starts[0] != starts[1]


def test_what_is_not_proposed_is_not_verified():
    trace = make_blocks([0, 1, 2, 0], 3, proposed=[0, 1, 2, 3])
    run = simulate(
        Scenario(make_profile(), make_arrivals([0.0] * 4, 4, 40), Drafter(trace, 3), StaticGamma(3)), steps=True
    )
    assert run.requests["verified"].sum() == run.steps["draft_tokens"].sum() < 3 * run.requests["cycles"].sum()
    # A request walks 0 -> 1 -> 3 -> 0 (a cycle yields 1, 2, 1 tokens) or 2 -> 1 first.
    ratio = run.requests["accepted"].sum() / run.requests["verified"].sum()
    assert ratio == pytest.approx(1 / 4, abs=0.05)  # of 0 + 1 + 3 verified a round, 1 is accepted


def test_every_block_of_the_fixture_reaches_its_end():
    run = simulate(Scenario(make_profile(), make_arrivals([0.0], 4, 41), always(3, 3), StaticGamma(3)))
    row = run.requests.iloc[0]
    assert (row["cycles"], row["verified"], row["accepted"], row["emitted"]) == (10, 30, 30, 41)
