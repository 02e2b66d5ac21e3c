"""Recording inside vLLM's process: plugin, traced scheduler class, recorder, writer.

Three promises hold for all of this code: no decision of the scheduler changes, no exception reaches the
engine, and nothing loops over the waiting queue.
"""
