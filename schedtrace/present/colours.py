"""Colours of what pictures show: told apart in four kinds of colour vision, on light and on dark ground."""

COLOURS: dict[str, tuple[str, str]] = {
    "decode": ("#0747a2", "#2267e9"),
    "prefill": ("#48c6f6", "#b3cae8"),
    "recompute": ("#aa50fc", "#bf8bfc"),
    "preempted": ("#1a1a1a", "#f5f5f5"),
    "front_end": ("#c3cbd2", "#4a545c"),
    "kv_blocks": ("#c92004", "#e62902"),
    "max_num_seqs": ("#803854", "#a34589"),
    "token_budget": ("#f1b811", "#f3cb11"),
    "preempted_this_step": ("#69a569", "#1eb478"),
    "other": ("#8a8a8a", "#8c949b"),
    "nobody": ("#eceff1", "#262b30"),
    "kv": ("#9db0be", "#5b6b78"),
}
"""Cause, state or part of a picture to its colour on light and on dark ground.

Every other cause has that of ``other``; ``nobody`` is where none was refused, ``kv`` are KV blocks in use.
"""
