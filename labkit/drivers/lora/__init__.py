"""The `lora` runtime: Megatron Core's model with a frozen base and adapters, run over packed sequences.

Not torch's users alone import this room: see `tests/test_architecture.py`. `adapt` goes over a built model, `LoraStep`
steps it.
"""
