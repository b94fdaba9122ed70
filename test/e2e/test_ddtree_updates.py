"""A weight update of the target leaves the drafter alone, whichever of upstream's calls makes it."""

import unittest
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.utils import MultiprocessingSerializer
from sglang.test.ci.ci_register import register_cpu_ci
from support.cases import DDTreeCase
from support.jobs import greedy
from support.processes import run_engine

register_cpu_ci(est_time=40, suite="e2e")


class Updates:
    """Updates an engine's target with its own weights, in each of the four ways."""

    def __init__(self, engine):
        self.manager = engine.scheduler.weight_updater
        self.path = engine.args.model_path
        self.weights = list(load_file(Path(self.path) / "model.safetensors").items())
        # Now, because upstream's first update replaces the pickling of tensors, and the new one needs CUDA.
        # A payload can be read once.
        self.payloads = [MultiprocessingSerializer.serialize(self.weights) for _ in range(2)]

    def disk(self):
        return self.manager.update_weights_from_disk(
            UpdateWeightFromDiskReqInput(model_path=self.path, load_format="auto")
        )

    def tensor(self, selector="all"):
        self.manager.begin_weight_update(BeginWeightUpdateReqInput(selector=selector))
        answer = self.manager.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(serialized_named_tensors=[self.payloads.pop()], selector=selector)
        )
        self.manager.end_weight_update(EndWeightUpdateReqInput())
        return answer

    def distributed(self, selector="all"):
        """The broadcast is replaced: nobody sends one."""
        self.manager.begin_weight_update(BeginWeightUpdateReqInput(selector=selector))
        request = UpdateWeightsFromDistributedReqInput(names=[], dtypes=[], shapes=[], selector=selector)
        with mock.patch.object(
            WeightUpdater, "receive_weights_from_distributed", lambda *_, **__: self.weights
        ):
            answer = self.manager.update_weights_from_distributed(request)
        self.manager.end_weight_update(EndWeightUpdateReqInput())
        return answer

    def ipc(self):
        """The checkpoint engine is replaced by a plain load: it needs CUDA."""

        def load(updater, request):
            return updater.load_weights_from_distributed(self.weights)

        with mock.patch.object(WeightUpdater, "update_weights_from_ipc", load):
            return self.manager.update_weights_from_ipc(UpdateWeightsFromIPCReqInput(zmq_handles={}))


def update_in_every_way(engine):
    """Return, for each way: whether it succeeded, whether target and drafter have changed, and the steps."""
    drafter = engine.scheduler.draft_worker.draft_model
    target = engine.scheduler.tp_worker.model_runner.model
    updates = Updates(engine)
    before = [weight.clone() for weight in drafter.parameters()]
    found = {"before": (True, False, False, greedy(engine).steps)}
    for way in ("disk", "tensor", "distributed", "ipc"):
        with torch.no_grad():
            target.model.norm.weight.add_(1)  # the update is to undo this
        answer = getattr(updates, way)()
        ruined = bool((target.model.norm.weight != 1).any())
        changed = any(not torch.equal(*pair) for pair in zip(before, drafter.parameters()))
        found[way] = (answer.success, ruined, changed, greedy(engine).steps)
    named = [updates.tensor("draft"), updates.distributed("draft")]
    changed = any(not torch.equal(*pair) for pair in zip(before, drafter.parameters()))
    return found, [(answer.success, answer.message) for answer in named], changed


class TestUpdates(DDTreeCase):
    def test_the_drafter_stays(self):
        found, named, changed = run_engine(self.tree, update_in_every_way)
        for way, outcome in found.items():
            with self.subTest(way):
                self.assertEqual(outcome, found["before"])
        for success, message in named:
            self.assertFalse(success)
            self.assertIn("DDTREE does not update the drafter's weights", message)
        self.assertFalse(changed)


if __name__ == "__main__":
    unittest.main()
