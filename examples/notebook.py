"""A question of one's own, asked in a notebook: do steps that prefill hold up the requests that decode?

``schedtrace export RUN`` writes a run's tables; ``python examples/notebook.py RUN/export`` answers with them.
Editors open the parts between ``# %%`` as cells.
"""

# %%
import sys
from pathlib import Path

import polars as pl

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "logs/base/export")
steps = pl.read_parquet(folder / "steps.parquet").filter(pl.col("trial").is_null() | (pl.col("trial") > 0))
requests = pl.read_parquet(folder / "requests.parquet")

# %% How long each step took, from its start to its output, and what it worked on
worked = steps.filter(pl.col("total_requests") > 0, pl.col("output_us").is_not_null()).with_columns(
    took_ms=(pl.col("output_us") - pl.col("start_us")) / 1e3,
    prefills=pl.col("prefill_tokens") > 0,
)
took = pl.col("took_ms")
print(worked.group_by("prefills").agg(pl.len().alias("steps"), took.median().alias("median_ms"), took.max()))

# %% Requests that decoded in a step that prefilled others: each waited that long for its next token
held_up = requests.filter(pl.col("phase") == "running", pl.col("scheduled_tokens") == 1).join(
    worked.filter("prefills").select("engine_rank", "step", "took_ms"), on=["engine_rank", "step"]
)
usual_ms = worked.filter(~pl.col("prefills"))["took_ms"].median()
if held_up.is_empty() or usual_ms is None:
    print("No request decoded in a step that prefilled others: nobody was held up.")
else:
    print(
        f"{held_up.height:,} tokens of {held_up['request_id'].n_unique():,} requests came from steps that "
        f"also prefilled: {held_up['took_ms'].median():,.1f} ms each instead of {usual_ms:,.1f} ms (medians)."
    )
