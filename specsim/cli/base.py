"""--base of pareto and report: the policy that gains are over."""

from __future__ import annotations

from collections.abc import Sequence

from specsim.cli.inputs import parse_policies
from specsim.cli.options import Options
from specsim.types import SpecsimError


def base_of(text: str | None, labels: Sequence[str], options: Options) -> str | None:
    """Return the one of ``labels`` that ``--base`` names, by itself or as -s would spell it; None if not given.

    Raises SpecsimError where it names none of them.
    """
    if text is None or text in labels:
        return text
    typed = options.scheduler or ["NoSpec"]
    if text in typed and len(typed) == len(labels):
        return labels[typed.index(text)]
    try:  # StaticGamma(gamma=3) where StaticGamma(3) was typed, or results that no -s goes with
        label = repr(parse_policies([text], None, options.gamma, None)[1][0])
    except SpecsimError:  # no scheduler at all: what could have been named says more
        label = None
    if label in labels:
        return label
    raise SpecsimError(f"--base: expected one of {', '.join(labels)}, got {text!r}")
