"""The store of Gloo's addresses: who may read and write it, and how much."""

from __future__ import annotations

import http.client

import pytest

from tfdist.launch.gloo_store import GlooStore

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def store():
    store = GlooStore()
    yield store
    store.close()


def ask(variables: dict[str, str], method: str, key: str, body: bytes | None = None, **headers):
    """Asks as Gloo's client does."""
    url = f"{variables['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{variables['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
    address, _, path = f"{url}/{key}".partition("/")
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request(method, f"/{path}", body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_ranks_find_what_others_of_their_meeting_left(store):
    first, second = store.variables(1), store.variables(2)
    assert ask(first, "GET", "global/0")[0] == 404
    assert ask(first, "PUT", "global/0", b"address")[0] == 200
    assert ask(first, "GET", "global/0") == (200, b"address")
    assert ask(second, "GET", "global/0")[0] == 404
    assert ask(first, "DELETE", "global/0")[0] == 200
    store.put(2, "rank_and_size", "host:0", "0,2")
    assert ask(second, "GET", "rank_and_size/host:0") == (200, b"0,2")
    store.forget()
    assert ask(first, "GET", "global/0")[0] == 404


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_strangers_are_sent_away(store, method):
    variables = store.variables(1)
    address = variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    host, secret, meeting = address.split("/")
    for guess in (f"{host}/", f"{host}/{meeting}", f"{host}/{'0' * len(secret)}/{meeting}"):
        stranger = variables | {"HOROVOD_GLOO_RENDEZVOUS_ADDR": guess}
        assert ask(stranger, method, "global/0", b"x")[0] == 403
    assert ask(variables, "GET", "global/0")[0] == 404


@pytest.mark.parametrize("length", [str(1 << 40), "-1", "many"])
def test_what_is_read_has_a_bound(store, length):
    variables = store.variables(1)
    status, _ = ask(variables, "PUT", "global/0", None, **{"Content-Length": length})
    assert status == 400


def test_each_job_has_a_secret_of_its_own(store):
    other = GlooStore()
    assert other.variables(0) != store.variables(0)
    other.close()
