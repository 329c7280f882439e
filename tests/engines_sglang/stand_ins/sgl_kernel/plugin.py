"""The CPU backend of SGLang that verifies trees, under a name that it accepts on every CPU."""


def register() -> None:
    """Give the name `torch_native` to `IntelAMXAttnBackend`; without AMX, SGLang falls back to that name."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend

    register_attention_backend("torch_native")(IntelAMXAttnBackend)
