"""Fetching and reading the Prometheus text of one process."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from pagemill.errors import ConfigError

Kind = Literal["router", "scheduler", "worker"]
Labels = tuple[tuple[str, str], ...]
SeriesKey = tuple[str, Labels]

# A series that only this kind of process has.
_SERIES_OF_KIND: tuple[tuple[str, Kind], ...] = (
    ("pagemill:requests_inflight", "router"),
    ("pagemill:scheduler_steps_total", "scheduler"),
    ("pagemill:worker_steps_total", "worker"),
)
# Of other names, such as aliases, nothing is read.
_PREFIX = "pagemill:"
_MAX_BODY_BYTES = 8 << 20
_HEADERS = {"Accept": "text/plain; version=0.0.4", "Connection": "close"}


class AwayError(Exception):
    """A process gave no metrics; the text says why, in a few words."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where one process serves its metrics. `given` is how the user wrote it, which makes no difference."""

    given: str = field(compare=False)
    scheme: Literal["http", "https"]
    host: str
    port: int
    path: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All series of one process at one time.

    Args:
        time_s: of the monotonic clock, when the answer was there.
        kind: of the process.
        series: value by sample name and sorted labels, of Pagemill's own names.
        counters: those keys of `series` that only grow while the process lives.
    """

    time_s: float
    kind: Kind
    series: Mapping[SeriesKey, float]
    counters: frozenset[SeriesKey]


def parse_address(text: str) -> Address:
    """Read `host:port` or `http(s)://host[:port][/path]`; `/metrics` is added where the path does not end so.

    Raises:
        ConfigError: it is neither.
    """
    form = "must be host:port or a URL such as http://127.0.0.1:8000"
    if any(character.isspace() or not character.isprintable() for character in text):
        raise ConfigError(f"address {text!r} has spaces or control characters; it {form}", field="addresses")
    has_scheme = "://" in text
    try:
        parts = urlsplit(text if has_scheme else f"http://{text}")
        port, host = parts.port, parts.hostname
    except ValueError as err:
        raise ConfigError(f"address {text!r}: {err}; it {form}", field="addresses") from err
    if parts.scheme not in ("http", "https"):
        raise ConfigError(
            f"address {text!r}: scheme {parts.scheme!r} is not http or https; it {form}", field="addresses"
        )
    if not host or port == 0 or (port is None and not has_scheme) or parts.query or parts.fragment:
        raise ConfigError(f"address {text!r} {form}", field="addresses")
    if parts.username is not None or parts.password is not None:
        raise ConfigError("an address holds a user name or password; use --api-key", field="addresses")
    scheme: Literal["http", "https"] = "https" if parts.scheme == "https" else "http"
    path = parts.path.rstrip("/").removesuffix("/v1")
    if not path.endswith("/metrics"):
        path += "/metrics"
    return Address(text, scheme, host, port or (443 if scheme == "https" else 80), path)


def scrape(address: Address, api_key: str, timeout_s: float) -> Snapshot:
    """Ask one process for its metrics.

    Args:
        api_key: sent as a bearer token, "" for none.
        timeout_s: for the connection, and again for the whole answer.

    Raises:
        AwayError: it cannot be reached, is too slow, refuses, or is no process of Pagemill.
    """
    headers = _HEADERS | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    connect = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = connect(address.host, address.port, timeout=timeout_s)
    late = threading.Event()
    try:
        connection.connect()
        with _cut_off(connection.sock, timeout_s, late):
            connection.request("GET", address.path, headers=headers)
            response = connection.getresponse()
            body = response.read(_MAX_BODY_BYTES + 1)
    except TimeoutError:
        raise AwayError(f"no answer within {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as err:
        raise AwayError(f"no answer within {timeout_s:g} s" if late.is_set() else _reason(err)) from err
    finally:
        connection.close()
    if late.is_set():
        raise AwayError(f"no answer within {timeout_s:g} s")
    if response.status in (401, 403):
        raise AwayError("wants an API key; --api-key gives one" if not api_key else "refuses the API key")
    if response.status != 200:
        raise AwayError(f"answers with status {response.status}")
    if len(body) > _MAX_BODY_BYTES:
        raise AwayError(f"answers with more than {_MAX_BODY_BYTES >> 20} MiB")
    return parse(body, time.monotonic())


@contextlib.contextmanager
def _cut_off(connection: socket.socket, timeout_s: float, late: threading.Event) -> Iterator[None]:
    """Shuts the connection down at the deadline: its own timeout starts anew with every byte that trickles in."""

    def cut() -> None:
        late.set()
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _reason(err: Exception) -> str:
    if isinstance(err, socket.gaierror | UnicodeError):
        return "no such host"
    if isinstance(err, OSError) and err.strerror:
        return err.strerror.lower()
    if isinstance(err, http.client.RemoteDisconnected | ConnectionError):
        return "closed the connection"
    if isinstance(err, http.client.BadStatusLine):
        return "does not speak HTTP; is this a gRPC port?"
    return f"broke off: {type(err).__name__}"


def parse(body: bytes, time_s: float) -> Snapshot:
    """Read Prometheus text.

    Raises:
        AwayError: it is none, or not that of a router, scheduler or worker.
    """
    series: dict[SeriesKey, float] = {}
    counters: set[SeriesKey] = set()
    try:
        for family in text_string_to_metric_families(body.decode("utf-8")):
            if not family.name.startswith(_PREFIX):
                continue
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                series[key] = float(sample.value)
                if family.type in ("counter", "histogram"):
                    counters.add(key)
    except ValueError as err:
        raise AwayError("answers, but not with Prometheus text") from err
    names = {name for name, _ in series}
    for name, kind in _SERIES_OF_KIND:
        if name in names:
            return Snapshot(time_s, kind, series, frozenset(counters))
    raise AwayError("answers with metrics that are not those of a router, scheduler or worker")
