"""TensorFlow Federated's runtime: the C++ worker that computes, and its life.

TFF's own manager leaves its worker behind on every kind of exit. Here the kernel ends the worker
when this process dies, however that dies, and ``Engine.close`` ends it before that.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfdist.compat import import_tensorflow_federated
from tfdist.errors import EngineMissingError, LaunchError
from tfdist.topology.loopback import Loopback

# Sets PR_SET_PDEATHSIG to SIGKILL, which survives exec; the parent may be dead by then already.
_DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "if os.getppid() != int(sys.argv[1]): os._exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)
_START_TIMEOUT_S = 60.0
_GRACE_S = 5.0
_POLL_S = 0.02
_MAX_MESSAGE_BYTES = 2_000_000_000
# Deaths of the worker within one call: the next try would end as these did.
_MOST_DEATHS = 3


def import_tff() -> Any:
    """Returns the module ``tensorflow_federated``.

    Raises:
        EngineMissingError: it is not installed.
    """
    try:
        return import_tensorflow_federated()
    except ImportError as error:
        raise EngineMissingError(
            "strategy 'federated' must have tensorflow-federated installed",
            received=f"an error: {error}",
            mend="Run tfdist install federated",
        ) from error


class Engine:
    """One worker process, started when a computation first needs it and anew should it die.

    Args:
        secure: computes secure sums as TFF's test backend does: the same numbers, in the open.
    """

    def __init__(self, *, secure: bool = False) -> None:
        is_first = "tensorflow_federated" not in sys.modules
        self._tff = import_tff()
        binary = Path(self._tff.__file__).parent / "data" / "worker_binary"
        if not binary.is_file():
            raise EngineMissingError(
                "tensorflow-federated must have its worker_binary",
                received=f"none at {binary}",
                mend="Install the wheel for this platform",
            )
        self._binary = str(binary)
        self._process: subprocess.Popen | None = None
        self._deaths = 0
        self._stub: Any = None
        self._channel: Any = None
        stack = self._tff.framework.ResourceManagingExecutorFactory(self._make_executor)
        self._context = self._tff.framework.SyncExecutionContext(
            executor_fn=stack,
            compiler_fn=self._compile_secure if secure else self._compile,
            transform_args=self._tff.tensorflow.transform_args,
            transform_result=self._tff.tensorflow.transform_result,
        )
        if is_first:  # TFF's own default context complains at exit, used or not.
            self._tff.framework.set_default_context(self._context)
        atexit.register(self.close)

    def _compile(self, computation: Any) -> Any:
        return self._tff.backends.native.desugar_and_transform_to_native(computation)

    def _compile_secure(self, computation: Any) -> Any:
        in_the_open = self._tff.backends.test.replace_secure_intrinsics_with_bodies(computation)
        return self._compile(in_the_open)

    def active(self) -> contextlib.AbstractContextManager:
        """Encloses calls of computations: they run on this engine."""
        self._deaths = 0
        return self._tff.framework.get_context_stack().install(self._context)

    def close(self) -> None:
        """Ends the worker."""
        atexit.unregister(self.close)
        process, self._process = self._process, None
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            channel.close()
        if process is not None:
            _end(process)

    def _make_executor(self, cardinalities: dict) -> Any:
        cardinalities.setdefault(self._tff.CLIENTS, 0)
        if self._process is None or self._process.poll() is not None:
            code = None if self._process is None else self._process.returncode
            self.close()
            self._deaths += code is not None
            if self._deaths == _MOST_DEATHS:  # TFF itself tries for ever.
                raise LaunchError(
                    "TFF's worker must live through a round",
                    received=f"its end in {self._deaths} tries, with exit code {code}",
                    mend="Give a round less to hold where memory is short (-9): a smaller "
                    "local_batch_size, or fewer clients_per_round",
                )
            self._start()
            atexit.register(self.close)
        executor = self._tff.framework.RemoteExecutor(self._stub)
        executor.set_cardinalities(cardinalities)
        return executor

    def _start(self) -> None:
        import grpc
        import portpicker

        port = portpicker.pick_unused_port()
        loopback = Loopback()  # The worker itself listens on all interfaces.
        worker = loopback.command(
            [self._binary, f"--port={port}", "--max_concurrent_computation_calls=-1"]
        )
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *worker],
            # Its arenas, one for each thread, would grow for as long as it lives.
            env=os.environ | {"MALLOC_ARENA_MAX": "1"},
            pass_fds=[loopback.child_fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # What matters comes back as an error of the call.
            stderr=subprocess.DEVNULL,
        )
        loopback.serve()
        limits = ("max_message_length", "max_receive_message_length", "max_send_message_length")
        try:
            self._wait_until_listening(port)
            self._channel = grpc.insecure_channel(
                f"localhost:{port}", [(f"grpc.{limit}", _MAX_MESSAGE_BYTES) for limit in limits]
            )
            self._stub = self._tff.framework.RemoteExecutorGrpcStub(_Unwatched(self._channel))
        except BaseException:
            self.close()
            raise

    def _wait_until_listening(self, port: int) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                socket.create_connection(("localhost", port), timeout=1).close()
                return
            time.sleep(_POLL_S)
        code = self._process.poll()
        raise EngineMissingError(
            "TFF's worker_binary must start",
            received=f"no answer in {_START_TIMEOUT_S:.0f} s"
            if code is None
            else f"exit code {code}",
            mend=f"Run {self._binary} --port={port} to see why",
        )


class _Unwatched:
    """A channel whose state nobody watches: TFF's watching thread would outlive it."""

    def __init__(self, channel: Any):
        self._channel = channel

    def subscribe(self, callback: Callable, try_to_connect: bool = False) -> None:
        import grpc

        callback(grpc.ChannelConnectivity.READY)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
