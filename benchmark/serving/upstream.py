"""Runs upstream's two benchmarks of a server in this process, because their imports take longer than a run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PAUSE = 0.02  # seconds before a run; upstream's is one second
SERVING = (
    "output_throughput", "median_tpot_ms", "p99_tpot_ms", "median_ttft_ms", "mean_e2e_latency_ms", "accept_length",
    "duration",
)  # fmt: skip


class Upstream:
    """Upstream's benchmarks, with one model's tokenizer and one set of prompts.

    Args:
        model: folder with the tokenizer.
        prompts: JSON, a list of token ids per prompt.
        folder: for the files that upstream reads and writes.
    """

    def __init__(self, model: str, prompts: Path, folder: Path):
        from sglang.benchmark import one_batch_server, serving

        self._serving, self._one_batch = serving, one_batch_server
        # Upstream reads the tokenizer twice in each run.
        serving.get_tokenizer = functools.cache(serving.get_tokenizer)
        serving.check_chat_template = functools.cache(serving.check_chat_template)
        serving.asyncio = SimpleNamespace(**vars(asyncio) | dict(sleep=lambda _: asyncio.sleep(PAUSE)))
        self.model = model
        self.tokenizer = serving.get_tokenizer(model)
        self.available = 0
        self._dataset, self._output = folder / "prompts.jsonl", folder / "result.jsonl"
        with self._dataset.open("w") as file:
            for prompt in json.loads(prompts.read_text()):
                turns = [{"content": self.tokenizer.decode(prompt)}, {"content": "an answer of any length"}]
                file.write(json.dumps({"conversations": turns}) + "\n")
                self.available += 1

    def serving(
        self, url: str, *, requests: int, concurrency: int, tokens: int, temperature: float, seed: int
    ) -> dict[str, Any]:
        """Run `sglang.benchmark.serving`: requests that stream, each client sends the next when one is answered.

        Args:
            url: of the server. Its prefix cache is emptied first.
            requests: to send.
            concurrency: requests at once.
            tokens: of an answer. The end of the text does not end it.
            temperature: of all requests.
            seed: decides which prompts are taken.

        Returns:
            The fields SERVING of upstream's result.

        Raises:
            RuntimeError: a request failed.
        """
        self._output.unlink(missing_ok=True)
        before, sys.argv = sys.argv, [
            "serving", "--backend", "sglang", "--base-url", url, "--model", self.model, "--tokenizer", self.model,
            "--dataset-name", "custom", "--dataset-path", str(self._dataset), "--num-prompts", str(requests),
            "--sharegpt-output-len", str(tokens), "--max-concurrency", str(concurrency), "--seed", str(seed),
            "--temperature", str(temperature), "--disable-tqdm", "--warmup-requests", "0", "--flush-cache",
            "--ready-check-timeout-sec", "0", "--output-file", str(self._output),
        ]  # fmt: skip
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self._serving.cli_main()
        finally:
            sys.argv = before
        found = json.loads(self._output.read_text())
        if found["completed"] != requests:
            raise RuntimeError(f"{url}: expected {requests} answers, got {found['completed']}")
        return {field: found[field] for field in SERVING}

    def one_batch(
        self, url: str, *, concurrency: int, tokens: int, temperature: float, seed: int
    ) -> dict[str, Any]:
        """Run `sglang.benchmark.one_batch_server`: one batch in one call.

        Args:
            url: of the server. Its prefix cache is emptied first.
            concurrency: prompts of the batch.
            tokens: of an answer. The end of the text does not end it.
            temperature: of all requests.
            seed: decides which prompts are taken.

        Returns:
            `output_throughput` (after the last prompt's first token), `accept_length` and `duration`.

        Raises:
            RuntimeError: a request failed.
        """
        random.seed(seed)
        with contextlib.redirect_stdout(io.StringIO()):
            found = self._one_batch.run_one_case(
                url, concurrency, 0, tokens, temperature, ignore_eos=True, return_logprob=False, stream_interval=1,
                input_len_step_percentage=0.0, run_name="", result_filename="", tokenizer=self.tokenizer,
                dataset_name="custom", dataset_path=str(self._dataset),
            )  # fmt: skip
        length = found.acc_length if found.acc_length > 0 else None
        return dict(output_throughput=found.output_throughput, accept_length=length, duration=found.latency)
