"""LLMServingSim bundles written by hand: kernels whose times are powers of two, so that sums tell what was run."""

from __future__ import annotations

import json

from specsim.hardware import Shape, step_cost
from specsim.importers.profile_parts import Ask
from specsim.importers.profiles import load_profile_source

CONFIG = {
    "model_type": "tiny", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
EXPERTS = CONFIG | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
DENSE = {
    "embedding": 1, "final_layernorm": 2, "layernorm": 4, "qkv_proj": 8, "rotary_emb": 16, "o_proj": 32,
    "gate_up_proj": 64, "act_fn": 128, "down_proj": 256,
}  # fmt: skip
META = {"model": "org/Tiny-1B", "architecture": "tiny", "gpu": "GPU X", "hardware": "X", "vllm_version": "0.1"}
LAYER = 2 * 4 + 8 + 16 + 32 + 64 + 128 + 256
ONE_FORWARD = 1 + 2 + 3 * LAYER


def csv_text(columns, rows):
    return "\n".join([columns, *(",".join(map(str, row)) for row in rows)]) + "\n"


def bundle(folder, *, config=CONFIG, meta=META, layers=DENSE, sizes=(1, 4, 16), moe=None, **files):
    """A bundle whose kernels take their weight in ``layers`` at one token and linearly more with tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    dense = [(name, b, weight * (1 + (b - 1) / 16)) for name, weight in layers.items() for b in sizes]
    heads = [(name, s, weight * s) for name, weight in (("lm_head", 512), ("sampler", 1024)) for s in (1, 4, 16)]
    points = [(0, 0, n, k, n * k) for n in (1, 4) for k in (10, 100)]
    points += [(c, h, 0, 0, c + h) for c in (4, 8) for h in (0, 16)]
    points += [(c, h, n, k, c + h + n * k) for c in (4, 8) for h in (0, 16) for n in (1, 4) for k in (10, 100)]
    texts = {
        "dense.csv": csv_text("layer,tokens,time_us", dense),
        "per_sequence.csv": csv_text("layer,sequences,time_us", heads),
        "attention.csv": csv_text("prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", points),
    }
    if moe:
        texts["moe.csv"] = csv_text("tokens,activated_experts,time_us", moe)
    texts |= {name.replace("__", "."): text for name, text in files.items()}
    for name, text in texts.items():
        (folder / name).write_text(text)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if meta is not None:
        (folder / "meta.yaml").write_text(json.dumps(meta))  # JSON is YAML
    return folder


def load(folder, **answers):
    return load_profile_source(folder, ask=Ask(**answers))[0]


def microseconds(profile, n=0, context=0, chunks=(), histories=(), drafts=0, extrapolate=False):
    cost = step_cost(profile, 256, 64, 0, extrapolate=extrapolate)
    return cost.seconds(Shape(n, n * context, list(chunks), list(histories)), drafts) * 1e6


LINK = {"link_bandwidth": 1e9, "link_latency": 5e-6}

SKEW = csv_text(
    "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha,n_samples",
    [
        (0, "n<=2", "sr<=15%", "kvB<=1k", "kp=0", 0.25, 4),
        (0, "n>256", "sr>70%", "kvB>16k", "kp<=16k", -0.5, 4),
        (8, "n<=2", "sr<=5%", "kvB<=64", "kp>8k", 0.5, 4),
    ],
)
