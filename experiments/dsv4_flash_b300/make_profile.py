"""Turn the published step-cost curve of DeepSeek-V4-Flash on B300 (TP4) into a hardware profile.

    python experiments/dsv4_flash_b300/make_profile.py CURVE.csv --out hw_profiles/

CURVE.csv has the columns part (verify | draft), x (tokens | sequences) and ms. The values are those
of figure 2 of the vLLM blog post of 2026-08-14 on adaptive verification, as measured: jagged.
"""

import argparse
from pathlib import Path

import pandas as pd

from specsim.hardware import SCHEMA, DraftCost, Profile, Provenance, Table1D, save_profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curve", type=Path)
    parser.add_argument("--out", type=Path, default=Path("hw_profiles"))
    arguments = parser.parse_args()
    curve = pd.read_csv(arguments.curve)
    verify, draft = (curve[curve["part"] == part] for part in ("verify", "draft"))
    profile = Profile(
        schema=SCHEMA,
        name="dsv4-flash-b300-tp4",
        kind="imported",
        model="DeepSeek-V4-Flash",
        device="NVIDIA B300",
        gpus=4,
        tp=4,
        engine="vLLM",
        max_num_tokens=int(verify["x"].max()),
        verify=Table1D(
            tokens=verify["x"].tolist(),
            seconds=(verify["ms"] / 1e3).round(9).tolist(),
            capture_limit=1024,
        ),
        draft=DraftCost(type="parallel", num_seqs=draft["x"].tolist(), seconds=(draft["ms"] / 1e3).round(9).tolist()),
        provenance=Provenance(
            source="vLLM blog, 2026-08-14, adaptive verification, figure 2 (verify and draft cost tables)",
            command="python experiments/dsv4_flash_b300/make_profile.py CURVE.csv --out hw_profiles/",
            date="2026-11-29",
            notes="Medians of five dummy steps a size at a synthetic context of 8192 tokens; CUDA graphs up to "
            "1024 tokens, eager above. The draft curve is that of the DSpark drafter. KV capacity is not published.",
        ),
    )
    print(save_profile(profile, arguments.out / f"{profile.name}.json"))


if __name__ == "__main__":
    main()
