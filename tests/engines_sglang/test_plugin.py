"""The algorithm that the plug-in registers beside SGLang's own; without a server."""

import inspect

from draftstore.engines.sglang import NAME, register


def test_every_question_is_answered_as_for_ngram() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    register()
    ours, ngram = SpeculativeAlgorithm.from_string(NAME), SpeculativeAlgorithm.NGRAM
    methods = [
        name
        for name, value in vars(SpeculativeAlgorithm).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    questions = [name for name in methods if not inspect.signature(getattr(ngram, name)).parameters]
    assert len(questions) > 15
    assert all(callable(getattr(ours, name)) for name in methods)
    assert [name for name in questions if getattr(ours, name)() != getattr(ngram, name)()] == []
