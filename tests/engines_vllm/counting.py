"""The drafter of the tests: it counts passes and acts in the middle of a run."""

from collections.abc import Callable
from typing import Any, ClassVar

from draftstore.engines.vllm import Drafter

NAME = f"{__name__}.Counting"


class Counting(Drafter):
    """A drafter that counts the passes of all texts.

    Attributes:
        last: the one that was made last.
        passes: of all texts, those that read a prompt to its end included.
        calls: of `propose`.
        then: what to do at some call.
    """

    last: ClassVar["Counting"]
    then: ClassVar[dict[int, Callable[[], None]]] = {}

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.passes = self.calls = 0
        Counting.last = self

    def propose(self, sampled_token_ids: Any, *arguments: Any, **named: Any) -> list[list[int]]:
        self.calls += 1
        self.passes += sum(bool(new) for new in sampled_token_ids)
        self.then.get(self.calls, lambda: None)()
        return super().propose(sampled_token_ids, *arguments, **named)
