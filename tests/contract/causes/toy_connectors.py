"""Toy connectors that vLLM's own factories build: a scene says what they answer.

The names of the methods are those of vLLM's base classes, where they are explained.
"""

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

KV = {"kv_connector": "ToyKV", "kv_connector_module_path": __name__, "kv_role": "kv_both"}
"""For ``kv_transfer_config``."""

EC = {"ec_connector": "ToyEC", "ec_connector_module_path": __name__, "ec_role": "ec_consumer"}
"""For ``ec_transfer_config``."""


def nothing(*_: Any, **__: Any) -> None:
    """For what only a worker would do."""


class ToyKV(KVConnectorBase_V1, SupportsHMA):
    """Says what the scene has put into ``has``, ``about_to_free`` and ``keeps``."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.has: dict[str, tuple[int | None, bool]] = {}
        """Request id to how many tokens there are, and whether loading them takes several steps."""
        self.about_to_free = False
        self.keeps = False
        """Whether finished requests keep their blocks until somebody has fetched them."""

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = update_state_after_alloc = nothing

    def get_num_new_matched_tokens(self, request: Any, _: int) -> tuple[int | None, bool]:
        return self.has.get(request.request_id, (0, False))

    def has_pending_block_frees(self) -> bool:
        return self.about_to_free

    def build_connector_meta(self, _: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, *_: Any) -> tuple[bool, None]:
        return self.keeps, None


class ToyEC(ECConnectorBase):
    """Has every encoder output or, if the scene says so, none yet."""

    arrived = True

    start_load_caches = save_caches = update_state_after_alloc = nothing

    def has_cache_item(self, _: str) -> bool:
        return False

    def ensure_cache_available(self, *_: Any) -> bool:
        return self.arrived

    def build_connector_meta(self, _: Any) -> ECConnectorMetadata:
        return ECConnectorMetadata()
