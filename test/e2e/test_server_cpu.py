"""The server of the installed wheel on a CPU, with the demo model, without speculation."""

import json
import os
import unittest
import urllib.error
import urllib.request

from sglang.srt.utils import kill_process_tree
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase, popen_launch_server

from tools import demo_model
from tools.serve import QUESTION

register_cpu_ci(est_time=150, suite="e2e")

PORT = int(os.environ.get("SGLANG_TEST_PORT", "21090"))
URL = f"http://127.0.0.1:{PORT}"


def request(path, body=None, timeout=300):
    """Send GET, or POST if there is a `body` (as JSON). Return the open response."""
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(
        urllib.request.Request(URL + path, data, {"Content-Type": "application/json"}), timeout=timeout
    )


class TestServerCpu(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        folder = demo_model.prepare(demo_model.default_folder())
        cls.model = folder.name
        # Neither SGLANG_USE_CPU_ENGINE nor --device: the server must find the CPU engine itself.
        environment = {k: v for k, v in os.environ.items() if k != "SGLANG_USE_CPU_ENGINE"}
        os.environ.clear()
        os.environ.update(environment)
        cls.process = popen_launch_server(
            str(folder),
            URL,
            timeout=300,
            other_args=["--served-model-name", cls.model, "--enable-metrics", "--max-total-tokens", "8192"],
            device="none",  # popen_launch_server adds --device only for "auto"
        )

    @classmethod
    def tearDownClass(cls):
        if hasattr(cls, "process"):
            kill_process_tree(cls.process.pid)

    def chat(self, **further):
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": 0,
            "max_tokens": 64,
            **further,
        }

    def test_health(self):
        with request("/health") as response:
            self.assertEqual(response.status, 200)

    def test_chat_completion_is_sensible(self):
        with request("/v1/chat/completions", self.chat()) as response:
            answer = json.load(response)
        text = answer["choices"][0]["message"]["content"]
        self.assertIn("def ", text)
        self.assertIn("fib", text.lower())
        self.assertGreater(answer["usage"]["completion_tokens"], 20)

    def test_stream_gives_the_same_text(self):
        with request("/v1/chat/completions", self.chat(max_tokens=24)) as response:
            whole = json.load(response)["choices"][0]["message"]["content"]
        pieces = []
        with request("/v1/chat/completions", self.chat(max_tokens=24, stream=True)) as response:
            lines = [line.decode().strip() for line in response if line.strip()]
        self.assertEqual(lines[-1], "data: [DONE]")
        for line in lines[:-1]:
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                pieces.append(choice["delta"].get("content") or "")
        self.assertGreater(len(pieces), 5)
        self.assertEqual("".join(pieces), whole)

    def test_responses_api_answers(self):
        body = {"model": self.model, "input": QUESTION, "temperature": 0, "max_output_tokens": 32}
        with request("/v1/responses", body) as response:
            answer = json.load(response)
        self.assertIn("def ", answer["output"][0]["content"][0]["text"])

    def test_generate_continues_the_prompt(self):
        body = {
            "text": "The capital of France is",
            "sampling_params": {"temperature": 0, "max_new_tokens": 8},
        }
        with request("/generate", body) as response:
            answer = json.load(response)
        self.assertIn("Paris", answer["text"])
        self.assertEqual(answer["meta_info"]["completion_tokens"], 8)

    def test_metrics_count_what_was_generated(self):
        with request(
            "/generate", {"text": "One, two,", "sampling_params": {"max_new_tokens": 4}}
        ) as response:
            response.read()
        with request("/metrics") as response:
            metrics = response.read().decode()
        counted = [
            float(line.rpartition(" ")[2])
            for line in metrics.splitlines()
            if line.startswith("sglang:generation_tokens_total")
        ]
        self.assertGreaterEqual(sum(counted), 4)

    def test_bad_request_is_refused_with_a_reason(self):
        with self.assertRaises(urllib.error.HTTPError) as refused:
            request("/v1/chat/completions", self.chat(temperature=-1))
        self.assertEqual(refused.exception.code, 400)
        self.assertIn("temperature", refused.exception.read().decode())


if __name__ == "__main__":
    unittest.main()
