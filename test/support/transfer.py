"""A stand-in for Mooncake's transfer engine, which has no build for every host: it moves the bytes over TCP.

Everything else of a disaggregated pair of engines is upstream's: the bootstrap server, the managers of both sides and
their messages.
"""

from __future__ import annotations

import ctypes
import os
import socket
import socketserver
import struct
import sys
import threading
from types import ModuleType

HOST = "127.0.0.1"
HEADER = struct.Struct("<QQ")  # address and length of what follows
DONE = b"\0"  # the answer to a length of 0


def _copy(target: int, source: int, length: int) -> None:
    """Copy memory of the host, or of the GPU in a process that uses one."""
    import torch

    if not torch.cuda.is_initialized():
        ctypes.memmove(target, source, length)
        return
    from cuda.bindings import runtime

    (status,) = runtime.cudaMemcpy(target, source, length, runtime.cudaMemcpyKind.cudaMemcpyDefault)
    if status != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"cudaMemcpy of {length} bytes: {status}")


class _Writes(socketserver.StreamRequestHandler):
    """Writes what arrives on a connection to the addresses of this process that come with it."""

    def handle(self) -> None:
        while header := self.rfile.read(HEADER.size):
            address, length = HEADER.unpack(header)
            if length:
                data = ctypes.create_string_buffer(self.rfile.read(length), length)
                _copy(address, ctypes.addressof(data), length)
            else:
                self.wfile.write(DONE)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 64


class TransferEngine:
    """The methods of mooncake.engine.TransferEngine that upstream calls to move KV."""

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int:
        self._server = _Server((HOST, 0), _Writes)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        return self._server.server_address[1]

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        return 0

    def batch_transfer_sync_write(
        self, session: str, sources: list[int], targets: list[int], lengths: list[int]
    ) -> int:
        """Copy memory of this process to addresses of another one. Return when it is there."""
        host, _, port = session.rpartition(":")
        with socket.create_connection((host, int(port))) as peer:
            for source, target, length in zip(sources, targets, lengths, strict=True):
                data = ctypes.create_string_buffer(length)
                _copy(ctypes.addressof(data), source, length)
                peer.sendall(HEADER.pack(target, length) + data.raw)
            peer.sendall(HEADER.pack(0, 0))
            return 0 if peer.recv(1) == DONE else -1


def install() -> None:
    """Let upstream find this engine as Mooncake's. Call it before the engine of a server is made."""
    module = ModuleType("mooncake.engine")
    module.TransferEngine = TransferEngine  # type: ignore[attr-defined]
    sys.modules |= {"mooncake": ModuleType("mooncake"), "mooncake.engine": module}
    os.environ["SGLANG_HOST_IP"] = HOST
    import torch
    from sglang.srt.disaggregation.mooncake import MooncakeKVSender

    if not torch.cuda.is_available():
        MooncakeKVSender.supports_host_tensor_indices = False  # they come with a CUDA event
