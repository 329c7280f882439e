"""Sections of a draft request: tagged data; readers skip unknown tags; see docs/frames.md.

offset  type   section
0       u16    tag
2       u16    zero
4       u32    size of its data in bytes
8       data, zero-padded to a multiple of four
"""

import enum
import struct
from collections.abc import Mapping

from draftstore.errors import WireError

_SECTION = struct.Struct("<HHI")


class Tag(enum.IntEnum):
    """Content of a section, see `draftstore.remote.queries`.

    Tag 2 is never used: it was reserved for the sampled tokens, which are the last ones of the contexts.
    """

    HIDDEN = 1
    """f32 [batch, dims], projected hidden states, the queries of a dense store; a row of NaN is none."""
    PROJECTION = 3
    """u64, the short hash of the projection that made them."""


def encode_sections(sections: Mapping[int, bytes]) -> bytes:
    """Return all sections, each padded to a multiple of four."""
    return b"".join(
        _SECTION.pack(tag, 0, len(data)) + data + bytes(-len(data) % 4) for tag, data in sections.items()
    )


def decode_sections(payload: bytes, start: int, stop: int) -> dict[int, bytes]:
    """Return the sections in a range of a payload by tag."""
    found: dict[int, bytes] = {}
    while start < stop:
        if stop - start < _SECTION.size:
            raise WireError(f"{stop - start} bytes behind the last section")
        tag, zero, size = _SECTION.unpack_from(payload, start)
        start += _SECTION.size
        if zero or tag in found or size + -size % 4 > stop - start:
            raise WireError(f"section {tag} of {size} bytes is damaged, comes twice, or does not fit")
        found[tag] = payload[start : start + size]
        start += size + -size % 4
    return found
