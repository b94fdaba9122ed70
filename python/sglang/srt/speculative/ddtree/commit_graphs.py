"""What follows a step's verify, as one CUDA graph per verify graph.

Accept, the move of the accepted KV, and the drafter's KV of the accepted path are two dozen small kernels, six of them
Triton's. The host takes longer to launch them than the device takes to run them. The target's token at each node is this
graph's input, so it serves every request: greedy or sampled, with penalties or with a grammar.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
    from sglang.srt.speculative.ddtree.expectation import Expectation

WARM_UP_RUNS = 2  # eager ones before a capture: Triton compiles in the first


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    outputs: torch.Tensor  # flat int64: see _views()
    path: torch.Tensor  # [bs, F] int64


Commit = Callable[[torch.Tensor, Accepted, torch.Tensor, torch.Tensor, torch.Tensor], None]


class CommitGraphs:
    """Captures accept and commit for each verify graph, and replays them.

    Args:
        trees: the ones that the draft graph builds into, for the largest batch and of the widest verify.
        slots: [max_bs, N of the widest verify] int64, of each request's window.
        block_size: F, the longest path.
        commit: DDTreeWorker.commit().
        expectation: counts accepted nodes; None: nothing counts them.
    """

    def __init__(
        self,
        *,
        trees: DraftTrees,
        slots: torch.Tensor,
        block_size: int,
        commit: Commit,
        expectation: Expectation | None = None,
    ) -> None:
        self.expectation = expectation
        self.trees = trees
        self.slots = slots
        self.block_size = block_size
        self.commit = commit
        self._target = trees.tokens.new_zeros(trees.tokens.numel())
        self._offsets = torch.arange(block_size, device=trees.tokens.device)
        # By N and batch size.
        self._hidden: dict[tuple[int, int], torch.Tensor] = {}
        self._graphs: dict[tuple[int, int], _Graph] = {}

    def target(self, bs: int, num_nodes: int) -> torch.Tensor:
        """Return the input of the graphs: [bs, N] int64, the target's token at each node."""
        return self._target[: bs * num_nodes].view(bs, num_nodes)

    def note_hidden(
        self, runner: Any, out: LogitsProcessorOutput, forward_batch: ForwardBatch, num_tokens: int
    ) -> None:
        """Keep the hidden states that a verify graph writes. This is the hook at the end of its capture.

        Upstream also runs it in the eager warm-ups before a capture; the capture itself comes last.
        """
        bs = forward_batch.batch_size
        self._hidden[num_tokens // bs, bs] = out.hidden_states

    def capture(self, runners: dict[int, DecodeCudaGraphRunner]) -> None:
        """Capture a graph for each verify graph.

        Args:
            runners: the target's, after their captures, by N.
        """
        # Not upstream's pool, from which an eager prefill may borrow between replays.
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        with freeze_gc(get_exec().graph.enable_cudagraph_gc):
            for (num_nodes, bs), hidden in sorted(self._hidden.items(), reverse=True):
                path = self.trees.tokens.new_zeros(bs, self.block_size)
                outputs = self.trees.tokens.new_zeros(bs * (self.block_size + 3))
                run = partial(self._run, bs, hidden, path, outputs, runners[num_nodes].buffers)
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(WARM_UP_RUNS):
                        run()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    run()
                self._graphs[num_nodes, bs] = _Graph(graph, outputs, path)

    def _run(
        self, bs: int, hidden: torch.Tensor, path: torch.Tensor, outputs: torch.Tensor, buffers: Any
    ) -> None:
        """Accept and commit.

        Args:
            bs: requests.
            hidden: [bs * N, width], as the verify graph left it.
            path, outputs: of _Graph.
            buffers: inputs of the verify graph: its nodes' tokens and slots, and the prefix lengths.
        """
        num_nodes = hidden.shape[0] // bs
        shape = bs, num_nodes
        seq_lens = buffers.seq_lens[:bs]
        trees = self.trees.first(bs)
        if num_nodes < trees.tokens.shape[1]:  # accept_path() reads no more of a tree than this
            parents = trees.parents[:, :num_nodes].contiguous()
            if num_nodes == 1:
                parents = torch.full_like(parents, -1)  # no draft has built these trees
            trees = replace(trees, tokens=buffers.input_ids[: bs * num_nodes].view(shape), parents=parents)
        tokens, lengths, bonus, new_seq_lens = self._views(outputs)
        accepted = Accepted(path=path, tokens=tokens, lengths=lengths, bonus=bonus)
        accept_path(trees, self.target(*shape), accepted)
        torch.add(seq_lens, lengths, out=new_seq_lens)
        if self.expectation is not None and num_nodes > 1:
            rows = buffers.req_pool_indices[:bs]
            self.expectation.count(self.trees.first(bs), accepted, rows, num_nodes)
        self.commit(
            hidden,
            accepted,
            seq_lens[:, None] + self._offsets,
            buffers.out_cache_loc[: bs * num_nodes].view(shape),
            self.slots[:bs, : self.block_size],
        )

    def _views(self, outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split a graph's results: tokens, lengths, bonus tokens, prefix lengths. One tensor needs only one copy."""
        bs = outputs.numel() // (self.block_size + 3)
        tokens, bonus, new_seq_lens, lengths = outputs.split([bs * self.block_size, bs, bs, bs])
        return tokens.view(bs, -1), lengths.view(torch.int32)[:bs], bonus, new_seq_lens

    def replay(self, bs: int, padded_bs: int, num_nodes: int) -> tuple[Accepted, torch.Tensor]:
        """Accept and commit the step whose verify graph ran last.

        Args:
            bs: requests. The target's tokens are in target(bs, num_nodes).
            padded_bs: requests of the verify graph; the others are padding.
            num_nodes: N of the verify graph.

        Returns:
            What was accepted, and [bs] int64, the new prefix lengths. All but the path are copies: the next replay
            overwrites the graph's own results while the host may still read these.
        """
        graph, outputs, path = self._graphs[num_nodes, padded_bs]
        graph.replay()
        tokens, lengths, bonus, new_seq_lens = (view[:bs] for view in self._views(outputs.clone()))
        return Accepted(path=path[:bs], tokens=tokens, lengths=lengths, bonus=bonus), new_seq_lens
