"""Frequency, presence and repetition penalties and min_new_tokens, exact at every row of a tree."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from sglang.srt.utils.common import async_h2d

# Logits that are penalized or sampled in one go. Penalizing takes about five times their float32 size for a moment,
# sampling up to twelve (808 MB on an H200, top-p in torch). All of a large batch's would be gigabytes, which a server with a
# full KV pool does not have.
LOGITS_AT_ONCE = 1 << 24


@dataclass
class Options:
    """What the requests of a batch ask for.

    Attributes:
        columns: [b, 1] float32 on the device, by the name of the sampling parameter.
        prompt_lens: [b, 1] int64 on the device.
        asking: which requests ask for any, on the host.
        frequency, presence, repetition, minimum: whether any request asks for it.
    """

    columns: dict[str, torch.Tensor]
    prompt_lens: torch.Tensor
    asking: list[int]
    frequency: bool
    presence: bool
    repetition: bool
    minimum: bool

    NEUTRAL = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }

    @classmethod
    def of(cls, reqs: list, device) -> Options | None:
        """The options of a batch's requests; None if none of them asks for any. Waits for nothing."""
        values = [[getattr(req.sampling_params, name) for req in reqs] for name in cls.NEUTRAL]
        asked = [[v != neutral for v in row] for row, neutral in zip(values, cls.NEUTRAL.values())]
        used = [any(row) for row in asked]
        if not any(used):
            return None
        asking = [i for i, any_of in enumerate(zip(*asked)) if any(any_of)]
        table = async_h2d(values, dtype=torch.float32, device=device)
        prompts = async_h2d([len(req.origin_input_ids) for req in reqs], dtype=torch.int64, device=device)
        return cls(dict(zip(cls.NEUTRAL, table.unsqueeze(-1))), prompts[:, None], asking, *used)

    def of_requests(self, part: slice | torch.Tensor) -> Options:
        """The options of some of the requests, chosen by a slice or an index; `asking` stays that of the batch."""
        columns = {name: column[part] for name, column in self.columns.items()}
        return replace(self, columns=columns, prompt_lens=self.prompt_lens[part])


class OutputPenalties:
    """Penalizes each row's logits for the output up to it: what the request has emitted, and the nodes of its path.

    Definition (SGLang 0.5.23, `penaltylib`, without overlap scheduling): with c the number of times that a token is in
    the output, a logit x becomes y = x - frequency * c - presence * [c > 0], and then, if c > 0, y * repetition where
    y < 0 and y / repetition elsewhere. Stop tokens are impossible while the output is shorter than min_new_tokens.

    Upstream's own counts are the scheduler's, which takes up one token a step, a step late under overlap scheduling, and
    none at all for the DFLASH family. These are kept where tokens are accepted, in the order of the forward stream: a
    request's row is set from its output when it is prefilled (again, after a retraction), and raised by each step.

    Args:
        requests: rows of the request pool.
        vocabulary: of the logits.
        device: of the counts; requests * vocabulary * 4 bytes of it, from the first request that needs them on.
    """

    def __init__(self, requests: int, vocabulary: int, device):
        self._shape = requests, vocabulary
        self._device = device
        self._counts = None  # [requests, vocabulary] float32

    def options(self, reqs: list) -> Options | None:
        """See Options.of()."""
        found = Options.of(reqs, self._device)
        if found is not None and self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
        return found

    def begin(self, batch) -> Options | None:
        """Before a prefill: counts the output that its requests start from, and hands the sampler what follows from it.

        Args:
            batch: of a prefill or a mixed one, whose running requests keep their counts; its sampling_info is the copy
                that upstream makes for each forward.

        Returns:
            The options, if any; then count() is due after the forward.
        """
        options = self.options(batch.reqs)
        if options is None:
            return None
        running = {id(req) for req in batch.decoding_reqs or ()}
        started = [(row, req) for row, req in enumerate(batch.reqs) if id(req) not in running]
        pool_rows = batch.req_pool_indices.long()
        fresh = async_h2d([row for row, _ in started], dtype=torch.int64, device=self._device)
        self._counts.index_fill_(0, pool_rows[fresh], 0.0)
        info = batch.sampling_info
        output = [(row, token) for row, req in started for token in req.output_ids]
        if not output and not running:
            # No token to penalize yet, and all may need their minimum: upstream's own are right. Its scale is 1
            # everywhere, and applying it compiles a kernel.
            info.acc_scaling_penalties = None
            return options
        if output:
            rows, tokens = async_h2d(list(zip(*output)), dtype=torch.int64, device=self._device)
            self._add(pool_rows[rows], tokens, torch.ones(len(output), device=self._device))
        counts = self._counts[pool_rows]
        emitted = batch.seq_lens[:, None].long() - options.prompt_lens
        additive = self._stops(options, info.acc_additive_penalties, emitted)
        info.acc_additive_penalties = torch.zeros_like(counts) if additive is None else additive
        self._subtract(info.acc_additive_penalties, counts, options.columns)
        if options.repetition:
            info.acc_scaling_penalties = torch.where(counts > 0, options.columns["repetition_penalty"], 1.0)
        return options

    def apply(self, logits, options: Options, sampling_info, pool_rows, trees, positions) -> None:
        """Penalizes the target's logits at every row of the trees, in place; those of requests that ask for it.

        Args:
            logits: [b * N, vocabulary].
            options: of the batch.
            sampling_info: of the batch.
            pool_rows: [b] of the request pool.
            trees: of b requests; the root's token is output already, and counted.
            positions: [b * N] int64, of the rows.
        """
        b, rows = trees.tokens.shape
        each = logits.view(b, rows, -1)
        positions = positions.view(b, rows, 1)
        stops = sampling_info.acc_additive_penalties
        at_once = max(1, LOGITS_AT_ONCE // (rows * each.shape[2]))
        count = len(options.asking)
        index = None if count == b else async_h2d(options.asking, dtype=torch.int64, device=self._device)
        for first in range(0, count, at_once):
            part = slice(first, first + at_once)
            part = part if index is None else index[part]
            chosen = each[part]
            self._apply(
                chosen,
                options.of_requests(part),
                None if stops is None else stops[part],
                pool_rows[part],
                trees.tokens[part],
                trees.ancestors[part],
                positions[part],
            )
            if index is not None:  # then it is a copy
                each[part] = chosen

    def _apply(self, each, options: Options, stops, pool_rows, tokens, ancestors, positions) -> None:
        """apply() for some of the requests: each [b, N, vocabulary], positions [b, N, 1]."""
        rows = tokens.shape[1]
        columns = {name: column[:, None] for name, column in options.columns.items()}
        if options.frequency or options.presence or options.repetition:
            node = torch.arange(rows, device=each.device)
            on_path = (ancestors[:, :, node // 64] >> (node % 64)) & 1  # [b, row, node]
            counts = self._counts[pool_rows.long()][:, None].repeat(1, rows, 1)
            nodes = tokens[:, None, 1:].expand(-1, rows, -1)
            counts.scatter_add_(2, nodes, on_path[:, :, 1:].to(counts.dtype))
            self._subtract(each, counts, columns)
            if options.repetition:
                scale = torch.where(counts > 0, columns["repetition_penalty"], 1.0)
                each.copy_(torch.where(each < 0, each * scale, each / scale))
        # The token after a row at position p is output number p + 1 - prompt, from 0.
        additive = self._stops(options, stops, positions + 1 - options.prompt_lens[:, None])
        if additive is not None:
            each.add_(additive)

    def count(
        self, pool_rows: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> None:
        """Takes up the tokens that a step emitted.

        Args:
            pool_rows: [b] of the request pool.
            tokens: [b, D] int64.
            lengths: [b] how many of them; all by default.
        """
        depth = torch.arange(tokens.shape[1], device=tokens.device)
        emitted = torch.ones_like(tokens) if lengths is None else depth < lengths[:, None]
        rows = pool_rows.long()[:, None].expand_as(tokens)
        self._add(rows.flatten(), tokens.flatten(), emitted.flatten().to(torch.float32))

    def _add(self, pool_rows, tokens, amounts) -> None:
        self._counts.view(-1).scatter_add_(0, pool_rows * self._shape[1] + tokens, amounts)

    @staticmethod
    def _subtract(logits, counts, columns) -> None:
        logits.sub_(columns["frequency_penalty"] * counts)
        logits.sub_(columns["presence_penalty"] * (counts > 0))

    @staticmethod
    def _stops(options: Options, stops: torch.Tensor | None, emitted: torch.Tensor) -> torch.Tensor | None:
        """What is added to the logits so that outputs of fewer than min_new_tokens do not stop.

        Args:
            stops: [b, vocabulary], what upstream's penalizers accumulate: -inf at the stop tokens, since they have seen
                no token of this family's.
            emitted: [b, 1] or [b, N, 1], output tokens before.
        """
        if not options.minimum:
            return None
        wanted = options.columns["min_new_tokens"]
        if emitted.dim() == 3:
            stops, wanted = stops[:, None], wanted[:, None]
        return torch.where(emitted < wanted, stops, 0.0)
