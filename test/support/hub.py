"""A stand-in for the hub, on a port of this host."""

from __future__ import annotations

import http.server
import threading
import unittest
from unittest import mock


class FakeHub:
    """Answers as the hub does. The name of a repository says why one cannot read it; "there" has files of SIZE bytes.

    Args:
        case: the test during which huggingface_hub asks this hub and finds nothing in its cache.

    Attributes:
        asked: the paths that were asked for.
        cache: the mock of try_to_load_from_cache().
        url: the address of the hub.
    """

    SIZE = 12345
    answers = {"there": (200, ""), "gated": (403, "GatedRepo"), "missing": (401, "RepoNotFound"), "empty": (404, "EntryNotFound"),
               "revision": (404, "RevisionNotFound"), "broken": (500, "")}  # fmt: skip

    def __init__(self, case: unittest.TestCase) -> None:
        self.asked: list[str] = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.asked.append(self.path)
                status, code = hub.answers[self.path.split("/")[2]]
                self.send_response(status)
                self.send_header("X-Error-Code", code)
                if status == 200:
                    self.send_header("ETag", "tag")
                    self.send_header("X-Repo-Commit", "0" * 40)
                    self.send_header("Content-Length", str(hub.SIZE))
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        case.addCleanup(server.server_close)
        case.addCleanup(server.shutdown)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        self.cache = case.enterContext(
            mock.patch("huggingface_hub.try_to_load_from_cache", return_value=None)
        )
        case.enterContext(
            mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        )  # the suite runs offline
        case.enterContext(
            mock.patch(
                "huggingface_hub.hf_hub_url",
                lambda name, file, revision: f"{self.url}/{name}/resolve/{revision or 'main'}/{file}",
            )
        )
