"""Keeps the programs that tfdist starts from listening on any interface but the loopback one.

mpirun, TensorFlow's gRPC server and TFF's worker listen on all interfaces, believe whoever calls,
and know no option against it. So the kernel is asked (a seccomp filter, which needs no root) to
hold each ``bind`` of theirs until it has been looked at from outside: where it names all
interfaces for a TCP socket, it is carried out for the loopback interface instead.

Linux 5.6 or newer on x86-64 or 64-bit ARM. Elsewhere, and in containers that forbid it, nothing
changes: such programs then listen as they do by themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import select
import socket
import struct
import sys
import threading

# machine -> its number in a filter, of bind, of seccomp, of pidfd_open, of pidfd_getfd.
_MACHINES = {
    "x86_64": (0xC000003E, 49, 317, 434, 438),
    "aarch64": (0xC00000B7, 200, 277, 434, 438),
}
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _NEW_LISTENER = 1, 1 << 3
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ASK = 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND, _IS_VALID = 0xC0502100, 0xC0182101, 0x40082102
_REQUEST_BYTES = 80
_CONTINUE = 1
_IPV6 = socket.IPPROTO_IPV6
_LONGEST_ADDRESS_BYTES = 128


class _Filter(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("jump_true", ctypes.c_ubyte),
        ("jump_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Filter))]


class Loopback:
    """The parent's part: it answers the binds of one child, and of all that this starts.

    The child calls ``enter``, or is the program ``command``. Where it cannot be confined none of
    its binds is changed.
    """

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()

    @property
    def child_fd(self) -> int:
        """The child's end; it must get it."""
        return self._theirs.fileno()

    def command(self, command: list[str]) -> list[str]:
        """Returns what runs ``command`` confined, given ``child_fd``."""
        return [sys.executable, "-I", "-S", __file__, str(self.child_fd), *command]

    def serve(self) -> None:
        """Answers, in a thread, until nothing of the child is left. Call it once it is there."""
        self._theirs.close()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._ours:
            _, listeners, _, _ = socket.recv_fds(self._ours, 1, 1)
        if not listeners:
            return
        (listener,) = listeners
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while True:
            ((_, event),) = poll.poll()
            if not event & select.POLLIN:
                break
            with contextlib.suppress(OSError):  # Of a process that has ended meanwhile.
                _answer(listener)
        os.close(listener)


def enter(child_fd: int) -> None:
    """Confines this process, and all that it starts; before exec."""
    with socket.socket(fileno=child_fd) as parent, contextlib.suppress(OSError, KeyError):
        listener = _install()
        try:
            socket.send_fds(parent, [b"."], [listener])
        finally:
            os.close(listener)


def _install() -> int:
    """Returns the file descriptor on which binds are told."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "seccomp is Linux's")
    machine, bind, seccomp, _, _ = _MACHINES[platform.machine()]
    lines = (_Filter * 6)(
        (_LOAD, 0, 0, 4),
        (_JUMP_IF_EQUAL, 0, 3, machine),
        (_LOAD, 0, 0, 0),
        (_JUMP_IF_EQUAL, 0, 1, bind),
        (_RETURN, 0, 0, _ASK),
        (_RETURN, 0, 0, _ALLOW),
    )
    program = _Program(len(lines), lines)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    return _checked(
        libc.syscall(seccomp, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.byref(program)), "seccomp"
    )


def _answer(listener: int) -> None:
    """Takes one bind, and carries it out or lets it go on."""
    request = bytearray(_REQUEST_BYTES)
    fcntl.ioctl(listener, _RECEIVE, request)
    number, pid, _, _, _, _, *arguments = struct.unpack("=QIIiIQ6Q", request)
    fd, address, length = arguments[:3]
    error, flags = 0, _CONTINUE
    # A container may forbid to look: better a bind on all interfaces than none.
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            place = _loopback_place(memory.read(min(length, _LONGEST_ADDRESS_BYTES)))
        if place is not None:
            own = stack.enter_context(_socket_of(pid, fd))
            fcntl.ioctl(listener, _IS_VALID, struct.pack("=Q", number))  # Else it is another's.
            if own.type == socket.SOCK_STREAM:
                error, flags = _bind(own, *place), 0
    fcntl.ioctl(listener, _SEND, struct.pack("=QqiI", number, 0, error, flags))


def _bind(own: socket.socket, host: str, port: int) -> int:
    """Returns what the kernel would: 0, or the number of an error below 0."""
    try:
        if own.family == socket.AF_INET6 and own.getsockopt(_IPV6, socket.IPV6_V6ONLY):
            host = "::1"
        own.bind((host, port))
    except OSError as error:
        return -(error.errno or errno.EACCES)
    return 0


def _loopback_place(data: bytes) -> tuple[str, int] | None:
    """Returns where to listen instead; None where ``data`` does not name all interfaces."""
    if len(data) < 8:
        return None
    (family,) = struct.unpack("=H", data[:2])
    (port,) = struct.unpack("!H", data[2:4])
    if family == socket.AF_INET and data[4:8] == bytes(4):
        return "127.0.0.1", port
    if family == socket.AF_INET6 and len(data) >= 24 and data[8:24] == bytes(16):
        return "::ffff:127.0.0.1", port  # What clients of localhost find, by IPv4.
    return None


def _socket_of(pid: int, fd: int) -> socket.socket:
    """Returns the socket of another process."""
    *_, pidfd_open, pidfd_getfd = _MACHINES[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    process = _checked(libc.syscall(pidfd_open, _process_of(pid), 0), "pidfd_open")
    try:
        return socket.socket(fileno=_checked(libc.syscall(pidfd_getfd, process, fd, 0), "getfd"))
    finally:
        os.close(process)


def _process_of(thread: int) -> int:
    with open(f"/proc/{thread}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Tgid:"))


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return result


if __name__ == "__main__":
    enter(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
