"""specsim: a discrete-event simulator and capacity planner for LLM serving with speculative decoding."""

from importlib import import_module
from typing import Any

from specsim.acceptance import Drafter, load_drafter, load_trace, synthetic
from specsim.audit import Audit, audit
from specsim.blocktrace import Trace, TraceMeta, make_trace, read_trace, write_trace
from specsim.calibration import reliability_table
from specsim.checkup import acceptance_check, gamma_check, gamma_words
from specsim.crossovers import crossovers
from specsim.engine import Policy, Scenario, simulate
from specsim.hardware import (
    Additive,
    DraftCost,
    Layered,
    Profile,
    Roofline,
    Shape,
    Table1D,
    Table2D,
    load_profile,
    roofline_profile,
    save_profile,
    sps,
    step_cost,
)
from specsim.importers.acceptance import load_acceptance
from specsim.importers.arrivals import load_arrivals
from specsim.lengths import Empirical, Fixed, LogNormal, Quantiles
from specsim.metrics import request_metrics, summarize
from specsim.paired import paired
from specsim.pareto import (
    Front,
    half_width,
    hypervolume,
    interactivity_at,
    pareto,
    sla_table,
    throughput_at,
)
from specsim.plan import plan
from specsim.plan_answer import Plan
from specsim.rules import Rules
from specsim.schedulers import (
    MTP1,
    BatchSizeTable,
    DSparkAsync,
    DSparkGreedy,
    GlobalArgmax,
    LoadBlind,
    NoSpec,
    Oracle,
    StaticGamma,
    Threshold,
    top_k,
)
from specsim.sweep import sweep
from specsim.synthesis import Synthetic
from specsim.tiers import Bound, Tier, parse_tier
from specsim.trace_calibration import calibrate
from specsim.trace_stats import acceptance_table, tau_table
from specsim.types import SLO, Requests, Result, SpecsimError
from specsim.views import StepView
from specsim.workload import Arrivals, ClosedLoop, Gamma, Poisson, Ramp
from specsim.zoo import TETRIS, DCut, GammaBandit, SmartSpec, SpecDecPP, WrongCost

__version__ = "0.1.0"


_PLOTS = {
    "plots": ("plot_pareto", "plot_load", "save_figure"),
    "plots_trace": ("plot_acceptance", "plot_reliability"),
}


def __getattr__(name: str) -> Any:
    """Load the plots, and matplotlib with them, when they are first asked for."""
    for module, names in _PLOTS.items():
        if name in names:
            return getattr(import_module(f"specsim.{module}"), name)
    raise AttributeError(f"module 'specsim' has no attribute {name!r}")
