"""Reports of ``specsim validate live`` as a Markdown table: a row a load, measured, predicted and their difference.

python experiments/engines/tables.py out/live_vllm/*/report.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SHOWN = (("throughput", "tok/s", 1.0), ("tpot", "tpot, ms", 1e3), ("ttft", "ttft, ms", 1e3), ("tau", "τ", 1.0))


def lines(path: Path) -> list[str]:
    """The loads of one report."""
    report = json.loads(path.read_text())
    found = []
    for load in dict.fromkeys(row["load"] for row in report["rows"]):
        rows = {row["metric"]: row for row in report["rows"] if row["load"] == load}
        cells = [path.parent.name, load.replace("closed ", "")]
        for metric, _, unit in SHOWN:
            row = rows.get(metric)
            cells.append(
                "–" if row is None
                else f"{unit * row['measured']:.4g} → {unit * row['predicted']:.4g} "
                f"(**{100 * row['error']:+.1f} %**, spread {100 * row['spread']:.1f} %)"
            )  # fmt: skip
        found.append(f"| {' | '.join(cells)} |")
    return found


if __name__ == "__main__":
    heads = ["", "users", *(f"{name}: measured → predicted" for _, name, _ in SHOWN)]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name in sys.argv[1:]:
        print("\n".join(lines(Path(name))))
