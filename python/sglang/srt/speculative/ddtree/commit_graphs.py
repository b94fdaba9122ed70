"""What follows a step's verify, as one CUDA graph per batch size.

Accept, the move of the accepted KV, and the drafter's KV of the accepted path are two dozen small kernels, six of them
Triton's. The host takes longer to launch them than the device takes to run them. The target's token at each node is this
graph's input, so it serves every request: greedy or sampled, with penalties or with a grammar.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sgl_kernel.ddtree import Accepted, DraftTrees, accept_path
from sglang.srt.model_executor.runner.base_cuda_graph_runner import freeze_gc
from sglang.srt.runtime_context import get_exec

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

WARM_UP_RUNS = 2  # eager ones before a capture: Triton compiles in the first


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    outputs: torch.Tensor  # flat int64: see _views()
    path: torch.Tensor  # [bs, F] int64


class CommitGraphs:
    """Captures accept and commit for each batch size that has a verify graph, and replays them.

    Args:
        trees: the ones that the draft graph builds into, for the largest batch.
        block_size: F, the longest path.
        commit: commit(hidden, accepted, positions, slots), which moves the KV and writes the drafter's. Arguments:
            [bs * N, width], Accepted, [bs, F] int64, [bs, N] int64.
    """

    def __init__(
        self,
        *,
        trees: DraftTrees,
        block_size: int,
        commit: Callable[[torch.Tensor, Accepted, torch.Tensor, torch.Tensor], None],
    ) -> None:
        self.trees = trees
        self.block_size = block_size
        self.commit = commit
        self.target = torch.zeros_like(trees.tokens)  # [max_bs, N] int64: the graphs' input
        self._offsets = torch.arange(block_size, device=trees.tokens.device)
        self._hidden: dict[int, torch.Tensor] = {}
        self._graphs: dict[int, _Graph] = {}

    def note_hidden(
        self, runner: Any, out: LogitsProcessorOutput, forward_batch: ForwardBatch, num_tokens: int
    ) -> None:
        """Keeps the hidden states that a verify graph writes. This is the hook at the end of its capture.

        Upstream also runs it in the eager warm-ups before a capture; the capture itself comes last.
        """
        self._hidden[forward_batch.batch_size] = out.hidden_states

    def capture(self, runner: DecodeCudaGraphRunner) -> None:
        """Captures a graph for each verify graph.

        Args:
            runner: the target's, after its captures.
        """
        # Not upstream's pool, from which an eager prefill may borrow between replays.
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        with freeze_gc(get_exec().graph.enable_cudagraph_gc):
            for bs, hidden in sorted(self._hidden.items(), reverse=True):
                path = self.trees.tokens.new_zeros(bs, self.block_size)
                outputs = self.trees.tokens.new_zeros(bs * (self.block_size + 3))
                buffers = runner.buffers
                run = partial(
                    self._run, bs, hidden, path, outputs, buffers.seq_lens[:bs], buffers.out_cache_loc
                )
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(WARM_UP_RUNS):
                        run()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    run()
                self._graphs[bs] = _Graph(graph, outputs, path)

    def _run(
        self,
        bs: int,
        hidden: torch.Tensor,
        path: torch.Tensor,
        outputs: torch.Tensor,
        seq_lens: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        trees = self.trees.first(bs)
        tokens, lengths, bonus, new_seq_lens = self._views(outputs)
        accepted = Accepted(path=path, tokens=tokens, lengths=lengths, bonus=bonus)
        accept_path(trees, self.target[:bs], accepted)
        torch.add(seq_lens, lengths, out=new_seq_lens)
        num_nodes = trees.tokens.shape[1]
        self.commit(
            hidden,
            accepted,
            seq_lens[:, None] + self._offsets,
            slots[: bs * num_nodes].view(bs, num_nodes),
        )

    def _views(self, outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Splits a graph's results: tokens, lengths, bonus tokens, new prefix lengths. One tensor is one copy."""
        bs = outputs.numel() // (self.block_size + 3)
        tokens, bonus, new_seq_lens, lengths = outputs.split([bs * self.block_size, bs, bs, bs])
        return tokens.view(bs, -1), lengths.view(torch.int32)[:bs], bonus, new_seq_lens

    def replay(self, bs: int, padded_bs: int) -> tuple[Accepted, torch.Tensor]:
        """Accept and commit the step whose verify graph ran last.

        Args:
            bs: requests. The target's tokens are in target[:bs].
            padded_bs: requests of the verify graph; the others are padding.

        Returns:
            What was accepted, and [bs] int64, the new prefix lengths. All but the path are copies: the next replay
            overwrites the graph's own results while the host may still read these.
        """
        graph, outputs, path = self._graphs[padded_bs]
        graph.replay()
        tokens, lengths, bonus, new_seq_lens = (view[:bs] for view in self._views(outputs.clone()))
        return Accepted(path=path[:bs], tokens=tokens, lengths=lengths, bonus=bonus), new_seq_lens
