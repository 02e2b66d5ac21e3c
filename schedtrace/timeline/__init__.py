"""Tables of one engine's trace: where time went, and which requests held what.

The functions share names for their arguments. ``frames`` are the frames of one engine (``EngineFrames``),
``departures`` is its table ``gone``, and ``steps`` in ``pieces`` is the result of ``placed``. ``engine``,
``states`` (or ``requests``), ``waits``, ``threads``, ``starved``, ``starving`` and ``events`` (or
``interruptions``) are, in this order, the tables ``engine_states``, ``request_states``, ``waits``,
``thread_times``, ``starved``, ``starved_steps`` and ``events``.
"""
