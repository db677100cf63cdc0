"""Starts the tests' programs warm: each is forked from a process that has imported TensorFlow.

A program of a test costs two to five seconds of imports before its first line. Here one server for
each worker of pytest and each Keras imports them once; who is started with Python's executable is
only a stub, which hands its arguments, environment, folder and standard streams over a Unix socket,
and passes signals on to its program and the program's end back. Whoever kills the stub kills the
program. Where a fork would not be what the test asks for, the stub goes on as the program itself:
see ``_differs``; and tests that look at the process (its parent, what it imports, whether it is
stopped) are marked ``honest_start`` and never come here.

    Start(...)                  pytest's side, in tests/conftest.py
    hand_over()                 the stub's side, called by sitecustomize
    python zygote.py SOCKET     the server, started by ``Start`` when the first stub calls
"""

from __future__ import annotations

import atexit
import contextlib
import marshal
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

#: Names the folder of the sockets, in the environment of all that a test starts.
VARIABLE = "TFDIST_TESTS_ZYGOTE"
_KERAS = "TF_USE_LEGACY_KERAS"
_PASSED_ON = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)
_ANSWER_S = 60
#: Modules that are programs of their own: those of ranks, and the engines that doctor tries.
_PROGRAMS = ("tfdist.runs.", "tfdist.launch.smoke")


# Pytest's side --------------------------------------------------------------------------------


class Start:
    """Listens for stubs, and starts a server of a Keras when the first one of it calls."""

    def __init__(self, folder: str):
        import subprocess
        import threading
        from functools import partial

        self._folder = folder
        # As they are now: a test changes them for itself.
        self._environ = {key: text for key, text in os.environ.items() if key != VARIABLE}
        self._at = os.getcwd()
        self._listeners = {name: socket.socket(socket.AF_UNIX) for name in ("keras-2", "keras-3")}
        for name, listener in self._listeners.items():
            listener.bind(os.path.join(folder, name))
            listener.listen(64)
        # Before a test puts something else in its place.
        popen = partial(subprocess.Popen, stdin=subprocess.DEVNULL)
        threading.Thread(target=self._start_servers, args=[popen], daemon=True).start()

    def _start_servers(self, popen: Callable[..., Any]) -> None:
        waiting = {listener: name for name, listener in self._listeners.items()}
        servers = {}
        while waiting or servers:
            for listener in select.select(list(waiting), [], [], 1.0)[0]:
                name = waiting.pop(listener)
                keras = "1" if name == "keras-2" else "0"
                with open(os.path.join(self._folder, f"{name}.log"), "w") as log:
                    servers[listener] = popen(
                        [sys.executable, __file__, str(listener.fileno())],
                        env=self._environ | {_KERAS: keras, "TF_CPP_MIN_LOG_LEVEL": "3"},
                        cwd=self._at,
                        stderr=log,
                        pass_fds=[listener.fileno()],
                    )
            for listener, server in list(servers.items()):
                if server.poll() is not None:  # Who calls starts for itself from now on.
                    servers.pop(listener)
                    os.unlink(listener.getsockname())
                    listener.close()


# The stub's side --------------------------------------------------------------------------------


def hand_over() -> None:
    """Has a server run this program, and ends as that ends; returns where it cannot."""
    argv = sys.orig_argv[1:]
    unbuffered = argv[:1] == ["-u"]
    argv = argv[unbuffered:]
    name = argv[1] if argv[:1] == ["-m"] else "".join(argv[:1])
    if name != "tfdist" and not name.startswith(_PROGRAMS) and not name.endswith(".py"):
        return
    if _KERAS not in os.environ:  # What tfdist is imported for sets it, and here it is imported.
        return
    keras = "3" if os.environ[_KERAS].lower() in ("0", "false") else "2"
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_ANSWER_S)
    umask = os.umask(0)
    os.umask(umask)
    request = marshal.dumps(
        {
            "argv": argv,
            "unbuffered": unbuffered,
            "environ": dict(os.environ),
            "folder": os.getcwd(),
            "umask": umask,
            "cores": list(os.sched_getaffinity(0)),
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "limits": [resource.getrlimit(limit) for limit in _LIMITS],
            "ignored": [int(n) for n in _PASSED_ON if signal.getsignal(n) == signal.SIG_IGN],
        }
    )
    try:
        connection.connect(os.path.join(os.environ[VARIABLE], f"keras-{keras}"))
        socket.send_fds(connection, [len(request).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(request)
        program = int.from_bytes(_exactly(connection, 8), "big")
    except OSError:
        return
    if program == 0:
        return
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(program, number))
    connection.settimeout(None)
    connection.sendall(b"!")
    try:
        status = int.from_bytes(_exactly(connection, 8), "big")
    except OSError:
        status = signal.SIGKILL
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.WTERMSIG(status) not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))


def _exactly(connection: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size:
        more = connection.recv(size - len(read))
        if not more:
            raise ConnectionError("the other end is gone")
        read += more
    return read


# The server ----------------------------------------------------------------------------------


def serve(listener: socket.socket) -> dict:
    """Forks for each stub; returns what is to be run, in the process that is to run it."""
    import gc

    parent = os.getppid()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while os.getppid() == parent:
        if not select.select([listener], [], [], 1.0)[0]:
            continue
        connection = listener.accept()[0]
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return _attend(connection)
        connection.close()
    os._exit(0)


def _attend(connection: socket.socket) -> dict:
    """Stands between a stub and its program, which alone returns."""
    connection.settimeout(_ANSWER_S)
    try:
        size, streams, _, _ = socket.recv_fds(connection, 8, 3)
        request = marshal.loads(_exactly(connection, int.from_bytes(size, "big")))
    except OSError:
        os._exit(1)
    if _differs(request):
        connection.sendall((0).to_bytes(8, "big"))
        os._exit(0)
    go, wait = os.pipe()
    program = os.fork()
    if program == 0:
        connection.close()
        os.close(wait)
        os.setsid()
        if os.read(go, 1):
            os.close(go)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            return request
        os._exit(0)
    for stream in streams:
        os.close(stream)
    # The program begins when the stub can pass signals on.
    try:
        connection.sendall(program.to_bytes(8, "big"))
        os.write(wait, _exactly(connection, 1))
    except OSError:
        os._exit(1)
    connection.settimeout(None)
    ends = os.pidfd_open(program)
    if ends not in select.select([connection, ends], [], [])[0]:  # The stub was killed.
        os.kill(program, signal.SIGKILL)
    status = os.waitpid(program, 0)[1]
    with contextlib.suppress(OSError):
        connection.sendall(status.to_bytes(8, "big"))
    os._exit(0)


#: What Python, TensorFlow, Keras and the dynamic linker read once, as they are loaded.
_READ_ONCE = (
    "PYTHON",
    "KERAS_",
    "LC_",
    "LANG",
    "LD_PRELOAD",
    "XLA_",
    "TF_ENABLE_",
    "TF2_",
    "TF_XLA_",
)
_AT_START = dict(os.environ)
_READ_LATER = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")


def _differs(request: dict) -> bool:
    """Whether the program would have loaded something else than this process has."""
    import tfdist

    package = os.path.join(_first_on_path(request), "tfdist")
    asked = request["environ"]
    # TensorFlow adds some of its own as it is imported; who starts the program may have, too.
    return any(
        asked.get(key) not in (_AT_START.get(key), os.environ.get(key))
        for key in {*asked, *_AT_START}
        if key.startswith(_READ_ONCE) and key not in _READ_LATER
    ) or (
        os.path.exists(package) and not os.path.samefile(package, os.path.dirname(tfdist.__file__))
    )


def _first_on_path(request: dict) -> str:
    """Returns the folder that Python puts before all others."""
    program = os.path.join(request["folder"], request["argv"][0])
    return (
        request["folder"]
        if request["argv"][0] == "-m"
        else os.path.dirname(os.path.realpath(program))
    )


def improve_graphs(does: bool) -> None:
    """Has TensorFlow's optimizer improve graphs, or not: the models of tests are tiny, so that it
    takes longer than it ever saves, a sixth of a training."""
    from tfdist.compat import import_tensorflow

    of_graphs = import_tensorflow().config.optimizer
    of_graphs.set_experimental_options({"disable_meta_optimizer": not does})


def import_all() -> None:
    """Imports what most programs of the tests do, but for engines that spoil a process."""
    import importlib
    import pkgutil

    import tfdist

    improve_graphs(False)
    if os.environ[_KERAS] == "0":
        import keras  # noqa: F401
    else:
        import tf_keras  # noqa: F401
    for module in pkgutil.walk_packages(tfdist.__path__, "tfdist."):
        left_out = ("mesh", "federated", "__main__", "examples", "scripts", "starter", "programs")
        if not any(word in module.name.split(".") for word in left_out):
            try:
                importlib.import_module(module.name)
            except ImportError:  # Of an engine that is not here.
                continue
    # And what they import as they go: a fit of Keras 2, and curves.
    late = ("scipy.sparse", "matplotlib.figure", "matplotlib.backends.backend_agg")
    for name in ("horovod.tensorflow.keras", *late):
        importlib.import_module(name)


def become(request: dict) -> None:
    """Makes this process the one that the stub was to be."""
    import random
    import tempfile
    import types

    import numpy as np

    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    for limit, values in zip(_LIMITS, request["limits"], strict=True):
        resource.setrlimit(limit, values)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    random.seed()
    np.random.seed()
    tempfile.tempdir = None
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    unbuffered = request["unbuffered"] or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty(), write_through=unbuffered)
    argv = request["argv"]
    sys.orig_argv = [sys.executable, *argv]
    sys.path[0] = _first_on_path(request)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if argv[0] == "-m":
        import runpy

        if argv[1] != "tfdist":  # A package, whose parts others have.
            sys.modules.pop(argv[1], None)  # Else Python warns that it is there before it runs.
        sys.argv = argv[1:]
        runpy._run_module_as_main(argv[1])
    else:
        sys.argv = argv
        try:
            with open(argv[0], "rb") as file:
                text = file.read()
        except OSError as error:
            sys.exit(f"{sys.executable}: can't open file '{argv[0]}': {error}")
        main.__file__ = argv[0]
        main.__builtins__ = __builtins__
        exec(compile(text, argv[0], "exec"), main.__dict__)


#: What the program has ended with, where that is a number.
_ended_with: list[int] = []


def _leave() -> None:
    """Ends a program that has ended well without taking Python down: a third of a second, in which
    all that was shared with the server is copied to be freed."""
    # Where it cannot be written, Python tells so.
    with contextlib.suppress(OSError, ValueError):
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        for status in _ended_with:
            os._exit(status & 0xFF)


if __name__ == "__main__":
    atexit.register(_leave)  # The first one is called last, after threads and what others register.
    _listener = socket.socket(fileno=int(sys.argv[1]))
    import_all()
    try:
        become(serve(_listener))
        _ended_with.append(0)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            _ended_with.append(end.code or 0)
        raise
