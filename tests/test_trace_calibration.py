"""Temperatures of a trace: fitted on some responses, judged on others, kept beside raw confidences."""

import numpy as np
import pandas as pd
import pytest
from conftest import make_blocks

from specsim.blocktrace import Trace
from specsim.calibration import calibration_report, ece, fit_sts, roc_auc
from specsim.synthesis import Domain, generate
from specsim.trace_calibration import calibrate, split
from specsim.types import SpecsimError


def recorded(responses=(12, 6), rows=200, overconfidence=2.0, seed=0, **more) -> Trace:
    """Domains "a" and "b" of so many responses, by a drafter whose logits are ``overconfidence`` times too large."""
    rng = np.random.default_rng(seed)
    law = Domain(conditional_acceptance=(0.85, 0.75, 0.7), concentration=3.0, overconfidence=overconfidence)
    names = [f"{domain}{i}" for domain, count in zip("ab", responses, strict=False) for i in range(count)]
    confidence, accepted = generate(law, rows * len(names), rng)
    return make_blocks(
        accepted.tolist(), 3, confidence=confidence, domain=[n[0] for n in np.repeat(names, rows)],
        request_id=np.repeat(names, rows).tolist(), position=np.tile(np.arange(rows), len(names)).tolist(), **more,
    )  # fmt: skip


def sides(trace, chosen):
    """The names of the responses on either side."""
    names = np.array(trace.request_ids)[trace.request_id]
    return set(names[chosen]), set(names[~chosen])


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.99])
def test_whole_responses_of_every_domain_are_on_both_sides(share):
    trace = recorded(rows=5)
    fit, held = sides(trace, split(trace, share))
    assert not fit & held
    assert len(fit | held) == 18
    for domain, count in {"a": 12, "b": 6}.items():
        ours = sum(name.startswith(domain) for name in fit)
        assert ours == min(max(round(share * count), 1), count - 1)


def test_the_draw_hangs_on_the_seed_and_the_names_alone():
    trace = recorded(rows=5)
    assert (split(trace, seed=3) == split(trace, seed=3)).all()
    assert len({frozenset(sides(trace, split(trace, seed=s))[0]) for s in range(6)}) > 3
    back = recorded(rows=5)
    order = np.argsort(-np.arange(len(back)) // 5, kind="stable")  # responses in reverse, domains too
    other = make_blocks(
        back.accepted[order].tolist(), 3, domain=[back.domains[d] for d in back.domain[order]],
        request_id=[back.request_ids[r] for r in back.request_id[order]], position=back.position[order].tolist(),
    )  # fmt: skip
    assert other.request_ids != trace.request_ids
    assert sides(other, split(other, seed=3)) == sides(trace, split(trace, seed=3))


def test_a_lone_response_is_held_out():
    trace = recorded((4, 1), rows=5)
    assert "b0" in sides(trace, split(trace, 0.99))[1]


def test_temperatures_come_from_the_fit_part_alone():
    trace = recorded()
    chosen = split(trace, 0.5, 7)
    done = calibrate(trace, 0.5, 7)
    assert done.trace.meta.sts == tuple(fit_sts(trace.confidence[chosen], trace.accepted[chosen]))
    assert done.responses == (9, 9)
    # Whatever the held-out responses did, the temperatures stay; the report is theirs alone.
    accepted = trace.accepted.copy()
    accepted[~chosen] = 0
    other = calibrate(Trace(**vars(trace) | {"accepted": accepted}), 0.5, 7)
    assert other.trace.meta.sts == done.trace.meta.sts
    assert (other.report["observed"] == 0).all()


def test_the_trace_keeps_its_raw_confidences_and_gains_only_metadata():
    trace = recorded(notes="as recorded")
    done = calibrate(trace)
    for name, value in vars(trace).items():
        if name != "meta":
            assert getattr(done.trace, name) is value, name
    changed = {k for k, v in done.trace.meta.model_dump().items() if v != trace.meta.model_dump()[k]}
    assert changed == {"sts", "notes"}
    assert done.trace.meta.notes.startswith("as recorded\nSTS: fitted on 9 of 18 responses")


def test_fitting_again_starts_from_the_raw_confidences():
    once = calibrate(recorded(), seed=1)
    twice = calibrate(once.trace, seed=1)
    assert twice.trace.meta == once.trace.meta  # the note is replaced, not repeated
    pd.testing.assert_frame_equal(twice.report, once.report)


def test_the_overconfidence_is_undone_on_responses_it_never_saw():
    report = calibrate(recorded((40, 40))).report
    means = report.groupby("domain")[["ece_before", "ece_after"]].mean()
    assert (means["ece_before"] > 0.06).all()
    assert (means["ece_after"] < 0.35 * means["ece_before"]).all()
    np.testing.assert_allclose(calibrate(recorded((40, 40))).trace.meta.sts, 2.0, rtol=0.15)


def test_the_report_is_that_of_the_rows_by_hand():
    trace = recorded()
    done = calibrate(trace)
    held = ~split(trace)
    in_a = held & (trace.domain == 0)
    table = done.report.set_index(["domain", "position"])
    reach = np.cumprod(trace.confidence[in_a].astype(np.float64), axis=1)[:, 1]
    row = table.loc[("a", 2)]
    assert row["count"] == in_a.sum()
    assert row["observed"] == (trace.accepted[in_a] >= 2).mean()
    assert row["ece_before"] == pytest.approx(ece(reach, trace.accepted[in_a] >= 2))
    assert row["auc_before"] == pytest.approx(roc_auc(reach, trace.accepted[in_a] >= 2))
    again = calibration_report(done.trace.confidences()[held], trace.accepted[held])
    np.testing.assert_allclose(table.loc["all", "ece_after"], again["ece"])
    assert done.report["domain"].drop_duplicates().tolist() == ["all", "a", "b"]


def test_tokens_never_proposed_are_left_out():
    trace = recorded(rows=20)
    proposed = np.where(np.arange(len(trace)) % 2, 3, 1)
    cut = Trace(**vars(trace) | {"proposed": proposed, "accepted": np.minimum(trace.accepted, proposed)})
    assert np.isnan(cut.confidences()).sum() == 2 * (proposed == 1).sum()
    report = calibrate(cut).report.set_index(["domain", "position"])["count"]
    assert report["all", 1] == 2 * report["all", 2] == 180


def test_what_cannot_be_calibrated_is_named():
    bare = make_blocks([0, 1], 2, confidence=None, request_id=["a", "b"], position=[0, 0])
    with pytest.raises(SpecsimError, match=r"mine: column 'confidence': null, expected confidences"):
        calibrate(bare, where="mine")
    with pytest.raises(SpecsimError, match="mine: column 'request_id': one response a domain, expected two"):
        calibrate(make_blocks([0, 1, 1], 2, domain=["x", "y", "y"]), where="mine")
    for share in (0.0, 1.0, 1.5, float("nan")):
        with pytest.raises(SpecsimError, match=r"fit_share: .*, expected a number between 0 and 1"):
            calibrate(recorded(), share)
    with pytest.raises(SpecsimError, match="seed: -1"):
        calibrate(recorded(), seed=-1)


@pytest.mark.parametrize("source", ["draft_prob", "position_mean"])
def test_any_source_of_confidence_will_do(source):
    assert calibrate(recorded(confidence_source=source)).trace.meta.sts is not None
