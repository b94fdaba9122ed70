"""Requests that arrive from a prefill server."""

import unittest
from types import SimpleNamespace

import torch
from sglang.srt.speculative.ddtree.disaggregation import draft_input_of_arrived, take_arrived
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=12, suite="unit")


class Request:
    """Like upstream's, it is compared by identity."""


class Relay:
    def __init__(self):
        self.given = []

    def publish(self, rows, lens):
        self.given.append((rows.tolist(), lens.tolist()))

    def stash(self, rows, payload):
        self.given.append((rows.tolist(), payload.bonus_tokens.tolist()))


def batch_of(requests, enable_overlap):
    rows = torch.arange(len(requests)) + 5
    return SimpleNamespace(
        reqs=requests, seq_lens=rows * 10, req_pool_indices=rows, enable_overlap=enable_overlap
    )


class TestArrived(CustomTestCase):
    def test_each_request_is_taken_once(self):
        first, second, other = Request(), Request(), Request()
        draft_input_of_arrived(batch_of([first, second], False), torch.tensor([3, 4]), Relay())
        self.assertEqual(take_arrived([other, first]), [(1, first)])
        self.assertEqual(take_arrived([second, other, first]), [(0, second)])
        self.assertEqual(take_arrived([second, other, first]), [])
        draft_input_of_arrived(batch_of([first], False), torch.tensor([3]), Relay())  # resumes
        self.assertEqual(take_arrived([second, first]), [(1, first)])

    def test_the_scheduler_gets_dflashs_input(self):
        algorithm = SpeculativeAlgorithm.from_string("DDTREE")
        for overlap, given in ((False, []), (True, [([5, 6], [50, 60]), ([5, 6], [3, 4])])):
            relay, batch = Relay(), batch_of([Request(), Request()], overlap)
            found = algorithm.build_disagg_draft_input(batch, torch.tensor([3, 4]), relay)
            self.assertEqual(found.bonus_tokens.tolist(), [3, 4])
            self.assertEqual(relay.given, given)


if __name__ == "__main__":
    unittest.main()
