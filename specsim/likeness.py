"""Are two baselines like with like? What they were made from, and what of that differs, for :mod:`specsim.compare`."""

from __future__ import annotations

from specsim.baseline import Baseline

LOADS = ("closed", "poisson", "ramp", "rate")
"""Settings that say which loads there are: they are matched one by one, and those of one side alone are told."""


def inputs(base: Baseline, new: Baseline) -> tuple[list[str], list[str]]:
    """What the two were made from and differs, a line each; and by what of it they are not like with like."""
    lines, unlike = [], []
    before, after = _files(base), _files(new)
    for option in sorted(before.keys() | after.keys()) if before and after else ():
        one, two = before.get(option, {}), after.get(option, {})
        for name in sorted(one.keys() & two.keys()):
            if one[name] != two[name]:
                told = [" ".join(sorted(side[name])) for side in (one, two)]
                lines.append(f"{option} {name}: its content differs (sha256 {told[0]} in BASE, {told[1]} in NEW)")
        alone = [
            {name: side[name] for name in sorted(side.keys() - other.keys())}
            for side, other in ((one, two), (two, one))
        ]
        if set().union(*alone[0].values()) != set().union(*alone[1].values()):  # not the same under another name
            names = [", ".join(side) or "none" for side in alone]
            lines.append(f"{option}: {names[0]} in BASE, {names[1]} in NEW")
            unlike += [option] * (option != "--scheduler")  # policies are matched by their labels
    if base.profiles and new.profiles and base.profiles != new.profiles and "--profile" not in unlike:
        lines.append(f"profile: {', '.join(base.profiles)} in BASE, {', '.join(new.profiles)} in NEW")
        unlike.append("the profile")
    for name in sorted(base.settings.keys() | new.settings.keys()) if base.settings and new.settings else ():
        was, now = (side.settings.get(name, "default") for side in (base, new))
        if was != now:
            option = f"--{name.replace('_', '-')}"
            lines.append(f"{option}: {was} in BASE, {now} in NEW")
            unlike += [option] * (name not in LOADS)
    labels = {run.load: run.workload for run in base.runs}
    other = {run.load: run.workload for run in new.runs if run.load in labels}
    for load, label in sorted(other.items()):
        if label != labels[load]:
            lines.append(f"load {load:g}: workload {labels[load]!r} in BASE, {label!r} in NEW")
            unlike += ["the workload"] * ("the workload" not in unlike)
    for where, side in (("BASE", base), ("NEW", new)):
        if not side.inputs and not side.settings:
            lines.append(f"{where} does not tell what it was made from: the same files and options are assumed")
    return lines, unlike


def _files(side: Baseline) -> dict[str, dict[str, set[str]]]:
    """The beginnings of the hashes of a side's inputs, by option and name (two folders may hold the same name)."""
    found: dict[str, dict[str, set[str]]] = {}
    for item in side.inputs:
        found.setdefault(item.option, {}).setdefault(item.name, set()).add(item.sha256[:8])
    return found
