"""The `lora` runtime: adapters on a frozen base, whole sequences packed into one pass, hidden states as outputs."""

from typing import Literal

from pydantic import PositiveInt

from labkit.workload.base import Many, Part

Runtime = Literal["megatron", "lora"]
"""Whose modules run: Megatron Core's own training, or the same layers with a frozen base and adapters."""

Outputs = Literal["hidden_states", "log_probs", "top_k", "logits"]
"""log_probs: of the token that follows; top_k: log-probabilities and ids of the likeliest; logits: of the whole
vocabulary, a chunk of tokens at a time, dropped before the next."""

AdaptedLinear = Literal["linear_qkv", "linear_proj", "in_proj", "out_proj", "linear_fc1", "linear_fc2"]


class Lora(Part):
    """What the `lora` runtime adds to the layers, and how it runs them."""

    rank: PositiveInt
    """Inner width of every adapter."""
    target_modules: Many[AdaptedLinear] | None = None
    """Linears that have adapters, experts and shared experts included; None: all of them."""
    regather: bool = False
    """Backward gathers an adapter's input again; otherwise the gathered input is kept."""
    compile_layers: bool = False
    """Each transformer layer runs under `torch.compile`."""
    optimizer_step: bool = True
    """False: forward and backward alone, as when only they are measured."""
    no_grad: bool = False
    """A pass under `torch.no_grad`, as for reference log-probabilities: nothing is kept, no backward follows."""
    outputs: Outputs = "hidden_states"
    """What a pass hands its caller, for every token of every sequence; other than hidden states they need `no_grad`."""
    output_chunk_rows: PositiveInt = 1024
    """Tokens whose logits are alive at once."""
    top_k: PositiveInt | None = None
    """Candidates a token, for `outputs: top_k`."""

    def adapts(self, linear: str) -> bool:
        """Whether the linear of this name has adapters."""
        return self.target_modules is None or linear in self.target_modules
