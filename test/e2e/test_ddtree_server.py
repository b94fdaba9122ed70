"""A DDTREE server over HTTP on a CPU."""

import unittest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from support.server import ServerChecks

register_cpu_ci(est_time=135, suite="e2e")


class TestDDTreeServer(ServerChecks, CustomTestCase):
    pass


if __name__ == "__main__":
    unittest.main()
