"""How well could a confidence head tell whether the first draft token survives?

    python experiments/smollm2/confidence_limit.py --target models/ --drafter experiments/smollm2/dspark \
        --train answers/train --test answers/test-t1

DeepSpec's head is linear in the drafter's hidden state and the Markov embedding of the anchor. Other heads are fitted
by themselves on the frozen drafter, on answers it was trained on, and judged on others by ROC-AUC at position 1: the
same linear head, one that also sees the draft distribution (entropy and the three largest log-probabilities), and both
with a hidden layer. "oracle" is the chance of survival itself, Σ min(p, q), which no head can beat.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from specsim.calibration import roc_auc
from specsim.drafters.batches import anchor_range, draft_ids, target_probabilities
from specsim.drafters.checkpoint import load_checkpoint
from specsim.drafters.dspark import DSpark
from specsim.drafters.responses import load_responses
from specsim.drafters.target import Target, load_target

STATISTICS = 4


@torch.inference_mode()
def first_positions(target: Target, drafter: DSpark, folder: Path, stride: int) -> dict[str, Tensor]:
    """At every ``stride``-th anchor of the answers: ``features`` [n, d + r + STATISTICS], the head's own ``logit``,
    the ``chance`` of survival and whether the token ``survived``."""
    recipe, responses = load_responses(folder)
    columns = [recipe.layers.index(i) for i in drafter.target_layers]
    final = recipe.layers.index(target.num_layers - 1)
    ids = draft_ids(drafter.vocabulary, target.vocab_size)
    generator = torch.Generator().manual_seed(0)
    parts: dict[str, list[Tensor]] = {name: [] for name in ("features", "logit", "chance", "survived")}
    for response in responses:
        first, end = anchor_range(response, drafter.gamma)
        if first >= end:
            continue
        at = torch.arange(first, end, stride)
        tokens, size = response.tokens, len(response.tokens) - 1
        context = drafter.context(1, size)
        drafter.read(context, tokens[None], response.hidden[:size, columns].float()[None], torch.arange(size)[None])
        block = drafter.block(context, tokens[at][None], at[None])
        logits, confidence = block.next(tokens[at][None])
        q = logits[0].softmax(-1)
        normalizer = response.log_normalizer[at]
        p = target_probabilities(
            target, response.hidden[at, final].float(), normalizer, recipe.temperature, drafter.vocabulary
        )
        drafted = ids[tokens[at + 1]]
        q_y, p_y = (x.gather(1, drafted.clamp(min=0)[:, None])[:, 0] for x in (q, p))
        entropy = -torch.special.xlogy(q, q).sum(-1, keepdim=True)
        assert drafter.markov_head is not None
        assert confidence is not None
        parts["features"].append(
            torch.cat(
                (block.hidden[0, :, 0], drafter.markov_head.markov_w1(tokens[at]), entropy, q.topk(3).values.log()), -1
            )
        )
        parts["logit"].append(confidence[0])
        parts["chance"].append(torch.minimum(p, q).sum(-1).clamp(max=1))
        parts["survived"].append((torch.rand(len(at), generator=generator) * p_y < q_y) & (drafted >= 0))
    return {name: torch.cat(values) for name, values in parts.items()}


def fit(x: Tensor, chance: Tensor, hidden: int, epochs: int = 12) -> nn.Module:
    """A head of one layer (``hidden`` 0) or two on features ``x`` [n, m], by binary cross-entropy."""
    torch.manual_seed(0)
    width = x.shape[1]
    head = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1)) if hidden else nn.Linear(width, 1)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=0.02)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(1024):
            loss = nn.functional.binary_cross_entropy_with_logits(head(x[rows])[:, 0], chance[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("target", "drafter", "train", "test"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    target = load_target(args.target, "float32")
    drafter = load_checkpoint(args.drafter, target)
    assert isinstance(drafter, DSpark)
    test = first_positions(target, drafter, args.test, 2)
    train = first_positions(target, drafter, args.train, 4)
    mean, spread = train["features"].mean(0), train["features"].std(0) + 1e-6
    x, held = ((part["features"] - mean) / spread for part in (train, test))
    survived = test["survived"].numpy()

    def show(name: str, score: Tensor) -> None:
        print(f"{name:<44} AUC {roc_auc(score.detach().numpy(), survived):.3f}", flush=True)

    print(f"{len(x):,} anchors to fit on, {len(held):,} to judge")
    show("the drafter's own head", test["logit"])
    for hidden, form in ((0, "linear"), (128, "hidden layer of 128")):
        for more, seen in ((-STATISTICS, "h, Markov"), (None, "h, Markov, draft distribution")):
            head = fit(x[:, :more], train["chance"], hidden)
            show(f"{form}: {seen}", head(held[:, :more])[:, 0])
    show("oracle", test["chance"])


if __name__ == "__main__":
    main()
