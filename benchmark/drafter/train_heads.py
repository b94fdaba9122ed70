"""Trains a selector and a Domino head on the demo's frozen drafter, then compares their trees with its own.

    python -m benchmark.drafter.train_heads --target FOLDER --drafter FOLDER --out FOLDER --results FILE

In one run on one GPU, the target writes texts as for train.py, the drafter drafts at random positions of them, the
heads learn from these drafts, and the evaluation set's greedy answers are replayed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmark.drafter import prompts, train
from benchmark.drafter.evaluate import Head, Marginals, accepted, replay, visits
from benchmark.drafter.heads import Domino, Lattice, PathHead, Selector, save, token_features
from benchmark.drafter.model import Drafter
from benchmark.drafter.nodes import Calibrated, Counts
from benchmark.drafter.target import Target


@dataclass(frozen=True)
class HeadRecipe:
    """Everything that determines the heads, except the GPU's speed and the texts."""

    candidates: int = 32  # K
    selector_rank: int = 32
    other_ranks: tuple[int, ...] = (8, 128)  # trained to see what the rank matters, not saved
    domino_width: int = 256  # of the GRU
    domino_rank: int = 64
    batch: int = 32  # texts per extraction step
    anchors: int = 64  # drafts per text
    extract_seconds: float = 40.0
    valid: int = 512  # texts that the heads never learn from: for the choice of the head, and for calibration
    valid_apart: bool = True  # these texts answer our own templates, and no such text is learned from
    near: int = 256  # more texts that the heads never learn from; they are of the kind that they learn from
    drafts: int = 4096  # per training step
    steps: tuple[int, int] = (600, 1500)  # of the selector, of Domino
    learning_rates: tuple[float, ...] = (1e-2, 3e-2)  # of these and of `free` the best on `valid` is kept
    free: tuple[float, ...] = (0.0, 0.03, 0.1)  # heads.TokenTable's
    decay: float = 4.0  # a candidate of depth d has the weight exp(-(d - 1) / decay) in the loss
    choose: int = 32  # N of the trees that choose the head
    weight_decay: float = 0.0
    warmup: float = 0.03  # share of `steps`
    answer_tokens: int = 448  # of the evaluation set
    widths: tuple[int, ...] = (8, 16, 32, 64)  # N of the evaluated trees, root included
    fewer_candidates: tuple[int, ...] = (8, 16)  # K that the trees are evaluated with, too


TEXTS = train.Recipe(
    seed=1, turns=18432, wave=3072, answer_tokens=256, answer_temperatures=(0.0,), generate_seconds=70.0
)
SMOKE_TEXTS = replace(train.SMOKE, seed=1, answer_temperatures=(0.0,))
SMOKE = HeadRecipe(
    candidates=8, selector_rank=4, other_ranks=(2,), domino_width=8, domino_rank=4, batch=2, anchors=4,
    extract_seconds=2.0, valid=2, valid_apart=False, near=1, drafts=16, steps=(20, 20), learning_rates=(1e-2,),
    answer_tokens=20, widths=(8, 16), fewer_candidates=(4,), choose=16,
)  # fmt: skip


@torch.no_grad()
def drafts(drafter: Drafter, target: Target, texts, anchors: torch.Tensor, k: int) -> Lattice:
    """Draft at some positions of some texts.

    Args:
        drafter: frozen, in the target's dtype.
        target: the target.
        texts: ids and prompt length of each text.
        anchors: [len(texts), a] int64, positions of the bonus tokens.
        k: candidates per position.

    Returns:
        len(texts) * a drafts.
    """
    longest = -(-max(len(ids) for ids, _ in texts) // 64) * 64
    ids = torch.tensor([t + [0] * (longest - len(t)) for t, _ in texts], device=target.device)
    lengths = torch.tensor([len(t) for t, _ in texts], device=target.device)
    features = target.forward(ids, layer_ids=drafter.config.target_layer_ids)[1]
    hidden, truth = train.blocks(drafter, target, ids, features, anchors, lengths)
    hidden, truth = hidden.flatten(0, 1).to(target.dtype), truth.flatten(0, 1)
    top, candidates, rest = [], [], []
    for part in hidden.flatten(0, 1).split(8192):  # chunks of logits
        logits = target.logits(part)
        best = logits.topk(k, dim=-1)
        every = logits.float().logsumexp(-1)
        outside = -torch.expm1(best.values.float().logsumexp(-1) - every)
        top.append(best.values)
        candidates.append(best.indices.int())
        rest.append(every + outside.clamp_min(1e-7).log())  # rounding can make it negative
    shape = truth.shape
    top, candidates = (torch.cat(x).unflatten(0, shape) for x in (top, candidates))
    return Lattice(
        ids.gather(1, anchors).flatten(), candidates, top, torch.cat(rest).view(shape), hidden, truth.int()
    )


def extract(drafter: Drafter, target: Target, texts, recipe: HeadRecipe, seconds: float) -> Lattice:
    """Draft at random positions of the texts until all are used or the time is up."""
    rng, began, parts = random.Random(0), time.monotonic(), []
    batches = train.batches(texts, recipe.batch, rng)
    for _ in range(-(-len(texts) // recipe.batch)):
        batch = next(batches)
        ends = torch.tensor([[len(ids) - 1 - start] for ids, start in batch], device=target.device)
        starts = torch.tensor([[start] for _, start in batch], device=target.device)
        random_ = torch.rand(len(batch), recipe.anchors, device=target.device)
        parts.append(drafts(drafter, target, batch, starts + (random_ * ends).long(), recipe.candidates))
        if time.monotonic() - began > seconds:
            break
    return Lattice.cat(parts)


def slot_loss(head: PathHead, lattice: Lattice, decay: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of the positions, summed, and the sum of their weights.

    It is the cross entropy over the K candidates after the target's own prefix. A position counts if the target's
    whole path up to it is within the candidates: no tree reaches the others. At depth 1 it is the divergence from the
    plain drafter: what follows the bonus token the drafter knows, and a correction by heart is worse on other texts.

    Args:
        head: gives the logits.
        lattice: the drafts.
        decay: HeadRecipe's.
    """
    match = lattice.match
    depth = torch.arange(match.shape[1], device=match.device)
    weight = match.any(-1).long().cumprod(1) * torch.exp(-depth / decay)
    log_q = head.teacher_forced(lattice).log_softmax(-1)
    loss = -log_q.gather(-1, match.long().argmax(-1, keepdim=True))[..., 0]
    plain = lattice.logits[:, 0].log_softmax(-1)
    first = (plain.exp() * (plain - log_q[:, 0])).sum(-1, keepdim=True)
    loss = torch.cat((first, loss[:, 1:]), 1)
    return (loss * weight).sum(), weight.sum()


@torch.no_grad()
def valid_loss(head: PathHead, lattice: Lattice, decay: float, rows: int = 4096) -> float:
    sums = [slot_loss(head, lattice[i : i + rows], decay) for i in range(0, len(lattice), rows)]
    return float(sum(loss for loss, _ in sums) / sum(count for _, count in sums))


@torch.no_grad()
def tree_length(walk: Callable[[Lattice], Head], lattice: Lattice, width: int, rows: int = 2048) -> float:
    """The mean accept length of a tree of `width` nodes, root included, over all drafts of a lattice.

    A server's steps are other drafts: they begin where the one before ended.
    """
    parts = (lattice[i : i + rows] for i in range(0, len(lattice), rows))
    sums = [float(accepted(walk(part), part.ids, part.truth, [width - 1]).sum()) for part in parts]
    return round(1 + sum(sums) / len(lattice), 4)


@torch.no_grad()
def first_choice(head: PathHead | None, lattice: Lattice, rows: int = 4096) -> list[float]:
    """How often the first choice is right at each depth, after the target's own prefix.

    Args:
        head: None is the plain drafter.
        lattice: the positions. Only those whose prefix is within the candidates count.
    """
    right, count = 0.0, 0.0
    for part in (lattice[i : i + rows] for i in range(0, len(lattice), rows)):
        match = part.match
        within = match.any(-1).long().cumprod(1)
        reached = torch.nn.functional.pad(within[:, :-1], (1, 0), value=1) * (part.truth >= 0)
        logits = part.logits if head is None else head.teacher_forced(part)
        right += (match.gather(-1, logits.argmax(-1, keepdim=True))[..., 0] * reached).sum(0)
        count += reached.sum(0)
    return [round(float(x), 4) for x in right / count]


def fit(
    head: PathHead, lattice: Lattice, valid: Lattice, recipe: HeadRecipe, learning_rate: float, steps: int
) -> dict:
    """Train `head` in place.

    Returns:
        Statistics; "loss" has, after each quarter of the steps, that quarter's mean loss and the loss on `valid`.
        "tree" is tree_length() on `valid`.
    """
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=recipe.weight_decay
    )
    began, curve, quarter = time.monotonic(), [], steps // 4
    total = torch.zeros((), device=lattice.ids.device)
    for step in range(steps):
        done = step / steps
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(max(done, 1e-3) / recipe.warmup, 1 - done)
        rows = torch.randint(len(lattice), (recipe.drafts,), device=lattice.ids.device)
        loss, count = slot_loss(head, lattice[rows], recipe.decay)
        loss = loss / count.clamp_min(1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if step % quarter == quarter - 1:
            curve.append(
                (step + 1, round(float(total) / quarter, 4), round(valid_loss(head, valid, recipe.decay), 4))
            )
            total.zero_()
            print(
                f"  step {step + 1:5d}  {time.monotonic() - began:5.1f} s  loss {curve[-1][1:]}", flush=True
            )
    return {
        "learning_rate": learning_rate,
        "seconds": round(time.monotonic() - began, 1),
        "loss": curve,
        "tree": tree_length(head.walk, valid, recipe.choose),
    }


def best_fit(
    make: Callable[[float], PathHead],
    lattice,
    valid,
    recipe: HeadRecipe,
    settings,
    steps: int,
    late=lambda: False,
):
    """Train once per setting.

    Args:
        make: the untrained head, for a size of the tables' free part.
        lattice, valid: drafts to learn from and to choose by.
        recipe: the recipe of the run.
        settings: pairs of a learning rate and a size of the free part.
        steps: the number of steps of each training.
        late: says when no further setting is begun.

    Returns:
        The head with the longest tree on `valid`, its setting, and all statistics.
    """
    tries = []
    for rate, free in settings:
        if tries and late():
            break
        torch.manual_seed(0)
        head = make(free)
        stats = fit(head, lattice, valid, recipe, rate, steps) | {"free": free}
        print(stats, flush=True)
        tries.append((stats["tree"], (rate, free), head, stats))
    _, setting, head, _ = max(tries, key=lambda t: t[:2])
    return head, setting, [stats for *_, stats in tries]


def split_templates(texts, tokenizer: Tokenizer):
    """Split texts into those that answer our own templates, and the others."""
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    written = {tuple(encode(text)) for text in prompts.written()}
    before, after = len(encode(train.BEFORE)), len(encode(train.AFTER))
    ours: list = []
    others: list = []
    for ids, start in texts:
        (ours if tuple(ids[before : start - after]) in written else others).append((ids, start))
    return ours, others


class Replay:
    """The evaluation set: every position of every answer drafted once.

    Args:
        texts: ids and prompt length of each answer.
        sets: name of each text's part of the set.
        k: candidates per position.
    """

    def __init__(self, drafter: Drafter, target: Target, texts, sets: Sequence[str], k: int):
        parts, self.sizes, self.sets = [], [], []
        for (ids, start), name in zip(texts, sets, strict=True):
            if len(ids) - start < 2:
                continue
            anchors = torch.arange(start, len(ids) - 1, device=target.device)[None]
            parts.append(drafts(drafter, target, [(ids, start)], anchors, k))
            self.sizes.append(len(parts[-1]))
            self.sets.append(name)
        self.lattice = Lattice.cat(parts)

    @torch.no_grad()
    def steps(self, walk: Callable[[Lattice], Head], budgets: Sequence[int], k: int | None = None, rows=2048):
        """Accepted tokens [len(budgets), n] of every draft."""
        lattice = self.lattice if k is None else self.lattice.best(k)
        chunks = (lattice[i : i + rows] for i in range(0, len(lattice), rows))
        return torch.cat([accepted(walk(part), part.ids, part.truth, budgets) for part in chunks], 1)

    def lengths(self, steps: torch.Tensor) -> dict[str, float]:
        """Accept length per part of the set, and over all of it."""
        totals: dict[str, list[int]] = {}
        for name, part in zip(self.sets, steps.cpu().split(self.sizes), strict=True):
            tokens, count = replay(part)
            for key in (name, "all"):
                sums = totals.setdefault(key, [0, 0])
                sums[0] += tokens
                sums[1] += count
        return {key: round(tokens / count, 4) for key, (tokens, count) in totals.items()}

    def visited(self, steps: torch.Tensor) -> torch.Tensor:
        """Indices of the drafts that a server makes."""
        at, starts = [], 0
        for part in steps.cpu().split(self.sizes):
            at += [starts + i for i in visits(part.tolist())]
            starts += len(part)
        return torch.tensor(at, device=steps.device)

    def table(self, walk: Callable[[Lattice], Head], widths: Sequence[int], k: int | None = None) -> dict:
        """Accept length of the chain and of each tree of N nodes, root included: {"chain": ..., "N=8": ...}."""
        steps = self.steps(walk, [0, *(width - 1 for width in widths)], k)
        return {name: self.lengths(row) for name, row in zip(["chain", *(f"N={w}" for w in widths)], steps)}


def plain(lattice: Lattice) -> Head:
    """The drafter's own head on these drafts."""
    return Marginals(lattice.marginals())


def calibrate(walk: Callable[[Lattice], Head], correction: torch.Tensor) -> Callable[[Lattice], Head]:
    return lambda lattice: Calibrated(walk(lattice), correction)


@torch.no_grad()
def count_nodes(walk, lattice: Lattice, budget: int | None, ranks: int, rows: int = 2048) -> Counts:
    counts = Counts(lattice.ids.shape[1], ranks, lattice.ids.device)
    for i in range(0, len(lattice), rows):
        part = lattice[i : i + rows]
        counts.add(walk(part), part.ids, part.truth, budget)
    return counts


def limits(replayed: Replay, walks: dict, width: int) -> dict:
    """What holds a tree of `width` nodes back.

    Returns:
        "all_candidates": the accept length of a tree of all K^depth prefixes, which no head can exceed, and per
        head the shares of verify steps whose path ends because the target's next token is no candidate, because
        it is one but not in the tree, or because the draft is accepted to its end.
    """
    lattice = replayed.lattice
    reach = torch.cat(
        [lattice[i : i + 8192].match.any(-1).long().cumprod(1).sum(1) for i in range(0, len(lattice), 8192)]
    )
    left = torch.cat([(lattice[i : i + 8192].truth >= 0).sum(1) for i in range(0, len(lattice), 8192)])
    result: dict = {"all_candidates": replayed.lengths(reach), "ends": {}}
    for name, walk in walks.items():
        steps = replayed.steps(walk, [width - 1])[0]
        seen = replayed.visited(steps)
        mine, most, room = steps[seen], reach[seen], left[seen]
        full, outside = mine == room, (mine == most) & (mine < room)
        ends = {"accepted_to_the_end": full, "not_a_candidate": outside, "not_in_the_tree": ~(full | outside)}
        result["ends"][name] = {key: round(float(where.double().mean()), 4) for key, where in ends.items()}
    return result


def options() -> argparse.Namespace:
    parser = train.parser_of(__doc__, "two folders OUT-selector and OUT-domino are written")
    parser.add_argument("--drafter", type=Path, required=True, help="folder of the frozen drafter")
    parser.add_argument(
        "--limit", type=float, default=240.0, help="seconds after which nothing optional is started"
    )
    parser.add_argument(
        "--set-texts", type=json.loads, default={}, metavar="JSON", help="the same of train.py's recipe"
    )
    return parser.parse_args()


class Report:
    """The results file. It is written anew with each part, so that a time limit loses nothing."""

    def __init__(self, path: Path, **content):
        self.path, self.content, self.began = path, content, time.monotonic()

    def seconds(self) -> float:
        return round(time.monotonic() - self.began, 1)

    def keep(self, **parts) -> None:
        self.content.update(parts, seconds=self.seconds())
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")
        print(f"[{self.seconds():6.1f} s] {', '.join(parts)}", flush=True)


def prepare(target: Target, drafter: Drafter, arguments, recipe: HeadRecipe, texts_recipe, report: Report):
    """Let the target write, and the drafter draft. Return the evaluation set, and drafts to learn and to choose by."""
    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    evaluated = prompts.evaluation(arguments.humaneval)
    if arguments.smoke:
        evaluated = evaluated[:2] + evaluated[-2:]
    held_out = train.answers(target, tokenizer, evaluated, recipe.answer_tokens)
    texts, written = train.write_texts(target, tokenizer, texts_recipe, [e["prompt"] for e in evaluated])
    report.keep(data=written)
    if target.device == "cuda":
        torch.cuda.empty_cache()
    sets = [e["id"].split("/")[0].lower() for e in evaluated]
    replayed = Replay(drafter, target, held_out, sets, recipe.candidates)
    valid, rest = texts[: recipe.valid], texts[recipe.valid :]
    if recipe.valid_apart:
        templates, rest = split_templates(texts, tokenizer)
        valid = templates[: recipe.valid]
    near, rest = rest[: recipe.near], rest[recipe.near :]
    drawn = {
        name: extract(drafter, target, part, recipe, recipe.extract_seconds)
        for name, part in (("valid", valid), ("near", near), ("train", rest))
    }
    sizes = {name: len(part) for name, part in drawn.items()}
    report.keep(drafts=sizes | {"evaluation": len(replayed.lattice)})
    return replayed, drawn


class Experiment:
    """Trains the heads, saves them and compares their trees.

    Args:
        replayed: the evaluation set.
        drawn: drafts of the texts to learn from ("train") and to choose by ("valid"), and of more texts ("near").
        embed: the target's embedding.
        arguments, recipe, report: of the run.
    """

    def __init__(
        self,
        replayed: Replay,
        drawn: dict[str, Lattice],
        embed: torch.Tensor,
        arguments: argparse.Namespace,
        recipe: HeadRecipe,
        report: Report,
    ):
        self.replayed, self.drawn, self.embed = replayed, drawn, embed
        self.arguments, self.recipe, self.report = arguments, recipe, report
        self.rms = float(drawn["train"].hidden[:4096].float().square().mean().sqrt())
        self.tokens = token_features(embed)
        self.walks: dict[str, Callable[[Lattice], Head]] = {"marginals": plain}
        self.heads: dict[str, PathHead | None] = {"marginals": None}
        self.settings: dict[
            str, tuple[float, float]
        ] = {}  # the best learning rate and free part of each head

    def run(self) -> None:
        """Run everything, the optional comparisons only while there is time."""
        loss = valid_loss(self.selector(0.0, rank=1), self.drawn["valid"], self.recipe.decay)
        self.report.keep(plain_valid_loss=round(loss, 4))
        self.train()
        self.compare()
        optional = {
            "nodes": self.nodes,
            "accept_length_calibrated": self.calibrated,
            "selector_by_rank": self.by_rank,
            "accept_length_by_candidates": self.by_candidates,
        }
        for name, part in optional.items():
            if not self.late():
                self.report.keep(**{name: part()})

    def late(self) -> bool:
        """Whether nothing optional is started any more."""
        return self.report.seconds() > self.arguments.limit

    def selector(self, free: float, rank: int | None = None) -> Selector:
        """An untrained selector. `free` is the size of its tables' free part."""
        vocab_size, hidden = self.embed.shape
        rank = self.recipe.selector_rank if rank is None else rank
        return Selector(vocab_size, hidden, rank, self.rms, self.tokens, free).to(self.embed.device)

    def domino(self, free: float) -> Domino:
        """An untrained Domino head."""
        width, rank = self.recipe.domino_width, self.recipe.domino_rank
        return Domino(self.embed, width, rank, self.rms, self.tokens, free).to(self.embed.device)

    def train(self) -> None:
        """Train and save both heads."""
        grid = list(itertools.product(self.recipe.learning_rates, self.recipe.free))
        makes = {"selector": self.selector, "domino": self.domino}
        fitted: dict = {}
        for (name, make), steps in zip(makes.items(), self.recipe.steps, strict=True):
            head, self.settings[name], fitted[name] = best_fit(
                make, self.drawn["train"], self.drawn["valid"], self.recipe, grid, steps, self.late
            )
            folder = Path(f"{self.arguments.out}-{name}")
            save(head, self.recipe.candidates, self.arguments.drafter, folder)
            head.load(head.tensors(), self.embed.device)  # bfloat16, as served
            self.walks[name], self.heads[name] = head.walk, head
            self.report.keep(training=fitted, chosen=self.settings)

    @property
    def width(self) -> int:
        """N of the trees that are looked at more closely."""
        return 32 if 32 in self.recipe.widths else max(self.recipe.widths)

    def compare(self) -> None:
        """Compare the trees of all heads."""
        lengths: dict = {}
        for name, walk in self.walks.items():
            lengths[name] = self.replayed.table(walk, self.recipe.widths)
            self.report.keep(accept_length=lengths)
        lattice = self.replayed.lattice
        self.report.keep(limits=limits(self.replayed, self.walks, self.width))
        self.report.keep(
            first_choice={name: first_choice(head, lattice) for name, head in self.heads.items()}
        )
        sets = {"near": self.drawn["near"], "valid": self.drawn["valid"], "evaluation": lattice}
        self.report.keep(
            all_drafts={
                kind: {name: tree_length(walk, part, self.width) for name, walk in self.walks.items()}
                for kind, part in sets.items()
            }
        )

    def nodes(self) -> dict:
        """Which nodes of the evaluation set's trees are accepted."""
        tables: dict = {}
        for name, walk in self.walks.items():
            seen = self.replayed.visited(self.replayed.steps(walk, [self.width - 1])[0])
            counts = count_nodes(walk, self.replayed.lattice[seen], self.width - 1, 9)
            tables[name] = {"steps": len(seen)} | counts.to_json()
        return {"N": self.width, "ranks": "0 to 7, then 8 and more"} | tables

    def calibrated(self) -> dict:
        """Accept lengths with scores that are corrected by what was accepted of other texts."""
        tables: dict = {}
        for name, walk in self.walks.items():
            counts = count_nodes(walk, self.drawn["valid"], None, self.recipe.candidates)
            tables[name] = self.replayed.table(calibrate(walk, counts.correction()), self.recipe.widths)
        return tables

    def by_rank(self) -> dict:
        """Accept lengths of selectors of other ranks."""
        tables: dict = {}
        for rank in self.recipe.other_ranks:
            head, _, stats = best_fit(
                partial(self.selector, rank=rank), self.drawn["train"], self.drawn["valid"], self.recipe,
                [self.settings["selector"]], self.recipe.steps[0],
            )  # fmt: skip
            lengths = self.replayed.table(head.walk, self.recipe.widths)
            tables[rank] = {"training": stats[0], "accept_length": lengths}
        return tables

    def by_candidates(self) -> dict:
        """Accept lengths with fewer candidates per position."""
        return {
            f"K={k}": {
                name: self.replayed.table(walk, self.recipe.widths, k) for name, walk in self.walks.items()
            }
            for k in self.recipe.fewer_candidates
        }


def summary(result: dict) -> str:
    """The main table, for a terminal."""
    columns = list(result["accept_length"]["marginals"])
    lines = ["accept length, all prompts   " + "  ".join(f"{c:>7s}" for c in columns)]
    for kind in ("accept_length", "accept_length_calibrated"):
        for name, row in result.get(kind, {}).items():
            label = name + ("" if kind == "accept_length" else ", calibrated")
            lines.append(f"{label:28s} " + "  ".join(f"{row[c]['all']:7.3f}" for c in columns))
    return "\n".join(lines)


def main() -> None:
    arguments = options()
    changes = {"--set": arguments.set, "--set-texts": arguments.set_texts}
    recipe = replace(SMOKE if arguments.smoke else HeadRecipe(), **arguments.set)
    texts = replace(SMOKE_TEXTS if arguments.smoke else TEXTS, **arguments.set_texts)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    report = Report(
        arguments.results,
        gpu=train.gpu_name(),
        torch=torch.__version__,
        commit=arguments.commit,
        command="python -m benchmark.drafter.train_heads --target T --drafter D --out O --results R"
        + " --smoke" * arguments.smoke
        + "".join(f" {flag} '{json.dumps(value)}'" for flag, value in changes.items() if value),
        recipe=asdict(recipe),
        texts=asdict(texts),
    )
    torch.manual_seed(texts.seed)
    target = Target(arguments.target, device, dtype)
    drafter = Drafter.load(arguments.drafter).to(device, dtype)
    replayed, drawn = prepare(target, drafter, arguments, recipe, texts, report)
    Experiment(replayed, drawn, target.embed, arguments, recipe, report).run()
    print(summary(report.content), flush=True)


if __name__ == "__main__":
    main()
