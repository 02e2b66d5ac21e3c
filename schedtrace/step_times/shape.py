"""What of a model decides its memory and its work."""

from dataclasses import dataclass

DTYPE_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder of attention and gated MLP layers (three matrices), dense or with experts."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Of the MLP in layers without experts."""
    vocab: int
    positions: int | None = None
    """Longest sequence, ``max_position_embeddings``: what vLLM's ``max_model_len`` is unless given."""
    tied: bool = False
    """Input and output embeddings are one matrix."""
    dtype: str = "bfloat16"
    """Of activations, embeddings and, where they are not quantized, weights."""
    quantization: str | None = None
    """What the weights of the layers are stored as (``DTYPE_BYTES``); None: as ``dtype``."""
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    """Experts that every token goes through, besides ``experts_per_token``."""
    expert_intermediate: int = 0
    dense_layers: int = 0
    """First layers without experts, in a model that has them."""
    kv_rank: int = 0
    """Multi-head latent attention: width of the compressed keys and values; 0: the model has none."""
    query_rank: int = 0
    """Likewise of the queries; 0: not compressed."""
    nope_dim: int = 0
    rope_dim: int = 0
    value_dim: int = 0

    @property
    def weight_dtype(self) -> str:
        """What the weights of the layers are stored as."""
        return self.quantization or self.dtype

    @property
    def attention_parameters(self) -> int:
        """Of one layer's projections."""
        if not self.kv_rank:
            return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        query = self.heads * (self.nope_dim + self.rope_dim)
        return (
            (self.query_rank * (self.hidden + query) if self.query_rank else self.hidden * query)
            + self.hidden * (self.kv_rank + self.rope_dim)
            + self.kv_rank * self.heads * (self.nope_dim + self.value_dim)
            + self.heads * self.value_dim * self.hidden
        )

    @property
    def expert_parameters(self) -> int:
        """Of one expert in one layer."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def expert_layers(self) -> int:
        """Layers that have experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def shared_parameters(self) -> int:
        """Of all layers, without the experts that only some tokens go through."""
        dense = (self.layers - self.expert_layers) * 3 * self.hidden * self.intermediate
        router_and_shared = self.hidden * self.experts + self.shared_experts * self.expert_parameters
        return self.layers * self.attention_parameters + dense + self.expert_layers * router_and_shared

    @property
    def parameters(self) -> int:
        """All of them, but norms and biases (under 0.01 % of the models in the table)."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        routed = self.expert_layers * self.experts * self.expert_parameters
        return self.shared_parameters + routed + embeddings

    @property
    def active_parameters(self) -> int:
        """That one token is multiplied with in the layers."""
        return self.shared_parameters + self.expert_layers * self.experts_per_token * self.expert_parameters
