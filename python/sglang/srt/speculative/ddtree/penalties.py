"""Frequency, presence and repetition penalties and min_new_tokens, exact at every node of a tree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from sgl_kernel.ddtree import ancestor_mask
from sglang.srt.speculative.ddtree.sampling import LOGITS_PER_CHUNK
from sglang.srt.utils.common import async_h2d

if TYPE_CHECKING:
    from sgl_kernel.ddtree import DraftTrees
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}


@dataclass
class Options:
    """The penalties and minimum lengths that a batch's requests ask for.

    Attributes:
        columns: [bs, 1] float32 on the device, by the name of the sampling parameter.
        prompt_lens: [bs, 1] int64 on the device.
        asking: indices of the requests that ask for any of these, on the host.
        frequency, presence, repetition, minimum: whether any request of the batch asks for it.
    """

    columns: dict[str, torch.Tensor]
    prompt_lens: torch.Tensor
    asking: list[int]
    frequency: bool
    presence: bool
    repetition: bool
    minimum: bool

    @classmethod
    def of(cls, reqs: list[Req], device: torch.device | str) -> Options | None:
        """Collect what a batch's requests ask for, without waiting for the device.

        Args:
            reqs: the batch's requests.
            device: where the columns go.

        Returns:
            The options, or None if no request asks for anything.
        """
        values = [[getattr(req.sampling_params, name) for req in reqs] for name in NEUTRAL]
        asked = [[v != neutral for v in row] for row, neutral in zip(values, NEUTRAL.values())]
        used = [any(row) for row in asked]
        if not any(used):
            return None
        asking = [i for i, any_of in enumerate(zip(*asked)) if any(any_of)]
        table = async_h2d(values, dtype=torch.float32, device=device)
        prompts = async_h2d([len(req.origin_input_ids) for req in reqs], dtype=torch.int64, device=device)
        return cls(dict(zip(NEUTRAL, table.unsqueeze(-1))), prompts[:, None], asking, *used)

    def of_requests(self, chosen: slice | torch.Tensor) -> Options:
        """Return the options of some requests, by a slice or an index. `asking` stays that of the batch."""
        columns = {name: column[chosen] for name, column in self.columns.items()}
        return replace(self, columns=columns, prompt_lens=self.prompt_lens[chosen])


class OutputPenalties:
    """Penalizes each node's logits for the output before it: what the request emitted, and the node's path.

    Definition (SGLang 0.5.23, `penaltylib`, without overlap scheduling): let c be how often a token is in the
    output. A logit x becomes y = x - frequency * c - presence * [c > 0]. If c > 0, a negative y is then
    multiplied by repetition, and any other y is divided by it. While the output is shorter than
    min_new_tokens, stop tokens get -inf.

    Upstream counts in the scheduler: one token per step, one step late under overlap scheduling, and none for
    the DFLASH family. Here the step that accepts tokens counts them, in the order of the forward stream. A
    prefill sets a request's counts from its output (also after a retraction), and each step adds to them. If the
    prefill ran on another server, the request's first step here sets them.

    Args:
        max_requests: rows of the request pool.
        vocab_size: columns of the logits.
        device: where the counts are kept. They take max_requests * vocab_size * 4 bytes once a request needs
            them.
    """

    def __init__(self, max_requests: int, vocab_size: int, device: torch.device | str) -> None:
        self._shape = max_requests, vocab_size
        self._device = device
        self._counts: torch.Tensor | None = None

    @property
    def counts(self) -> torch.Tensor:
        """How often each token is in each request's output: [max_requests, vocab_size] float32."""
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
        return self._counts

    def options(self, reqs: list[Req]) -> Options | None:
        """Return what the requests ask for. See Options.of()."""
        return Options.of(reqs, self._device)

    def begin(self, batch: ScheduleBatch) -> Options | None:
        """Set the counts before a prefill, and give the sampler the penalties that follow from them.

        Args:
            batch: a prefill batch, or a mixed one, whose running requests keep their counts. Its
                sampling_info is the copy that upstream makes for each forward.

        Returns:
            The options, or None. With options, call count() after the forward.
        """
        options = self.options(batch.reqs)
        if options is None:
            return None
        running = {id(req) for req in batch.decoding_reqs or ()}
        started = [(i, req) for i, req in enumerate(batch.reqs) if id(req) not in running]
        pool_rows = batch.req_pool_indices.long()
        self._start(pool_rows, started)
        info = batch.sampling_info
        if not running and not any(req.output_ids for _, req in started):
            # There is no token to penalize yet, and every request may still need its minimum. Upstream's own
            # additive penalties are right. Its scale is 1 everywhere, and applying it would compile a kernel.
            info.acc_scaling_penalties = None
            return options
        counts = self.counts[pool_rows]
        emitted = batch.seq_lens[:, None].long() - options.prompt_lens
        additive = self._stops(options, info.acc_additive_penalties, emitted)
        info.acc_additive_penalties = torch.zeros_like(counts) if additive is None else additive
        self._subtract(info.acc_additive_penalties, counts, options.columns)
        if options.repetition:
            info.acc_scaling_penalties = torch.where(counts > 0, options.columns["repetition_penalty"], 1.0)
        return options

    def resume(self, batch: ScheduleBatch, arrived: list[tuple[int, Req]]) -> None:
        """Set the counts of requests that have had no prefill here.

        Args:
            batch: the batch of their first step.
            arrived: these requests, each with its index in the batch.
        """
        if self.options([req for _, req in arrived]) is not None:
            self._start(batch.req_pool_indices.long(), arrived)

    def _start(self, pool_rows: torch.Tensor, started: list[tuple[int, Req]]) -> None:
        """Set the counts of some requests of a batch from their output."""
        fresh = async_h2d([i for i, _ in started], dtype=torch.int64, device=self._device)
        self.counts.index_fill_(0, pool_rows[fresh], 0.0)
        output = [(i, token) for i, req in started for token in req.output_ids]
        if output:
            requests, tokens = async_h2d(list(zip(*output)), dtype=torch.int64, device=self._device)
            self._add(pool_rows[requests], tokens, torch.ones(len(output), device=self._device))

    def apply(
        self,
        logits: torch.Tensor,
        options: Options,
        sampling_info: SamplingBatchInfo,
        pool_rows: torch.Tensor,
        trees: DraftTrees,
        positions: torch.Tensor,
    ) -> None:
        """Penalize the target's logits at every node, in place, for the requests that ask for it.

        Args:
            logits: [bs * N, vocabulary] of the target, changed in place.
            options: what the batch's requests ask for.
            sampling_info: the batch's.
            pool_rows: [bs] the requests' rows of the request pool.
            trees: the batch's trees. The root's token has been emitted and counted already.
            positions: [bs * N] int64, the nodes' positions.
        """
        bs, num_nodes = trees.tokens.shape
        by_node = logits.view(bs, num_nodes, -1)
        positions = positions.view(bs, num_nodes, 1)
        stops = sampling_info.acc_additive_penalties
        chunk = max(1, LOGITS_PER_CHUNK // (num_nodes * by_node.shape[2]))
        asking = len(options.asking)
        index = None if asking == bs else async_h2d(options.asking, dtype=torch.int64, device=self._device)
        for start in range(0, asking, chunk):
            requests = slice(start, start + chunk)
            requests = requests if index is None else index[requests]
            chosen = by_node[requests]
            self._apply(
                chosen,
                options.of_requests(requests),
                None if stops is None else stops[requests],
                pool_rows[requests],
                trees.tokens[requests],
                trees.ancestors[requests],
                positions[requests],
            )
            if index is not None:  # then `chosen` is a copy
                by_node[requests] = chosen

    def _apply(
        self,
        by_node: torch.Tensor,
        options: Options,
        stops: torch.Tensor | None,
        pool_rows: torch.Tensor,
        tokens: torch.Tensor,
        ancestors: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Run apply() for some requests: by_node is [bs, N, vocabulary], positions is [bs, N, 1]."""
        num_nodes = tokens.shape[1]
        columns = {name: column[:, None] for name, column in options.columns.items()}
        if options.frequency or options.presence or options.repetition:
            on_path = ancestor_mask(ancestors, num_nodes)  # [bs, node, ancestor]
            counts = self.counts[pool_rows.long()][:, None].repeat(1, num_nodes, 1)
            drafted = tokens[:, None, 1:].expand(-1, num_nodes, -1)
            counts.scatter_add_(2, drafted, on_path[:, :, 1:].to(counts.dtype))
            self._subtract(by_node, counts, columns)
            if options.repetition:
                scale = torch.where(counts > 0, columns["repetition_penalty"], 1.0)
                by_node.copy_(torch.where(by_node < 0, by_node * scale, by_node / scale))
        # The token after a node at position p is output number p + 1 - prompt, counted from 0.
        additive = self._stops(options, stops, positions + 1 - options.prompt_lens[:, None])
        if additive is not None:
            by_node.add_(additive)

    def count(
        self, pool_rows: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> None:
        """Count the tokens that a step emitted.

        Args:
            pool_rows: [bs] the requests' rows of the request pool.
            tokens: [bs, F] int64, the emitted tokens.
            lengths: [bs], how many tokens of each request to count; None counts all.
        """
        place = torch.arange(tokens.shape[1], device=tokens.device)
        emitted = torch.ones_like(tokens) if lengths is None else place < lengths[:, None]
        rows = pool_rows.long()[:, None].expand_as(tokens)
        self._add(rows.flatten(), tokens.flatten(), emitted.flatten().to(torch.float32))

    def _add(self, pool_rows: torch.Tensor, tokens: torch.Tensor, amounts: torch.Tensor) -> None:
        self.counts.view(-1).scatter_add_(0, pool_rows * self._shape[1] + tokens, amounts)

    @staticmethod
    def _subtract(logits: torch.Tensor, counts: torch.Tensor, columns: dict[str, torch.Tensor]) -> None:
        logits.sub_(columns["frequency_penalty"] * counts)
        logits.sub_(columns["presence_penalty"] * (counts > 0))

    @staticmethod
    def _stops(options: Options, stops: torch.Tensor | None, emitted: torch.Tensor) -> torch.Tensor | None:
        """Return what to add to the logits so that outputs shorter than min_new_tokens do not stop.

        Args:
            options: what the batch's requests ask for.
            stops: [bs, vocabulary] from upstream's penalizers: -inf at the stop tokens. They count no token
                of this family, so they never lift it themselves.
            emitted: [bs, 1] or [bs, N, 1], output tokens so far.

        Returns:
            [bs, vocabulary] or [bs, N, vocabulary], or None if no request asks for a minimum.
        """
        if not options.minimum:
            return None
        assert stops is not None  # upstream's penalizers make it if a request asks for a minimum
        wanted = options.columns["min_new_tokens"]
        if emitted.dim() == 3:
            stops, wanted = stops[:, None], wanted[:, None]
        return torch.where(emitted < wanted, stops, 0.0)
