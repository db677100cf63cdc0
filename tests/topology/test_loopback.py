"""What a confined program listens on, and that nothing else of it changes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tfdist.topology.loopback import Loopback

pytestmark = pytest.mark.timeout(60)

PROGRAM = """
import socket, subprocess, sys, threading
def listen():
    ipv4, ipv6 = socket.AF_INET, socket.AF_INET6
    for family, host in ((ipv4, ""), (ipv6, "::"), (ipv4, "127.0.0.2")):
        with socket.socket(family) as own, socket.socket(family) as other:
            if "only" in sys.argv and family == ipv6:
                own.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            own.bind((host, 0))
            own.listen()
            name = own.getsockname()
            try:
                other.bind((host, name[1]))
            except OSError as error:
                print(name[0], error.errno, flush=True)
            socket.create_connection(name[:2]).close()
listen()
thread = threading.Thread(target=listen)
thread.start()
thread.join()
with socket.socket(type=socket.SOCK_DGRAM) as own:
    own.bind(("", 0))
    print(own.getsockname()[0], flush=True)
with socket.socket(socket.AF_UNIX) as own:
    own.bind("")
if "child" not in sys.argv:
    subprocess.run([sys.executable, __file__, "child", *sys.argv[1:]], check=True)
"""


@pytest.mark.parametrize(
    ("option", "ipv6"), [("", "::ffff:127.0.0.1"), ("only", "::1")], ids=["both", "only IPv6"]
)
def test_all_interfaces_become_loopback(tmp_path, option, ipv6):
    """In threads and children too; errors of the kernel come as ever (98: in use)."""
    (tmp_path / "program.py").write_text(PROGRAM)
    loopback = Loopback()
    with subprocess.Popen(
        loopback.command([sys.executable, str(tmp_path / "program.py"), option]),
        pass_fds=[loopback.child_fd],
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        loopback.serve()
        words = program.stdout.read().splitlines()
    assert program.returncode == 0
    once = ["127.0.0.1 98", f"{ipv6} 98", "127.0.0.2 98"]
    assert words == 2 * [*once, *once, "0.0.0.0"]


def test_a_program_whose_parent_is_gone_is_told(tmp_path):
    """A bind that nobody answers fails, and hangs nobody."""
    code = (
        "import os, subprocess, sys; from tfdist.topology.loopback import Loopback; l = Loopback();"
        "subprocess.Popen(l.command([sys.executable, '-c', 'import socket, time; time.sleep(1); "
        "socket.create_server((\\'\\', 0))']), pass_fds=[l.child_fd]); l.serve()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0
    assert "OSError" in done.stderr
