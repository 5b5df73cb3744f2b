"""A blob arrives whole and in order whatever the network does, with bounded memory, or one clear error says why not."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from runner.errors import RunnerError
from runner.images.reference import registry_reference
from runner.images.sources.registry.credentials import Search
from runner.images.sources.registry.repository import Repository
from runner.images.sources.registry.transfer import PART, WINDOW, Blob, Downloads, check_range
from runner.images.sources.registry.web import Patience, Web
from runner.images.sources.registry.web_errors import Transient
from tests.images.sources.hostile import Hostile, Request, download_threads
from tests.waiting import until

MIB = 1 << 20
QUICK = Patience(tries=4, backoff_seconds=0.01, longest_wait_seconds=2)
DIGEST = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@contextmanager
def downloads(server: Hostile, connections: int = 4, patience: Patience = QUICK) -> Iterator[Downloads]:
    web = Web({}, connections=connections, patience=patience)
    repository = Repository(registry_reference(f"{server.address}/team/image:1"), web, Search(None, ()))
    made = Downloads(repository.blob, web, server.address)
    try:
        yield made
    finally:
        made.close()


def serving(blob: Callable[[Request], None]) -> Hostile:
    """A registry that answers the ping, and for blobs behaves as told."""
    return Hostile(lambda request: blob(request) if "/blobs/" in request.path else request.answer(200, b"{}"))


def fetched(server: Hostile, size: int, *, connections: int = 4, patience: Patience = QUICK) -> bytes:
    with server, downloads(server, connections, patience) as made, made.open(DIGEST, size) as reader:
        return reader.read()


def test_parts_that_come_in_any_order_are_read_in_order() -> None:
    """Each answer is held back for a while of its own; read() gives as many bytes as asked, fewer only at the end."""
    data = noise(3 * PART + 12345)
    pauses = random.Random(2)

    def blob(request: Request) -> None:
        time.sleep(pauses.uniform(0, 0.05))
        request.blob(data)

    with serving(blob) as server, downloads(server) as made, made.open(DIGEST, len(data)) as reader:
        got, position = [], 0
        for size in (1, 7, MIB, 3 * MIB + 1, 0, 512, 5 * MIB):
            got.append(reader.read(size))
            assert len(got[-1]) == size
            position += size
        got.append(reader.read(100 * MIB))
        assert reader.read(10) == b"" == reader.read()
    assert b"".join(got) == data
    assert sorted(request.span for request in server.asked("/v2/team/image/blobs")) == [
        (0, PART), (PART, 2 * PART), (2 * PART, 3 * PART), (3 * PART, len(data))
    ]  # fmt: skip


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1])
def test_sizes_at_the_borders_of_a_part(size: int) -> None:
    data = noise(size)
    assert fetched(serving(lambda request: request.blob(data)), size) == data


def test_a_server_without_ranges_is_read_in_one_stream() -> None:
    """The first answer, 200 for a range, says so: each blob is asked for once, and blobs after it too."""
    data = noise(WINDOW + 5 * MIB)
    with serving(lambda request: request.blob(data, ranges=False)) as server, downloads(server) as made:
        for _ in range(2):
            with made.open(DIGEST, len(data)) as reader:
                assert reader.read() == data
        assert len(server.asked("/v2/team/image/blobs")) == 2


def test_a_broken_stream_without_ranges_goes_on_behind_what_was_read() -> None:
    data = noise(6 * MIB)
    numbers = count()
    behave = serving(lambda request: request.blob(data, ranges=False, only=5 * MIB if next(numbers) == 0 else None))
    assert fetched(behave, len(data)) == data


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_breaks_midway_is_resumed_at_that_byte(reset: bool) -> None:
    data = noise(2 * PART)
    numbers = count()

    def blob(request: Request) -> None:
        if next(numbers) % 2:
            return request.blob(data)
        request.blob(data, only=MIB + 17)
        return request.hang_up(reset=reset) if reset else None

    server = serving(blob)
    assert fetched(server, len(data), connections=1) == data
    starts = [request.span[0] for request in server.asked("/v2/team/image/blobs") if request.span]
    assert any(start % PART for start in starts)
    if not reset:  # what a reset takes away from the socket is anyone's guess
        assert MIB <= starts[1] <= MIB + 17


def test_an_answer_shorter_than_the_range_is_completed() -> None:
    """206 with fewer bytes than asked for is a right answer; the rest is asked for."""
    data = noise(PART + 3)

    def blob(request: Request) -> None:
        start, end = request.span or (0, len(data))
        end = min(end, start + MIB + 5)
        head = {"Content-Length": str(end - start), "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
        request.head(206, head)
        request.wfile.write(data[start:end])

    assert fetched(serving(blob), len(data)) == data


def test_one_stalled_connection_is_given_up_and_resumed() -> None:
    """The server would stall until the client leaves; a busy machine may stall too, hence the many tries."""
    data = noise(2 * PART)
    numbers = count()

    def blob(request: Request) -> None:
        if next(numbers) != 1:
            return request.blob(data)
        start, end = request.span or (0, 0)
        head = {"Content-Length": str(end - start), "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
        request.head(206, head)
        request.wfile.write(data[start : start + MIB])
        return request.stall()

    server = serving(blob)
    assert fetched(server, len(data), patience=replace(QUICK, stall_seconds=0.4, tries=50)) == data
    starts = [request.span[0] for request in server.asked("/v2/team/image/blobs") if request.span]
    assert any(start % PART == MIB for start in starts)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_busy_is_asked_again(status: int) -> None:
    data = noise(PART + 1)
    numbers = count()

    def blob(request: Request) -> None:
        if next(numbers) < 3:
            request.answer(status, b'{"errors":[{"code":"X","message":"busy"}]}', Retry_After="0")
        else:
            request.blob(data)

    assert fetched(serving(blob), len(data)) == data


def test_retry_after_is_heard() -> None:
    """One second is waited for; an hour is not."""
    data = noise(5)
    numbers = count()
    behave = serving(lambda request: request.blob(data) if next(numbers) else request.answer(429, b"", Retry_After="1"))
    before = time.monotonic()
    assert fetched(behave, len(data)) == data
    assert time.monotonic() - before > 0.9 and len(behave.asked("/v2/team/image/blobs")) == 2
    refusing = serving(lambda request: request.answer(429, b"", Retry_After="3600"))
    with pytest.raises(RunnerError) as caught:
        fetched(refusing, 5)
    assert len(refusing.asked("/v2/team/image/blobs")) == 1
    assert "rate-limiting requests" in caught.value.why


def test_a_server_that_stays_ill_ends_in_one_error() -> None:
    """It names the registry, the blob, how often it was tried and what was said."""
    server = serving(lambda request: request.answer(503, b'{"errors":[{"message":"the disk is full"}]}'))
    with pytest.raises(RunnerError) as caught:
        fetched(server, 10 * MIB)
    assert DIGEST in caught.value.what and server.address in caught.value.what
    assert "4 attempts" in caught.value.why and "503 the disk is full" in caught.value.why
    assert len(server.asked("/v2/team/image/blobs")) == QUICK.tries


def test_one_byte_per_connection_is_no_progress() -> None:
    """A server that feeds a byte at a time does not hold us forever."""
    data = noise(PART)
    server = serving(lambda request: request.blob(data, only=1))
    with pytest.raises(RunnerError, match="cannot fetch blob"):
        fetched(server, len(data))
    assert len(server.asked("/v2/team/image/blobs")) == QUICK.tries


def test_a_blob_of_another_size_than_in_the_manifest_is_refused() -> None:
    data = noise(2 * PART)
    with pytest.raises(RunnerError) as caught:
        fetched(serving(lambda request: request.blob(data)), len(data) + 10)
    assert f"{len(data):,}" in caught.value.why
    with pytest.raises(RunnerError) as caught:
        fetched(serving(lambda request: request.blob(data, ranges=False)), len(data) + 10)
    assert f"the server sends {len(data):,} bytes" in caught.value.why


def test_another_range_than_asked_is_refused() -> None:
    data = noise(2 * PART)

    def blob(request: Request) -> None:
        start, end = request.span or (0, 0)
        request.answer(206, data[start:end], Content_Range=f"bytes 5-{end}/{len(data)}")

    with pytest.raises(RunnerError, match="cannot fetch blob") as caught:
        fetched(serving(blob), len(data))
    assert "the requested range begins at" in caught.value.why


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({}, "the server sent a partial answer without the header Content-Range"),
        (
            {"Content-Range": "bytes 0-9/10"},
            "the server sent bytes 0-9/10, but the requested range begins at byte 4,096",
        ),
    ],
)
def test_a_wrong_range_is_told_apart_from_a_missing_one(head: dict[str, str], words: str) -> None:
    data = noise(8)

    def blob(request: Request) -> None:
        request.head(206, {"Content-Length": "8", **head})
        request.wfile.write(data)

    with (
        serving(blob) as server,
        downloads(server) as made,
        made._fetch(DIGEST, 0, 8, 8) as answer,
        pytest.raises(Transient, match=re.escape(words)),
    ):
        check_range(answer, Blob(DIGEST, 10, threading.Lock()), 4096, "r")


def test_no_more_is_fetched_ahead_than_the_window_holds() -> None:
    """A reader that does not read stops the server after WINDOW bytes, whether they come in ranges or in a stream."""
    # the kernel's socket buffers, whose size depends on the machine, take some more of a stream
    sockets = sum(int(Path(f"/proc/sys/net/ipv4/{name}").read_text().split()[2]) for name in ("tcp_rmem", "tcp_wmem"))
    data = noise(WINDOW + sockets + 4 * PART)
    for ranges in (True, False):
        sent = []

        def blob(request: Request, ranges: bool = ranges, sent: list[int] = sent) -> None:
            start, end = request.span if request.span and ranges else (0, len(data))
            head = {"Content-Length": str(end - start)}
            if ranges:
                head["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            request.head(206 if ranges else 200, head)
            for at in range(start, end, MIB):
                request.wfile.write(data[at : min(at + MIB, end)])
                sent.append(min(at + MIB, end) - at)

        with (
            serving(blob) as server,
            downloads(server, 8) as made,
            made.open(DIGEST, len(data)) as reader,
        ):
            until(lambda sent=sent: sum(sent) >= WINDOW - PART)
            time.sleep(0.5)  # were there no bound, it would go on
            assert sum(sent) <= WINDOW + (0 if ranges else sockets)
            assert reader.read() == data


def test_two_blobs_are_read_at_the_same_time() -> None:
    """The first one's parts fill the window; the second one still comes."""
    data = {DIGEST: noise(WINDOW + 2 * PART, 1), OTHER: noise(3 * PART, 2)}
    with (
        serving(lambda request: request.blob(data[request.path.rpartition("/")[2]])) as server,
        downloads(server, 8) as made,
        made.open(DIGEST, len(data[DIGEST])) as first,
    ):
        assert first.read(1) == data[DIGEST][:1]
        until(lambda: len(server.requests) >= WINDOW // PART)
        with made.open(OTHER, len(data[OTHER])) as second:
            assert second.read() == data[OTHER]
        assert first.read() == data[DIGEST][1:]


def test_expected_blobs_come_before_they_are_opened() -> None:
    """Small layers are fetched while a large one is read; one that is passed over is forgotten."""
    data = {f"sha256:{n:064d}": noise(100_000 + n, n) for n in range(6)}
    with serving(lambda request: request.blob(data[request.path.rpartition("/")[2]])) as server:
        with downloads(server) as made:
            made.expect([(digest, len(body)) for digest, body in data.items()])
            until(lambda: len(server.asked("/v2/team/image/blobs")) == 6)
            for digest in list(data)[::2]:
                with made.open(digest, len(data[digest])) as reader:
                    assert reader.read() == data[digest]
            with made.open(list(data)[1], len(data[list(data)[1]])) as reader:
                assert reader.read() == data[list(data)[1]]
        assert len(server.asked("/v2/team/image/blobs")) == 7


def test_leaving_early_ends_every_thread_at_once() -> None:
    """Ctrl-C is heard while we wait for servers that have stopped sending or never answered; no thread is left."""
    data = noise(4 * PART)
    numbers = count()

    def blob(request: Request) -> None:
        if next(numbers) == 0:
            return request.blob(data)
        if request.span and request.span[0] == PART:
            request.head(
                206, {"Content-Length": str(PART), "Content-Range": f"bytes {PART}-{2 * PART - 1}/{len(data)}"}
            )
        return request.stall()

    before = time.monotonic()
    with (
        pytest.raises(KeyboardInterrupt),
        serving(blob) as server,
        downloads(server, 4, Patience(stall_seconds=600)) as made,
        made.open(DIGEST, len(data)) as reader,
    ):
        assert reader.read(100) == data[:100]
        until(lambda: len(server.asked("/v2/team/image/blobs")) == 4)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        reader.read()
    until(lambda: not download_threads())
    assert time.monotonic() - before < 300, "nobody waited for a stalled server"


@pytest.mark.parametrize("by_reader", [False, True])
def test_closing_a_blob_wakes_its_reader_in_another_thread(by_reader: bool) -> None:
    """A pump that reads ahead is not left waiting when the blob, or its reader, is closed under it."""
    ended: list[BaseException] = []

    def read(reader: object) -> None:
        try:
            reader.read(10)  # type: ignore[attr-defined]
        except BaseException as error:
            ended.append(error)

    with serving(lambda request: request.stall()) as server, downloads(server, 2, Patience(stall_seconds=600)) as made:
        with made.open(DIGEST, 100) as reader:
            thread = threading.Thread(target=read, args=(reader,))
            thread.start()
            until(lambda: server.asked("/v2/team/image/blobs"))
            if by_reader:
                reader.abandon()
                thread.join(60)
                assert not thread.is_alive()
        thread.join(60)
        assert not thread.is_alive()
    assert isinstance(ended[0], ValueError)


def test_a_redirected_blob_asks_the_registry_once() -> None:
    """Ranges go straight to where the registry has sent us; an address that is too old is asked for again."""
    data = noise(4 * PART)
    stale = threading.Event()

    def store(request: Request) -> None:
        if "old" in request.path and stale.is_set():
            return request.answer(403, b"<Error>expired</Error>")
        if (request.span or (0, 0))[0] >= 2 * PART:
            stale.set()
        return request.blob(data)

    with Hostile(store) as other:

        def blob(request: Request) -> None:
            age = "new" if stale.is_set() else "old"
            request.answer(307, b"", Location=f"{other.url}/{age}?signature=x")

        server = serving(blob)
        assert fetched(server, len(data), connections=1) == data
        assert len(server.asked("/v2/team/image/blobs")) == 2
        assert len(other.asked("/")) == 5
