"""Custom logit processors at every node of a tree. Each sees its request as it is after the node's path."""

from __future__ import annotations

import copy
import dataclasses
import logging
from array import array
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from sglang.srt.constrained.dead_end import allow_token_0
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.utils.common import async_d2h, async_h2d

if TYPE_CHECKING:
    from sgl_kernel.ddtree import DraftTrees
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

logger = logging.getLogger(__name__)

REQUEST = "__req__"  # upstream's key for the request in a request's custom parameters
# In place of infinity. It stays finite when divided by 1e-6, below which a temperature means greedy.
LARGEST_LOGIT = 1e30
READ_ONLY = (
    "a custom logit processor cannot write to its request or to its parameters: DDTREE calls it for all nodes of a "
    "tree, and only one path of them is emitted"
)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    """Refuse a change that would be the state of one node only."""
    raise TypeError(READ_ONLY)


class NodeParams(dict[str, Any]):
    """The custom parameters of a request at one node. A processor can read them, but not change them."""

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse


class RequestAtNode:
    """A request after the path to a node. Reads go to a copy of the request, which the first of them makes.

    Args:
        copy_of_request: makes the copy.
    """

    __slots__ = ("_copy", "_made")

    def __init__(self, copy_of_request: Callable[[], Req]) -> None:
        object.__setattr__(self, "_copy", copy_of_request)
        object.__setattr__(self, "_made", None)

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            object.__setattr__(self, "_made", self._copy())
        return getattr(self._made, name)

    __setattr__ = __delattr__ = _refuse


class HostCopy:
    """Tensors on their way to the host.

    Args:
        tensors: tensors of one device. Writes that follow on the current stream do not change the copies.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        device = tensors[0].device
        self._done = None
        if device.type == "cpu":
            self._host = [tensor.clone() for tensor in tensors]
        else:
            self._host = [async_d2h(tensor) for tensor in tensors]
            self._done = torch.get_device_module(device).Event()
            self._done.record()
        self._lists: list[list] | None = None

    def lists(self) -> list[list]:
        """Wait for the copies, and return each tensor as a list."""
        if self._lists is None:
            if self._done is not None:
                self._done.synchronize()
            self._lists = [tensor.tolist() for tensor in self._host]
        return self._lists


class Emitted:
    """What the last forward emitted. Under overlap scheduling, the requests do not have these tokens yet.

    Args:
        reqs: the requests of the forward.
        tokens: [bs, width], the emitted tokens first.
        lengths: [bs], how many tokens each request emitted.
    """

    def __init__(self, reqs: list[Req], tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        self._rows = {req.rid: row for row, req in enumerate(reqs)}
        self._copy = HostCopy(tokens, lengths)

    def last(self, req: Req, count: int) -> list[int]:
        """Return the last `count` tokens that a request emitted, or fewer if there are not so many."""
        row = self._rows.get(req.rid)
        if row is None or count <= 0:
            return []
        tokens, lengths = self._copy.lists()
        return tokens[row][: lengths[row]][-count:]


class NodeStates:
    """What the processors of one step see.

    Args:
        reqs: the batch's requests.
        emitted: [bs], how many tokens each request has emitted, the tree's root included. On the device.
        trees: the batch's trees, or None for a forward without trees, whose only node is the root.
        last: what the forward before this one emitted.
    """

    def __init__(
        self, reqs: list[Req], emitted: torch.Tensor, trees: DraftTrees | None, last: Emitted | None
    ) -> None:
        self._reqs = reqs
        self._last = last
        tree = () if trees is None else (trees.parents, trees.tokens)
        self._copy = HostCopy(emitted, *tree)
        self._outputs: dict[int, list[array]] = {}

    def params(self, row: int, node: int, params: dict[str, Any] | None) -> NodeParams | None:
        """Return the custom parameters of a request at one node.

        Args:
            row: the request's index in the batch.
            node: the node's index in the tree.
            params: the request's custom parameters.
        """
        if not isinstance(params, dict):
            return params
        if REQUEST not in params:
            return NodeParams(params)
        at_node = RequestAtNode(lambda: self._request(row, node))
        return NodeParams(params | {REQUEST: at_node})

    def _request(self, row: int, node: int) -> Req:
        """Return a copy of a request whose output ends at a node."""
        if row not in self._outputs:
            self._outputs[row] = self._outputs_of(row)
        request = copy.copy(self._reqs[row])
        request.output_ids = self._outputs[row][node][:]
        return request

    def _outputs_of(self, row: int) -> list[array]:
        """Return a request's output at each of its nodes."""
        emitted, *tree = self._copy.lists()
        request = self._reqs[row]
        output = array("q", request.output_ids)
        if self._last is not None:
            output.extend(self._last.last(request, emitted[row] - len(output)))
        outputs = [output]
        if tree:
            parents, tokens = (lists[row] for lists in tree)
            for parent, token in zip(parents[1:], tokens[1:], strict=True):  # parents come before children
                outputs.append(outputs[parent] + array("q", [token]) if parent >= 0 else output)
        return outputs


class GuardedProcessor:
    """A custom logit processor for the nodes of one request. If it fails, the request ends with an error.

    Its logits may be NaN or infinite, or leave a node without a token, for example on a path that it has forbidden
    itself. Sampling from the NaN probabilities that follow could end the server (dead_end.py), so such logits are made
    finite or forbidden, and token 0 is allowed where no token is.

    Args:
        processor: the processor.
        req: the request.
    """

    def __init__(self, processor: CustomLogitProcessor, req: Req) -> None:
        self._processor = processor
        self._req = req

    def __call__(self, logits: torch.Tensor, params: list[NodeParams | None]) -> torch.Tensor:
        """Change logits [nodes, vocabulary] in place, and return them."""
        self._call(logits, params)
        logits.nan_to_num_(nan=-float("inf"), posinf=LARGEST_LOGIT, neginf=-float("inf"))
        allow_token_0(logits)
        return logits

    def _call(self, logits: torch.Tensor, params: list[NodeParams | None]) -> None:
        try:
            result = self._processor(logits, params)
            if result.shape != logits.shape:
                raise ValueError(f"expected logits of shape {tuple(logits.shape)}, got {tuple(result.shape)}")
        except Exception as error:
            name = type(self._processor).__name__
            message = f"custom logit processor {name}: {type(error).__name__}: {error}"
            logger.error("DDTREE: %s", message)
            self._req.to_finish = FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")
            return
        if result is not logits:
            logits.copy_(result)


class LogitProcessors:
    """Runs the requests' custom logit processors in the forwards of one worker.

    Upstream's speculative decoding calls a processor once for all positions of a batch, with one state of each request.
    Here each request has calls of its own, and every node has the state of its path. The state is on the host, so a
    processor that reads its request waits for the trees. Other processors wait for nothing.
    """

    def __init__(self) -> None:
        self._last: Emitted | None = None

    def prefill(self, batch: ScheduleBatch) -> None:
        """Before a prefill, let upstream's sampler call the processors as process() does.

        Args:
            batch: a prefill batch, or a mixed one. Its sampling_info is the copy that upstream makes for each forward.
        """
        if not _has_processors(batch):
            return
        info = batch.sampling_info
        states = NodeStates(batch.reqs, batch.seq_lens - _prompt_lens(batch), None, self._last)
        info.custom_params = [states.params(row, 0, params) for row, params in enumerate(info.custom_params)]
        info.custom_logit_processor = {
            row: dataclasses.replace(
                entry,
                processor=GuardedProcessor(entry.processor, batch.reqs[row]),
                rows=[row],
                indices=entry.indices[place : place + 1],
            )
            for entry in info.custom_logit_processor.values()
            for place, row in enumerate(entry.rows)
        }

    def states(self, batch: ScheduleBatch, drafted: Callable[[], DraftTrees]) -> NodeStates | None:
        """Begin to copy to the host what processors may read.

        Args:
            batch: a decoding batch. Its seq_lens are the prefix lengths.
            drafted: returns the batch's trees.

        Returns:
            The states, or None if no request has a processor.
        """
        if not _has_processors(batch):
            return None
        return NodeStates(batch.reqs, batch.seq_lens + 1 - _prompt_lens(batch), drafted(), self._last)

    def remember(
        self, batch: ScheduleBatch, tokens: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> None:
        """Remember what a forward emitted, until the next forward.

        Args:
            batch: the batch of the forward.
            tokens: [bs, width], or [bs] if the width is 1. The emitted tokens come first.
            lengths: [bs], how many tokens each request emitted; None: all of the width.
        """
        if not _has_processors(batch):
            self._last = None
            return
        tokens = tokens.view(len(batch.reqs), -1)
        if lengths is None:
            lengths = torch.full_like(tokens[:, 0], tokens.shape[1])
        self._last = Emitted(batch.reqs, tokens, lengths)


def _has_processors(batch: ScheduleBatch) -> bool:
    """Return whether a request of the batch has a processor."""
    return batch.sampling_info is not None and batch.sampling_info.has_custom_logit_processor


def _prompt_lens(batch: ScheduleBatch) -> torch.Tensor:
    """Return [bs] int64 on the batch's device: the lengths of the prompts."""
    return async_h2d(
        [len(req.origin_input_ids) for req in batch.reqs], dtype=torch.int64, device=batch.device
    )


def process(logits: torch.Tensor, batch: ScheduleBatch, states: NodeStates) -> None:
    """Run the custom logit processors on the target's logits, in place.

    Args:
        logits: [bs * N, vocabulary], after penalties, bias and grammar, as in plain decoding.
        batch: the batch of the step.
        states: from LogitProcessors.states().
    """
    info = batch.sampling_info
    of_requests = logits.view(len(batch.reqs), -1, logits.shape[1])
    for entry in info.custom_logit_processor.values():
        for row in entry.rows:
            params = [
                states.params(row, node, info.custom_params[row]) for node in range(of_requests.shape[1])
            ]
            GuardedProcessor(entry.processor, batch.reqs[row])(of_requests[row], params)
