"""Server-sent events out of the bytes of an HTTP answer, each with the moment when its end came: read when all is over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import h11

from benchmarks.results import BenchmarkError

Pieces = Iterable[tuple[float, bytes]]
"""What came over the socket, and when."""


def data_of(pieces: Pieces) -> Iterator[tuple[float, bytes]]:
    """The data of each event.

    Raises:
        BenchmarkError: the answer is none of status 200.
    """
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="POST", target="/", headers=[("Host", "bench"), ("Content-Length", "0")]))
    parser.send(h11.EndOfMessage())
    status, text = 0, b""
    for at, data in pieces:
        parser.receive_data(data)
        while isinstance(event := parser.next_event(), h11.Response | h11.InformationalResponse | h11.Data):
            if isinstance(event, h11.Data):
                text += event.data
            else:
                status = event.status_code
        if status == 200:
            *events, text = text.split(b"\n\n")
            yield from ((at, each.removeprefix(b"data: ")) for each in events if each.startswith(b"data: "))
    if status != 200:
        raise BenchmarkError(f"the server answered {status}: {text.decode(errors='replace')}")
