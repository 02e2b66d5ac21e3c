"""Tables of one engine's trace: where time went, and which requests held what.

All functions use the same names for their arguments. ``frames`` holds the frames of one engine
(``EngineFrames``), ``steps`` in ``pieces`` its ``placed`` steps, ``departures`` its ``gone`` requests.
``engine``, ``states`` (or ``requests``), ``waits``, ``threads``, ``starved``, ``starving`` and ``events`` (or
``interruptions``) are the tables ``engine_states``, ``request_states``, ``waits``, ``thread_times``,
``starved``, ``starved_steps`` and ``events``.
"""
