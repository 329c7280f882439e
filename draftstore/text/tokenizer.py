"""A model's tokenizer: encoding, decoding, BOS, chat template, identity.

It reads the files that ship with Hugging Face models: `tokenizer.json`, and `tokenizer_config.json`,
`chat_template.jinja` and `chat_template.json` if present. The package `tokenizers` does the work and is imported when a
tokenizer is loaded: opening a store and drafting from it do not need it.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from draftstore.errors import TokenizerError, needs_extra
from draftstore.storage.files import load_json
from draftstore.storage.manifest import TokenizerIdentity, model_name
from draftstore.text.chat import (
    DOCUMENT_DATE,
    NO_SETTINGS,
    Message,
    as_parts,
    find_template,
    plain_chat,
    reads_parts,
    render_template,
)
from draftstore.text.tokenizer_files import (
    CONFIG_FILE,
    FILES,
    GGUF_SUFFIX,
    PROCESSOR_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    main_file,
    read_gguf,
)
from draftstore.text.tools import write_tools

if TYPE_CHECKING:
    from tokenizers import Tokenizer


CONFIG = TypeAdapter(dict[str, Any])
LONG_TEXT = 1 << 14
"""Characters above which a text is encoded as a batch: only that releases the GIL."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextTokenizer:
    """A Hugging Face tokenizer with its chat template, without truncation and padding.

    Text that spells a special token (`</s>`, `<|im_end|>`) becomes that token, as in transformers: chat templates
    require it.

    Attributes:
        name: display name: a folder or hub name.
    """

    def __init__(self, backend: "Tokenizer", name: str, files: Mapping[str, bytes]) -> None:
        """Wrap a tokenizer and the contents of its `FILES`; truncation, padding and BPE dropout are disabled."""
        backend.no_truncation()
        backend.no_padding()
        if getattr(backend.model, "dropout", None):
            backend.model.dropout = None  # random merges would make builds irreproducible
        self.name = name
        self._backend = backend
        self._files = dict(files)
        self._config = _parsed(files.get(CONFIG_FILE, b"{}"), CONFIG_FILE, name)
        self._template = _chat_template(self._config, files, name)
        self._named_tokens = _named_tokens(self._config)

    @cached_property
    def vocab_size(self) -> int:
        """Largest token id + 1, added tokens included."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def serialized(self) -> str:
        """The tokenizer as `tokenizer.json`."""
        return self._backend.to_str()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal digits over everything that affects encoding.

        Included: the model (type, vocabulary, merges, options), the added tokens (text, id, matching rules), the
        normalizer and the pre-tokenizer. Excluded: truncation, padding, post-processor (BOS), decoder, configuration,
        template, names, the layout of the JSON, and options that are off (null, false, empty), which versions of
        `tokenizers` may write or omit.
        """
        state = json.loads(self.serialized)
        model = state["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = sorted((i, token) for token, i in model["vocab"].items())
        for token in state["added_tokens"]:
            del token["special"]  # affects only decoding
        state["added_tokens"].sort(key=lambda token: token["id"])
        deciding = {key: state[key] for key in ("model", "added_tokens", "normalizer", "pre_tokenizer")}
        text = json.dumps(_without_unset(deciding), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def identity(self) -> TokenizerIdentity:
        """Name and fingerprint, as manifests record them."""
        return TokenizerIdentity(name=self.name, fingerprint=self.fingerprint)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the added tokens that are marked as special."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @cached_property
    def special_texts(self) -> dict[str, int]:
        """Those ids by what spells them."""
        return {text: i for i in self.special_ids if (text := self._entry(i))}

    @cached_property
    def bos_ids(self) -> tuple[int, ...]:
        """Ids that `encode(bos=True)` prepends: usually one or none.

        They are determined by the configuration's `add_bos_token` if set, as in transformers, else the post-processor.
        """
        wanted = self._config.get("add_bos_token")
        named = self._id_of("bos_token")
        if isinstance(wanted, bool):
            return (named,) if wanted and named is not None else ()
        bare = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        starts = (i for i in range(len(full)) if full[i : i + len(bare)] == bare)
        return tuple(full[: next(starts, 0)])

    @property
    def eos_id(self) -> int | None:
        """Id of the configuration's `eos_token`; None if there is none."""
        return self._id_of("eos_token")

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` uses the model's template instead of the plain role format."""
        return self._template is not None

    @property
    def template_fingerprint(self) -> str:
        """SHA-256 over everything that affects the text of a conversation: the template and the named tokens."""
        deciding = json.dumps([self._template, self._named_tokens], sort_keys=True)
        return hashlib.sha256(deciding.encode()).hexdigest()

    def encode(self, text: str, bos: bool) -> NDArray[np.int32]:
        """Return the token ids of one text, int32 [n]; TokenizerError if it has an unpaired surrogate.

        With `bos`, `bos_ids` come first, unless the text begins with them, as rendered chats do. EOS is never appended.
        """
        ids = self._guarded(lambda: self._encoding(text).ids)
        prefix = list(self.bos_ids) if bos else []
        if ids[: len(prefix)] != prefix:
            ids = prefix + ids
        return np.array(ids, dtype=np.int32)

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the token ids of several texts, int32 [n] each, without BOS or EOS; on all cores, without the GIL."""
        encodings = self._guarded(lambda: self._backend.encode_batch_fast(texts, add_special_tokens=False))
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """Return the text of token ids, including special tokens; ids outside the vocabulary are dropped."""
        return self._backend.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=False)

    def decode_within(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence as inside a longer text, keeping a leading space; otherwise as `decode`."""
        before = self._encoding("a").ids  # a decoder may drop a space at the beginning of a text
        texts = self._backend.decode_batch([[*before, *ids] for ids in sequences], skip_special_tokens=False)
        length = len(self.decode(before))
        return [text[length:] for text in texts]

    def token_text(self, token: int) -> str:
        """Return one token for drawings of trees, with blanks and control characters visible; `<id 7>` if unknown."""
        piece = self._entry(token)
        if piece is None:
            return f"<id {int(token)}>"
        if token in self.special_ids:
            return piece
        return _shown(_piece_bytes(piece, self._byte_level).decode("utf-8", errors="surrogateescape"))

    def exact_text(self, token: int) -> str | None:
        """Return the exact text of one token; None if its id is unknown or it is only part of a character."""
        piece = self._entry(token)
        if piece is None or token in self.special_ids:
            return piece
        try:
            return _piece_bytes(piece, self._byte_level).decode("utf-8")
        except UnicodeDecodeError:
            return None

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        settings: Mapping[str, Any] = NO_SETTINGS,
        date: datetime | None = None,
    ) -> str:
        """Render a conversation with the model's chat template, or else with `plain_chat`.

        A template may use a date, today's by default, as in transformers, and variables from `settings`, such as
        `tools`; without one that knows tools, they become text (`draftstore.text.tools`). TokenizerError if it is
        broken or rejects these messages, or there are other settings, but no template.
        """
        if "tools" not in (self._template or ""):
            settings = dict(settings)
            messages = write_tools(messages, settings.pop("tools", None) or ())
        if self._template is None:
            if settings:
                raise TokenizerError(f"the model {self.name!r} has no chat template: omit its settings")
            return plain_chat(messages, add_generation_prompt)
        return render_template(
            self._template, as_parts(messages) if self._reads_parts else messages,
            add_generation_prompt=add_generation_prompt,
            named_tokens=self._named_tokens, owner=self.name, settings=settings, date=date,
        )  # fmt: skip

    def render_document(self, messages: Sequence[Message]) -> str:
        """Render a whole conversation as the text of a document, the same on every day; see `render_chat`."""
        return self.render_chat(messages, add_generation_prompt=False, date=DOCUMENT_DATE)

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files, byte for byte as read, into an existing directory."""
        for name, data in self._files.items():
            (directory / name).write_bytes(data)

    @cached_property
    def _reads_parts(self) -> bool:
        return self._template is not None and reads_parts(self._template, self._named_tokens)

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in f"{self._backend.decoder!r} {self._backend.pre_tokenizer!r}"

    def _entry(self, token: int) -> str | None:
        return self._backend.id_to_token(int(token)) if 0 <= token < 2**32 else None

    def _id_of(self, named_token: str) -> int | None:
        text = self._named_tokens.get(named_token)
        return None if text is None else self._backend.token_to_id(text)

    def _encoding(self, text: str) -> Any:
        """Encode one text without special tokens; if it is long, without the GIL."""
        if len(text) > LONG_TEXT:
            return self._backend.encode_batch_fast([text], add_special_tokens=False)[0]
        return self._backend.encode(text, add_special_tokens=False)

    def _guarded(self, encode: Callable[[], Any]) -> Any:
        try:
            return encode()
        except TypeError:
            raise TokenizerError("a text is not valid Unicode: it has an unpaired surrogate") from None


def load_tokenizer(spec: str | Path, name: str | None = None) -> TextTokenizer:
    """Load a tokenizer from disk or from the Hugging Face hub.

    Args:
        spec: a `tokenizer.json`, a GGUF file, a folder with one of these, or a hub name `organisation/model`, which is
            taken from the local cache if offline.
        name: display name; None: the name of the folder (of a `tokenizer.json`, its folder), or the hub name.

    Raises:
        TokenizerError: not found, unreachable, or a broken file.
        MissingExtraError: `tokenizers` is not installed, or, for a GGUF file, a package of the extra `hf`.
    """
    main, path = main_file(str(spec)), Path(spec)
    gguf = main.suffix == GGUF_SUFFIX
    if gguf:
        files = read_gguf(main)
    else:
        files = {file: (main.parent / file).read_bytes() for file in FILES if (main.parent / file).is_file()}
        files[TOKENIZER_FILE] = main.read_bytes()
    with needs_extra("tokenizers"):
        from tokenizers import Tokenizer
    try:
        backend = Tokenizer.from_str(files[TOKENIZER_FILE].decode("utf-8"))
    except Exception as error:  # noqa: BLE001 (the Rust side raises bare Exception)
        raise TokenizerError(f"{main} is not a usable tokenizer: {error}") from None
    return TextTokenizer(
        backend, name or model_name(path.parent if path == main and not gguf else path), files
    )


def _parsed(data: bytes, file: str, name: str) -> dict[str, Any]:
    try:
        return load_json(data, CONFIG)
    except ValueError as error:
        raise TokenizerError(f"{file} of {name!r} is not a JSON object: {error}") from None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the configuration's named tokens, each stored as text or as an object."""
    values = {key: config.get(key) for key in NAMED_TOKENS}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in values.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _chat_template(config: Mapping[str, Any], files: Mapping[str, bytes], name: str) -> str | None:
    """Return the chat template from its own file, else from the configuration, else from the processor's file."""
    if TEMPLATE_FILE in files:
        try:
            return files[TEMPLATE_FILE].decode("utf-8")
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{TEMPLATE_FILE} of {name!r} is not UTF-8 text: {error}") from None
    found = find_template(config)
    if found is None and PROCESSOR_FILE in files:
        found = find_template(_parsed(files[PROCESSOR_FILE], PROCESSOR_FILE, name))
    return found


def _without_unset(value: Any) -> Any:
    """Drop null, false and empty options from nested objects; zero stays."""
    if isinstance(value, dict):
        kept = {key: _without_unset(inner) for key, inner in value.items()}
        return {key: inner for key, inner in kept.items() if not (inner is False or inner in (None, ""))}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_unset(inner) for inner in value]
    return value


@cache
def _byte_alphabet() -> dict[str, int]:
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _piece_bytes(piece: str, byte_level: bool) -> bytes:
    """Return the bytes of a vocabulary entry: byte-level, a byte such as `<0x0A>`, or text with `▁` for spaces."""
    if byte_level:
        alphabet = _byte_alphabet()
        return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in piece)
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def _shown(text: str) -> str:
    """Show spaces as `␣` and invisible characters as `repr` does; bytes are given as surrogates."""
    parts = []
    for character in text:
        code = ord(character)
        if character == " ":
            parts.append("␣")
        elif 0xDC80 <= code <= 0xDCFF:
            parts.append(f"\\x{code - 0xDC00:02x}")
        else:
            parts.append(repr(character)[1:-1] if character != "'" else character)
    return "".join(parts)
