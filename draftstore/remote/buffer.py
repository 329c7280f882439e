"""Splitting of a byte stream into frames."""

from collections.abc import Iterator

from draftstore.remote.wire import HEADER, MAX_PAYLOAD, Frame, read_header


class FrameBuffer:
    """Splits a byte stream into frames."""

    def __init__(self, most: int = MAX_PAYLOAD) -> None:
        """Accept payloads of at most `most` bytes."""
        self.most = most
        self._rest = bytearray()

    @property
    def empty(self) -> bool:
        """Whether no part of a frame is kept."""
        return not self._rest

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Append received data and yield the complete frames.

        Raises:
            WireError: the data are not frames; the stream is unusable.
        """
        if not self._rest and len(data) >= HEADER.size:
            header = read_header(data, self.most)
            if len(data) == HEADER.size + header.length:  # the common case
                yield Frame(header, data[HEADER.size :])
                return
        self._rest += data
        while len(self._rest) >= HEADER.size:
            header = read_header(self._rest, self.most)
            stop = HEADER.size + header.length
            if len(self._rest) < stop:
                return
            payload = bytes(memoryview(self._rest)[HEADER.size : stop])
            del self._rest[:stop]
            yield Frame(header, payload)
