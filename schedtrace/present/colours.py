"""The colours of what pictures show: readable by colour-blind people on light and on dark ground."""

COLOURS: dict[str, tuple[str, str]] = {
    "background": ("#ffffff", "#14171a"),
    "decode": ("#0747a2", "#2267e9"),
    "prefill": ("#48c6f6", "#b3cae8"),
    "recompute": ("#aa50fc", "#bf8bfc"),
    "kv_blocks": ("#c92004", "#e62902"),
    "max_num_seqs": ("#803854", "#a34589"),
    "token_budget": ("#f1b811", "#f3cb11"),
    "preempted": ("#1a1a1a", "#f5f5f5"),
    "other": ("#8a8a8a", "#8c949b"),
    "nobody waited": ("#eceff1", "#262b30"),
}
"""Cause or state to its colour on light and on dark ground; every other cause has that of ``other``."""
