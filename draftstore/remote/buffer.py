"""A stream of bytes, cut into frames."""

from collections.abc import Iterator

from draftstore.remote.wire import HEADER, MAX_PAYLOAD, Frame, read_header


class FrameBuffer:
    """Cuts a stream of bytes into frames."""

    def __init__(self, most: int = MAX_PAYLOAD) -> None:
        """Take payloads of at most `most` bytes."""
        self.most = most
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take in what has arrived and yield the frames that are now complete.

        Raises:
            WireError: the bytes are no frames; nothing that follows can be read.
        """
        if not self._rest and len(data) >= HEADER.size:
            header = read_header(data, self.most)
            if len(data) == HEADER.size + header.length:  # nearly always
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
